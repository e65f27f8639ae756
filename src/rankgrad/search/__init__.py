"""What a trained run is good for: embeddings of any images, an index over them, search, a page to search with, and export.

    network = open_run(Path("runs/mine"))
    embed_images(network, folder_of_images(Path("photos")), Path("photos-embedded"))
    build_index(Gallery.open(Path("photos-embedded")), Path("photos-embedded"), kind="auto")
    searcher = Searcher.open(Path("photos-embedded"))
    scores, rows = searcher.search(network.embed_file(Path("query.jpg"))[None], k=10)

faiss, pyarrow, onnx and the server are loaded where they are used: pip install 'rankgrad[search]'.
"""

from rankgrad.search.gallery import Gallery, embed_images
from rankgrad.search.image_lists import Items, folder_of_images, manifest_of_images, split_of_data_set
from rankgrad.search.index import KINDS, build_index
from rankgrad.search.searcher import Searcher
from rankgrad.search.trained_model import Network, open_run

__all__ = [
    "KINDS",
    "Gallery",
    "Items",
    "Network",
    "Searcher",
    "build_index",
    "embed_images",
    "folder_of_images",
    "manifest_of_images",
    "open_run",
    "split_of_data_set",
]
