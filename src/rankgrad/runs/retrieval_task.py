"""Retrieval of images or texts as a task: its data, batches, network, loss and evaluation."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from rankgrad._messages import Progress, plural
from rankgrad.data.image_batches import ImageBatches
from rankgrad.data.samplers import class_sizes
from rankgrad.data.seeds import bits, derive, permutation
from rankgrad.data.text_batches import TextBatches
from rankgrad.losses import PRESETS
from rankgrad.losses.calibration import CalibratedRankLoss, ProxyAnchor, ProxySoftmax
from rankgrad.losses.compile_ahead import compile_kernels
from rankgrad.losses.distributed import DistributedRankLoss
from rankgrad.losses.memory import EmbeddingMemory
from rankgrad.losses.rank_loss import RankLoss
from rankgrad.losses.simix import SiMix
from rankgrad.models import Embedder, build_model, initialise_head, learn_whitening, parameter_groups
from rankgrad.runs.data_cache import WITH_DISTRACTORS, DataCache, Split
from rankgrad.runs.data_identity import DataIdentity
from rankgrad.runs.embedding import MultiScale, embed
from rankgrad.runs.recipe import Published
from rankgrad.runs.retrieval_batches import fitting_batch, memory_format_of, ordered_batches, training_batches
from rankgrad.runs.retrieval_evaluation import SplitEvaluator, evaluate_shards
from rankgrad.runs.retrieval_recipe import METRIC_LEARNING, RetrievalRecipe
from rankgrad.runs.run_folder import RunFolder
from rankgrad.runs.task import RETRIEVAL, VALIDATION, RunContext, SplitResult, TestIdentity
from rankgrad.runs.warm_up import InBackground, warm_up, warm_up_crops, warm_up_evaluation
from rankgrad.train.large_batch import Loss
from rankgrad.train.loop import Evaluator
from rankgrad.train.settings import AUTOCAST

M = TypeVar("M", bound=nn.Module)

# images that learned whitening is computed from: ten for each of 2,048 dimensions
WHITENING_IMAGES = 20_480
# images of a class where a sampler takes whole classes and there is no data: the mean of SOP
ASSUMED_PER_CLASS = 5
# a batch to compile kernels for: they are the same for every number of items that fills some tiles
KERNEL_ITEMS = 1024
# RS@k's means over ROxford and RParis, medium and hard
LANDMARK_MEANS = {
    "mean": ("roxford5k", "roxford5k+r1m", "rparis6k", "rparis6k+r1m"),
    "mean+r1m": ("roxford5k+r1m", "rparis6k+r1m"),
}


class RetrievalTask:
    """Train an embedding network and rank images, or texts, by its scores.

    Args:
        recipe: everything that decides the result.
        context: where it runs.
        data: what is opened already; by default nothing.
    """

    name = RETRIEVAL
    command = "rankgrad train"
    untrained_is_baseline = True
    outputs_are_embeddings = True

    def __init__(self, recipe: RetrievalRecipe, context: RunContext, data: DataCache | None = None) -> None:
        self.recipe, self.context = recipe, context
        self.data = data or DataCache(context)

    @classmethod
    def from_run(cls, run: RunFolder, context: RunContext, changes: Mapping[str, Any]) -> Self:
        return cls(run.read_recipe(RetrievalRecipe).with_settings(changes), run.context(context))

    def with_recipe(self, recipe: RetrievalRecipe) -> Self:
        return type(self)(recipe, self.context, self.data)

    def for_selection(self) -> Self:
        """Validation classes are set aside, and the batch is lowered to what the others can fill, with a note."""
        # judged by the last weights, as the chosen setting will be: it has no classes left to select a checkpoint on
        recipe = replace(
            self.recipe,
            validation="split" if self.recipe.validation == "split" else "half",
            evaluate_every=0,
            patience=0,
        )
        most = fitting_batch(recipe, self.data.training(recipe)[0].selected) if recipe.batch_size else 0
        if recipe.batch_size <= most or not most:
            return self.with_recipe(recipe)
        self.context.note(
            f"batches have {most:,} images instead of {recipe.batch_size:,} while validation classes are set aside: the other "
            "classes have no more"
        )
        return self.with_recipe(replace(recipe, batch_size=most))

    def notes(self) -> Sequence[str]:
        recipe, notes = self.recipe, self.data.data_set(self.recipe).notes
        if recipe.sampler != "class-balanced":
            return notes
        sizes = class_sizes(self.data.table(recipe, "train").labels)
        unused = int(((sizes > 1) & (sizes < recipe.per_class)).sum())
        if not unused:
            return notes
        classes, verb = plural(unused, "class has", "classes have"), "is" if unused == 1 else "are"
        return (*notes, f"{classes} fewer than {recipe.per_class} training images and {verb} not sampled: see --per-class")

    def data_identity(self) -> Mapping[str, DataIdentity]:
        splits = ["train", *([VALIDATION] if self.recipe.validation == "split" else [])]
        found = {split: self.data.identity(self.recipe, split) for split in splits}
        # the result of a test on other data sets says itself what they were
        if not self.recipe.test_on:
            for split in self.test_splits():
                found[split] = self.data.identity(self.recipe, split)
        return found

    def data_counts(self) -> Mapping[str, Mapping[str, int]]:
        train, validation = self.data.training(self.recipe)
        splits = {"train": train, **({VALIDATION: validation} if validation else {})}
        return {
            name: {"images": len(split.labels), "classes": split.selected.num_classes} for name, split in splits.items()
        }  # fmt: skip

    def run_file_entries(self) -> Mapping[str, Any]:
        names = {
            split: {str(label): table.class_name(label) for label in np.unique(table.labels).tolist() if label != -1}
            for split, table in self.data.data_set(self.recipe).splits.items()
            if table.class_names
        }
        if self.recipe.is_text:
            return {"class_names": names}
        return {"preprocessing": self.recipe.preprocessing().as_dict(), "class_names": names}

    def published(self) -> Sequence[Published]:
        return self.recipe.published

    def make_model(self, *, pretrained: bool) -> Embedder:
        recipe = self.recipe if pretrained else replace(self.recipe, weights="none")
        model = build_model(recipe.model_spec(), seed=derive(recipe.seed, "first weights")).to(self.context.device)
        # in the format it is trained in: a test that sums in another order would differ in the last bits
        return model.to(memory_format=torch.channels_last) if recipe.channels_last else model

    def initialise(self, model: nn.Module) -> None:
        """Whiten the embeddings, if the recipe asks for it."""
        if self.recipe.whiten:
            for note in whiten(self, as_embedder(model), self.data.training(self.recipe)[0]):
                self.context.note(note)

    def param_groups(self, model: nn.Module, loss: Loss) -> list[dict[str, Any]]:
        recipe = self.recipe
        groups = parameter_groups(
            as_embedder(model),
            lr=recipe.lr,
            weight_decay=recipe.weight_decay,
            head_lr=recipe.head_lr,
            decay_norms=recipe.decay_norms,
            gem_lr=recipe.gem_lr,
            decay_gem=recipe.decay_gem,
        )
        own = list(loss.parameters()) if isinstance(loss, nn.Module) else []
        # proxies decay like weights, a temperature does not
        for params, decay in (([p for p in own if p.ndim], recipe.weight_decay), ([p for p in own if not p.ndim], 0.0)):
            if params:
                groups.append({"params": params, "lr": recipe.lr * recipe.loss_lr, "weight_decay": decay})
        return groups

    def make_loss(self) -> Loss:
        if self.recipe.uses_metric_learning:
            return self._metric_learning_loss()
        loss = self.local_loss()
        return DistributedRankLoss(loss) if self.context.processes.size > 1 else loss

    def _metric_learning_loss(self) -> Loss:
        recipe = self.recipe
        if self.context.processes.size > 1:
            raise ValueError(
                f"--loss {recipe.loss} cannot be divided over processes: each would see its own batch only. "
                "Use one process, or a rank loss"
            )
        from rankgrad.integrations.pytorch_metric_learning import MetricLearningLoss, parse_arguments

        return self._with_proxies(
            lambda classes, dim: MetricLearningLoss(
                recipe.loss.removeprefix(METRIC_LEARNING),
                parse_arguments(recipe.loss_args, "--loss-args"),
                classes,
                dim,
                recipe.miner,
                parse_arguments(recipe.miner_args, "--miner-args"),
            )
        )

    def _with_proxies(self, make: Callable[[list[int], int], M]) -> M:
        """What `make` makes of the training classes and the dimensions; the first proxies are the same for every start."""
        recipe = self.recipe
        classes = np.unique(self.data.training(recipe)[0].selected.labels)
        dim = recipe.dim or self.make_model(pretrained=False).dim
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(derive(recipe.seed, "first proxies"))
            return make(classes[classes >= 0].tolist(), dim).to(self.context.device)

    def local_loss(self) -> RankLoss | SiMix | EmbeddingMemory | CalibratedRankLoss:
        """The loss of one process: the recipe's preset, with SiMix or a memory and then proxies around it."""
        recipe, loss = self.recipe, self._rank_loss()
        if not recipe.proxy_weight:
            return loss
        if self.context.processes.size > 1 and self.context.parallel == "fsdp":
            raise ValueError(
                "--proxy-weight needs --parallel ddp: proxies are not divided over processes as --parallel fsdp does"
            )
        return CalibratedRankLoss(loss, self._with_proxies(self._proxy_term), recipe.proxy_weight)

    def _proxy_term(self, classes: list[int], dim: int) -> ProxySoftmax | ProxyAnchor:
        recipe = self.recipe
        if recipe.proxy_loss == "anchor":
            return ProxyAnchor(classes, dim, alpha=1 / recipe.proxy_temperature)
        return ProxySoftmax(classes, dim, recipe.proxy_temperature)

    def _rank_loss(self) -> RankLoss | SiMix | EmbeddingMemory:
        recipe = self.recipe
        loss = PRESETS[recipe.loss].build(recipe, learn_tau=recipe.learn_tau, tau_end=recipe.tau_end or None)
        if self.recipe.simix:
            # draws from torch's generator, which the training loop seeds before every step
            return SiMix(loss)
        if self.recipe.memory:
            return EmbeddingMemory(loss, self.recipe.memory)
        return loss

    def warm_up(self) -> Callable[[], None] | None:
        recipe, device = self.recipe, self.context.device
        plain = recipe.loss in PRESETS and not (recipe.simix or recipe.memory or self.context.processes.size > 1)
        if device.type != "cuda" or not plain or not (recipe.trains and recipe.batch_size and recipe.dim):
            return None
        loss = PRESETS[recipe.loss].build(recipe)
        loss.cuda_graphs = False
        shape = (recipe.batch_size, recipe.per_class or ASSUMED_PER_CLASS, recipe.dim)
        return InBackground(partial(warm_up, loss, *shape, device, AUTOCAST[recipe.precision])).wait

    def compile_kernels(self, gpu: str) -> int:
        """Compile the kernels of loss, evaluation and crops for a GPU that need not be there; their number."""
        recipe = self.recipe
        if recipe.loss not in PRESETS:
            raise ValueError(f"--loss {recipe.loss} is a loss of pytorch-metric-learning, which has no kernels")
        if not recipe.dim:
            raise ValueError(f"{recipe.name} has the dimension of its network: give it with --dim")
        loss = self._rank_loss()
        shape, cpu = (KERNEL_ITEMS, recipe.per_class or ASSUMED_PER_CLASS, recipe.dim), torch.device("cpu")

        def run() -> None:
            for _ in range(2):  # in the first step a memory is empty
                warm_up(loss, *shape, cpu, AUTOCAST[recipe.precision])
            warm_up_evaluation(recipe.dim, cpu)
            if not recipe.is_text:
                warm_up_crops(recipe.size, {memory_format_of(recipe), torch.contiguous_format}, cpu)

        return compile_kernels(run, gpu)

    def make_batches(self) -> ImageBatches | TextBatches:
        return training_batches(self.recipe, self.data.training(self.recipe)[0], self.context)

    def sample_batch(self) -> tuple[Any, Tensor]:
        recipe = self.recipe
        if self.has_data:
            _, _, images, labels = next(self.make_batches().iterate(0))
            return images, labels
        if recipe.is_text:
            raise ValueError(f"{recipe.name}: the length of texts depends on the data: give --data FILE")
        if not recipe.batch_size:
            raise ValueError(f"{recipe.name}: the batch size depends on the data: give --data DIR or --batch-size N")
        # one image many times: time and memory do not depend on the pixels
        image = torch.randint(0, 256, (1, 3, recipe.size, recipe.size), dtype=torch.uint8)
        labels = torch.arange(recipe.batch_size) // (recipe.per_class or ASSUMED_PER_CLASS)
        return image.expand(recipe.batch_size, -1, -1, -1), labels

    @property
    def has_data(self) -> bool:
        """Whether there are images to make batches of."""
        return self.context.data is not None or self.recipe.data_set == "glyphs"

    def evaluators(self) -> Mapping[str, Evaluator]:
        selected_on = self.selected_on()
        if selected_on is None:
            return {}
        _, validation = self.data.training(self.recipe)
        if validation is None:
            return {selected_on: lambda model: SplitEvaluator(self, as_embedder(model))(selected_on).metrics}
        ks = self.data.data_set(self.recipe).ks

        def on_validation(model: nn.Module) -> Mapping[str, float]:
            embeddings = self.embed(as_embedder(model), validation)
            return dict(evaluate_shards(embeddings, validation.selected, self.context, ks=ks) or {})

        return {VALIDATION: on_validation}

    def selected_on(self) -> str | None:
        if self.recipe.validation == "none":
            return None
        return next(iter(self.test_splits())) if self.recipe.validation == "test" else VALIDATION

    def test_splits(self) -> Sequence[str]:
        return list(self.data.tests(self.recipe))

    def test_identity(self, split: str, protocol: str | None = None) -> TestIdentity:
        name, split_of_data_set = self.data.tests(self.recipe)[split]
        own = self.data.data_set(self.recipe, name).protocols[split_of_data_set]
        fingerprint = self.data.identity(self.recipe, split_of_data_set, name).fingerprint
        if split.endswith(WITH_DISTRACTORS):
            fingerprint += f"+{self.data.identity(self.recipe, 'distractors', name).fingerprint}"
        return TestIdentity(fingerprint, protocol or own, is_default=protocol in (None, own))

    def make_evaluator(self, model: nn.Module) -> SplitEvaluator:
        return SplitEvaluator(self, as_embedder(model), announce=True)

    def combine(self, results: Mapping[str, SplitResult]) -> Mapping[str, Mapping[str, float]]:
        """RS@k's means over the landmark tests."""
        return {
            name: {"mAP": float(np.mean([results[s].metrics[f"mAP[{level}]"] for s in splits for level in ("medium", "hard")]))}
            for name, splits in LANDMARK_MEANS.items()
            if all(split in results for split in splits)
        }

    def embed(self, model: Embedder, split: Split) -> Tensor:
        """Embeddings [N, d] of this process's shard of the selected rows, in their order, on the CPU."""
        module = model if self.recipe.scales == (1.0,) else MultiScale(model, self.recipe.scales)
        processes, rows = self.context.processes, None
        if processes.size > 1:
            rows = (np.arange(len(split.table)) if split.rows is None else split.rows)[processes.shard(len(split.labels))]
        return embed(
            module,
            ordered_batches(self.recipe, split, self.context, rows),
            device=self.context.device,
            precision=self.recipe.precision,
            name=f"embedding {split.table.name}",
            shown=processes.first,
        )


