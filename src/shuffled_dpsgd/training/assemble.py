"""`make_private`: from a model, an optimizer and a budget to a run whose parts agree."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.errors import InvalidArgumentError, UnsupportedModuleError
from shuffled_dpsgd.permutation import PermutationSpec, discover
from shuffled_dpsgd.training.ledger import Ledger
from shuffled_dpsgd.training.mechanism import ShuffledGaussianMechanism
from shuffled_dpsgd.training.noise import GaussianNoise
from shuffled_dpsgd.training.optimizers import check_optimizer, check_parameters
from shuffled_dpsgd.training.plan import (
    Accounting,
    Adjacency,
    NoiseFrame,
    PrivacyPlan,
    Sampling,
    Shuffle,
)
from shuffled_dpsgd.training.planning import PlanRequest, check_request, make_plan
from shuffled_dpsgd.training.private import PrivateTraining
from shuffled_dpsgd.training.randomness import RandomStreams
from shuffled_dpsgd.training.sampler import PoissonSampler

DEFAULT_PHYSICAL_BATCH = 64


def make_private(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    dataset_size: int,
    expected_batch_size: int,
    delta: float,
    epochs: int | None = None,
    num_steps: int | None = None,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    unshuffled_noise_multiplier: float | None = None,
    clip_norm: float = 1.0,
    clip: str = "flat",
    batch_clip_norm: float | None = None,
    accounting: Accounting = "certified",
    shuffle: Shuffle = "every-step",
    scope: str = "paper",
    sampling: Sampling = "poisson",
    adjacency: Adjacency = "add-remove",
    delta_split: float = 0.5,
    loss_reduction: str = "sum",
    noise_frame: NoiseFrame = "shuffled",
    seed: int | None = None,
    secure: bool | None = None,
    physical_batch_size: int | None = None,
    strategy: str = "bookkeeping",
    ledger_path: str | Path | None = None,
) -> PrivateTraining:
    """Plan a private run of `model` with `optimizer`; neither changes type, name or shape.

    Budget: `epsilon` calibrates the noise (`accounting="certified"`: to a proven epsilon, the same
    noise everywhere, shuffling credited with nothing; `"paper"`: by Algorithm 1's own formula,
    heuristic, `batch_clip_norm` explicit), or `noise_multiplier` fixes it and nothing needs to be
    priced; with `"paper"` it is sigma, and `unshuffled_noise_multiplier` is sigma_0.
    Length: `num_steps`, or `epochs` of ceil(dataset_size / expected_batch_size) steps.
    Randomness: from the operating system unless a `seed` is given; a seeded run can be repeated
    and resumed bit for bit, and its noise removed by whoever knows the seed.
    Own batches: `sampling="unaccounted"` trains on whatever is fed, and claims nothing.
    Crash safety: `ledger_path` keeps the count of releases on disk, written ahead of each.
    """
    request = PlanRequest(
        dataset_size=dataset_size,
        expected_batch_size=expected_batch_size,
        delta=delta,
        epochs=epochs,
        num_steps=num_steps,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        unshuffled_noise_multiplier=unshuffled_noise_multiplier,
        clip=clip,
        clip_norm=clip_norm,
        batch_clip_norm=batch_clip_norm,
        accounting=accounting,
        shuffle=shuffle,
        scope=scope,
        sampling=sampling,
        adjacency=adjacency,
        delta_split=delta_split,
        loss_reduction=loss_reduction,
        noise_frame=noise_frame,
        seed=seed,
        secure=secure,
    )
    return assemble(
        model,
        optimizer,
        request,
        physical_batch_size=physical_batch_size,
        strategy=strategy,
        ledger_path=ledger_path,
    )


def assemble(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    request: PlanRequest,
    *,
    physical_batch_size: int | None = None,
    strategy: str = "bookkeeping",
    ledger_path: str | Path | None = None,
) -> PrivateTraining:
    """Build every part of a run from one request; what `make_private` does."""
    check_request(request)
    inner = _uncompiled(model)
    _refuse_replicas(inner)
    check_optimizer(optimizer, shuffled=request.shuffle != "off")
    check_parameters(inner, optimizer)
    spec: PermutationSpec | None = None
    if request.needs_blocks:
        spec = discover(inner, scope=_scope(request.scope))
    plan = make_plan(
        request,
        sizes={n: p.numel() for n, p in inner.named_parameters() if p.requires_grad},
        moved=frozenset() if spec is None else spec.moved_names,
    )
    streams = RandomStreams(seed=plan.seed)
    return PrivateTraining(
        model=inner,
        optimizer=optimizer,
        plan=plan,
        engine=_engine(inner, plan, strategy),
        sampler=PoissonSampler(
            dataset_size=plan.dataset_size, sampling_prob=plan.sampling_prob, streams=streams
        ),
        mechanism=ShuffledGaussianMechanism(plan, GaussianNoise(streams)),
        ledger=Ledger(
            plan_fingerprint=plan.fingerprint(), max_releases=plan.num_steps, path=ledger_path
        ),
        streams=streams,
        spec=spec,
        physical_batch_size=_physical(physical_batch_size, plan.expected_batch_size),
    )


def _engine(model: torch.nn.Module, plan: PrivacyPlan, strategy: str) -> ClippingEngine:
    unclipped = math.isinf(plan.clip_norm)
    return ClippingEngine(
        model,
        clip_norm=1.0 if unclipped else plan.clip_norm,
        clip="none" if unclipped else plan.clip,
        strategy=strategy,
        loss_reduction=plan.loss_reduction,
    )


def _physical(given: int | None, expected_batch_size: int) -> int:
    if given is None:
        return min(DEFAULT_PHYSICAL_BATCH, expected_batch_size)
    if given < 1:
        raise InvalidArgumentError("physical_batch_size", expected="a positive integer", got=given)
    return given


def _uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """The module `torch.compile` wrapped: same parameters, names without its prefix."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, torch.nn.Module) else model


def _refuse_replicas(model: torch.nn.Module) -> None:
    """Replicas would each sample, noise and count for themselves, and drift apart unnoticed."""
    parallel = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    if isinstance(model, parallel) or type(model).__name__ == "FullyShardedDataParallel":
        raise UnsupportedModuleError(
            "",
            expected="the model itself, on one device",
            got=type(model).__name__,
            remedy="pass the wrapped module and run one process",
        )


def _scope(name: str) -> Any:
    if name not in ("paper", "full"):
        raise InvalidArgumentError("scope", expected="'paper' or 'full'", got=name)
    return name
