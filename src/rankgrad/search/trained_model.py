"""A trained model in use: load a run, embed images or texts as the run evaluates them, search a gallery."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rankgrad._messages import first_ten, shorten
from rankgrad.data.image_files import UnreadableImageError, map_images
from rankgrad.data.preprocessing import ImageInput, Preprocessing
from rankgrad.data.table import Table
from rankgrad.models import Embedder, TextTokenizer, embed_multiscale, trust_factory
from rankgrad.runs.embedding import MultiScale, embed_batch
from rankgrad.runs.retrieval_batches import EMBEDDING_BATCH
from rankgrad.runs.retrieval_recipe import RetrievalRecipe
from rankgrad.runs.retrieval_task import RetrievalTask
from rankgrad.runs.run_folder import RunFolder
from rankgrad.runs.task import RunContext
from rankgrad.search.gallery import Gallery
from rankgrad.search.image_lists import folder_of_images, listed_texts
from rankgrad.search.searcher import Searcher, is_searchable

T = TypeVar("T")
Embeddings: TypeAlias = NDArray[np.float32]
GalleryInput: TypeAlias = str | Path | Gallery | Searcher | NDArray[Any] | Tensor | Sequence[Any]


@dataclass(frozen=True)
class Hit:
    """One neighbour of a query.

    Attributes:
        row: its row in the gallery.
        score: cosine of the two embeddings.
        label: name of its class, "" where it has none.
        path: its file; None where the gallery is of texts, or of embeddings alone.
        text: its text, "" where the gallery is not of texts.
    """

    row: int
    score: float
    label: str = ""
    path: Path | None = None
    text: str = ""


@dataclass(frozen=True, eq=False, repr=False)
class TrainedModel:
    """The model of a run, with the preprocessing that it was evaluated with.

        model = rankgrad.load("runs/pets")
        model.embed("cat.jpg")                             # [d], of length 1
        model.embed(["cat.jpg", image, pixels])            # [3, d]; a folder of images works, too
        model.search("cat.jpg", "photos-embedded", k=5)    # five hits: row, score, label, path

    That of a sentence encoder takes texts in place of images.

    Attributes:
        folder: of the run.
        recipe: the settings it was trained with.
        model: the network, in evaluation mode: pixels [B, 3, H, W] of 0..255 -> embeddings [B, d].
        preprocess: an image -> uint8 [3, H, W], as the run evaluates images.
        device: where it computes.
        checkpoint: "best" or "last".
        step: of the checkpoint.
        fingerprint: of the weights; embeddings are comparable only where it is the same.
        debug: whether the run was a debug version, whose embeddings mean nothing.
        tokenizer: of a sentence encoder; None where the model embeds images.
    """

    folder: Path
    recipe: RetrievalRecipe
    model: Embedder
    preprocess: Preprocessing
    device: torch.device
    checkpoint: Literal["best", "last"]
    step: int
    fingerprint: str
    debug: bool = False
    tokenizer: TextTokenizer | None = None

    def __repr__(self) -> str:
        """In one line: a network is hundreds of them."""
        seen = f"images of {self.preprocess.size} pixels" if self.tokenizer is None else "texts"
        network = f"{self.recipe.trunk}, {seen}, {self.dim} dimensions"
        return f"TrainedModel({str(self.folder)!r}: {network}, {self.checkpoint} checkpoint, step {self.step}, {self.device})"

    @property
    def dim(self) -> int:
        """Dimensions of the embeddings."""
        return self.model.dim

    def embed(self, images: ImageInput | Sequence[ImageInput], *, workers: int | None = None) -> Embeddings:
        """Embeddings of length 1: [d] of one image, [N, d] of several.

        Args:
            images: a file or a folder of images (in the order of `folder_of_images`), bytes, a PIL image, a uint8 array
                [H, W, 3] or tensor [3, H, W], a batch of either, or a sequence of any of these. For a sentence encoder a
                text, or several.
            workers: threads that decode images; by default one per core.
        """
        given: Any = images
        if self.tokenizer is not None:
            embeddings = self.embed_texts(_checked_texts(given))
            return embeddings[0] if isinstance(given, str) else embeddings
        if _is_single(given):
            embedding: Embeddings = self.embed_pixels([self.preprocess(given)])[0]
            return embedding
        read: Callable[[Any], Tensor] = self.preprocess
        if isinstance(given, (str, Path)):
            table = folder_of_images(Path(given).expanduser()).table
            given, read = range(len(table)), partial(self.preprocess.from_table, table)
        found: list[Embeddings] = []
        bad: list[UnreadableImageError] = []
        for _, embeddings, unreadable in self._embed_each(read, list(given), workers):
            found.append(embeddings)
            bad += unreadable
        if bad:
            raise UnreadableImageError(f"embed: images that cannot be read:\n{first_ten([str(error) for error in bad])}")
        return np.concatenate(found) if found else np.empty((0, self.dim), np.float32)

    def search(self, query: Any, gallery: GalleryInput, k: int = 10) -> list[Any]:
        """The `k` images of `gallery` nearest to an image, best first: a list of `Hit`, or a list of such lists for several.

        Args:
            query: what `embed` takes, or embeddings [d] or [Q, d] of floating-point numbers.
            gallery: folder that `rankgrad embed` or `rankgrad index` wrote, a `Gallery` or `Searcher`, embeddings [N, d], or
                images to embed now: a folder, or a sequence of what `embed` takes. To search often, open a `Searcher` once.
            k: number of neighbours, at most the size of the gallery.
        """
        searcher = self._searcher(gallery)
        embeddings = np.asarray(query.detach().cpu() if isinstance(query, Tensor) else query) if _is_float(query) else None
        if embeddings is None:
            embeddings = self.embed(query)
        queries = np.atleast_2d(embeddings).astype(np.float32, copy=False)
        found = [
            [Hit(row, score, *searcher.gallery.named(row)) for score, row in zip(scores, rows, strict=True) if row >= 0]
            for scores, rows in zip(*(part.tolist() for part in searcher.search(queries, k)), strict=True)
        ]
        return found if embeddings.ndim == 2 else found[0]

    def _searcher(self, gallery: GalleryInput) -> Searcher:
        if isinstance(gallery, Searcher):
            searcher = gallery
        elif isinstance(gallery, Gallery):
            searcher = Searcher(gallery)
        elif isinstance(gallery, (str, Path)):
            folder = Path(gallery).expanduser()
            if self.tokenizer is not None and not is_searchable(folder):
                raise ValueError(f"search: {folder} is not a folder that embed or index wrote; a list of texts works, too")
            if not is_searchable(folder):
                images = folder_of_images(folder)
                return Searcher(Gallery.of(self.embed(folder), images))
            searcher = Searcher.open(folder)
        elif _is_float(gallery):
            array = gallery.detach().cpu().numpy() if isinstance(gallery, Tensor) else gallery
            return Searcher(Gallery.of(np.asarray(array, np.float32)))
        elif self.tokenizer is not None:
            texts = _checked_texts(gallery)
            return Searcher(Gallery.of(self.embed_texts(texts), listed_texts(texts)))
        else:
            return Searcher(Gallery.of(np.atleast_2d(self.embed(gallery))))
        searcher.gallery.check_fits(self)
        return searcher

    def embed_table(
        self, table: Table, workers: int | None = None
    ) -> Iterator[tuple[list[int], Embeddings, list[UnreadableImageError]]]:
        """Rows, their embeddings and the images that cannot be read, a batch at a time in the order of the table.

        Files are decoded in threads while the network computes; only a few batches are in memory.
        """
        if (table.texts is None) != (self.tokenizer is None):
            wanted = "images" if self.tokenizer is None else "texts"
            raise ValueError(f"embed: the model of {self.folder} embeds {wanted}, and {table.name} holds {table.noun}s")
        if table.texts is not None:
            return self._embed_text_table(table.texts)
        return self._embed_each(partial(self.preprocess.from_table, table), range(len(table)), workers)

    def _embed_text_table(self, texts: Sequence[str]) -> Iterator[tuple[list[int], Embeddings, list[UnreadableImageError]]]:
        for begin in range(0, len(texts), EMBEDDING_BATCH):
            part = texts[begin : begin + EMBEDDING_BATCH]
            yield list(range(begin, begin + len(part))), self.embed_texts(part), []

    def embed_texts(self, texts: Sequence[str]) -> Embeddings:
        """[N, d] of texts, on the CPU."""
        if self.tokenizer is None:
            raise ValueError(f"embed: the model of {self.folder} embeds images, and not texts")
        found = [np.empty((0, self.dim), np.float32)]
        for begin in range(0, len(texts), EMBEDDING_BATCH):
            tokens = self.tokenizer.collate(self.tokenizer(texts[begin : begin + EMBEDDING_BATCH]))
            with torch.no_grad():
                found.append(embed_batch(self.model, tokens, self.device, self.recipe.precision).cpu().numpy())
        return np.concatenate(found)

    def embed_pixels(self, images: Sequence[Tensor]) -> Embeddings:
        """[N, d] of preprocessed images, on the CPU."""
        if not len(images):
            return np.empty((0, self.dim), np.float32)
        if self.preprocess.native_shape:
            parts = [embed_multiscale(self.model, image[None].to(self.device), self.recipe.scales) for image in images]
            return torch.cat(parts).float().cpu().numpy()
        scales = self.recipe.scales
        network: nn.Module = self.model if scales == (1.0,) else MultiScale(self.model, scales).eval()
        with torch.no_grad():
            embeddings = embed_batch(network, torch.stack(list(images)), self.device, self.recipe.precision)
        return embeddings.cpu().numpy()

    def _embed_each(
        self, read: Callable[[T], Tensor], items: Iterable[T], workers: int | None
    ) -> Iterator[tuple[list[T], Embeddings, list[UnreadableImageError]]]:
        done: list[T] = []
        pixels: list[Tensor] = []
        bad: list[UnreadableImageError] = []
        for item, result in map_images(read, items, workers):
            if isinstance(result, UnreadableImageError):
                bad.append(result)
                continue
            done.append(item)
            pixels.append(result)
            if len(done) == EMBEDDING_BATCH:
                yield done, self.embed_pixels(pixels), bad
                done, pixels, bad = [], [], []
        if done or bad:
            yield done, self.embed_pixels(pixels), bad


def load(
    path: str | Path,
    device: torch.device | str = "auto",
    checkpoint: Literal["best", "last"] | None = None,
    *,
    trust_code: bool = False,
) -> TrainedModel:
    """Load the model of a run, or one that was shared.

    Args:
        path: the folder that `rankgrad train` or `rankgrad card --out` wrote.
        device: where to compute; "auto" is a GPU where there is one.
        checkpoint: "best" or "last"; by default the best where there is one.
        trust_code: allow the run to name a function of yours as its trunk (`package.module:factory`), which is imported and
            called.
    """
    if checkpoint not in (None, "best", "last"):
        raise ValueError(f"load: checkpoint must be 'best' or 'last', got {checkpoint!r}")
    folder = Path(path).expanduser()
    if str(device) == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    run = RunFolder(folder)
    task = RetrievalTask.from_run(run, RunContext(None, torch.device(device)), {})
    which = checkpoint or run.default_checkpoint
    found = run.checkpoint(which)
    if trust_code:
        trust_factory(task.recipe.trunk)
    # all weights come from the checkpoint: the file or download that training began with is not needed
    model = task.make_model(pretrained=False)
    found.load_into(model)
    return TrainedModel(
        folder=folder,
        recipe=task.recipe,
        model=model.eval(),
        preprocess=task.recipe.preprocessing(),
        device=torch.device(device),
        checkpoint=which,
        step=found.step,
        fingerprint=found.fingerprint,
        debug=run.read().debug,
        tokenizer=TextTokenizer(task.recipe.trunk, task.recipe.max_length) if task.recipe.is_text else None,
    )


def _checked_texts(given: Any) -> list[str]:
    texts = [given] if isinstance(given, str) else list(given)
    for text in texts:
        if not isinstance(text, str) or not text.strip():
            raise TypeError(f"embed: texts must be strings that are not empty, got {shorten(text)}")
    return texts


def _is_single(images: Any) -> bool:
    """Whether `images` is one image and not several."""
    from PIL import Image

    if isinstance(images, (str, Path)):
        return not Path(images).expanduser().is_dir()
    if isinstance(images, (np.ndarray, Tensor)):
        return images.ndim < 4
    if isinstance(images, (bytes, bytearray, memoryview)) or not isinstance(images, Iterable):
        return True
    return isinstance(images, Image.Image)


def _is_float(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point()
    return isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.floating)
