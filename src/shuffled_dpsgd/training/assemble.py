"""`make_private`: from a model, an optimizer and a budget to a run whose parts agree."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.clipping.opacus_engine import OpacusEngine
from shuffled_dpsgd.core.ledger import Ledger
from shuffled_dpsgd.core.mechanism import ShuffledGaussianMechanism
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.core.sampler import PoissonSampler
from shuffled_dpsgd.core.streams import RandomStreams
from shuffled_dpsgd.distributed.agreement import agree
from shuffled_dpsgd.distributed.world import World, current_world
from shuffled_dpsgd.errors import InvalidArgumentError, require
from shuffled_dpsgd.options import (
    Accounting,
    Adjacency,
    Clip,
    LossReduction,
    Method,
    Noise,
    NoiseFrame,
    PrivacyOptions,
    Sampling,
    Scope,
    Shuffle,
    Strategy,
)
from shuffled_dpsgd.options.other_names import answers_other_names
from shuffled_dpsgd.runtime.shards import any_sharded, is_wrapped
from shuffled_dpsgd.runtime.uncompiled import refuse_compiled_whole
from shuffled_dpsgd.training.device_noise import DeviceNoise
from shuffled_dpsgd.training.kinds import check_adapters, check_kinds, refuse_wrappers, uncompiled
from shuffled_dpsgd.training.launch_check import join_ranks
from shuffled_dpsgd.training.moving_clip import gradient_clip
from shuffled_dpsgd.training.optimizers import check_optimizer, check_parameters, check_precision
from shuffled_dpsgd.training.planning import large_delta, make_plan, without_seed
from shuffled_dpsgd.training.private import PrivateTraining
from shuffled_dpsgd.training.rows import DEFAULT_UNIT
from shuffled_dpsgd.training.shared_ledger import SharedLedger
from shuffled_dpsgd.training.succession import close_predecessors
from shuffled_dpsgd.training.symmetries import usable_symmetries
from shuffled_dpsgd.training.units import Units

if TYPE_CHECKING:
    from shuffled_dpsgd.distributed.sharding import AnySharding

DEFAULT_PHYSICAL_BATCH = 64


@answers_other_names
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
    clip: Clip = "flat",
    clip_quantile: float | None = None,
    batch_clip_norm: float | None = None,
    method: Method | None = None,
    accounting: Accounting | None = None,
    shuffle: Shuffle | None = None,
    scope: Scope | None = None,
    noise_frame: NoiseFrame = "shuffled",
    noise: Noise = "independent",
    bands: int | None = None,
    strategy: Strategy | None = None,
    check_rate: float = 1 / 256,
    sampling: Sampling = "poisson",
    adjacency: Adjacency = "add-remove",
    delta_split: float = 0.5,
    loss_reduction: LossReduction = "sum",
    loss: Callable[[Any, Any], Any] | None = None,
    mesh: Any = None,
    seed: int | None = None,
    secure: bool | None = None,
    physical_batch_size: int | None = None,
    ledger_path: str | Path | None = None,
    budget: str | None = None,
    unit: str | Sequence[Hashable] = "row",
    records_per_unit: int | None = None,
    largest_batch: int | None = None,
) -> PrivateTraining:
    """Plan a private run of `model` with `optimizer`; neither changes type, name or shape.

    With `epsilon` the noise is calibrated. `accounting="certified"` calibrates it to a proven
    epsilon: the same noise everywhere, shuffling credited with nothing. `"paper"` uses the formula
    of Algorithm 1, which is heuristic. With `noise_multiplier` nothing is calibrated; under
    `"paper"` it is sigma, the noise of the shuffled block, and `unshuffled_noise_multiplier` is
    sigma_0.
    A run with a `seed` can be repeated and resumed bit for bit.

    Args:
        model: Any module the clipping engine understands and, under a shuffle that is asked for by
            name, the shuffle.
        optimizer: An optimizer over all of the model's trainable parameters.
        dataset_size: N, the number of training records.
        expected_batch_size: B, the expected size of a Poisson batch; actual sizes vary around it.
        delta: δ of every claim; well below 1 / number of records.
        epochs: Length in epochs of ⌈N/B⌉ steps; this or num_steps.
        num_steps: Length in optimizer steps; this or epochs.
        epsilon: Budget ε that the noise is calibrated to; this or noise_multiplier.
        noise_multiplier: Noise std in units of clip_norm; this or epsilon.
        unshuffled_noise_multiplier: σ0, the noise multiplier of parameters that do not move; given
            exactly when accounting is paper and noise_multiplier is given.
        clip_norm: c, the clip of each sample's gradient over all trainable weights.
        clip: How a sample is clipped: flat, automatic, per-layer, or none, which allows no claim.
        clip_quantile: Share of records whose gradients are to be below the clip, such as 0.5: the
            clip starts at clip_norm and follows the norms, within the same ε. None: it stays.
        batch_clip_norm: c', the clip of the shuffled block as a whole; paper needs it.
        method: A name for a choice of the options below: shuffled (the paper's Algorithm 1),
            mixopt, ghost, opacus (needs it installed), certified (recommended) or non-private.
        accounting: What the noise is calibrated by. certified (the default): proven ε, tight. rdp:
            proven, looser. paper: the paper's own formula, heuristic.
        shuffle: When weights are permuted: every-step, at-release or off. auto (the default, unless
            a method is named): every step, where some of what is trained can move.
        scope: Which weights move. paper: Theorems 1-2. full (the default under shuffle auto): every
            exact symmetry.
        noise_frame: shuffled: noise is drawn for the weights as they lie. unshuffled: as if they
            had never moved, so that runs with and without a shuffle can be compared.
        noise: independent: every step has noise of its own. banded: within blocks of steps, noise
            is taken away again in part; refused where that gains nothing.
        bands: Steps in a block of banded noise; by default chosen by the accountant.
        strategy: How the clipping engine computes, bookkeeping unless a method is named; never
            changes what is released.
        check_rate: Share of batches in which a few samples are run once more among other records
            and compared; 1 checks every one. First batches and new kinds are always checked.
        sampling: poisson: the sampler accounted for. unaccounted: batches of your own, and no
            claim.
        adjacency: How neighbouring data sets differ: add-remove or replace-one.
        delta_split: Share of δ that the paper's formula keeps for composition.
        loss_reduction: What a scalar loss is: the sum over its samples, or their mean.
        loss: The loss, as a function of the model and a batch that returns one loss per record. It
            is tried out on the first batches; without it the card lists it as not checked.
        mesh: The DeviceMesh that fully_shard was given: one axis of ranks that share the weights,
            or before it one of copies; or that of parallelize_module. None: the model's.
        seed: Repeatable noise, for experiments: whoever knows the seed can remove it. None: noise
            from the operating system.
        secure: True: refuse a seed. False: require one. By default neither.
        physical_batch_size: Samples in memory at once; never changes what is released.
        ledger_path: File that counts releases, written ahead of each; by default kept in memory
            only.
        budget: File that counts every run on the same records and refuses one too many; made by
            shuffled-dpsgd budget new.
        unit: What one row of the data is, such as patient, document or window of 512 tokens: what
            every claim is about. row: not stated. With records_per_unit, the column of the data
            that says whose each record is, or the ids themselves, one for each record.
        records_per_unit: Protect all of a unit's records together: units are drawn, dataset_size
            and expected_batch_size count them, and so many records of each take part at most.
        largest_batch: M, a hard bound on a batch: of a larger draw so many are kept, and with
            pad_batches all batches have that shape. ε counts what it costs: from about B + 6·√B on
            nothing, below it much (`advise` has the number for a plan).
    """
    # From `locals()`, so that a new parameter cannot be forgotten here.
    options = dict(locals())
    del options["model"], options["optimizer"]
    private = assemble(model, optimizer, PrivacyOptions(**options))
    warning = large_delta(private.plan)
    if warning is not None:
        warnings.warn(warning, UserWarning, stacklevel=3)
    return private


def assemble(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    options: PrivacyOptions,
) -> PrivateTraining:
    """Build every part of a run from its options; what `make_private` does."""
    check_kinds(model, optimizer)
    inner = uncompiled(model)
    refuse_wrappers(inner)
    check_adapters(inner)
    # Under auto a shuffle is left out where the optimizer rules it out.
    by_name = options.shuffle not in ("auto", "off")
    check_optimizer(optimizer, shuffled=by_name, sharded=any_sharded(inner.parameters()))
    check_parameters(inner, optimizer)
    check_precision(inner)
    close_predecessors(inner, optimizer)
    world = current_world()
    sharding = _find_sharding(world, inner, options, compiled=inner is not model)
    with _as_written(sharding):
        spec = usable_symmetries(inner, optimizer, options, split=_is_split(sharding))
    if _is_split(sharding) and options.clip == "per-layer":
        expected = "one factor for a sample where layers are split over ranks"
        raise InvalidArgumentError("clip", expected=expected, got=options.clip)
    plan = make_plan(
        options,
        sizes={n: p.numel() for n, p in inner.named_parameters() if p.requires_grad},
        moved=frozenset() if spec is None else spec.moved_names,
    )
    if plan.clip_quantile is not None and (world.size > 1 or sharding is not None):
        raise InvalidArgumentError(
            "clip_quantile", expected="nothing in several processes", got=plan.clip_quantile
        )
    exchange = join_ranks(world, inner, optimizer, plan, spec, sharding)
    with _as_written(sharding):
        engine = _engine(inner, plan, options, sharding)
    ledger = _ledger(world, plan, options.ledger_path)
    streams = RandomStreams(plan.seed, secret=ledger.key, releases=ledger.releases)
    private = PrivateTraining(
        model=inner,
        optimizer=optimizer,
        plan=plan,
        engine=engine,
        sampler=PoissonSampler(
            dataset_size=plan.dataset_size,
            sampling_prob=plan.sampling_prob,
            streams=streams,
            largest_batch=plan.largest_batch,
            bands=plan.bands,
        ),
        mechanism=ShuffledGaussianMechanism(
            plan,
            DeviceNoise(),
            places=None if exchange is None else exchange.places(),
            total=None if exchange is None else exchange.total,
        ),
        ledger=ledger,
        streams=streams,
        spec=spec,
        physical_batch_size=options.physical_batch_size or DEFAULT_PHYSICAL_BATCH,
        world=world,
        exchange=exchange,
        sharding=sharding,
        check_rate=options.check_rate,
        unit=options.unit if isinstance(options.unit, str) else DEFAULT_UNIT,
        units=_units(options, compiled=inner is not model, sharded=sharding is not None),
        budget=options.budget,
    )
    if options.loss is not None:
        private.use_loss(options.loss)
    return private


def _units(options: PrivacyOptions, *, compiled: bool, sharded: bool) -> Units | None:
    """The units that the options name one by one; refuses what units do not go with."""
    if options.records_per_unit is None:
        return None
    for is_so, got in ((compiled, "torch.compile of it"), (sharded, "fully_shard of it")):
        require(not is_so, "model", "the model itself, as a unit has several records", got)
    if isinstance(options.unit, str):
        return None
    found = Units(options.unit)
    if len(found) != options.dataset_size:
        raise InvalidArgumentError(
            "dataset_size",
            expected=f"the number of units, {len(found)}",
            got=options.dataset_size,
            remedy="dataset_size and expected_batch_size count units where units are drawn",
        )
    return found


def _find_sharding(
    world: World, model: torch.nn.Module, options: PrivacyOptions, *, compiled: bool
) -> AnySharding | None:
    """How `fully_shard` has spread the model, if it has; what it does not go with is refused."""
    spread = is_wrapped(model) or any_sharded(model.parameters())
    agree(
        world,
        {"kind of model": "sharded" if spread else "whole"},
        remedy="call fully_shard on every rank, or on none",
    )
    if not spread:
        if options.mesh is not None:
            raise InvalidArgumentError(
                "mesh",
                expected="None for a model that every rank has the whole of",
                got=options.mesh,
                remedy="call fully_shard(module, mesh=mesh) on its blocks, then on the model, or "
                "parallelize_module; pipeline, context and expert parallelism are not supported",
            )
        return None
    # torch.distributed.fsdp takes a while to import.
    from shuffled_dpsgd.distributed.sharding import find_sharding

    if world.size > 1 and options.sampling != "poisson":
        raise InvalidArgumentError(
            "sampling",
            expected="'poisson' for a sharded model, whose ranks run equally many batches, "
            "some of which do not count",
            got=options.sampling,
        )
    ours = options.method != "opacus"
    require(ours, "method", "one of ours for a sharded model", options.method)
    if compiled:
        refuse_compiled_whole()
    agree(
        world,
        {"physical batch size": options.physical_batch_size},
        remedy="sharded ranks run equally many batches: give all of them the same",
    )
    return find_sharding(world, model, options.mesh)


def _is_split(sharding: AnySharding | None) -> bool:
    """Whether every rank computes a part of each layer, with the same records."""
    return sharding is not None and sharding.split is not None


def _as_written(
    sharding: AnySharding | None,
) -> AbstractContextManager[None]:
    """Where modules are known by their classes, which `fully_shard` has replaced."""
    return nullcontext() if sharding is None else sharding.as_written()


def _engine(
    model: torch.nn.Module,
    plan: PrivacyPlan,
    options: PrivacyOptions,
    sharding: AnySharding | None,
) -> ClippingEngine:
    if options.method == "opacus":
        if plan.clip != "flat" or plan.loss_reduction != "sum":
            raise InvalidArgumentError(
                "method",
                expected="clip='flat' and loss_reduction='sum' with 'opacus'",
                got=(plan.clip, plan.loss_reduction),
            )
        # It has the methods of ClippingEngine that training calls.
        return OpacusEngine(model, clip_norm=gradient_clip(plan))  # type: ignore[return-value]
    unclipped = math.isinf(plan.clip_norm)
    assert options.strategy is not None, "filled in on construction"
    return ClippingEngine(
        model,
        clip_norm=1.0 if unclipped else gradient_clip(plan),
        clip="none" if unclipped else plan.clip,
        strategy=options.strategy,
        check_rate=options.check_rate,
        loss_reduction=plan.loss_reduction,
        sharding=sharding,
    )


def _ledger(world: World, plan: PrivacyPlan, path: str | Path | None) -> Ledger:
    """The ledger of the plan: opened by this process, or by rank 0 for all."""
    planned: dict[str, Any] = {
        "plan_fingerprint": without_seed(plan).fingerprint(),
        "max_releases": plan.num_steps,
        "path": path,
    }
    return (
        Ledger(**planned) if world.size == 1 else SharedLedger(world, secure=plan.secure, **planned)
    )
