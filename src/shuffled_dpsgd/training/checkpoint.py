"""Checkpoints: everything that is needed to continue a run.

A checkpoint is a folder (`checkpoint_folder.py`) with three files: the weights, the state of the
optimizer and of the run, and fingerprints of the plan that it belongs to. Weights are safetensors,
or a digest if they are saved elsewhere; a sharded model has files of its own
(`sharded_checkpoint.py`). Only tensors and plain data are unpickled.

A secure run resumes with fresh noise, and the ledger counts the steps that were lost after the
checkpoint. A seeded run repeats them bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from shuffled_dpsgd.core.ledger import LedgerEntry
from shuffled_dpsgd.core.streams import STREAM_VERSION
from shuffled_dpsgd.distributed.agreement import agree, all_do, first_does
from shuffled_dpsgd.distributed.world import World
from shuffled_dpsgd.errors import CheckpointError, InvalidArgumentError, require
from shuffled_dpsgd.permutation import Permutation
from shuffled_dpsgd.training.checkpoint_folder import (
    MANIFEST,
    choose_checkpoint,
    finish_files,
    hash_file,
    listed_files,
    prune,
    put_in_place,
    verify_files,
)
from shuffled_dpsgd.training.fingerprints import fingerprint
from shuffled_dpsgd.training.global_randomness import (
    global_randomness,
    seed_rank,
    set_global_randomness,
)
from shuffled_dpsgd.training.planning import differences, field_fingerprints, without_seed
from shuffled_dpsgd.training.private import PrivateTraining

WEIGHTS, _STATE, _RUN = "model.safetensors", "state.pt", "run.json"
_DIGEST = "digest"
# A disk with fewer free bytes counts as full.
_ROOM_LEFT = 1 << 20
Kinds = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class Stateful(Protocol):
    """Anything with a state that belongs in the checkpoint, such as a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


def save_checkpoint(
    private: PrivateTraining,
    directory: str | Path,
    *,
    extras: Mapping[str, Stateful] | None = None,
    keep: int = 2,
    weights: bool = True,
) -> Path:
    """Write `directory/checkpoint-<step>` atomically, and delete all but the newest `keep`.

    Without `weights` only their digest is saved: they must be loaded into the model before
    `load_checkpoint`, which compares. Call it between steps, on all ranks; rank 0 writes. Until
    the new checkpoint is complete, the last one stays.
    """
    require(keep >= 1, "keep", "at least 1", keep)
    if private.is_sharded and not weights:
        raise InvalidArgumentError("weights", expected="True for a sharded model", got=weights)
    private.check()
    private.claims.check_released()
    randomness = private.world.gather(global_randomness())
    root = Path(directory)
    temporary = first_does(private.world, lambda: _make_room(root, private.steps_taken))
    shards: dict[str, str] = {}
    state = {
        "optimizer": private.optimizer.state_dict(),
        "extras": {name: extra.state_dict() for name, extra in (extras or {}).items()},
    }
    if private.is_sharded:
        from shuffled_dpsgd.training.sharded_checkpoint import without_shards, write_shards

        model, optimizer = private.model, private.optimizer
        try:
            shards = write_shards(private.world, temporary, model, optimizer, state["extras"])
        except CheckpointError:
            if private.world.leads:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        state = without_shards(state)

    def save() -> Path:
        target = root / f"checkpoint-{private.steps_taken:08d}"
        try:
            if not shards:
                digest = None if weights else {_DIGEST: _digest(private.model)}
                tensors = _on_host(private.model) if weights else {}
                save_file(tensors, temporary / WEIGHTS, metadata=digest)
            torch.save(state | _position(private, randomness), temporary / _STATE)
            (temporary / _RUN).write_text(json.dumps(_run(private), indent=1), encoding="utf-8")
            names = (_STATE, _RUN) if shards else (WEIGHTS, _STATE, _RUN)
            finish_files(temporary, names, shards)
            put_in_place(temporary, target)
        except (OSError, SafetensorError, RuntimeError) as error:
            failure = not_written(target, error)
            shutil.rmtree(temporary, ignore_errors=True)
            raise failure from error
        prune(root, keep=keep, spare=target)
        return target

    return first_does(private.world, save)


def _make_room(root: Path, step: int) -> Path:
    """A new folder for a checkpoint, under a temporary name."""
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(".checkpoint-*.tmp"):
        shutil.rmtree(leftover)
    temporary = root / f".checkpoint-{step:08d}.{os.getpid()}.tmp"
    try:
        temporary.mkdir()
    except OSError as error:
        raise not_written(root / f"checkpoint-{step:08d}", error) from error
    return temporary


