"""Images, or texts, to unit embeddings: trunks, pooling, the linear layer, parameter groups, whitening.

    model = build_model(ModelSpec(trunk="resnet50", weights="default", dim=512), seed=0)
    model(images)                                       # [B, 3, H, W] of 0..255 -> [B, 512], rows of length 1
    parameter_groups(model, lr=1e-4, weight_decay=4e-4, head_lr=10)
    embed_multiscale(model.eval(), images)              # the average over three sizes of the image

torchvision and timm are imported when one of their trunks is built: pip install 'rankgrad[train]'.
"""

from rankgrad.models.embedder import BatchNorm, Embedder, ModelSpec, Pixels, Pool, build_model, embed_multiscale
from rankgrad.models.param_groups import parameter_groups
from rankgrad.models.text_trunks import TextTokenizer, is_text_folder
from rankgrad.models.trunks import trunk_names, trust_factory
from rankgrad.models.whitening import Whitening, initialise_head, learn_whitening

__all__ = [
    "BatchNorm",
    "Embedder",
    "ModelSpec",
    "Pixels",
    "Pool",
    "TextTokenizer",
    "Whitening",
    "build_model",
    "embed_multiscale",
    "initialise_head",
    "is_text_folder",
    "learn_whitening",
    "parameter_groups",
    "trunk_names",
    "trust_factory",
]