def as_embedder(model: nn.Module) -> Embedder:
    """The model that the loop hands back, which is the one it was given."""
    assert isinstance(model, Embedder)
    return model


@torch.no_grad()
def whiten(task: RetrievalTask, model: Embedder, split: Split) -> list[str]:
    """Set the linear layer to the learned whitening of training images; returns notes for the user."""
    recipe, device = task.recipe, task.context.device
    # whole classes in random order: whitening is learned from pairs of one class
    names, classes = np.unique(split.labels, return_inverse=True)
    order = permutation(len(names), bits(recipe.seed, "whitening"))[classes]
    rows = order.argsort(kind="stable")[:WHITENING_IMAGES]
    if split.rows is not None:
        rows = split.rows[rows]
    batches = ordered_batches(recipe, split, task.context, rows)
    model.eval()
    pooled = []
    with Progress(len(batches), "whitening", unit="batches") as progress:
        for _, _, images, _ in batches.iterate(0):
            pooled.append(model.pooled(images.to(device)).float())
            progress.advance()
    labels = torch.from_numpy(split.table.labels[rows]).to(device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learned = learn_whitening(torch.cat(pooled), labels)
    initialise_head(model, learned.mean, learned.projection)
    model.train()
    # the outputs of layer norm sum to 0, so one direction is always missing
    wanted = len(learned.mean) - recipe.layer_norm
    return [str(warning.message) for warning in caught] if learned.spanned < wanted else []