def not_written(target: Path, error: BaseException) -> CheckpointError:
    """The error for a checkpoint that could not be written.

    When the disk is full, torch only reports a file that is too short.
    """
    free = shutil.disk_usage(target.parent).free
    reason = f"the disk is full: {free:,} bytes are free" if free < _ROOM_LEFT else str(error)
    return CheckpointError(
        f"{target}: could not be written ({reason}); make room or mend the disk, then resume: "
        "checkpoints written before it are whole"
    )


def load_checkpoint(
    private: PrivateTraining,
    path: str | Path,
    *,
    extras: Mapping[str, Stateful] | None = None,
) -> None:
    """Restore a new run of the same plan to the checkpoint.

    `path` is a checkpoint, or the folder that `save_checkpoint` was given: then its newest one.
    Plan, parameters and symmetries must be those of the checkpoint, and the ledger must contain its
    releases. Everything is checked before anything is changed. The number of ranks may differ;
    every rank must be able to read the files.
    """
    found = all_do(private.world, lambda: _read(private, Path(path), extras or {}))
    agree(
        private.world,
        {"checkpoint": found.mark},
        remedy="every rank must read the same folder: put it on a disk all of them share",
    )
    durable = bool(found.run["durable_ledger"])
    private.ledger.adopt([LedgerEntry(*entry) for entry in found.run["releases"]], durable=durable)
    private.resumed_without_ledger = not durable or bool(found.run["resumed_without_ledger"])
    further = _restore(private, found, extras or {})
    for name, extra in (extras or {}).items():
        extra.load_state_dict(further[name])
    private.leave_block()
    private.note_weights()


@dataclass(frozen=True, kw_only=True)
class _Contents:
    """A checkpoint that fits the run; `mark` is a digest of all files, `weights` may be empty."""

    source: Path
    mark: str
    run: dict[str, Any]
    weights: dict[str, torch.Tensor]
    state: dict[str, Any]


def _read(private: PrivateTraining, path: Path, extras: Mapping[str, Stateful]) -> _Contents:
    """Read a checkpoint and compare it with the run."""
    source = choose_checkpoint(path)
    verify_files(source, _files_to_verify(source, private))
    run = json.loads((source / _RUN).read_text(encoding="utf-8"))
    differing = differences(without_seed(private.plan), run["plan"])
    if differing:
        raise CheckpointError(
            f"{source}: belongs to another plan, which differs in {', '.join(differing)}; "
            "resume with the settings of the checkpoint, or start in a fresh directory"
        )
    if run.get("streams") != STREAM_VERSION:
        raise CheckpointError(
            f"{source}: written by another version of this library, whose noise was drawn "
            "otherwise; resume with that version, or start in a fresh directory"
        )
    if run.get("split layers", False) != private.is_split:
        raise CheckpointError(
            f"{source}: of weights spread by rows and layers split by parallelize_module, it has "
            "the one and this run the other; resume it as it was begun"
        )
    if run["spec"] != _spec_hash(private):
        raise CheckpointError(f"{source}: the model's permutation groups differ from this model's")
    weights: dict[str, torch.Tensor] = {}
    if private.is_sharded:
        from shuffled_dpsgd.training.sharded_checkpoint import check_shards

        check_shards(source, private.model)
    else:
        weights = _read_weights(source, private.model)
    state = torch.load(source / _STATE, map_location="cpu", weights_only=True)
    wanted = set(extras)
    if set(state["extras"]) != wanted:
        raise CheckpointError(
            f"{source}: holds the state of {sorted(state['extras'])}, asked for {sorted(wanted)}"
        )
    mark = hash_file(source / MANIFEST)
    return _Contents(source=source, mark=mark, run=run, weights=weights, state=state)


def _files_to_verify(source: Path, private: PrivateTraining) -> list[str]:
    """The files that this rank verifies: all, or its share of the shards."""
    shards = [name for name in listed_files(source) if name not in (WEIGHTS, _STATE, _RUN)]
    if bool(shards) != private.is_sharded:
        kinds = {True: "a sharded run", False: "a run with whole weights on every rank"}
        raise CheckpointError(
            f"{source}: written by {kinds[bool(shards)]}, this is {kinds[private.is_sharded]}; "
            "resume it as it was begun"
        )
    if not shards:
        return [WEIGHTS, _STATE, _RUN]
    return [_STATE, _RUN, *shards[private.world.rank :: private.world.size]]


