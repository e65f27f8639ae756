"""Small fake data sets in the layouts of the real archives, with images that a network can learn from.

    build("sop", tmp_path)      writes the tree and returns the folder to hand to `rankgrad.data.readers.read`

Their counts are not the published ones, so they are read with partial=True.
"""

import colorsys
import csv
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CATEGORIES = 3
SOP_NAMES = ("bicycle", "cabinet", "chair")
INSHOP_NAMES = ("WOMEN/Dresses", "WOMEN/Tees_Tanks", "MEN/Denim")
INAT_NAMES = ("Aves", "Insecta", "Plantae")


def build(name: str, root: Path, *, classes: int = 6, per_class: int = 5, seed: int = 0) -> Path:
    """Write the tree of `name` below `root`: so many classes a split, the splits disjoint. Returns the folder to read.

    Besides the names of the readers there are "cars-devkit", "gldv1-list", "folder-flat" and "folder-categories" for the
    other layouts that some of them take.
    """
    root.mkdir(parents=True, exist_ok=True)
    return BUILDERS[name](root, classes, per_class, seed)


def picture(label: int, example: int, seed: int = 0) -> np.ndarray:
    """[H, W, 3] uint8: colour and stripes of the class, size, shift and noise of the example."""
    rng = np.random.default_rng((seed, label, example))
    height, width = rng.integers(40, 53, size=2)
    # steps of the golden ratio keep neighbouring labels apart in hue
    colour = np.array(colorsys.hsv_to_rgb(label * 0.618 % 1, 0.8, 0.9))
    angle, frequency = label * 0.9, 0.3 + 0.15 * (label % 4)
    rows, columns = np.mgrid[:height, :width]
    stripes = np.sin(frequency * (rows * np.cos(angle) + columns * np.sin(angle)) + rng.uniform(0, 6.28))
    pixels = 255 * colour * (0.6 + 0.35 * stripes[..., None]) + rng.normal(0, 12, (height, width, 3))
    return np.clip(pixels, 0, 255).astype(np.uint8)


