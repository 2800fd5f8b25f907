"""Compares the ranks of a launch before their first step.

They must have the same versions, plan, optimizer and records. A difference would go unnoticed
later, and the sums would no longer be those that the plan accounts for. A refusal names the rank.
"""

from __future__ import annotations

import hashlib
import json
import platform
import random
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.core.release import Exchange
from shuffled_dpsgd.distributed.agreement import agree, first_writes
from shuffled_dpsgd.distributed.exchange import ReplicatedSums
from shuffled_dpsgd.distributed.layouts import send_first
from shuffled_dpsgd.distributed.world import World
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.permutation import PermutationSpec
from shuffled_dpsgd.runtime.shards import held, is_sharded
from shuffled_dpsgd.training.data import MapStyle
from shuffled_dpsgd.training.global_randomness import (
    global_randomness,
    seed_rank,
    set_global_randomness,
)
from shuffled_dpsgd.training.layout import lengths_of
from shuffled_dpsgd.training.planning import field_fingerprints
from shuffled_dpsgd.training.record_digest import digest_of_some

if TYPE_CHECKING:
    from shuffled_dpsgd.distributed.sharding import AnySharding

_RECORDS = 256
_PACKAGES = ("shuffled_dpsgd", "torch", "numpy", "transformers", "peft")
_REMEDY = "start every rank with the same program, files and versions"


def join_ranks(
    world: World,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: PrivacyPlan,
    spec: PermutationSpec | None,
    sharding: AnySharding | None = None,
) -> Exchange | None:
    """Compare the launch on all ranks, give all of them rank 0's weights; None for one process.

    Of a sharded model every rank has its own weights, those of the first copy, and buffers alone
    are rank 0's.

    Raises:
        RankError: naming the rank that differs, and in what.
    """
    if world.size == 1:
        return None
    if plan.noise_frame == "unshuffled":
        raise InvalidArgumentError(
            "noise_frame",
            expected="'shuffled' with several ranks",
            got=plan.noise_frame,
            remedy="each rank noises its own coordinates, which a frame would move to others: run "
            "it in one process; banded noise takes shuffle='off' or 'at-release' there",
        )
    agree(world, _facts(model, optimizer, plan, spec), remedy=_REMEDY)
    send_first(world, [*([] if sharding else model.parameters()), *model.buffers()])
    if sharding is not None and sharding.split is not None:
        send_first(world, [p for p in model.parameters() if not is_sharded(p)])
        set_global_randomness(world.from_first(global_randomness()))
        return sharding.sums
    seed_rank(world.rank)
    if sharding is not None:
        send_first(sharding.copies, [held(p) for p in model.parameters()])
        return sharding.sums
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return ReplicatedSums(world, trainable)


def compare_records(world: World, data: MapStyle) -> None:
    """Refuse data that differ between ranks, by their number and by records that rank 0 draws.

    Other records are drawn at every call. All ranks load them under the same random state. Records
    that still differ from one load to the next are compared by their number alone.
    """
    remedy = "give every rank the same data, in the same order"
    agree(world, {"number of records": len(data)}, remedy=remedy)
    seed = world.from_first(secrets.randbits(64))
    chosen = random.Random(seed).sample(range(len(data)), min(len(data), _RECORDS))
    content = digest_of_some(data, chosen, b"records of a launch", seed)
    agree(world, {"set of records": content}, remedy=remedy)


def lengths_on_all(world: World, data: MapStyle) -> Sequence[int] | None:
    """What `lengths_of` says on rank 0: no other rank looks at its records. Collective."""
    found: list[Sequence[int]] = []

    def count() -> str:
        found.extend(each for each in [lengths_of(data)] if each is not None)
        return str(len(found[0])) if found else ""

    number = first_writes(world, count)
    if world.size == 1 or not number:
        return found[0] if found else None
    lengths = torch.tensor(found[0]) if found else torch.empty(int(number), dtype=torch.int64)
    world.copy_first_(lengths)
    return lengths.tolist()


def _facts(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: PrivacyPlan,
    spec: PermutationSpec | None,
) -> dict[str, Any]:
    kinds = {n: (tuple(p.shape), str(p.dtype)) for n, p in model.named_parameters()}
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    groups = None if spec is None else spec.to_json()
    marks = field_fingerprints(plan)
    return {
        "version of Python": platform.python_version(),
        **{f"version of {name}": _version(name) for name in _PACKAGES},
        "kind of device": _hardware(next(model.parameters()).device),
        **{f"plan, in {name}": _shown(plan, name, mark) for name, mark in marks.items()},
        "model": _mark(kinds),
        "set of trained parameters": _mark(trained),
        "set of permutation groups": _mark(groups),
        "optimizer": _describe(optimizer),
        "optimizer state": _mark(sorted(map(str, optimizer.state_dict()["state"]))),
    }


def _shown(plan: PrivacyPlan, name: str, mark: str) -> Any:
    """A field as a refusal shows it: its value, or a hash if it is secret or long."""
    value = getattr(plan, name)
    plain = value is None or isinstance(value, bool | int | float | str)
    return value if plain and name != "seed" else mark


def _hardware(device: torch.device) -> str:
    """GPUs of different kinds round differently, so equal weights would drift apart."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _version(package: str) -> str | None:
    """The version that is imported, which may differ from what the installed metadata say."""
    return getattr(sys.modules.get(package), "__version__", None)


def _describe(optimizer: torch.optim.Optimizer) -> str:
    groups = [_settings(group) for group in optimizer.param_groups]
    return f"{type(optimizer).__name__} {groups}"


def _settings(group: Mapping[str, Any]) -> dict[str, str]:
    held = {key: repr(value) for key, value in sorted(group.items()) if key != "params"}
    return held | {"params": str(len(group["params"]))}


def _mark(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
