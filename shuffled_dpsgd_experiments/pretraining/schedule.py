"""How far a pre-training run is: by its steps or by its clock, whichever is further."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch

from shuffled_dpsgd.errors import DivergenceError

WARM_UP = 0.05


@dataclass(kw_only=True)
class Pace:
    """Progress from 0 to 1 through `num_steps` steps, or through `seconds` if they end first.

    The learning rate follows progress, so a run that is cut short by the clock still ends at a
    rate near zero.
    """

    num_steps: int
    seconds: float
    step: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    @property
    def progress(self) -> float:
        """The larger of the share of steps and the share of time."""
        return min(max(self.step / self.num_steps, self.elapsed / self.seconds), 1.0)

    @property
    def done(self) -> bool:
        return self.progress >= 1.0


def rate_at(progress: float) -> float:
    """The share of the peak learning rate: a linear warm-up, then a cosine to zero.

    >>> [round(rate_at(p), 3) for p in (0.0, 0.025, 0.05, 0.525, 1.0)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if progress < WARM_UP:
        return progress / WARM_UP
    return 0.5 * (1.0 + math.cos(math.pi * (progress - WARM_UP) / (1.0 - WARM_UP)))


def descend(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: torch.Tensor,
    pace: Pace,
    peak_rate: float,
) -> None:
    """One step at the rate of the moment; the gradient as a whole is clipped to 1."""
    # The first step would have a rate of zero.
    share = rate_at(max(pace.progress, 1 / max(pace.num_steps, 1) * WARM_UP))
    for group in optimizer.param_groups:
        group["lr"] = peak_rate * share
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    pace.step += 1


def refuse_divergence(loss: torch.Tensor, pace: Pace) -> None:
    """End at once when the loss is not a number any more; nothing would be kept of the rest.

    Raises:
        DivergenceError: the loss is infinite or NaN.
    """
    if not math.isfinite(loss.item()):
        raise DivergenceError(
            f"the loss is {loss.item()} after {pace.step} steps; lower --learning-rate"
        )


def rounded(model: torch.nn.Module, stored: str) -> None:
    """Round weights as they will be stored, in place, so that scores are those of the files."""
    if stored == "bf16":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())


def decayed(model: torch.nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves biases and norms alone."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=fused)
