"""Glyphs: a retrieval data set drawn at run time from the fonts that ship with matplotlib.

A Unicode character is a class, its script is its category, a font is an example, and every drawing is distorted and made
noisy by a seeded generator. Training and test characters are disjoint, as in the field's benchmarks, and the split of a
character does not depend on the seed.

    load_glyphs("train")        a `Glyphs` value of numpy arrays, from the cache or drawn in a few seconds

Needs matplotlib (for its fonts) and Pillow: pip install 'rankgrad[glyphs]'.
"""

import hashlib
import importlib.util
import os
import unicodedata
import warnings
import zipfile
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rankgrad._files import atomic_file, write_error_reason
from rankgrad._messages import install_hint

Split: TypeAlias = Literal["train", "test"]
Pixels: TypeAlias = NDArray[np.uint8]
Font: TypeAlias = int
"""A position in `FONTS`."""

SPLITS: tuple[Split, Split] = ("train", "test")

# the text faces; the others that ship with matplotlib contain large brackets or use a TeX encoding
FONTS = (
    *(f"DejaVu{face}{style}.ttf" for face in ("Sans", "SansMono") for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}.ttf" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}.ttf" for style in ("", "Bol", "Italic", "BolIta")),
)
MIN_FONTS = 8

# letters, digits and symbols. Marks and punctuation differ mostly by height above the baseline, modifiers are small
# copies of letters, the others have no ink.
GENERAL_CATEGORIES = frozenset({"Lu", "Ll", "Lt", "Lo", "Nd", "Nl", "No", "Sm", "So", "Sc"})

# first code point of each run of Unicode blocks that belong together
SCRIPTS = (
    (0x0000, "Latin"),
    (0x0370, "Greek"),
    (0x0400, "Cyrillic"),
    (0x0530, "Armenian"),
    (0x0590, "Other scripts"),
    (0x0E80, "Lao"),
    (0x0F00, "Other scripts"),
    (0x10A0, "Georgian"),
    (0x1100, "Other scripts"),
    (0x1D00, "Latin"),
    (0x1F00, "Greek"),
    (0x2000, "Letterlike and numbers"),
    (0x2190, "Arrows"),
    (0x2200, "Mathematics"),
    (0x2300, "Technical"),
    (0x2460, "Letterlike and numbers"),
    (0x2500, "Boxes and blocks"),
    (0x25A0, "Shapes and pictures"),
    (0x27C0, "Mathematics"),
    (0x27F0, "Arrows"),
    (0x2800, "Braille"),
    (0x2900, "Arrows"),
    (0x2980, "Mathematics"),
    (0x2B00, "Arrows"),
    (0x2C60, "Latin"),
    (0x2C80, "Other scripts"),
    (0x2D00, "Georgian"),
    (0x2D30, "Other scripts"),
    (0xA640, "Cyrillic"),
    (0xA6A0, "Other scripts"),
    (0xA720, "Latin"),
    (0xA800, "Other scripts"),
    (0xFB00, "Latin"),
    (0xFB07, "Other scripts"),
)

# two characters are one class when the squared difference of their drawings, relative to the inkier of the two,
# stays below this in at least half of the fonts they share: A of Latin, Greek and Cyrillic; Angstrom and A with ring
SAME_DRAWING = 0.02

# images distorted at once: 512 coordinate maps of 32 x 32 are a few MiB and stay in the processor's cache
CHUNK = 512


@dataclass(frozen=True, eq=False)
class Glyphs:
    """Drawings of one split, the examples of a class next to each other.

    Attributes:
        images: [N, H, W] uint8, ink is bright.
        labels: [N] int64, the class of each image, dense from 0.
        categories: [N] int64, the script of each image's class.
        class_names: the character of each label.
        category_names: the script of each category.
    """

    images: Pixels
    labels: NDArray[np.int64]
    categories: NDArray[np.int64]
    class_names: tuple[str, ...]
    category_names: tuple[str, ...]

    def __post_init__(self) -> None:
        lengths = len(self.images), len(self.labels), len(self.categories)
        if self.images.ndim != 3 or len(set(lengths)) != 1:
            raise ValueError(f"Glyphs: images must be [N, H, W] with N labels and categories, got lengths {lengths}")
        for name, values, names in (
            ("labels", self.labels, self.class_names),
            ("categories", self.categories, self.category_names),
        ):
            if len(values) and not 0 <= values.min() <= values.max() < len(names):
                raise ValueError(f"Glyphs: {name} must lie in [0, {len(names)}), got {values.min()} to {values.max()}")


