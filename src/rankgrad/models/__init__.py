"""Images to unit embeddings: trunks, pooling, the linear layer, and what belongs to their training.

    model = build_model(ModelSpec(trunk="resnet50", weights="default", dim=512), seed=0)
    model(images)                                       # [B, 3, H, W] of 0..255 -> [B, 512], rows of length 1
    parameter_groups(model, lr=1e-4, weight_decay=4e-4, head_lr=10)
    describe(model.eval(), images)                      # the average over three sizes of the image

torchvision and timm are loaded when a trunk of theirs is built: pip install 'rankgrad[train]'.
"""

from rankgrad.models.embedder import Embedder, build_model, live_batch_norms
from rankgrad.models.multiscale import describe
from rankgrad.models.param_groups import parameter_groups
from rankgrad.models.spec import ModelSpec
from rankgrad.models.trunks import trunk_names
from rankgrad.models.whitening import Whitening, initialise_head, learn_whitening

__all__ = [
    "Embedder",
    "ModelSpec",
    "Whitening",
    "build_model",
    "describe",
    "initialise_head",
    "learn_whitening",
    "live_batch_norms",
    "parameter_groups",
    "trunk_names",
]