def save(path: Path, label: int, example: int, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(picture(label, example, seed))
    image.save(path, format="PNG" if path.suffix == ".png" else "JPEG")


def write_lines(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def sop(root: Path, classes: int, per_class: int, seed: int) -> Path:
    folder = root / "Stanford_Online_Products"
    image = 0
    for split, first in (("train", 1), ("test", 11_319)):
        lines = ["image_id class_id super_class_id path"]
        for label in range(first, first + classes):
            category = label % CATEGORIES
            for example in range(per_class):
                image += 1
                path = f"{SOP_NAMES[category]}_final/{110_000_000_000 + label}_{example}.JPG"
                lines.append(f"{image} {label} {category + 1} {path}")
                save(folder / path, label, example, seed)
        write_lines(folder / f"Ebay_{split}.txt", lines)
    return root


def inshop(root: Path, classes: int, per_class: int, seed: int) -> Path:
    rows = []
    for label in range(1, 2 * classes + 1):
        for example in range(per_class):
            path = f"img/{INSHOP_NAMES[label % CATEGORIES]}/id_{label:08d}/{example:02d}_1_front.jpg"
            status = "train" if label <= classes else ("query", "gallery")[example % 2]
            rows.append(f"{path:<70}id_{label:08d}     {status}")
            save(root / path, label, example, seed)
    write_lines(root / "Eval" / "list_eval_partition.txt", [str(len(rows)), "image_name item_id evaluation_status", *rows])
    return root


def vehicleid(root: Path, classes: int, per_class: int, seed: int) -> Path:
    """Every third vehicle has no model; the test lists contain each other."""
    folder = root / "VehicleID_V1.0"
    models = ["999999 7"]
    lists: dict[str, list[str]] = {name: [] for name in ("train_list", "test_list_800", "test_list_1600", "test_list_2400")}
    image = 0
    for vehicle in range(1, 2 * classes + 3):
        if vehicle % 3:
            models.append(f"{vehicle} {vehicle % 3}")
        chosen = ["train_list"] if vehicle <= classes else ["test_list_2400"]
        chosen += ["test_list_1600"] if classes < vehicle <= 2 * classes + 1 else []
        chosen += ["test_list_800"] if classes < vehicle <= 2 * classes else []
        for example in range(per_class):
            image += 1
            for name in chosen:
                lists[name].append(f"{image:07d} {vehicle}")
            save(folder / "image" / f"{image:07d}.jpg", vehicle, example, seed)
    for name, lines in lists.items():
        write_lines(folder / "train_test_split" / f"{name}.txt", lines)
    write_lines(folder / "attribute" / "model_attr.txt", models)
    return root


def inat(root: Path, classes: int, per_class: int, seed: int) -> Path:
    for split, first in (("train", 1), ("test", 1 + classes)):
        paths = []
        for label in range(first, first + classes):
            for example in range(per_class):
                paths.append(f"train_val2018/{INAT_NAMES[label % CATEGORIES]}/{label}/{label:04x}{example:04x}.jpg")
                save(root / paths[-1], label, example, seed)
        write_lines(root / "Inat_dataset_splits" / f"Inaturalist_{split}_set1.txt", paths)
    return root


def cub(root: Path, classes: int, per_class: int, seed: int) -> Path:
    folder = root / "CUB_200_2011"
    images, labels = [], []
    for label in (*range(1, classes + 1), *range(101, 101 + classes)):
        for example in range(per_class):
            path = f"{label:03d}.Some_Bird/Some_Bird_{example:04d}.jpg"
            images.append(f"{len(images) + 1} {path}")
            labels.append(f"{len(images)} {label}")
            save(folder / "images" / path, label, example, seed)
    write_lines(folder / "images.txt", images)
    write_lines(folder / "image_class_labels.txt", labels)
    return root


def _annotations(field: str, rows: list[tuple[str, int]]) -> np.ndarray:
    fields = [(field, "O"), *((name, "O") for name in ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class"))]
    records = np.empty((1, len(rows)), dtype=fields)
    for i, (path, label) in enumerate(rows):
        records[0, i] = (path, np.uint16(1), np.uint16(1), np.uint16(40), np.uint16(40), np.uint8(label))
    return records


def write_annotations(path: Path, field: str, rows: list[tuple[str, int]]) -> None:
    from scipy.io import savemat

    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, {"annotations": _annotations(field, rows)})


def cars(root: Path, classes: int, per_class: int, seed: int) -> Path:
    rows = []
    for label in (*range(1, classes + 1), *range(99, 99 + classes)):
        for example in range(per_class):
            rows.append((f"car_ims/{len(rows) + 1:06d}.jpg", label))
            save(root / rows[-1][0], label, example, seed)
    write_annotations(root / "cars_annos.mat", "relative_im_path", rows)
    return root


def cars_devkit(root: Path, classes: int, per_class: int, seed: int) -> Path:
    """The same classes are in both files: that split is for classification."""
    for folder, name, examples in (
        ("cars_train", "devkit/cars_train_annos.mat", range(0, per_class, 2)),
        ("cars_test", "cars_test_annos_withlabels.mat", range(1, per_class, 2)),
    ):
        rows = []
        for label in (*range(1, classes + 1), *range(99, 99 + classes)):
            for example in examples:
                rows.append((f"{len(rows) + 1:05d}.jpg", label))
                save(root / folder / rows[-1][0], label, example, seed)
        write_annotations(root / name, "fname", rows)
    return root


def gldv1(root: Path, classes: int, per_class: int, seed: int) -> Path:
    with (root / "train.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerow(("id", "url", "landmark_id"))
        for label in range(classes):
            for example in range(per_class):
                image = f"{label:08x}{example:08x}"
                writer.writerow((image, f"https://example.org/{image},s1600/", 100 + label))
                save(root / "train" / f"{image}.jpg", label, example, seed)
    return root


def gldv1_list(root: Path, classes: int, per_class: int, seed: int) -> Path:
    folder = root / "landmarks18"
    rows = [(f"{label}/{example}.jpg", label, example) for label in range(classes) for example in range(per_class)]
    for path, label, example in rows:
        save(folder / "images" / path, label, example, seed)
    write_lines(folder / "lists" / "train.txt", [f"{path} {label}" for path, label, _ in rows])
    return root


def revisited(name: str) -> Callable[[Path, int, int, int], Path]:
    def builder(root: Path, classes: int, per_class: int, seed: int) -> Path:
        """A query per class; of its images the first is easy, the last junk, those between are hard. Two distractors."""
        gallery, queries, truth = [], [], []
        for label in range(classes):
            queries.append(f"building_{label:03d}_query")
            save(root / name / "jpg" / f"{queries[-1]}.jpg", label, per_class, seed)
            found = [len(gallery) + example for example in range(per_class)]
            for example in range(per_class):
                gallery.append(f"building_{label:03d}_{example:06d}")
                save(root / name / "jpg" / f"{gallery[-1]}.jpg", label, example, seed)
            truth.append({"bbx": [2.5, 3.0, 30.0, 31.5], "easy": found[:1], "hard": found[1:-1], "junk": found[-1:]})
        content: dict[str, Any] = {"imlist": gallery, "qimlist": queries, "gnd": truth}
        (root / name / f"gnd_{name}.pkl").write_bytes(pickle.dumps(content, protocol=2))
        distractors = [f"ab/{i:06d}.jpg" for i in range(2)]
        for i, path in enumerate(distractors):
            save(root / "revisitop1m" / "jpg" / path, 500 + i, 0, seed)
        write_lines(root / "revisitop1m" / "revisitop1m.txt", distractors)
        return root

    return builder


def omniglot(root: Path, classes: int, per_class: int, seed: int) -> Path:
    for folder, first in (("images_background", 1), ("images_evaluation", 1 + classes)):
        for label in range(first, first + classes):
            for example in range(per_class):
                path = f"{folder}/Alphabet_{label % CATEGORIES}/character{label:02d}/{label:04d}_{example + 1:02d}.png"
                save(root / path, label, example, seed)
    return root


def folder_tree(splits: tuple[str, ...], *, categories: bool = False) -> Callable[[Path, int, int, int], Path]:
    def builder(root: Path, classes: int, per_class: int, seed: int) -> Path:
        for i, split in enumerate(splits):
            for label in range(i * classes, (i + 1) * classes):
                inside = Path(split, f"group-{label % CATEGORIES}") if categories else Path(split)
                for example in range(per_class):
                    save(root / inside / f"class-{label:03d}" / f"{example}.png", label, example, seed)
        return root

    return builder


def manifest(root: Path, classes: int, per_class: int, seed: int) -> Path:
    """Training classes, then test classes with queries and gallery, as open-metric-learning lists them."""
    with (root / "dataset.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("path", "label", "split", "category", "is_query", "is_gallery"))
        for label in range(2 * classes):
            for example in range(per_class):
                path = f"images/{label}_{example}.jpg"
                flags = ("", "") if label < classes else (example % 2 == 0, example % 2 == 1)
                split = "train" if label < classes else "test"
                writer.writerow((path, f"product {label:03d}", split, f"kind {label % CATEGORIES}", *flags))
                save(root / path, label, example, seed)
    return root


BUILDERS: dict[str, Callable[[Path, int, int, int], Path]] = {
    "sop": sop,
    "inshop": inshop,
    "vehicleid": vehicleid,
    "inat": inat,
    "cub": cub,
    "cars": cars,
    "cars-devkit": cars_devkit,
    "gldv1": gldv1,
    "gldv1-list": gldv1_list,
    "roxford5k": revisited("roxford5k"),
    "rparis6k": revisited("rparis6k"),
    "omniglot": omniglot,
    "folder": folder_tree(("train", "test")),
    "folder-categories": folder_tree(("train", "val", "test"), categories=True),
    "folder-flat": folder_tree((".",)),
    "csv": manifest,
    # drawn, so there is nothing to write
    "glyphs": lambda root, classes, per_class, seed: root,
}