def load_glyphs(split: Split, *, size: int = 32, seed: int = 0, examples: int = MIN_FONTS, cache: Path | None = None) -> Glyphs:
    """The drawings of one split: a pure function of its arguments, kept on disk after the first call.

    Args:
        split: "train" or "test"; no character is in both.
        size: height and width of an image in pixels, at least 16.
        seed: of the choice of fonts and of the distortions.
        examples: images per class, each in another font until all fonts of the class (8 at least) are used, then again.
        cache: folder for the drawn arrays. By default $RANKGRAD_CACHE, else ~/.cache/rankgrad.
    """
    if split not in SPLITS:
        raise ValueError(f"load_glyphs: split must be one of {SPLITS}, got {split!r}")
    for name, value, least in (("size", size, 16), ("seed", seed, 0), ("examples", examples, 1)):
        if value < least:
            raise ValueError(f"load_glyphs: {name} must be at least {least}, got {value}")
    folder = cache or Path(os.environ.get("RANKGRAD_CACHE") or Path.home() / ".cache" / "rankgrad")
    path = folder / f"glyphs-{split}-{size}px-{examples}x-seed{seed}-{_fingerprint()}.npz"
    glyphs = _read(path)
    if glyphs is None:
        glyphs = _draw(split, size, seed, examples)
        _write(path, glyphs)
    return glyphs


def _draw(split: Split, size: int, seed: int, examples: int) -> Glyphs:
    chosen = [(char, fonts) for char, fonts in _classes() if _split(char) == split]
    rng = np.random.default_rng((seed, SPLITS.index(split)))
    wanted = [(char, font) for char, fonts in chosen for font in np.resize(rng.permutation(fonts), examples)]

    scripts = [_script(char) for char, _ in chosen]
    category_names = tuple(dict.fromkeys(scripts))
    return Glyphs(
        images=_distort(_rasterise(wanted, size), rng),
        labels=np.repeat(np.arange(len(chosen)), examples),
        categories=np.repeat([category_names.index(script) for script in scripts], examples),
        class_names=tuple(char for char, _ in chosen),
        category_names=category_names,
    )


@lru_cache(maxsize=1)
def _classes() -> list[tuple[str, list[Font]]]:
    """Every character that enough fonts have, with these fonts; one of each group whose drawings coincide."""
    from matplotlib.ft2font import FT2Font

    fonts_of: dict[str, list[Font]] = defaultdict(list)
    for font, path in enumerate(_font_paths()):
        for code in FT2Font(str(path)).get_charmap():
            fonts_of[chr(code)].append(font)
    chars = sorted(
        char for char, fonts in fonts_of.items() if len(fonts) >= MIN_FONTS and unicodedata.category(char) in GENERAL_CATEGORIES
    )
    pairs = [(char, font) for char in chars for font in fonts_of[char]]
    drawings = _rasterise(pairs, size=32).reshape(len(pairs), -1).astype(np.float32)
    fonts = np.array([font for _, font in pairs])

    coincide: Counter[tuple[str, str]] = Counter()
    dropped: set[str] = set()
    for font in range(len(FONTS)):
        here = np.flatnonzero(fonts == font)
        ink = (drawings[here] ** 2).sum(axis=1)
        dropped.update(pairs[i][0] for i in here[ink == 0])
        difference = ink[:, None] + ink - 2 * drawings[here] @ drawings[here].T
        same = np.triu(difference <= SAME_DRAWING * np.maximum(ink[:, None], ink), k=1)
        coincide.update((pairs[here[i]][0], pairs[here[j]][0]) for i, j in np.argwhere(same))

    # in order of code points, so the first of a group (mostly the Latin one) is kept
    for (first, second), times in sorted(coincide.items()):
        shared = len(set(fonts_of[first]) & set(fonts_of[second]))
        if first not in dropped and 2 * times >= shared:
            dropped.add(second)
    return [(char, fonts_of[char]) for char in chars if char not in dropped]


def _rasterise(wanted: list[tuple[str, Font]], size: int) -> Pixels:
    """Plain drawings [len(wanted), size, size], all of one em size on one baseline, so that o and O differ."""
    from PIL import Image, ImageDraw, ImageFont

    fonts = [
        # the basic layout does not depend on whether Pillow was built with libraqm
        ImageFont.truetype(str(path), round(0.6 * size), layout_engine=ImageFont.Layout.BASIC)
        for path in _font_paths()
    ]
    drawings = np.zeros((len(wanted), size, size), np.uint8)
    for drawing, (char, font) in zip(drawings, wanted, strict=True):
        image = Image.new("L", (size, size))
        ImageDraw.Draw(image).text((size / 2, 0.72 * size), char, fill=255, font=fonts[font], anchor="ms")
        drawing[:] = np.asarray(image)
    return drawings


