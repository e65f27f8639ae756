"""Which learning rate and weight decay each parameter gets."""

from typing import Any

from torch import nn

from rankgrad._checks import check_not_negative, check_positive
from rankgrad.models.embedder import Embedder
from rankgrad.models.pooling import GeM


def parameter_groups(
    model: Embedder,
    *,
    lr: float,
    weight_decay: float,
    head_lr: float = 1.0,
    decay_norms: bool = True,
    gem_lr: float = 1.0,
    decay_gem: bool = False,
) -> list[dict[str, Any]]:
    """Every trainable parameter once, in groups for a torch optimizer: trunk, layer norm, embedding layer, GeM exponent.

    Args:
        lr: the learning rate; the other two rates multiply it.
        head_lr: for the linear layer that makes the embedding; FastAP has 10.
        decay_norms: whether scales and shifts of norms, biases, and whatever else the trunk's makers exempt (class token,
            position embeddings) decay too, as in the papers.
        gem_lr: for GeM's exponent; the landmark recipes have 10.
        decay_gem: whether GeM's exponent decays towards 0; the code of RS@k lets it.
    """
    if not isinstance(model, Embedder):
        raise TypeError(
            f"parameter_groups: model must be an Embedder, got {type(model).__name__}; make the groups before wrapping it"
        )
    check_positive(lr, name="lr", caller="parameter_groups")
    for name, value in (("weight_decay", weight_decay), ("head_lr", head_lr), ("gem_lr", gem_lr)):
        check_not_negative(value, name=name, caller="parameter_groups")

    exempt = {f"trunk.{name}" for name in getattr(model.trunk, "no_weight_decay", set)()}
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name.startswith("head.linear."):
            part, rate, decays = "embedding", head_lr, True
        elif isinstance(model.head.pool, GeM) and parameter is model.head.pool.p:
            part, rate, decays = "gem", gem_lr, decay_gem
        else:
            part, rate, decays = name.partition(".")[0], 1.0, True
        # norms and biases are the vectors among the parameters
        if part != "gem" and not decay_norms and (parameter.ndim <= 1 or name in exempt):
            decays = False
        group = groups.setdefault(
            part if decays or part == "gem" else f"{part}-no-decay",
            {"params": list[nn.Parameter](), "lr": lr * rate, "weight_decay": weight_decay if decays else 0.0},
        )
        group["params"].append(parameter)
    return [{**group, "name": name} for name, group in groups.items()]