def _restore(
    private: PrivateTraining, found: _Contents, extras: Mapping[str, Stateful]
) -> dict[str, Any]:
    """Restore everything but the extras, whose states are returned."""
    state = found.state
    further: dict[str, Any] = state["extras"]
    if private.is_sharded:
        from shuffled_dpsgd.training.sharded_checkpoint import read_shards, with_shards

        own = {name: extra.state_dict() for name, extra in extras.items()}
        read_shards(found.source, private.model, private.optimizer, state["optimizer"], own)
        further = with_shards(further, own)
    else:
        tensors = named_tensors(private.model)
        with torch.no_grad():
            for name, stored in found.weights.items():
                tensors[name].copy_(stored)
        private.optimizer.load_state_dict(state["optimizer"])
    private.trust_buffers()
    private.steps_taken = state["steps_taken"]
    private.released = state["released"]
    private.moving_clip.level = state["clip_level"]
    private.claims.note_released()
    if private.shuffling.frame is not None:
        packed = state["frame"].to(private.device)
        private.shuffling.frame = Permutation(spec=private.shuffling.frame.spec, packed=packed)
    _restore_randomness(private.world, state)
    return further


def _restore_randomness(world: World, state: dict[str, Any]) -> None:
    """Restore each rank's generators; a rank that is new is seeded by its number."""
    known = [state["randomness"], *state.get("other_ranks_randomness", [])]
    set_global_randomness(known[min(world.rank, len(known) - 1)])
    if world.rank >= len(known):
        seed_rank(world.rank)


def _position(private: PrivateTraining, randomness: list[dict[str, Any]]) -> dict[str, Any]:
    """The state of the run, without that of optimizer and extras."""
    frame = private.shuffling.frame
    return {
        "steps_taken": private.steps_taken,
        "released": private.released,
        "clip_level": private.moving_clip.level,
        "frame": None if frame is None else frame.packed.cpu(),
        "randomness": randomness[0],
        "other_ranks_randomness": randomness[1:],
    }


def _run(private: PrivateTraining) -> dict[str, Any]:
    return {
        "plan": field_fingerprints(without_seed(private.plan)),
        "spec": _spec_hash(private),
        "streams": STREAM_VERSION,
        "split layers": private.is_split,
        "releases": [list(entry) for entry in private.ledger.entries()],
        "durable_ledger": private.ledger.path is not None,
        "resumed_without_ledger": private.resumed_without_ledger,
    }


def _spec_hash(private: PrivateTraining) -> str:
    spec = None if private.spec is None else private.spec.to_json()
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:32]


def _read_weights(source: Path, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights, if they fit; none if there is only their digest, which the model must have."""
    with safe_open(source / WEIGHTS, framework="pt") as file:
        digest = (file.metadata() or {}).get(_DIGEST)
    if digest is None:
        weights = load_file(source / WEIGHTS)
        compare_kinds(source, {n: (tuple(t.shape), t.dtype) for n, t in weights.items()}, model)
        return weights
    if _digest(model) != digest:
        raise CheckpointError(
            f"{source}: the weights in the model are not those of the checkpoint; load the ones "
            "that were saved with it first"
        )
    return {}


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What is stored of a model: parameters, tied ones once, and persistent buffers."""
    persistent = model.state_dict(keep_vars=True)
    buffers = {name: b for name, b in model.named_buffers() if name in persistent}
    return {**dict(model.named_parameters()), **buffers}


def compare_kinds(source: Path, stored: Kinds, model: torch.nn.Module) -> None:
    """Refuse tensors whose names, shapes or types differ from the model's."""
    wanted = {name: (tuple(t.shape), t.dtype) for name, t in named_tensors(model).items()}
    if stored.keys() != wanted.keys():
        odd = sorted(stored.keys() ^ wanted.keys())
        raise CheckpointError(
            f"{source}: the model's tensors differ from the checkpoint's, first {odd[0]}"
        )
    for name, (shape, dtype) in wanted.items():
        if stored[name] != (shape, dtype):
            raise CheckpointError(
                f"{source}: {name} is {stored[name][0]} {stored[name][1]} in the checkpoint and "
                f"{shape} {dtype} in the model"
            )


def _digest(model: torch.nn.Module) -> str:
    return fingerprint(dict(sorted(_on_host(model).items())), b"weights of a checkpoint")


def _on_host(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.detach().cpu().contiguous() for name, t in named_tensors(model).items()}
