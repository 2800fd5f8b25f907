"""What counts as a model's function, and how far two computations of it may be apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from shuffled_dpsgd.permutation.layers import class_name

# Outputs that carry the model's inner axes and therefore move along with the weights.
_INNER_OUTPUTS = frozenset(
    {
        "attentions",
        "cross_attentions",
        "encoder_hidden_states",
        "hidden_states",
        "last_hidden_state",
        "past_key_values",
    }
)
# Summation order changes, so results agree to rounding; deep models lose a few digits more.
_TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-3,
    torch.bfloat16: 1e-1,
    torch.float16: 5e-2,
}
# Below this share of the largest entry of all lies rounding.
FLOOR = 1e-2


def default_tolerance(model: nn.Module, also: Iterable[torch.dtype] = ()) -> float:
    """By the coarsest dtype in which the model computes: that of a parameter, or one of `also`.

    The RMS norms of Hugging Face's models compute in float32 whatever comes in.
    """
    dtypes = {*also, *(parameter.dtype for parameter in model.parameters())}
    names = (class_name(module) for module in model.modules())
    if any(name.startswith("transformers.") and name.endswith("RMSNorm") for name in names):
        dtypes.add(torch.float32)
    return max((_TOLERANCE.get(dtype, 0.0) for dtype in dtypes), default=1e-10)


def function_outputs(output: Any) -> Iterator[torch.Tensor]:
    """The floating-point tensors that are the model's function, inner states left out."""
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            if key not in _INNER_OUTPUTS or len(output) == 1:
                yield from function_outputs(value)
    elif isinstance(output, Sequence) and not isinstance(output, str):
        for value in output:
            yield from function_outputs(value)
    elif is_dataclass(output) or isinstance(output, SimpleNamespace):
        yield from function_outputs(vars(output))


def output_deviation(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> float:
    """The largest difference, relative to an output's own largest entry.

    Or to `FLOOR` times the largest entry of any output, if that is more. Entries that were not
    finite before are left out: a record that breaks the model breaks it either way.
    """
    if len(before) != len(after):
        return float("inf")
    finite = [torch.isfinite(tensor) for tensor in before]
    kept = [tensor[mask] for tensor, mask in zip(before, finite, strict=True)]
    largest = [float(tensor.abs().max()) if tensor.numel() else 0.0 for tensor in kept]
    floor = FLOOR * max(largest, default=0.0)
    gaps = [
        gap(found[mask], expected, max(own, floor)) if found.shape == mask.shape else float("inf")
        for found, mask, expected, own in zip(after, finite, kept, largest, strict=True)
    ]
    return max(gaps, default=0.0)


def gap(found: torch.Tensor | None, expected: torch.Tensor, scale: float | None) -> float:
    """Largest difference over `scale` (default: the largest expected entry); NaN is infinite."""
    if found is None or found.shape != expected.shape:
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    largest = float(expected.abs().max()) if scale is None else scale
    difference = float((found - expected).abs().max())
    if difference != difference:
        return float("inf")
    return difference / largest if largest > 0 else difference
