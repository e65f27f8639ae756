"""Recipes of image retrieval: data, batches, model, loss, optimisation, evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self, TypeAlias

from rankgrad.data.preprocessing import Crop, Preprocessing
from rankgrad.data.readers import READERS, Columns
from rankgrad.losses import PRESETS
from rankgrad.models import BatchNorm, ModelSpec, Pixels, Pool
from rankgrad.models.trunks import trunk_names
from rankgrad.runs.recipe import Recipe, setting, settings_of
from rankgrad.train.settings import Keep

Sampler: TypeAlias = Literal["class-balanced", "whole-class", "category-hard", "category-half"]
Weighting: TypeAlias = Literal["log", "loglog"]
ProxyLoss: TypeAlias = Literal["softmax", "anchor"]
Validation: TypeAlias = Literal["none", "half", "split", "test"]

METRIC_LEARNING = "pml:"

# size of a debug version
DEBUG_CLASSES, DEBUG_IMAGES_PER_CLASS = 12, 6


@dataclass(frozen=True, kw_only=True)
class RetrievalRecipe(Recipe):
    """One training run of an embedding network. The defaults are those for a user's own images.

    Where a paper and its published code disagree, the default follows the paper and the field says what the code does.
    """

    data_set: str = setting("folder", "layout of the images", group="data", choices=READERS)
    test_on: tuple[str, ...] = setting(
        (),
        "other data sets to test on, each in DIR/<name>; empty: the data set's own test splits",
        group="data",
        choices=READERS,
    )
    partial: bool = setting(False, "accept an incomplete copy of the data set and list what is missing", group="data")
    skip_bad: bool = setting(False, "skip unreadable images, and list them, instead of stopping", group="data")
    split_seed: int | Literal["alphabetical"] = setting(
        0,
        "seed of the random split of classes into train and test, and of `validation='half'`, for your own images without a "
        "split; 'alphabetical': the first half of the classes trains",
        group="data",
        least=0,
    )
    image_root: str = setting("", "folder of the images that a CSV file lists; empty: the folder of the file", group="data")
    text_column: str = setting("text", "column of the texts", group="data")
    label_column: str = setting("label", "column of the classes of texts, or of images of a saved dataset", group="data")
    pair_columns: tuple[str, ...] = setting(
        ("anchor", "positive"), "columns of texts that belong together, for data without text and label", group="data"
    )
    image_column: str = setting("image", "column of the images of a saved dataset", group="data")
    classes: int = setting(
        0, "use only this many classes of each split, spread over the categories; 0: all", group="data", least=0
    )
    images_per_class: int = setting(0, "use only the first images of each class; 0: all", group="data", least=0)

    size: int = setting(224, "side of the square input of the network, in pixels", group="images", least=16, most=2048)
    stored_side: int = setting(
        0, "side at which decoded images are stored; 0: size x 256 / 224", group="images", least=0, most=4096
    )
    train_side: int = setting(
        0,
        "side at which training images are stored; 0: as all others. A larger one keeps random crops sharp, as if they were "
        "cropped from the files",
        group="images",
        least=0,
        most=4096,
    )
    decode: Literal["once", "always"] = setting(
        "once",
        "'once': decode all images first and cache them; 'always': decode on every use, for sets too large to cache",
        group="images",
    )
    aspect: Literal["kept", "square"] = setting(
        "kept", "'kept': resize the short side to stored_side; 'square': resize both, distorting", group="images"
    )
    crop: Crop = setting(
        "resized",
        "training crops: 'resized': of random scale and aspect ratio; 'random': of fixed size; 'center'",
        group="images",
    )
    crop_scale: float = setting(
        0.08, "smallest fraction of the image's area in a 'resized' crop", group="images", least=0.01, most=1.0
    )
    flip: bool = setting(True, "mirror training images at random", group="images")
    max_length: int = setting(
        0, "tokens of a text at most, longer ones are cut; 0: as many as the encoder takes", group="batches", least=0
    )

    sampler: Sampler = setting(
        "class-balanced",
        "'class-balanced': per_class images of each class; 'whole-class': all images of random classes; 'category-hard': "
        "every batch from two categories; 'category-half': one labelled category and unlabelled images",
        group="batches",
    )
    batch_size: int = setting(
        0,
        "images in a batch; 0: per_class x the number of classes that have this many, at most 4,000",
        group="batches",
        least=0,
    )
    per_class: int = setting(
        4, "images of each class in a batch; 0: all it has (not for class-balanced)", group="batches", least=0
    )
    batches_per_pair: int = setting(
        5, "batches of each pair of categories in an epoch (category-hard)", group="batches", least=1
    )

    trunk: str = setting(
        "resnet50",
        f"one of {', '.join(trunk_names())}; a timm model by name or folder; or package.module:factory. For texts a sentence "
        "encoder: a folder of transformers or sentence-transformers, or a name on the Hugging Face Hub",
        group="model",
    )
    weights: str = setting(
        "default",
        "'default': the published weights of the trunk; 'none': random; or a file, or the folder of a run",
        group="model",
    )
    pool: Pool = setting(
        "auto", "pooling of the trunk's features; 'auto': the class token where there is one, else gem", group="model"
    )
    gem_p: float = setting(3.0, "initial exponent of GeM pooling", group="model", least=1e-3, most=100.0)
    gem_learned: bool = setting(True, "learn the exponent of GeM", group="model")
    l2_pooled: bool = setting(False, "L2-normalise between pooling and the linear layer, as landmark models do", group="model")
    layer_norm: bool = setting(True, "layer norm between pooling and the linear layer", group="model")
    dim: int = setting(
        512, "dimensions of an embedding; 0: those of the trunk, without a linear layer", group="model", least=0, most=65_536
    )
    # RS@k's text says that batch norm parameters are frozen; its code fixes the statistics and trains scale and shift
    batch_norm: BatchNorm = setting(
        "frozen",
        "'frozen': keep the statistics, train scale and shift; 'fixed': train nothing; 'live': ordinary, whole batches only",
        group="model",
    )
    pixels: Pixels = setting(
        "native", "normalise pixels as for the trunk's own weights, or as for ImageNet models", group="model"
    )
    whiten: bool = setting(
        False, "initialise the linear layer with the learned whitening of the training images", group="model"
    )

    loss: str = setting(
        "recall-at-k",
        "loss to optimise; pml:NAME is a loss of pytorch-metric-learning",
        group="loss",
        choices=(*PRESETS, f"{METRIC_LEARNING}NAME"),
    )
    loss_args: str = setting("", "constructor arguments of a pml: loss, as name=value,name=value", group="loss")
    loss_lr: float = setting(
        1.0, "learning rate of the loss's own parameters, such as proxies, as a multiple of lr", group="loss", least=0.0
    )
    miner: str = setting("", "miner of pytorch-metric-learning for a pml: loss", group="loss")
    miner_args: str = setting("", "constructor arguments of the miner, as name=value,name=value", group="loss")
    bins: int = setting(10, "histogram bins (fastap)", group="loss", least=1)
    lam: float = setting(
        4.0,
        "interpolation strength of the blackbox gradient, on ranks divided by the list's length (rambo)",
        group="loss",
        least=1e-9,
    )
    margin: float = setting(0.02, "margin between relevant and other scores (rambo)", group="loss", least=0.0)
    weighting: Weighting = setting("loglog", "weighting of ranks (rambo-recall)", group="loss")
    tau: float = setting(
        0.01, "temperature on score differences (recall-at-k, smooth-ap, sup-ap, approx-ndcg)", group="loss", least=1e-9
    )
    tau_end: float = setting(
        0.0, "tau at the end of training, approached by equal factors; 0: tau does not change", group="loss", least=0.0
    )
    learn_tau: bool = setting(False, "learn tau, beginning with the given one, at the rate of loss_lr", group="loss")
    rho: float = setting(100.0, "slope of the bound far ahead (sup-ap)", group="loss", least=0.0)
    delta: float = setting(0.05, "score difference from which the bound is linear (sup-ap)", group="loss", least=0.0)
    tau_cut: float = setting(1.0, "temperature on ranks (recall-at-k)", group="loss", least=1e-9)
    ks: tuple[int, ...] = setting(
        (1, 2, 4, 8, 16), "cut-offs of recall-at-k; simix widens the default set", group="loss", least=1
    )
    # eq. 6 of RS@k leaves the query out; the published code, and so every published number, has it in
    query_in_database: bool = setting(
        False, "rank the query in its own list, as the published code does (recall-at-k)", group="loss"
    )
    simix: bool = setting(False, "add virtual examples between all pairs of a class", group="loss")
    proxy_weight: float = setting(
        0.0,
        "weight of a term over class proxies, whose learning rate is loss_lr; the rank loss has the rest. SupRank: 0.1",
        group="loss",
        least=0.0,
        most=1.0,
    )
    proxy_loss: ProxyLoss = setting(
        "softmax", "the term over proxies: 'softmax' as in SupRank, or 'anchor' as in Proxy-Anchor, margin 0.1", group="loss"
    )
    proxy_temperature: float = setting(
        0.05, "temperature of the softmax over proxies; of 'anchor' 1 / alpha", group="loss", least=1e-9
    )
    memory: int = setting(0, "past batches whose embeddings are added to the ranked lists", group="loss", least=0)

    head_lr: float = setting(1.0, "learning rate of the embedding layer, as a multiple of lr", group="optimisation", least=0.0)
    gem_lr: float = setting(1.0, "learning rate of GeM's exponent, as a multiple of lr", group="optimisation", least=0.0)
    decay_norms: bool = setting(True, "apply weight decay to norms and biases too", group="optimisation")
    decay_gem: bool = setting(False, "apply weight decay to GeM's exponent too", group="optimisation")
    warmup: float = setting(
        0.0,
        "epochs over which the learning rate rises to lr, in place of warmup_steps; half of a run that is no longer",
        group="optimisation",
        least=0.0,
    )
    compile: bool = setting(False, "torch.compile the network", group="optimisation")
    cuda_graphs: bool = setting(True, "replay the network as CUDA graphs on a GPU", group="optimisation")
    channels_last: bool = setting(True, "channels-last memory format, faster for convolutions", group="optimisation")
    keep: Keep = setting(
        "auto",
        "chunks whose activations are kept instead of recomputed; 'auto': as many as fit in memory",
        group="optimisation",
        least=0,
    )

    validation: Validation = setting(
        "none",
        "what selects the best checkpoint: 'half': train on half of the classes, validate on the rest; 'split': the data "
        "set's own validation split; 'test': the test classes, as some papers did; 'none': keep the last",
        group="evaluation",
    )
    evaluate_every: int = setting(5, "epochs between validations; 0: only at the end", group="evaluation", least=0)
    patience: int = setting(
        0, "validations without improvement after which training ends; 0: never", group="evaluation", least=0
    )
    scales: tuple[float, ...] = setting(
        (1.0,), "scales at which a test image is embedded, relative to its own", group="evaluation", least=0.05
    )

    before_setting: ClassVar[Mapping[str, Any]] = {
        "split_seed": "alphabetical",
        "train_side": 0,
        "tau_end": 0.0,
        "learn_tau": False,
        "proxy_weight": 0.0,
        "proxy_temperature": 0.05,
        "proxy_loss": "softmax",
        "rho": 100.0,
        "delta": 0.05,
        "loss_args": "",
        "loss_lr": 1.0,
        "miner": "",
        "miner_args": "",
        "text_column": "text",
        "label_column": "label",
        "pair_columns": ["anchor", "positive"],
        "image_column": "image",
        "max_length": 0,
    }
    locations: ClassVar[frozenset[str]] = frozenset({"image_root"})
    mutable_on_resume: ClassVar[frozenset[str]] = frozenset({"partial", "skip_bad", "test_on", "scales", "image_root"})

    def check_combinations(self) -> None:
        """Refuse settings of batches, model, loss and data that exclude each other."""
        self.model_spec()
        self._check_batches()
        self._check_loss()
        whole = self.chunk_size == 0 or (isinstance(self.chunk_size, int) and 0 < self.batch_size <= self.chunk_size)
        if self.batch_norm == "live" and not whole:
            raise ValueError(
                f"`batch_norm='live'` needs the whole batch at once, but `chunk_size` is {self.chunk_size}: "
                "use `batch_norm='frozen'` or `chunk_size=0`"
            )
        if self.simix and self.memory:
            raise ValueError("`simix` and `memory` exclude each other: use `memory=0` or `simix=False`")
        if self.whiten and not self.dim:
            raise ValueError("`whiten` initialises the linear layer, and `dim=0` has none")
        for name in ("stored_side", "train_side"):
            if 0 < getattr(self, name) < self.size:
                raise ValueError(f"`{name}` must be at least `size` ({self.size}), got {getattr(self, name)}")
        if self.skip_bad and self.decode == "always":
            raise ValueError("`skip_bad` needs `decode='once'`: only then are bad images known before training")
        if len(self.pair_columns) != 2:
            raise ValueError(f"`pair_columns` must be two names, got {','.join(self.pair_columns)}")
        if self.is_text:
            self._check_text()
        elif self.max_length:
            raise ValueError(f"`max_length` is for texts, and `data_set` is {self.data_set}")
        if not READERS[self.data_set].needs_folder and self.test_on:
            raise ValueError(f"`test_on` is for data sets on disk; {self.data_set} has a test split of its own")

    @property
    def is_text(self) -> bool:
        """Whether it trains on texts and not on images."""
        return self.data_set == "texts"

    @property
    def columns(self) -> Columns:
        """Names of the columns of texts, images and labels."""
        return Columns(self.text_column, self.label_column, self.pair_columns, self.image_column)

    def _check_text(self) -> None:
        """Refuse settings that have a meaning for images only."""
        schema = settings_of(type(self))
        others = ("image_root", "skip_bad", "test_on", "scales", "pool", "pixels", "whiten")
        for name in (*others, *(entry.name for entry in schema.values() if entry.group == "images")):
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise ValueError(f"`{name}` is for images, and the data are texts")

    @property
    def uses_metric_learning(self) -> bool:
        """Whether the loss is one of pytorch-metric-learning."""
        return self.loss.startswith(METRIC_LEARNING)

    def _check_loss(self) -> None:
        if self.uses_metric_learning:
            for name in ("simix", "memory", "query_in_database", "proxy_weight", "tau_end", "learn_tau"):
                if getattr(self, name):
                    raise ValueError(f"`{name}` is for rank losses, and `loss` is {self.loss}")
            return
        if self.proxy_loss != "softmax" and not self.proxy_weight:
            raise ValueError(f"`proxy_loss` is {self.proxy_loss}, and there are no proxies: give a `proxy_weight`")
        if self.tau_end and self.learn_tau:
            raise ValueError("`tau_end` and `learn_tau` exclude each other: tau follows a schedule or is learned")
        for name in ("tau_end", "learn_tau"):
            if getattr(self, name) and "tau" not in PRESETS[self.loss].settings.values():
                raise ValueError(f"`{name}` is for losses with a `tau`, and `loss` is {self.loss}")
        for name in ("loss_args", "miner", "miner_args"):
            if getattr(self, name):
                raise ValueError(f"`{name}` is for losses of pytorch-metric-learning (pml:NAME), and `loss` is {self.loss}")

    def _check_batches(self) -> None:
        if self.sampler == "class-balanced":
            if self.per_class < 2:
                raise ValueError(f"`per_class` must be at least 2 for `sampler='class-balanced'`, got {self.per_class}")
            if self.batch_size % self.per_class:
                lower = self.batch_size - self.batch_size % self.per_class
                raise ValueError(
                    f"`batch_size` must be a multiple of `per_class` ({self.per_class}), got {self.batch_size}; "
                    f"use {lower or self.per_class} or {lower + self.per_class}"
                )
        elif self.batch_size == 0:
            raise ValueError(f"`sampler={self.sampler!r}` needs a `batch_size`")
        if self.batch_size == 1:
            raise ValueError("`batch_size` must be at least 2: a single image has nothing to be ranked against")

    def model_spec(self) -> ModelSpec:
        """What the network is built from."""
        return ModelSpec(
            trunk=self.trunk,
            weights=self.weights,
            pool=self.pool,
            gem_p=self.gem_p,
            gem_learned=self.gem_learned,
            l2_pooled=self.l2_pooled,
            layer_norm=self.layer_norm,
            dim=self.dim,
            batch_norm=self.batch_norm,
            pixels=self.pixels,
            inputs="texts" if self.is_text else "images",
        )

    def preprocessing(self) -> Preprocessing:
        """How an image is prepared for evaluation, embedding and search; landmarks keep their shape."""
        return Preprocessing(self.size, self.stored, square=self.aspect == "square", native_shape=bool(self.test_on))

    @property
    def stored(self) -> int:
        """Side of the decoded images."""
        return self.stored_side or round(self.size * 256 / 224)

    def side_of(self, split: str) -> int:
        """Side of the decoded images of a split."""
        return self.train_side if self.train_side and split == "train" else self.stored

    def _replaced_by(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        replaced = super()._replaced_by(changes)
        # the warm-up is given in epochs or in steps
        if changes.get("warmup"):
            replaced["warmup_steps"] = 0
        elif changes.get("warmup_steps"):
            replaced["warmup"] = 0.0
        return replaced

    def _loop_settings(self) -> dict[str, Any]:
        found = {"warmup_epochs": self.warmup, "patience": 0 if self.validation == "none" else self.patience}
        # every batch of texts has a length of its own, and a graph is of one shape
        return {**found, "cuda_graphs": False} if self.is_text else found

    def debug_version(self, *, has_data: bool = True) -> Self:
        """A copy with a tiny network, few classes, small batches and two epochs; sampler, loss and protocol stay.

        An incomplete copy of the data set is accepted. Its results mean nothing.
        """
        per_class = min(self.per_class, 3)
        batch = {"class-balanced": 3 * per_class, "category-hard": 16}.get(self.sampler, 12)
        of_images: dict[str, Any] = {
            "size": 32,
            "stored_side": 36,
            "train_side": 48 if self.train_side else 0,
            "trunk": "convnet",
            "weights": "none",
            "pool": "avg" if self.pool == "cls" else self.pool,
        }
        return replace(
            self,
            name=f"{self.name}-debug",
            what=f"{self.what} (debug version: its numbers mean nothing)",
            partial=True,
            classes=DEBUG_CLASSES,
            images_per_class=DEBUG_IMAGES_PER_CLASS,
            batch_size=batch,
            per_class=per_class,
            batches_per_pair=1,
            dim=16 if self.dim else 0,
            **({} if self.is_text else of_images),
            chunk_size=5 if isinstance(self.chunk_size, int) and self.chunk_size else self.chunk_size,
            memory=min(self.memory, 1),
            lr=min(1e-3, self.lr * 10),
            milestones=(1,) if self.milestones else (),
            warmup=min(self.warmup, 0.5),
            warmup_steps=min(self.warmup_steps, 1),
            epochs=2,
            steps=4 if self.steps else 0,
            precision="float32",
            compile=False,
            evaluate_every=1,
            log_every=1,
        )
