"""A small folder in the layout of Pascal VOC."""

from pathlib import Path

import numpy as np
from PIL import Image

OBJECT = """<object><name>{name}</name>{difficult}<bndbox><xmin>{box[0]}</xmin><ymin>{box[1]}</ymin><xmax>{box[2]}</xmax>
<ymax>{box[3]}</ymax></bndbox>{part}</object>"""
PART = "<part><name>head</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox></part>"


def annotation(objects, width=64, height=48):
    """XML of (name, box) or (name, box, difficult), boxes as VOC writes them: first and last pixel, counted from 1."""
    parts = [
        OBJECT.format(
            name=name,
            box=box,
            difficult="".join(f"<difficult>{int(flag)}</difficult>" for flag in rest),
            part=PART if name == "person" else "",
        )
        for name, box, *rest in objects
    ]
    size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
    return f"<annotation><filename>x.jpg</filename>{size}{''.join(parts)}</annotation>"


def write_image(path: Path, width=64, height=48, seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def write_voc(folder: Path, images, lists):
    """`images`: stem -> objects; `lists`: name of a split -> stems."""
    for number, (stem, objects) in enumerate(images.items()):
        write_image(folder / "JPEGImages" / f"{stem}.jpg", seed=number)
        xml = folder / "Annotations" / f"{stem}.xml"
        xml.parent.mkdir(parents=True, exist_ok=True)
        xml.write_text(annotation(objects))
    for name, stems in lists.items():
        path = folder / "ImageSets" / "Main" / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{stem}\n" for stem in stems))
    return folder
