"""What is checked around a step: losses, records and weights, each with a remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from shuffled_dpsgd.errors import DivergenceError, InvalidArgumentError

DIVERGENCE_ADVICE = (
    "try a smaller learning rate, a larger expected_batch_size (noise is divided by it), "
    "a learning-rate warm-up, or float32 where bfloat16 overflows; "
    "resume from the last checkpoint, the budget spent so far stays spent"
)


def check_losses(losses: torch.Tensor, *, expected: int | None, may_be_mean: bool) -> int:
    """How many records the losses stand for; refuse anything but one loss per record.

    A scalar passes only when it was declared a mean: undeclared, it would shrink every gradient
    before the clip. `expected` is the size of the physical batch, None when it is not ours.
    """
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


def check_count(count: int, *, drawn: int) -> None:
    """Refuse unless every record the sampler drew has one gradient in the sum.

    A record that went backward twice contributes twice the clip, and nothing else would notice.
    """
    if count != drawn:
        raise InvalidArgumentError(
            "backward",
            expected=f"gradients of the {drawn} records drawn",
            got=count,
            remedy="run the forward and backward of every physical batch inside the loop, once",
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


def check_weights(weights: Mapping[str, torch.Tensor], *, step: int) -> None:
    """Refuse to go on once a weight is not finite; one transfer from the device if all are."""
    largest = torch._foreach_norm([weight.detach() for weight in weights.values()], math.inf)
    if bool(torch.isfinite(torch.stack([norm.float() for norm in largest])).all()):
        return
    broken = [name for name, weight in weights.items() if not torch.isfinite(weight).all()]
    raise DivergenceError(
        f"step {step}: {len(broken)} parameters are no longer finite, first {broken[0]}; "
        f"{DIVERGENCE_ADVICE}"
    )
