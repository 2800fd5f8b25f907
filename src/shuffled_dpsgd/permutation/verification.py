"""Check on a probe batch that a spec's permutations leave the model's function unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

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

Loss = Callable[[Any], torch.Tensor]


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


@dataclass(frozen=True, kw_only=True)
class _Result:
    outputs: tuple[torch.Tensor, ...]
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]


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
            expected = {name: g.clone() for name, g in before.gradients.items()}
            apply_to_tensors(permutation, expected)
            found.append(_compare(before, after, expected))
    outputs, losses, _, _ = zip(*found, strict=True)
    _, _, gradient, parameter_name = max(found, key=lambda each: each[2])
    worst = Verification(
        num_draws=num_draws,
        output_deviation=max(outputs),
        loss_deviation=max(losses),
        gradient_deviation=gradient,
        worst_parameter=parameter_name if gradient else "",
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
    modes = {module: module.training for module in model.modules()}
    kept = {p: (p.requires_grad, p.grad) for p in model.parameters()}
    try:
        model.eval()
        for parameter in kept:
            parameter.grad = None
            if parameter.is_floating_point():
                parameter.requires_grad_(True)
        yield
    finally:
        for module, training in modes.items():
            module.training = training
        for parameter, (requires_grad, grad) in kept.items():
            parameter.requires_grad_(requires_grad)
            parameter.grad = grad


def _evaluate(model: nn.Module, batch: Any, loss: Loss | None, seed: int) -> _Result:
    with torch.enable_grad():
        output = _call(model, batch)
        outputs = tuple(function_outputs(output))
        value = _default_loss(output, outputs, seed) if loss is None else loss(output)
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        found = torch.autograd.grad(
            value.sum(), [p for p in model.parameters() if p.requires_grad], allow_unused=True
        )
    gradients = {name: g for name, g in zip(names, found, strict=True) if g is not None}
    return _Result(
        outputs=tuple(o.detach() for o in outputs), loss=value.detach(), gradients=gradients
    )


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, torch.Tensor):
        return model(batch)
    return model(*batch)


def _default_loss(output: Any, outputs: tuple[torch.Tensor, ...], seed: int) -> torch.Tensor:
    own = getattr(output, "loss", None)
    total: torch.Tensor | None = own.sum() if isinstance(own, torch.Tensor) else None
    generator = torch.Generator().manual_seed(seed)
    for tensor in outputs:
        weight = torch.randn(tensor.shape, generator=generator, device="cpu").to(tensor)
        part = (weight * tensor).sum() / max(tensor.numel(), 1) ** 0.5
        total = part if total is None else total + part
    if total is None:
        raise InvalidArgumentError(
            "batch",
            expected="a batch for which the model returns floating-point numbers",
            got=type(output).__name__,
        )
    return total


def _compare(
    before: _Result, after: _Result, expected: dict[str, torch.Tensor]
) -> tuple[float, float, float, str]:
    """Deviations of outputs, loss and gradients, and where gradients deviate most."""
    scale = max((float(g.abs().max()) for g in expected.values()), default=0.0)
    by_name = {
        name: gap(after.gradients.get(name), g, max(float(g.abs().max()), FLOOR * scale))
        for name, g in expected.items()
    }
    name = max(by_name, key=lambda n: by_name[n], default="")
    outputs = output_deviation(before.outputs, after.outputs)
    return outputs, gap(after.loss, before.loss, None), by_name.get(name, 0.0), name
