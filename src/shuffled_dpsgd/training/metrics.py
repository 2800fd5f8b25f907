"""Metrics of a step: loss, gradient norms, and what the noise did.

Loss, norms and shares are computed from private data and carry no noise: they are for whoever
holds the data, and publishing them is not covered by any epsilon.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.runtime.notices import say_once


class Unnoised(float):
    """A number computed from the records without noise: to look at, not to base decisions on.

    It prints, adds up and goes into JSON like any other number, and so do results computed from it.
    `float()` of it, as in `ReduceLROnPlateau`, is refused: a decision based on it is a release that
    no ε covers. Comparing it with another number is allowed and warned of once. A copy by
    `torch.tensor` or NumPy is a plain number.

    >>> f"{Unnoised(0.25):.1f}", Unnoised(0.25) < 1, type(-sum([Unnoised(0.25)]) / 2).__name__
    ('0.2', True, 'Unnoised')
    """

    __slots__ = ()

    def __float__(self) -> float:
        raise _refusal(float.__repr__(self))


def _keeping(operation: Callable[..., Any]) -> Callable[..., Any]:
    """An operation of plain numbers, whose result is unnoised as well."""

    def method(*numbers: Any) -> Any:
        found = operation(*numbers)
        return found if found is NotImplemented else Unnoised(found)

    return method


def _with_a_warning(comparison: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def method(number: Unnoised, other: Any) -> Any:
        say_once(_COMPARED)
        return comparison(number, other)

    return method


_COMPARED = (
    "a loss or a norm of training records was compared with another number: if the result decides "
    "when to stop, which weights to keep or how to go on, no ε covers that choice. Decide by "
    "scores on public records, or fix it beforehand"
)
for _name in ("lt", "le", "gt", "ge"):
    setattr(Unnoised, f"__{_name}__", _with_a_warning(getattr(float, f"__{_name}__")))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    for _method in (f"__{_name}__", f"__r{_name}__"):
        setattr(Unnoised, _method, _keeping(getattr(float, _method)))
for _name in ("neg", "pos", "abs", "round"):
    setattr(Unnoised, f"__{_name}__", _keeping(getattr(float, f"__{_name}__")))


def plain(number: float) -> float:
    """The number without its guard, for code that shows something and decides nothing."""
    return float.__pos__(number)


class UnnoisedTensor(torch.Tensor):
    """The same for a tensor, and for tensors computed from it; `tolist` gives plain numbers."""

    def __float__(self) -> float:
        raise _refusal(repr(self.tolist()))

    item = __float__


def _refusal(got: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        "metrics",
        expected="a number that may decide something, such as a score on public records",
        got=f"{got}, computed from the training records without noise",
        remedy="let no schedule, early stopping or choice of weights read it; to write it down, "
        "print it or put it into JSON as it is",
    )


@dataclass(frozen=True, kw_only=True)
class BlockRelease:
    """One block of a release: the norm of its sum, its batch clip, and the norm of its noise."""

    name: str
    norm_on_device: torch.Tensor
    batch_clip_norm: float | None
    noise_norm: float

    @functools.cached_property
    def sum_norm(self) -> float:
        """Norm of the block's sum; waits for the device, so it is read only where asked for."""
        return Unnoised(self.norm_on_device)

    @property
    def batch_clip_factor(self) -> float:
        """What the batch clip multiplied the sum by."""
        clip = self.batch_clip_norm
        return (
            1.0 if clip is None or not self.norm_on_device.item() > clip else clip / self.sum_norm
        )


@dataclass(frozen=True, kw_only=True)
class Release:
    """The record of one release; its norms are computed from private data and not noised."""

    blocks: tuple[BlockRelease, ...]

    @property
    def signal_to_noise(self) -> float:
        """Norm of what was released over the expected norm of its noise."""
        noise = math.hypot(*(block.noise_norm for block in self.blocks))
        signal = math.hypot(*(b.sum_norm * b.batch_clip_factor for b in self.blocks))
        return Unnoised(signal / noise if noise else math.inf)

    @classmethod
    def of(cls, plan: PrivacyPlan, norms: Mapping[str, torch.Tensor]) -> Release:
        """What a mechanism of this plan did to blocks of these norms."""
        rows = plan.noise_rows or ((1.0,),)
        # Of banded noise, the root mean square over the steps of a block.
        spread = math.sqrt(sum(w * w for row in rows for w in row) / len(rows))
        return cls(
            blocks=tuple(
                BlockRelease(
                    name=block.name,
                    norm_on_device=norms[block.name],
                    batch_clip_norm=block.batch_clip_norm,
                    noise_norm=spread
                    * block.noise_std(plan.clip_norm)
                    * math.sqrt(block.dimension),
                )
                for block in plan.blocks
            )
        )


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One update. `loss` is the mean over the logical batch, None when it was not observed.

    `loss` is seen by `private.backward` only; a plain `backward()` leaves it None.
    """

    step: int
    batch_size: int
    loss: float | None
    mean_norm: float | None
    median_norm: float | None
    clipped_share: float | None
    num_nonfinite: int
    release: Release

    @property
    def signal_to_noise(self) -> float:
        """Norm of what was released over the expected norm of its noise; waits for the device."""
        return self.release.signal_to_noise

    def to_json(self) -> dict[str, Any]:
        """Plain data; an infinite signal-to-noise (no noise) becomes None."""
        ratio = self.signal_to_noise
        return {
            **{name: value for name, value in vars(self).items() if name != "release"},
            "signal_to_noise": ratio if math.isfinite(ratio) else None,
            "batch_clip_factors": {b.name: b.batch_clip_factor for b in self.release.blocks},
        }


class LossMeter:
    """Adds up per-sample losses over the physical batches of a logical one.

    `unread` is their sum, on whatever device; a copy on the host may take its place.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.unread: torch.Tensor | None = None
        self._count = 0

    def add(self, losses: torch.Tensor, *, count: int, mean: bool) -> None:
        """Add a vector of losses, or one scalar that stands for `count` samples."""
        observed = losses.detach()
        total = torch.nan_to_num(observed.double(), nan=0.0, posinf=0.0, neginf=0.0).sum()
        total = total * count if mean else total
        self.unread = total if self.unread is None else self.unread + total
        self._count += count

    def totals(self) -> tuple[float, int] | None:
        """Sum and number of the losses, non-finite ones as zero; None when nothing was added."""
        return None if self.unread is None else (float(self.unread), self._count)

    def mean(self) -> float | None:
        """The mean loss, non-finite samples counted as zero; None when nothing was added."""
        return mean_loss([self.totals()])


def mean_loss(totals: Sequence[tuple[float, int] | None]) -> float | None:
    """The mean over the samples of several meters; None when nothing was added to any.

    >>> mean_loss([(6.0, 2), None, (3.0, 1)])
    3.0
    """
    added = [pair for pair in totals if pair is not None]
    return sum(t for t, _ in added) / sum(n for _, n in added) if added else None


def describe_step(
    *, step: int, norms: torch.Tensor, clip_norm: float, loss: float | None, release: Release
) -> StepMetrics:
    """Summarise one update from the per-sample norms and the record of its release."""
    finite = norms[torch.isfinite(norms)]
    known = finite.numel() > 0
    return StepMetrics(
        step=step,
        batch_size=norms.numel(),
        loss=None if loss is None else Unnoised(loss),
        mean_norm=Unnoised(finite.mean()) if known else None,
        median_norm=Unnoised(finite.median()) if known else None,
        clipped_share=Unnoised((finite > clip_norm).double().mean()) if known else None,
        num_nonfinite=norms.numel() - finite.numel(),
        release=release,
    )