def _distort(drawings: Pixels, rng: np.random.Generator) -> Pixels:
    """Rotate, shear, scale, shift and bend every drawing at random, then change contrast and add noise."""
    n, size = len(drawings), drawings.shape[1]
    angle, shear = rng.normal(0, 0.08, n), rng.normal(0, 0.1, n)
    zoom, stretch = rng.uniform(0.9, 1.1, n), rng.uniform(0.9, 1.1, n)
    shift = rng.uniform(-0.04, 0.04, (n, 2)) * size
    bend = rng.normal(0, 0.025, (n, 2, 4, 4)) * size
    contrast, paper = rng.uniform(0.6, 1, n), rng.uniform(0, 60, n)

    # from a pixel of the result to its place in the drawing: rows of [n, 2, 2]
    cos, sin = np.cos(angle), np.sin(angle)
    matrix = np.stack([stretch * cos, sin + shear, -sin, cos], axis=1).reshape(n, 2, 2) / zoom[:, None, None]
    centred = np.arange(size) - (size - 1) / 2
    grid = np.stack(np.meshgrid(centred, centred, indexing="ij")).reshape(2, -1)
    # hat functions interpolate the 4 x 4 displacements to the image
    knots = np.maximum(0, 1 - np.abs(np.linspace(0, 3, size)[:, None] - np.arange(4)))

    result = np.empty_like(drawings)
    for start in range(0, n, CHUNK):
        part = slice(start, start + CHUNK)
        bent = (knots @ bend[part] @ knots.T).reshape(-1, 2, size * size)
        place = matrix[part] @ grid + bent + shift[part, :, None] + (size - 1) / 2
        sampled = _sample(drawings[part], place)
        ink = contrast[part, None, None] * (255 - paper[part, None, None])
        noisy = paper[part, None, None] + ink * sampled + rng.normal(0, 10, sampled.shape)
        result[part] = np.clip(noisy, 0, 255).astype(np.uint8)
    return result


def _sample(drawings: Pixels, place: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bilinear samples in [0, 1] at `place` [n, 2, pixels] (row, column); outside the drawing there is no ink."""
    n, size = len(drawings), drawings.shape[1]
    framed = np.pad(drawings, ((0, 0), (1, 1), (1, 1))) / 255
    place = np.clip(place + 1, 0, size + 1 - 1e-6)
    corner = place.astype(np.int64)
    (row, column), (down, right) = np.moveaxis(corner, 1, 0), np.moveaxis(place - corner, 1, 0)
    flat: NDArray[np.float64] = framed.reshape(-1)
    at = (np.arange(n)[:, None] * (size + 2) + row) * (size + 2) + column
    upper = flat[at] * (1 - right) + flat[at + 1] * right
    lower = flat[at + size + 2] * (1 - right) + flat[at + size + 3] * right
    sampled: NDArray[np.float64] = upper * (1 - down) + lower * down
    return sampled.reshape(n, size, size)


def _split(char: str) -> Split:
    # a hash, so that a character keeps its split whatever the seed and the other characters
    return SPLITS[hashlib.sha256(char.encode()).digest()[0] % len(SPLITS)]


def _script(char: str) -> str:
    return SCRIPTS[bisect_right(SCRIPTS, ord(char), key=lambda entry: entry[0]) - 1][1]


@lru_cache(maxsize=1)
def _font_paths() -> tuple[Path, ...]:
    missing = [name for name in ("matplotlib", "PIL") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"load_glyphs draws with matplotlib's fonts and Pillow, missing: {', '.join(missing)}. "
            f"Install them with {install_hint('glyphs')}",
            name=missing[0],
        )
    import matplotlib as mpl

    folder = Path(mpl.get_data_path()) / "fonts" / "ttf"
    paths = tuple(folder / name for name in FONTS)
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: install matplotlib from PyPI, which includes its fonts")
    return paths


@lru_cache(maxsize=1)
def _fingerprint() -> str:
    """A digest of what else decides a pixel: the fonts, the rasteriser, this file."""
    from PIL import features

    digest = hashlib.sha256(f"{features.version('freetype2')} {np.__version__}".encode())
    for path in (*_font_paths(), Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _read(path: Path) -> Glyphs | None:
    """What `_write` left at `path`; None if it is absent or damaged, in which case it is drawn again."""
    try:
        # opened here, because numpy leaves a damaged file open
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return Glyphs(
                images=stored["images"],
                labels=stored["labels"],
                categories=stored["categories"],
                class_names=tuple(stored["class_names"].tolist()),
                category_names=tuple(stored["category_names"].tolist()),
            )
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile):
        return None


def _write(path: Path, glyphs: Glyphs) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as unfinished:
            np.savez(
                unfinished,
                images=glyphs.images,
                labels=glyphs.labels,
                categories=glyphs.categories,
                class_names=np.array(glyphs.class_names),
                category_names=np.array(glyphs.category_names),
            )
    except OSError as error:
        warnings.warn(f"glyphs are not cached: {path} cannot be written: {write_error_reason(error)}", stacklevel=3)
