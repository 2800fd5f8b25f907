"""What is checked around a step: losses, records and weights, each with a remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset

from shuffled_dpsgd.errors import DivergenceError, InvalidArgumentError
from shuffled_dpsgd.runtime.notices import say_once, warn_caller

DIVERGENCE_ADVICE = (
    "try a smaller learning rate, a larger expected_batch_size (noise is divided by it), "
    "a learning-rate warm-up, or float32 where bfloat16 overflows; "
    "resume from the last checkpoint, the budget spent so far stays spent"
)

# GradScaler begins at 2^16 and halves that at every overflow.
_SMALLEST_SCALE = 2.0**8
_NO_SCALES = (
    "leave out accumulation steps and loss scalers (logical batches are split for you, and "
    "bfloat16 needs no scaler), or scale clip_norm by the same factor"
)

UNSEEN_LOSSES = (
    "a loss went backward by itself, and nobody can see whether it is the sum over the records: a "
    "mean, or a sum that was divided or scaled, would be clipped at another norm than clip_norm. "
    "Call private.backward(losses) with one loss per record, or declare loss_reduction='mean'"
)


def check_usable(closed_because: str | None) -> None:
    """Refuse to go on with a run that has let go of its model."""
    if closed_because is not None:
        raise InvalidArgumentError(
            "private",
            expected="a run that is not closed",
            got=closed_because,
            remedy="make a new one with make_private; what this one spent stays spent",
        )


def check_records(data: Any, *, dataset_size: int) -> None:
    """Refuse anything but a map-style data set of the size the plan accounts for."""
    iterable = isinstance(data, IterableDataset) or not hasattr(data, "__getitem__")
    if iterable or not hasattr(data, "__len__"):
        raise InvalidArgumentError(
            "data",
            expected="a map-style data set (with len() and indexing)",
            got=type(data).__name__,
            remedy="Poisson sampling needs random access: load the stream first, list(data) will "
            "do",
        )
    if len(data) != dataset_size:
        raise InvalidArgumentError(
            "data",
            expected=f"the {dataset_size} records the plan accounts for",
            got=len(data),
            remedy="pass dataset_size=len(data) to make_private",
        )


def check_losses(losses: torch.Tensor, *, expected: int | None, may_be_mean: bool) -> int:
    """How many records the losses stand for; refuse anything but one loss per record.

    A scalar passes only when it was declared a mean: undeclared, it would shrink every gradient
    before the clip. `expected` is the size of the physical batch, None when it is not ours.
    """
    if not isinstance(losses, torch.Tensor):
        raise InvalidArgumentError(
            "losses", expected="a tensor with one loss per sample", got=type(losses).__name__
        )
    if losses.dim() == 0 and may_be_mean:
        return expected or 1
    if losses.dim() != 1 or expected not in (None, losses.shape[0]):
        raise InvalidArgumentError(
            "losses",
            expected=f"one loss per sample, shape ({'B' if expected is None else expected},)",
            got=tuple(losses.shape),
            remedy="use reduction='none' and reduce over everything but the batch, "
            "or declare loss_reduction='mean'",
        )
    return int(losses.shape[0])


def check_scale(factor: float, of: str, *, may_be_mean: bool) -> None:
    """Refuse, or say, that a loss comes multiplied by a constant, as far as its graph shows it.

    `of` says what is: a mean, a sum, or "" where nobody can tell. A sum is clipped elsewhere then,
    and a declared mean is no mean.

    Raises:
        InvalidArgumentError: a mean that is scaled or not declared, or a gradient scaler's loss.
    """
    is_scaled = not math.isclose(factor, 1.0, rel_tol=1e-6)
    scaler = factor >= _SMALLEST_SCALE and math.log2(factor).is_integer()
    is_share = 0.0 < factor < 1.0
    verb = f"divided by {1.0 / factor:g}" if is_share else f"multiplied by {factor:g}"
    verb = f"{verb}, as by a GradScaler" if scaler else verb
    found = f"losses {verb}" if is_scaled else "a mean"
    if (of == "mean" and (is_scaled or not may_be_mean)) or scaler:
        raise InvalidArgumentError(
            "losses",
            expected="one loss per sample, their sum, or a declared mean",
            got=f"{found}, clipped at another norm than clip_norm",
            remedy=f"call private.backward(losses), or declare loss_reduction='mean'; {_NO_SCALES}",
        )
    if is_scaled and not may_be_mean:
        said = f"losses are {verb} before the clip, which bounds the scaled gradients: {_NO_SCALES}"
        warn_caller(said)
    elif not of and not may_be_mean:
        say_once(UNSEEN_LOSSES)


def check_count(count: int, *, drawn: int, padded: bool = False) -> None:
    """Refuse unless every record the sampler drew has one gradient in the sum.

    A record that went backward twice contributes twice the clip, and nothing else would notice.
    Copies that pad a batch would be such, were they not left out by `private.backward`.
    """
    if count != drawn:
        raise InvalidArgumentError(
            "backward",
            expected=f"gradients of the {drawn} records drawn",
            got=count,
            remedy="call private.backward(losses), which leaves out the samples that only pad a "
            "batch or keep ranks in step, or do without pad_batches"
            if padded
            else "run the forward and backward of every physical batch inside the loop, once",
        )


def check_finite(norms: torch.Tensor, *, step: int) -> None:
    """Refuse to go on when most gradients are not finite; one bad record alone stops nothing.

    If it did, whether a run stops would tell that the record is there.
    """
    num_nonfinite = int((~torch.isfinite(norms)).sum())
    if num_nonfinite > 1 and 2 * num_nonfinite > norms.numel():
        raise DivergenceError(
            f"step {step}: {num_nonfinite} of {norms.numel()} records have a non-finite "
            f"gradient; {DIVERGENCE_ADVICE}"
        )


class WeightCheck:
    """Refuses to go on once a weight is not finite.

    Waiting for a GPU after every update would leave it idle while the next forward is issued. So
    `note` says that there are new weights, `ask` has the device look at them while it is busy
    anyway, and `answer` reads what it found once the run has waited for the device, before anything
    more is released or saved. `unread` is what it found; a copy on the host may take its place.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights = weights
        self.unread: torch.Tensor | None = None
        self._are_new = False
        self._step = 0

    def note(self, step: int) -> None:
        """The weights are those that `step` has left."""
        self._step, self._are_new, self.unread = step, True, None

    def ask(self) -> bool:
        """Have weights looked at if they are new, and say whether they were."""
        if not self._are_new:
            return False
        self._are_new = False
        weights = [weight.detach() for weight in self._weights.values() if weight.numel()]
        if all(weight.device.type == "cpu" for weight in weights):
            # A norm takes ten times as long there. Both ends are NaN if any weight is.
            ends = [end for weight in weights for end in torch.aminmax(weight)]
        else:
            ends = list(torch._foreach_norm(weights, math.inf))
        self.unread = torch.isfinite(torch.stack([end.float() for end in ends])).all()
        return True

    def answer(self) -> None:
        """Raise if a weight is not finite; weights that were found finite are not read again.

        Raises:
            DivergenceError: naming the step and the first such parameter.
        """
        self.ask()
        finite, self.unread = self.unread, None
        if finite is None or bool(finite):
            return
        broken = [name for name, w in self._weights.items() if not torch.isfinite(w).all()]
        raise DivergenceError(
            f"step {self._step}: {len(broken)} parameters are no longer finite, first {broken[0]}; "
            f"{DIVERGENCE_ADVICE}"
        )
