"""From what a user asks for to a frozen plan: validate, calibrate, split into blocks.

Two accountings. `certified` finds one noise multiplier by privacy-loss distributions and gives it
to every parameter. `paper` is Algorithm 1's own calibration: sigma on the shuffled block, sigma_0
on the rest, and plain DP-SGD at sigma_0 when sigma is not smaller; its epsilon is heuristic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from shuffled_dpsgd.accounting import calibrate_certified, calibrate_paper
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training.plan import (
    Accounting,
    Adjacency,
    NoiseBlock,
    NoiseFrame,
    PrivacyPlan,
    Sampling,
    Shuffle,
)

_CHOICES = {
    "accounting": get_args(Accounting),
    "shuffle": get_args(Shuffle),
    "sampling": get_args(Sampling),
    "noise_frame": get_args(NoiseFrame),
    "adjacency": get_args(Adjacency),
    "loss_reduction": ("sum", "mean"),
}


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What the user asked for; `make_private` documents the fields."""

    dataset_size: int
    expected_batch_size: int
    delta: float
    epochs: int | None = None
    num_steps: int | None = None
    epsilon: float | None = None
    noise_multiplier: float | None = None
    unshuffled_noise_multiplier: float | None = None
    clip: str = "flat"
    clip_norm: float = 1.0
    batch_clip_norm: float | None = None
    accounting: Accounting = "certified"
    shuffle: Shuffle = "every-step"
    scope: str = "paper"
    sampling: Sampling = "poisson"
    adjacency: Adjacency = "add-remove"
    delta_split: float = 0.5
    loss_reduction: str = "sum"
    noise_frame: NoiseFrame = "shuffled"
    seed: int | None = None
    secure: bool | None = None

    @property
    def needs_blocks(self) -> bool:
        """Whether the model's symmetries matter: something moves, or is clipped as a block."""
        return self.shuffle != "off" or self.batch_clip_norm is not None

    def steps(self) -> int:
        """T = epochs * ceil(N / B), unless given."""
        if self.num_steps is not None:
            return self.num_steps
        assert self.epochs is not None
        return self.epochs * math.ceil(self.dataset_size / self.expected_batch_size)


def make_plan(
    request: PlanRequest, *, sizes: Mapping[str, int], moved: frozenset[str]
) -> PrivacyPlan:
    """Validate, calibrate and freeze.

    `sizes` maps every trainable parameter to its number of coordinates, `moved` names those a
    permutation moves. Contradictions are refused, never resolved silently.
    """
    check_request(request)
    shuffled = tuple(name for name in sizes if name in moved) if request.needs_blocks else ()
    if request.needs_blocks and not shuffled:
        wider = "" if request.scope == "full" else ", or scope='full'"
        raise InvalidArgumentError(
            "model",
            expected="trainable parameters that a permutation moves",
            got=f"none under scope={request.scope!r}",
            remedy=f"use shuffle='off' without batch_clip_norm{wider}",
        )
    rest = tuple(name for name in sizes if name not in shuffled)
    dimension = sum(sizes[name] for name in shuffled)
    noise, unshuffled_noise = _noise_multipliers(request, dimension)
    falls_back = request.accounting == "paper" and noise >= unshuffled_noise
    if falls_back:
        noise = unshuffled_noise
    blocks = []
    if shuffled:
        blocks.append(
            NoiseBlock(
                name="shuffled",
                parameters=shuffled,
                dimension=dimension,
                noise_multiplier=noise,
                batch_clip_norm=None if falls_back else request.batch_clip_norm,
            )
        )
    if rest:
        blocks.append(
            NoiseBlock(
                name="rest",
                parameters=rest,
                dimension=sum(sizes[name] for name in rest),
                noise_multiplier=unshuffled_noise,
            )
        )
    return _freeze(request, tuple(blocks), falls_back=falls_back)


def check_request(request: PlanRequest) -> None:
    """Refuse arguments that are out of range or contradict each other."""
    for name, choices in _CHOICES.items():
        if getattr(request, name) not in choices:
            raise InvalidArgumentError(
                name, expected=f"one of {choices}", got=getattr(request, name)
            )
    _check_sizes(request)
    _check_clips(request)
    _check_budget(request)
    _check_randomness(request)
    if request.noise_frame == "unshuffled" and request.shuffle != "every-step":
        raise _clash("noise_frame='unshuffled'", f"shuffle={request.shuffle!r}", "every-step")


def _noise_multipliers(request: PlanRequest, dimension: int) -> tuple[float, float]:
    """(sigma of the shuffled block, sigma of the rest)."""
    if request.noise_multiplier is not None:
        other = request.unshuffled_noise_multiplier
        return request.noise_multiplier, request.noise_multiplier if other is None else other
    assert request.epsilon is not None
    common: dict[str, Any] = {
        "epsilon": request.epsilon,
        "delta": request.delta,
        "sampling_prob": request.expected_batch_size / request.dataset_size,
        "num_steps": request.steps(),
    }
    if request.accounting == "certified":
        found = calibrate_certified(**common, adjacency=request.adjacency)
        return found.noise_multiplier, found.noise_multiplier
    assert request.batch_clip_norm is not None
    paper = calibrate_paper(
        **common,
        dimension=dimension,
        batch_clip=request.batch_clip_norm / request.clip_norm,
        delta_split=request.delta_split,
    )
    return paper.noise_multiplier, paper.unshuffled_noise_multiplier


