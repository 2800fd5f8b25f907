"""Check on a probe batch that a spec's permutations leave the model's function unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shuffled_dpsgd.errors import InvalidArgumentError, InvarianceError
from shuffled_dpsgd.permutation.comparison import (
    FLOOR,
    default_tolerance,
    function_outputs,
    gap,
    output_deviation,
)
from shuffled_dpsgd.permutation.discovery import discover
from shuffled_dpsgd.permutation.drawing import draw
from shuffled_dpsgd.permutation.moving import apply, apply_to_tensors
from shuffled_dpsgd.permutation.spec import PermutationSpec, Scope
from shuffled_dpsgd.runtime.replay import without_a_trace

Loss = Callable[[Any], Tensor]
# Outputs, loss, and gradients by parameter.
_Result = tuple[list[Tensor], Tensor, dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Worst deviations over all draws, each relative to the largest entry of what it compares.

    An output counts relative to its own largest entry, or to a hundredth of the largest entry of
    any output if that is more: below it lies rounding. Likewise a parameter's gradient among
    gradients. `worst_parameter` names the parameter where gradients differ most.
    """

    num_draws: int
    output_deviation: float
    loss_deviation: float
    gradient_deviation: float
    worst_parameter: str
    tolerance: float

    @property
    def worst_deviation(self) -> float:
        """The largest of the three."""
        return max(self.output_deviation, self.loss_deviation, self.gradient_deviation)

    def to_json(self) -> dict[str, Any]:
        """Plain data for reports."""
        return asdict(self)


def verify(
    model: nn.Module,
    batch: Any,
    spec: PermutationSpec | None = None,
    *,
    scope: Scope = "paper",
    loss: Loss | None = None,
    num_draws: int = 2,
    seed: int = 0,
    tolerance: float | None = None,
) -> Verification:
    """Permute, compare outputs, loss and all gradients with those before, and put weights back.

    `batch` is what the model is called with: a mapping of keywords, a sequence of positional
    arguments, or one tensor. `loss` maps the model's output to per-sample losses or a scalar; by
    default it is the output's own loss if it has one, plus a fixed random weighting of all
    outputs, so that no output goes unnoticed. Dropout is off and frozen parameters are included.
    Gradients make the check sharp: a parameter that is zero everywhere still has one.

    Raises `InvarianceError` beyond `tolerance` (default by dtype). The weights are restored bit
    for bit either way; `.grad` is not touched.
    """
    if num_draws < 1:
        raise InvalidArgumentError("num_draws", expected="at least one draw", got=num_draws)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise InvalidArgumentError(
                "model",
                expected="weights to compute with",
                got=f"{name} on the meta device",
                remedy="load or initialise the weights first; discover alone needs none",
            )
    spec = discover(model, scope=scope) if spec is None else spec
    generator = torch.Generator().manual_seed(seed)
    found: list[tuple[float, float, float, str]] = []
    with _probing(model):
        before = _evaluate(model, batch, loss, seed)
        for _ in range(num_draws):
            permutation = draw(spec, generator)
            apply(permutation, model)
            try:
                after = _evaluate(model, batch, loss, seed)
            finally:
                apply(permutation.inverse(), model)
            expected = {name: g.clone() for name, g in before[2].items()}
            apply_to_tensors(permutation, expected)
            found.append(_deviations(before, after, expected))
    outputs, losses, _, _ = zip(*found, strict=True)
    _, _, gradient, name = max(found, key=lambda each: each[2])
    worst = Verification(
        num_draws=num_draws,
        output_deviation=max(outputs),
        loss_deviation=max(losses),
        gradient_deviation=gradient,
        worst_parameter=name if gradient else "",
        tolerance=default_tolerance(model) if tolerance is None else tolerance,
    )
    if not worst.worst_deviation <= worst.tolerance:
        raise InvarianceError(
            f"permuting changed the model: outputs by {worst.output_deviation:.2e}, loss by "
            f"{worst.loss_deviation:.2e}, gradients by {worst.gradient_deviation:.2e} (most in "
            f"{worst.worst_parameter}); expected at most {worst.tolerance:.0e}; a group of the "
            "spec is wrong for this model, or the model is not deterministic"
        )
    return worst


@contextmanager
def _probing(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, every parameter differentiable, `.grad` set aside; all put back after."""
    kept = {p: p.requires_grad for p in model.parameters()}
    with without_a_trace(model):
        model.eval()
        try:
            for parameter in kept:
                parameter.grad = None
                parameter.requires_grad_(parameter.is_floating_point())
            yield
        finally:
            for parameter, requires_grad in kept.items():
                parameter.requires_grad_(requires_grad)


def _evaluate(model: nn.Module, batch: Any, loss: Loss | None, seed: int) -> _Result:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        if isinstance(batch, Mapping):
            output = model(**batch)
        else:
            output = model(batch) if isinstance(batch, Tensor) else model(*batch)
        outputs = [*function_outputs(output)]
        value = _default_loss(output, outputs, seed) if loss is None else loss(output)
        found = torch.autograd.grad(value.sum(), [*trained.values()], allow_unused=True)
    gradients = {name: g for name, g in zip(trained, found, strict=True) if g is not None}
    return [o.detach() for o in outputs], value.detach(), gradients


def _default_loss(output: Any, outputs: list[Tensor], seed: int) -> Tensor:
    own = getattr(output, "loss", None)
    parts = [own.sum()] if isinstance(own, Tensor) else []
    generator = torch.Generator().manual_seed(seed)
    for tensor in outputs:
        weight = torch.randn(tensor.shape, generator=generator, device="cpu").to(tensor)
        parts.append((weight * tensor).sum() / max(tensor.numel(), 1) ** 0.5)
    if not parts:
        raise InvalidArgumentError(
            "batch",
            expected="a batch for which the model returns floating-point numbers",
            got=type(output).__name__,
        )
    return sum(parts[1:], parts[0])


def _deviations(
    before: _Result, after: _Result, expected: dict[str, Tensor]
) -> tuple[float, float, float, str]:
    """Deviations of outputs, loss and gradients, and where gradients deviate most."""
    largest = {name: float(g.abs().max()) for name, g in expected.items()}
    floor = FLOOR * max(largest.values(), default=0.0)
    apart = {
        name: gap(after[2].get(name), g, max(largest[name], floor)) for name, g in expected.items()
    }
    name = max(apart, key=lambda each: apart[each], default="")
    outputs = output_deviation(before[0], after[0])
    return outputs, gap(after[1], before[1], None), apart.get(name, 0.0), name
