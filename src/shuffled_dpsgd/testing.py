"""Conformance checks for models and layers of your own: does the engine clip them exactly?

`check_model` holds the fast engine against the definition, one sample at a time with plain
autograd, in float64. `check_rule` does so for one layer. Passing says that this batch is clipped
exactly; a run goes on checking. Nothing is released, and the model given is left as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.utils._pytree import tree_leaves, tree_map_only

from shuffled_dpsgd.clipping import ClippingEngine, ReferenceSum, clipped_sum_reference
from shuffled_dpsgd.errors import InvalidArgumentError, RefereeError

__all__ = ["Conformance", "check_model", "check_rule"]

Batch: TypeAlias = "Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]"
Losses: TypeAlias = Callable[[nn.Module, Any], Tensor]
TOLERANCE = 1e-9
EXERCISED = 1e-9  # A clipped sum below this share of the whole could hide a wrong rule.


@dataclass(frozen=True, kw_only=True)
class Conformance:
    """What was compared: so many samples, and the rule of every parameter with a gradient.

    `unchecked` names the parameters that this batch gave no gradient: of them nothing is known.
    """

    samples: int
    rules: Mapping[str, str]
    unchecked: tuple[str, ...]


def check_model(model: nn.Module, batch: Batch, losses: Losses | None = None) -> Conformance:
    """Compare the engine with the definition on one batch, in float64 and evaluation mode.

    `batch` is what the model takes: a tensor, a tuple, or a mapping of keyword arguments, with at
    least two samples along the first axis. `losses(model, batch)` returns one loss per sample; by
    default the outputs are weighted by fixed random numbers and added up. In the copy that is
    checked, weights that are all zero are drawn at random, so that what lies behind them is too.

    Raises:
        UnsupportedModuleError: a module is refused by name, as in a run.
        RefereeError: a sample's norm or the clipped sum of a parameter is another one.
    """
    twin, given = _without_zeros(copy.deepcopy(model).double().eval()), _double(batch)
    found = losses or _weighted_outputs
    size = _size(given)
    if size < 2:
        raise InvalidArgumentError("batch", expected="at least two samples", got=size)
    singles = [_rows(given, slice(i, i + 1)) for i in range(size)]

    def loss_of_one(module: nn.Module, one: Any) -> Tensor:
        return found(module, one).sum()

    with torch.no_grad():
        apart = torch.cat([found(twin, one) for one in singles])
        if not torch.allclose(found(twin, given), apart, rtol=TOLERANCE, atol=0.0):
            raise RefereeError("the loss of a sample depends on the others in its batch")
    clip_norm = float(clipped_sum_reference(twin, loss_of_one, singles).sample_norms.median())
    if not clip_norm > 0.0:
        raise InvalidArgumentError("batch", expected="samples with a gradient", got="none has one")
    wanted = clipped_sum_reference(twin, loss_of_one, singles, clip_norm)
    halves = [_rows(given, slice(0, size // 2)), _rows(given, slice(size // 2, size))]
    for parts, how in (([given], "in one batch"), (halves, "in two batches")):
        _compare(_run(twin, parts, found, clip_norm), wanted, how)
    for i, one in enumerate(singles):
        alone = _run(twin, [one], found, clip_norm)
        if float(get_total_norm(alone.clipped_sum.values())) > clip_norm * (1.0 + TOLERANCE):
            raise RefereeError(f"sample {i} contributes more than the clip norm {clip_norm:.4g}")
    left = [path for path, module in twin.named_modules() if "forward" in vars(module)]
    if left:
        raise RefereeError(f"{left[0]}: the engine left its forward there", name=left[0])
    _run(twin.train(), [given], found, clip_norm)  # What only training shows is refused here.
    sums, plan = wanted.clipped_sum, ClippingEngine(twin, clip_norm=clip_norm).plan()
    least = EXERCISED * float(get_total_norm(sums.values()))
    rules = {name: row.kind for row in plan for name in row.parameters}
    unchecked = tuple(name for name in rules if float(sums[name].norm()) <= least)
    checked = {name: kind for name, kind in rules.items() if name not in unchecked}
    return Conformance(samples=size, rules=checked, unchecked=unchecked)


def check_rule(module: nn.Module, inputs: Batch | None = None) -> Conformance:
    """Compare how one layer is handled with the definition; see `check_model`.

    `inputs` are what the layer takes, for at least two samples. Where a layer says its sizes by the
    names that PyTorch's layers have, they may be left out.
    """
    return check_model(module, _inputs_for(module) if inputs is None else inputs)


def _inputs_for(module: nn.Module, size: int = 4, positions: int = 3) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    sizes: Any = module
    if hasattr(module, "num_embeddings"):
        return torch.randint(sizes.num_embeddings, (size, positions), generator=draw)
    if hasattr(module, "in_features"):
        return torch.randn(size, positions, sizes.in_features, generator=draw)
    if hasattr(module, "normalized_shape"):
        return torch.randn(size, positions, *sizes.normalized_shape, generator=draw)
    if hasattr(module, "in_channels"):
        spatial = [4 * edge for edge in sizes.kernel_size]
        return torch.randn(size, sizes.in_channels, *spatial, generator=draw)
    raise InvalidArgumentError(
        "inputs", expected="what the layer takes, for at least two samples", got="nothing"
    )


def _run(model: nn.Module, parts: list[Any], losses: Losses, clip_norm: float) -> ReferenceSum:
    engine = ClippingEngine(model, clip_norm=clip_norm)
    with engine:
        for part in parts:
            engine.backward(losses(model, part))
    return ReferenceSum(sample_norms=engine.sample_norms, clipped_sum=dict(engine.clipped_sum()))


def _compare(got: ReferenceSum, wanted: ReferenceSum, how: str) -> None:
    norms = (got.sample_norms - wanted.sample_norms).abs() / wanted.sample_norms.clamp(min=1e-300)
    if got.sample_norms.shape != wanted.sample_norms.shape or not bool((norms <= TOLERANCE).all()):
        worst = int(norms.nan_to_num(torch.inf).argmax())
        raise RefereeError(
            f"sample {worst}, {how}: expected a norm of {float(wanted.sample_norms[worst]):.9g} "
            f"by plain autograd, got {float(got.sample_norms[worst]):.9g}"
        )
    whole = float(get_total_norm(wanted.clipped_sum.values()))
    for name, expected in wanted.clipped_sum.items():
        off = float((got.clipped_sum[name] - expected).norm())
        if not off <= TOLERANCE * max(float(expected.norm()), 1e-4 * whole):
            whole_of_it = float(expected.norm())
            raise RefereeError(
                f"{name}, {how}: its clipped sum is off by {off:.3g}, of {whole_of_it:.3g}",
                name=name,
            )


def _weighted_outputs(model: nn.Module, batch: Any) -> Tensor:
    """One number per sample, in which every output counts with a weight of its own."""
    if isinstance(batch, Mapping):
        outputs = model(**batch)
    else:
        outputs = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    size, totals = _size(batch), []
    for value in tree_leaves(dict(outputs) if isinstance(outputs, Mapping) else outputs):
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        if value.shape[:1] == (size,):
            draw = torch.Generator().manual_seed(value[0].numel())
            weights = torch.randn(value.shape[1:], generator=draw, dtype=value.dtype)
            totals.append((value * weights.to(value.device)).reshape(size, -1).sum(1))
    if not totals:
        raise InvalidArgumentError("losses", expected="one loss per sample", got="no such output")
    return torch.stack(totals).sum(0)


def _size(batch: Any) -> int:
    return next((len(value) for value in tree_leaves(batch) if isinstance(value, Tensor)), 0)


def _rows(batch: Any, rows: slice) -> Any:
    return tree_map_only(Tensor, lambda value: value[rows], batch)


def _double(batch: Any) -> Any:
    plain = dict(batch) if isinstance(batch, Mapping) else batch
    return tree_map_only(Tensor, lambda v: v.double() if v.is_floating_point() else v, plain)


def _without_zeros(model: nn.Module) -> nn.Module:
    """Weights that are all zero, such as the second factor of a new LoRA, stop gradients."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in model.parameters():
            if value.is_floating_point() and not bool(value.any()):
                value.copy_(0.1 * torch.randn(value.shape, generator=draw))
    return model
