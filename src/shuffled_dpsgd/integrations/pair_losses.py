"""Losses of preference pairs, one for each pair: DPO and its relatives.

A pair is one record. Its loss is a function of four numbers, the log-probabilities that the trained
model and the reference give to the chosen and to the rejected answer, and of no other pair. The
formulas are those of TRL's `DPOTrainer`, which averages them over a batch; the tests compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from shuffled_dpsgd.integrations.per_sample_loss import IGNORED_LABEL, following, loss_of_tokens


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The chosen or the rejected answers of B pairs: (B,) numbers for each."""

    logps: Tensor
    ref_logps: Tensor
    tokens: Tensor

    @property
    def gain(self) -> Tensor:
        """The log-ratio of trained model and reference."""
        return self.logps - self.ref_logps


def score(gain: Tensor, divergence: str, alpha: float) -> Tensor:
    """What an f-divergence makes of a log-ratio; the usual one leaves it as it is."""
    if divergence == "forward_kl":
        return 1 - torch.exp(-gain)
    if divergence == "js_divergence":
        return math.log(2) + logsigmoid(gain)
    if divergence == "alpha_divergence" and abs(alpha - 1) >= 1e-6:
        return (torch.exp(((alpha - 1) * gain).clamp(max=80.0)) - 1) / (alpha - 1)
    return gain


def pair_losses(kind: str, chosen: Answers, rejected: Answers, args: Any) -> Tensor:
    """(B,) losses of one of TRL's kinds, under the settings of a `DPOConfig`."""
    beta, smooth = args.beta, args.label_smoothing
    divergence = args.f_divergence_type, args.f_alpha_divergence_coef
    won, lost = score(chosen.gain, *divergence), score(rejected.gain, *divergence)
    margin = beta * (won - lost)
    mean_margin = won / chosen.tokens.clamp(min=1) - lost / rejected.tokens.clamp(min=1)
    good, bad = beta * chosen.gain, beta * rejected.gain
    losses: Mapping[str, Callable[[], Tensor]] = {
        "sigmoid": lambda: -logsigmoid(margin),
        "sigmoid_norm": lambda: -logsigmoid(beta * mean_margin),
        "hinge": lambda: torch.relu(1 - margin),
        "ipo": lambda: (mean_margin - 1 / (2 * beta)) ** 2,
        "exo_pair": lambda: _exo(margin, smooth),
        "nca_pair": lambda: -logsigmoid(good) - 0.5 * (logsigmoid(-good) + logsigmoid(-bad)),
        "robust": lambda: (
            (smooth * logsigmoid(-margin) - (1 - smooth) * logsigmoid(margin)) / (1 - 2 * smooth)
        ),
        "bco_pair": lambda: -logsigmoid(good) - logsigmoid(-bad),
        "sppo_hard": lambda: (chosen.gain - 0.5 / beta) ** 2 + (rejected.gain + 0.5 / beta) ** 2,
        "apo_zero": lambda: 1 - torch.sigmoid(good) + torch.sigmoid(bad),
        "apo_down": lambda: torch.sigmoid(good) + 1 - torch.sigmoid(good - bad),
        "discopop": lambda: _discopop(margin, args.discopop_tau),
        "sft": lambda: -chosen.logps / chosen.tokens.clamp(min=1),
    }
    return losses[kind]()


def _exo(margin: Tensor, smooth: float) -> Tensor:
    up, down = logsigmoid(margin), logsigmoid(-margin)
    return up.exp() * (up - math.log1p(-smooth)) + down.exp() * (down - math.log(smooth))


def _discopop(margin: Tensor, tau: float) -> Tensor:
    share = torch.sigmoid(margin / tau)
    return -logsigmoid(margin) * (1 - share) + torch.exp(-margin) * share


def answer_logps(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """(B,) weighted sums of the log-probabilities of labelled tokens."""
    return -(loss_of_tokens(logits, following(labels), 0.0) * following(weights)).sum(1)


def token_weights(chosen: Tensor, rejected: Tensor, alpha: float | None) -> tuple[Tensor, Tensor]:
    """Ones; or `alpha` for the part of an answer by which it is longer than the other (LD-DPO)."""
    masks = [(labels != IGNORED_LABEL).long() for labels in (chosen, rejected)]
    if alpha is None:
        return masks[0], masks[1]
    shared = torch.minimum(masks[0].sum(1), masks[1].sum(1))[:, None]
    short, long = (torch.where(m.cumsum(1) <= shared, 1.0, alpha) for m in masks)
    return short, long


@contextmanager
def taking_pairs(model: nn.Module) -> Iterator[None]:
    """Inside, `model(chosen=..., rejected=...)` is one call with a pair in every row.

    The model runs twice in it, so that the gradient of a pair is that of both answers together.
    Other calls stay as they are, and afterwards so does the model.
    """
    before = model.__dict__.get("forward")
    forward = model.forward

    def of_pairs(*args: Any, chosen: Any = None, rejected: Any = None, **kwargs: Any) -> Any:
        if chosen is None:
            return forward(*args, **kwargs)
        return {"chosen": forward(**chosen).logits, "rejected": forward(**rejected).logits}

    model.forward = of_pairs
    try:
        yield
    finally:
        del model.forward
        if before is not None:
            model.forward = before
