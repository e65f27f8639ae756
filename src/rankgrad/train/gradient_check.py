"""Compares gradients computed in stages with those of a plain backward pass, from the same state of everything."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rankgrad.train.snapshot import BufferSnapshot, LossSnapshot, RngSnapshot

if TYPE_CHECKING:
    from rankgrad.train.large_batch import Loss

# relative error that the order of sums may cause, by the dtype of the model
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3}
ROUNDING_16_BIT = 3e-2


@dataclass(frozen=True)
class CheckReport:
    """How the gradients of `LargeBatch` compare with those of a plain backward pass.

    Attributes:
        cosine: between the two gradients, all parameters together.
        relative_error: length of the difference over length of the plain gradient.
        worst: the parameters that differ most, with their relative errors.
        exact: whether rounding explains the difference and no other problem was found.
        explanation: what was compared, and what is wrong.
    """

    cosine: float
    relative_error: float
    worst: tuple[tuple[str, float], ...]
    exact: bool
    explanation: str

    def __str__(self) -> str:
        verdict = "exact" if self.exact else "NOT the gradient of the whole batch"
        worst = ", ".join(f"{name} {error:.1e}" for name, error in self.worst)
        return (
            f"LargeBatch is {verdict}: cosine {self.cosine:.6f}, relative error {self.relative_error:.1e} (most in {worst}). "
            f"{self.explanation}"
        )


class GradientCheck:
    """Compares both computations and restores everything.

    Args:
        model: gradients of its parameters are compared.
        loss: those of its parameters too.
        embed: embeddings of a slice of the batch.
        staged: the computation to check; leaves gradients in the parameters.
        labels: of the batch.
        cuts: the chunks.
        device: where the model is.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: "Loss",
        *,
        embed: Callable[[slice], Tensor],
        staged: Callable[[], object],
        labels: Any,
        cuts: list[slice],
        device: torch.device,
    ) -> None:
        self.model, self.loss, self.embed, self.staged = model, loss, embed, staged
        self.labels, self.cuts, self.device = labels, cuts, device
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if isinstance(loss, nn.Module):
            self.parameters |= {f"loss.{name}": p for name, p in loss.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ValueError("LargeBatch.check: model and loss have no parameter that requires a gradient")
        self.random, self.buffers, self.memory = RngSnapshot.of(device), BufferSnapshot.of(model), LossSnapshot.of(loss)

    def report(self) -> CheckReport:
        before = {name: p.grad for name, p in self.parameters.items()}
        try:
            problems = self._problems()
            is_random = self._is_random()
            # a plain pass in chunks would hide what depends on the chunk, so it is used only where random layers require it
            everything = [slice(0, self.cuts[-1].stop)]
            plain = self._gradients(lambda: self._plain(self.cuts if is_random else everything))
            staged = self._gradients(self.staged)
        finally:
            self._rewind()
            for name, parameter in self.parameters.items():
                parameter.grad = before[name]
        return self._compare(plain, staged, problems, is_random)

    def _compare(
        self, plain: dict[str, Tensor], staged: dict[str, Tensor], problems: list[str], is_random: bool
    ) -> CheckReport:
        errors = {name: _relative_error(staged[name], plain[name]) for name in plain}
        worst = tuple(sorted(errors.items(), key=lambda pair: -pair[1])[:3])
        ours, theirs = (torch.cat([tensor.flatten() for tensor in side.values()]) for side in (staged, plain))
        lengths = float(ours.norm() * theirs.norm())
        error = _relative_error(ours, theirs)
        agrees = error <= self._rounding()
        if not agrees and not problems:
            problems.append("An image's embedding depends on the other images of its chunk.")
        against = "all chunks kept alive, as random layers draw for each chunk" if is_random else "the whole batch at once"
        return CheckReport(
            cosine=float(ours @ theirs) / lengths if lengths else 1.0,
            relative_error=error,
            worst=worst,
            exact=agrees and not problems,
            explanation=" ".join((f"Compared with {against}.", *problems)),
        )

    def _rounding(self) -> float:
        if torch.is_autocast_enabled(self.device.type):
            return ROUNDING_16_BIT
        return max(ROUNDING.get(p.dtype, ROUNDING_16_BIT) for p in self.parameters.values())

    def _problems(self) -> list[str]:
        problems = []
        live = live_batch_norms(self.model) if len(self.cuts) > 1 else []
        if live:
            problems.append(f"Batch normalisation uses the statistics of a chunk, put it in eval mode: {', '.join(live[:3])}.")
        if not torch.equal(self._first_chunk(), self._first_chunk()):
            problems.append(
                "The model embeds a chunk differently each time from the same random state: look for generators other than "
                "torch's and for nondeterministic operations."
            )
        norms = {name for name, module in self.model.named_modules() if isinstance(module, _BatchNorm)}
        changed = [name for name in self.buffers.changed() if name.rpartition(".")[0] not in norms]
        if changed:
            problems.append(f"A forward pass changes buffers, and there are two for each chunk: {', '.join(changed[:3])}.")
        return problems

    def _first_chunk(self) -> Tensor:
        self._rewind()
        with torch.no_grad():
            return self.embed(self.cuts[0])

    def _is_random(self) -> bool:
        self._first_chunk()
        return not RngSnapshot.of(self.device).equals(self.random)

    def _gradients(self, run: Callable[[], object]) -> dict[str, Tensor]:
        self._rewind()
        # casts of weights that were made without a graph must not be used in a pass with one
        torch.clear_autocast_cache()
        for parameter in self.parameters.values():
            parameter.grad = None
        run()
        return {
            name: (torch.zeros_like(p) if p.grad is None else p.grad).detach().double() for name, p in self.parameters.items()
        }

    def _plain(self, cuts: list[slice]) -> None:
        embeddings = torch.cat([self.embed(cut) for cut in cuts])
        value = self.loss(embeddings, self.labels)
        with torch.autocast(self.device.type, enabled=False):
            value.sum().backward()

    def _rewind(self) -> None:
        self.random.restore()
        self.buffers.restore()
        self.memory.restore()


def live_batch_norms(model: nn.Module) -> list[str]:
    """Names of the batch normalisations that would use statistics of the images they are given."""
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
    ]


def _relative_error(value: Tensor, reference: Tensor) -> float:
    length, difference = float(reference.norm()), float((value - reference).norm())
    if length:
        return difference / length
    return float("inf") if difference else 0.0
