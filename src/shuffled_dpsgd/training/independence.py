"""Does a record's loss depend on that record alone? Tried out on a few records.

Every claim assumes it. A contrastive loss, weights by the class counts of a batch, a mean over
the tokens of a batch, padding without a mask: in each, one record changes the gradients of the
others, by more than the clip allows, and no norm shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import default_collate

from shuffled_dpsgd.clipping.checks.random_states import DrawsNoted, RandomStates
from shuffled_dpsgd.clipping.checks.solo_runs import dropout_silenced, without_a_trace
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training.data import MapStyle, shaped, to_device
from shuffled_dpsgd.training.global_randomness import randomness_kept

_RECORDS = 4
# Wider than the rounding of the type; accelerators may compute float32 in TF32.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
_TF32_TOLERANCE = 1e-2
_HALF_TOLERANCE = 1e-1


def check_independence(
    model: torch.nn.Module,
    data: MapStyle,
    per_sample_loss: Callable[[torch.nn.Module, Any], torch.Tensor],
    *,
    collate: Callable[[list[Any]], Any] | None = None,
) -> None:
    """Compare the losses of the first records in one batch with those of each among its copies.

    The copies change what a batch is padded to, and everything that records could see of each
    other. Without gradients, once in evaluation mode and once in training mode with dropout off;
    what is random besides is repeated. Where nothing is, batches of half as many copies are
    compared too. Nothing is released, and the model and all global generators are put back. A
    scalar is taken for a mean. Passing proves nothing about other records: it catches the mistakes
    that show everywhere. Batches of the run are tried out when they come.

    Raises:
        InvalidArgumentError: a loss changes with the company its record is in.
    """
    device = next(model.parameters()).device
    gather = collate or default_collate
    records = [data[i] for i in range(min(_RECORDS, len(data)))]

    def losses(items: list[Any]) -> torch.Tensor:
        return per_sample_loss(model, to_device(shaped(gather(items)), device)).detach()

    for training in (False, True):
        with torch.no_grad(), randomness_kept(), without_a_trace(model):
            model.train(training)
            with dropout_silenced(model):
                found = _together_and_apart(losses, records, RandomStates.now(model, device))
        if found is not None and not _agree(*found):
            together, expected = found
            raise InvalidArgumentError(
                "per_sample_loss",
                expected=f"the losses of {len(records)} records among copies of themselves, "
                f"{_shown(expected)}, in one batch too",
                got=_shown(together),
                remedy="records must not see each other: average over a record's own tokens, "
                "weight by fixed class weights, mask padding, do not compare records",
            )


def _together_and_apart(
    losses: Callable[[list[Any]], torch.Tensor], records: list[Any], states: RandomStates
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Losses of records in one batch and of each among copies; None where all are not finite."""
    noted, size = DrawsNoted(len(records)), len(records)
    with noted:
        together = losses(records)
    is_random = noted.any or states.host_has_moved()
    if together.dim() > 1:
        return None
    apart: list[torch.Tensor] = []
    for count in (size,) if is_random else (size, max(1, size // 2)):
        found = []
        for place, record in enumerate(records):
            states.restore()
            own = losses([record] * count)
            found.append(own[min(place, count - 1)] if own.dim() else own)
        apart.append(torch.stack(found))
    if is_random and together.dim() == 0:
        return None
    expected = apart[0] if _agree(apart[0], apart[-1]) else apart[-1]
    return together, expected if together.dim() else expected.mean()


def _shown(losses: torch.Tensor) -> str:
    return ", ".join(f"{loss:.6g}" for loss in losses.reshape(-1).tolist())


def _agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    tolerance = _TOLERANCE.get(one.dtype, _HALF_TOLERANCE)
    if one.dtype is torch.float32 and one.device.type != "cpu":
        tolerance = _TF32_TOLERANCE
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
