"""A trained run in use: embeddings of any images, an index over them, search, a page to search with, and export.

    model = load("runs/mine")
    embed_images(model, folder_of_images(Path("photos")), Path("photos-embedded"))
    build_index(Gallery.open(Path("photos-embedded")), Path("photos-embedded"), kind="auto")
    searcher = Searcher.open(Path("photos-embedded"))
    for hit in model.search("query.jpg", searcher, k=10):
        print(hit.score, hit.label, hit.path)

faiss, pyarrow, onnx and the server are imported where they are used: pip install 'rankgrad[search]'.
"""

from rankgrad.search.gallery import Gallery
from rankgrad.search.gallery_writer import embed_images
from rankgrad.search.image_lists import ImageList, folder_of_images, manifest_of_images, split_of_data_set
from rankgrad.search.index import KINDS, IndexReport, build_index
from rankgrad.search.searcher import Searcher
from rankgrad.search.trained_model import Hit, TrainedModel, load

__all__ = [
    "KINDS",
    "Gallery",
    "Hit",
    "ImageList",
    "IndexReport",
    "Searcher",
    "TrainedModel",
    "build_index",
    "embed_images",
    "folder_of_images",
    "load",
    "manifest_of_images",
    "split_of_data_set",
]
