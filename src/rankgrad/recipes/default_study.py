"""What `rankgrad train --data DIR` does with no flags, one setting changed at a time and judged on validation classes.

rankgrad study defaults --data DIR --data-set cars --trunk tf_efficientnet_lite0 --weights FILE --size 160
rankgrad study defaults --data-set glyphs --trunk convnet --weights none --size 32
"""

from typing import Any

from rankgrad.recipes.starters import OWN_IMAGES
from rankgrad.runs.study import Study, Variation

PROXIES: dict[str, Any] = {"proxy_weight": 0.4, "loss_lr": 100.0}
LINES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("loss", "as they are", {}),
    ("loss", "smooth-ap", {"loss": "smooth-ap"}),
    ("loss", "sup-ap", {"loss": "sup-ap"}),
    ("loss", "fastap", {"loss": "fastap"}),
    ("loss", "rambo-ap", {"loss": "rambo-ap"}),
    ("loss", "recall-at-k, simix", {"simix": True}),
    ("loss", "recall-at-k, proxies", PROXIES),
    ("loss", "recall-at-k, proxy anchors", {**PROXIES, "proxy_loss": "anchor"}),
    ("loss", "3e-4, proxies", {"lr": 3e-4, **PROXIES}),
    ("learning rate", "3e-5", {"lr": 3e-5}),
    ("learning rate", "3e-4", {"lr": 3e-4}),
    ("learning rate", "1e-3", {"lr": 1e-3}),
    ("learning rate", "3e-3", {"lr": 3e-3}),
    ("embedding layer", "x 4", {"head_lr": 4.0}),
    ("embedding layer", "x 10", {"head_lr": 10.0}),
    ("embedding layer", "whitened", {"whiten": True}),
    ("embedding layer", "3e-4, x 4", {"lr": 3e-4, "head_lr": 4.0}),
    ("embedding layer", "3e-4, whitened", {"lr": 3e-4, "whiten": True}),
    ("embedding layer", "1e-3, whitened", {"lr": 1e-3, "whiten": True}),
    ("schedule", "constant", {"schedule": "constant"}),
    ("schedule", "no warm-up", {"warmup": 0.0}),
    ("images", "crops of at least 0.08", {"crop_scale": 0.08}),
    ("images", "crops of at least 0.2", {"crop_scale": 0.2}),
    ("batch", "8 of a class", {"per_class": 8}),
    ("batch", "at most 128", {"batch_size": 128}),
    ("regularisation", "weight decay 0.01", {"weight_decay": 0.01}),
    ("precision", "bf16", {"precision": "bf16"}),
)

DEFAULTS = Study(
    "defaults",
    OWN_IMAGES,
    tuple(Variation(group, label, changes) for group, label, changes in LINES),
    metrics=("R@1", "mAP@R"),
    on_validation=True,
)