def _freeze(
    request: PlanRequest, blocks: tuple[NoiseBlock, ...], *, falls_back: bool
) -> PrivacyPlan:
    return PrivacyPlan(
        dataset_size=request.dataset_size,
        expected_batch_size=request.expected_batch_size,
        num_steps=request.steps(),
        epsilon=request.epsilon,
        delta=request.delta,
        clip=request.clip,
        clip_norm=request.clip_norm,
        accounting=request.accounting,
        shuffle=request.shuffle,
        scope=request.scope,
        sampling=request.sampling,
        adjacency=request.adjacency,
        delta_split=request.delta_split,
        loss_reduction=request.loss_reduction,
        noise_frame=request.noise_frame,
        seed=request.seed,
        falls_back=falls_back,
        blocks=blocks,
    )


def _check_sizes(request: PlanRequest) -> None:
    for name in ("dataset_size", "expected_batch_size", "epochs", "num_steps"):
        value = getattr(request, name)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise InvalidArgumentError(name, expected="a positive integer", got=value)
    if request.expected_batch_size > request.dataset_size:
        raise InvalidArgumentError(
            "expected_batch_size",
            expected=f"at most dataset_size = {request.dataset_size}",
            got=request.expected_batch_size,
            remedy="the sampling probability cannot exceed 1",
        )
    if (request.epochs is None) == (request.num_steps is None):
        raise InvalidArgumentError(
            "epochs",
            expected="exactly one of epochs and num_steps",
            got={"epochs": request.epochs, "num_steps": request.num_steps},
        )


def _check_clips(request: PlanRequest) -> None:
    if not request.clip_norm > 0.0:
        raise InvalidArgumentError("clip_norm", expected="a positive number", got=request.clip_norm)
    batch_clip = request.batch_clip_norm
    if batch_clip is not None and not batch_clip > 0.0:
        raise InvalidArgumentError(
            "batch_clip_norm", expected="a positive number or None", got=batch_clip
        )
    if math.isinf(request.clip_norm) and request.noise_multiplier != 0.0:
        raise InvalidArgumentError(
            "clip_norm",
            expected="a finite number, unless noise_multiplier=0",
            got=request.clip_norm,
            remedy="noise is scaled by clip_norm",
        )
    if request.clip == "none" and request.epsilon is not None:
        raise _clash("clip='none'", "epsilon", "a clip that bounds each record's contribution")
    if request.accounting == "paper":
        if batch_clip is None:
            raise InvalidArgumentError(
                "batch_clip_norm",
                expected="an explicit value with accounting='paper'",
                got=None,
                remedy="the paper's formula depends on it more than on anything else",
            )
        if request.shuffle == "off":
            raise _clash("accounting='paper'", "shuffle='off'", "every-step or at-release")


def _check_budget(request: PlanRequest) -> None:
    if not 0.0 < request.delta < 1.0:
        raise InvalidArgumentError("delta", expected="a number in (0, 1)", got=request.delta)
    if (request.epsilon is None) == (request.noise_multiplier is None):
        raise InvalidArgumentError(
            "epsilon",
            expected="exactly one of epsilon and noise_multiplier",
            got={"epsilon": request.epsilon, "noise_multiplier": request.noise_multiplier},
            remedy="epsilon calibrates the noise, noise_multiplier fixes it",
        )
    if request.epsilon is not None and not 0.0 < request.epsilon < math.inf:
        raise InvalidArgumentError("epsilon", expected="a positive number", got=request.epsilon)
    for name in ("noise_multiplier", "unshuffled_noise_multiplier"):
        value = getattr(request, name)
        if value is not None and not 0.0 <= value < math.inf:
            raise InvalidArgumentError(name, expected="a non-negative number", got=value)
    if request.sampling == "unaccounted" and request.epsilon is not None:
        raise _clash("epsilon", "sampling='unaccounted'", "sampling='poisson'")
    two = request.accounting == "paper" and request.noise_multiplier is not None
    if two != (request.unshuffled_noise_multiplier is not None):
        raise InvalidArgumentError(
            "unshuffled_noise_multiplier",
            expected="a value exactly when accounting='paper' and noise_multiplier is given",
            got=request.unshuffled_noise_multiplier,
            remedy="Algorithm 1 needs sigma for the shuffled block and sigma_0 for the rest",
        )


def _check_randomness(request: PlanRequest) -> None:
    if request.seed is not None and request.secure:
        raise _clash("secure=True", "seed", "one of them: a seed lets its holder remove the noise")
    if request.seed is None and request.secure is False:
        raise InvalidArgumentError("seed", expected="a seed with secure=False", got=None)


def _clash(one: str, other: str, wanted: str) -> InvalidArgumentError:
    return InvalidArgumentError(one, expected=wanted, got=other, remedy="the two contradict")
