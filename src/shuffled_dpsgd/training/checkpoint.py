"""Checkpoints: everything a run needs to go on as if nothing had happened.

A checkpoint is a directory written under a temporary name, synced, then renamed: it exists whole
or not at all, and what it replaces is there until it is. Its manifest holds a hash per file, so a
torn or altered one is refused with the reason. Weights are safetensors; nothing is unpickled
beyond tensors and plain data.

A secure run stores no randomness of ours: it resumes with fresh noise, and the ledger counts the
steps that were taken after the checkpoint and are lost. A seeded run repeats them bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from shuffled_dpsgd.distributed.agreement import agree, all_do, first_does
from shuffled_dpsgd.distributed.world import World
from shuffled_dpsgd.errors import CheckpointError, InvalidArgumentError
from shuffled_dpsgd.permutation import Permutation
from shuffled_dpsgd.training.fingerprints import fingerprint
from shuffled_dpsgd.training.global_randomness import (
    global_randomness,
    seed_rank,
    set_global_randomness,
)
from shuffled_dpsgd.training.ledger import fsync_directory
from shuffled_dpsgd.training.private import PrivateTraining

FORMAT = 1
# One that replaces another of the same step has the longer name until the other is gone.
_NEWER = "-new"
_NAME = re.compile(rf"checkpoint-\d{{8}}({_NEWER})?")
_DIGEST = "digest"
_WEIGHTS, _STATE, _RUN, _MANIFEST = "model.safetensors", "state.pt", "run.json", "manifest.json"


class Stateful(Protocol):
    """Anything with a state of its own that should travel along: a learning-rate scheduler."""

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
    """Write `directory/checkpoint-<step>` atomically, and prune all but the newest `keep`.

    Without `weights` only their digest is kept: whoever saves them elsewhere must have put them
    back into the model before `load_checkpoint`, which compares.

    At every instant the checkpoint written last is complete in `directory`, or the one before.
    Only between steps: a partial logical batch is not part of the state. Of several ranks, all of
    which call this, rank 0 writes, and all learn whether it could.
    """
    if keep < 1:
        raise InvalidArgumentError("keep", expected="at least 1", got=keep)
    private.check()
    randomness = private.world.gather(global_randomness())
    root = Path(directory)

    def save() -> Path:
        return _save(private, root, extras or {}, randomness, keep=keep, weights=weights)

    return first_does(private.world, save)


def _save(
    private: PrivateTraining,
    root: Path,
    extras: Mapping[str, Stateful],
    randomness: list[dict[str, Any]],
    *,
    keep: int,
    weights: bool,
) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    target = root / f"checkpoint-{private.steps_taken:08d}"
    temporary = root / f".{target.name}.{os.getpid()}.tmp"
    for leftover in root.glob(".checkpoint-*.tmp"):
        shutil.rmtree(leftover)
    try:
        _write(private, temporary, _state(private, extras, randomness), weights=weights)
        _put_in_place(temporary, target)
    except (OSError, SafetensorError, RuntimeError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"{target}: could not be written ({error}); make room or mend the disk, then resume: "
            "checkpoints written before it are whole"
        ) from error
    for old in find_checkpoints(root)[:-keep]:
        if old != target:
            _remove(old)
    return target


def _write(private: PrivateTraining, folder: Path, state: dict[str, Any], *, weights: bool) -> None:
    """Every file of a checkpoint, durable when this returns."""
    folder.mkdir()
    tensors = _weights(private.model)
    kept = tensors if weights else {}
    save_file(kept, folder / _WEIGHTS, metadata=None if weights else {_DIGEST: _digest(tensors)})
    torch.save(state, folder / _STATE)
    (folder / _RUN).write_text(json.dumps(_run(private), indent=1), encoding="utf-8")
    hashes = {name: _hash(folder / name) for name in (_WEIGHTS, _STATE, _RUN)}
    manifest = {"format": FORMAT, "files": hashes}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for name in (*hashes, _MANIFEST):
        _fsync_file(folder / name)
    fsync_directory(folder)


def _put_in_place(temporary: Path, target: Path) -> None:
    """Give a complete checkpoint its name, after it has been found under another one."""
    newer = target.with_name(f"{target.name}{_NEWER}")
    if newer.exists():  # A process was killed at the last line of this function.
        _replace(target, newer)
    if not target.exists():
        _rename(temporary, target)
        return
    _rename(temporary, newer)
    _replace(target, newer)


def _replace(target: Path, newer: Path) -> None:
    if target.exists():
        _remove(target)
    _rename(newer, target)


def _remove(checkpoint: Path) -> None:
    """Delete a checkpoint so that a part of it is never taken for one."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.removed.tmp")
    _rename(checkpoint, hidden)
    shutil.rmtree(hidden)


def _rename(source: Path, target: Path) -> None:
    os.rename(source, target)
    fsync_directory(target.parent)


def find_checkpoints(directory: str | Path) -> list[Path]:
    """Complete checkpoints in `directory`, oldest first."""
    root = Path(directory)
    found = root.iterdir() if root.is_dir() else ()
    return sorted(path for path in found if _NAME.fullmatch(path.name))


def latest_checkpoint(directory: str | Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    found = find_checkpoints(directory)
    return found[-1] if found else None


def load_checkpoint(
    private: PrivateTraining,
    path: str | Path,
    *,
    extras: Mapping[str, Stateful] | None = None,
) -> None:
    """Put a freshly assembled run where the checkpoint left it.

    `path` is a checkpoint, or the folder that `save_checkpoint` was given: then the newest in
    it. To go back further, name one of `find_checkpoints(folder)`. The plan, the parameters and
    the symmetries must be those of the checkpoint; the ledger must know at least its releases.
    Everything is checked before anything is changed. The number of ranks may be another than
    the checkpoint was written by; every rank must be able to read it.
    """
    found = all_do(private.world, lambda: _read(private, Path(path), extras or {}))
    agree(
        private.world,
        {"checkpoint": found.mark},
        remedy="every rank must read the same folder: put it on a disk all of them share",
    )
    private.ledger.adopt(tuple(found.run["releases"]), durable=found.run["durable_ledger"])
    _restore(private, found.weights, found.state)
    for name, extra in (extras or {}).items():
        extra.load_state_dict(found.state["extras"][name])
    private.streams.renew()


@dataclass(frozen=True, kw_only=True)
class _Contents:
    """A checkpoint that was read and fits the run; `mark` is a digest of all of it."""

    mark: str
    run: dict[str, Any]
    weights: dict[str, torch.Tensor]
    state: dict[str, Any]


def _read(private: PrivateTraining, path: Path, extras: Mapping[str, Stateful]) -> _Contents:
    """Everything in a checkpoint, compared with the run before anything is changed."""
    source = _chosen(path)
    try:
        _verify_files(source)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_earlier(source)}") from error
    run = json.loads((source / _RUN).read_text(encoding="utf-8"))
    differing = private.plan.differences(run["plan"])
    if differing:
        raise CheckpointError(
            f"{source}: belongs to another plan, which differs in {', '.join(differing)}; "
            "resume with the settings of the checkpoint, or start in a fresh directory"
        )
    if run["spec"] != _spec_hash(private):
        raise CheckpointError(f"{source}: the model's permutation groups differ from this model's")
    weights = _stored_weights(source, private.model)
    _check_weights(source, private.model, weights)
    state = torch.load(source / _STATE, map_location="cpu", weights_only=True)
    wanted = set(extras)
    if set(state["extras"]) != wanted:
        raise CheckpointError(
            f"{source}: holds the state of {sorted(state['extras'])}, asked for {sorted(wanted)}"
        )
    return _Contents(mark=_hash(source / _MANIFEST), run=run, weights=weights, state=state)


def _stored_weights(source: Path, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The checkpoint's weights; where it has their digest only, the model's, if they agree."""
    with safe_open(source / _WEIGHTS, framework="pt") as file:
        digest = (file.metadata() or {}).get(_DIGEST)
    if digest is None:
        return load_file(source / _WEIGHTS)
    present = _weights(model)
    if _digest(present) != digest:
        raise CheckpointError(
            f"{source}: the weights in the model are not those of the checkpoint; load the ones "
            "that were saved with it first"
        )
    return present


def _digest(weights: Mapping[str, torch.Tensor]) -> str:
    return fingerprint(dict(sorted(weights.items())), b"weights of a checkpoint")


def _chosen(path: Path) -> Path:
    """The checkpoint itself, or the newest of those in a folder."""
    if (path / _MANIFEST).is_file() or _NAME.fullmatch(path.name):
        return path
    newest = latest_checkpoint(path)
    if newest is None:
        raise CheckpointError(
            f"{path}: no checkpoint and no folder of checkpoints; pass what save_checkpoint was "
            "given, or what it returned"
        )
    return newest


def _earlier(source: Path) -> str:
    """How to use the checkpoint before one that is broken."""
    before = [c for c in find_checkpoints(source.parent) if c.name < source.name]
    if not before:
        return "; there is none before it"
    return (
        f"; the one before it is {before[-1]}: pass that to load_checkpoint, or resume with "
        f"`--checkpoint {before[-1].name}`"
    )


def _restore(
    private: PrivateTraining, weights: Mapping[str, torch.Tensor], state: dict[str, Any]
) -> None:
    with torch.no_grad():
        for name, tensor in _named_tensors(private.model).items():
            tensor.copy_(weights[name])
    private.trust_buffers()
    private.optimizer.load_state_dict(state["optimizer"])
    private.steps_taken = state["steps_taken"]
    private.released = state["released"]
    if private.shuffling.frame is not None:
        packed = state["frame"].to(private.device)
        private.shuffling.frame = Permutation(spec=private.shuffling.frame.spec, packed=packed)
    _restore_randomness(private.world, state)


def _restore_randomness(world: World, state: dict[str, Any]) -> None:
    """Each rank as it was; a rank that was not there before begins a sequence of its own."""
    known = [state["randomness"], *state.get("other_ranks_randomness", [])]
    set_global_randomness(known[min(world.rank, len(known) - 1)])
    if world.rank >= len(known):
        seed_rank(world.rank)


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    # Tied tensors appear once in named_parameters(), as safetensors requires.
    return {name: t.detach().cpu().contiguous() for name, t in _named_tensors(model).items()}


def _named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    persistent = model.state_dict(keep_vars=True)
    buffers = {name: b for name, b in model.named_buffers() if name in persistent}
    return {**dict(model.named_parameters()), **buffers}


def _state(
    private: PrivateTraining,
    extras: Mapping[str, Stateful],
    randomness: list[dict[str, Any]],
) -> dict[str, Any]:
    return {
        "optimizer": private.optimizer.state_dict(),
        "steps_taken": private.steps_taken,
        "released": private.released,
        "frame": None if private.shuffling.frame is None else private.shuffling.frame.packed.cpu(),
        "randomness": randomness[0],
        "other_ranks_randomness": randomness[1:],
        "extras": {name: extra.state_dict() for name, extra in extras.items()},
    }


def _run(private: PrivateTraining) -> dict[str, Any]:
    return {
        "plan": private.plan.field_fingerprints(),
        "spec": _spec_hash(private),
        "releases": list(private.ledger.tokens()),
        "durable_ledger": private.ledger.path is not None,
    }


def _verify_files(source: Path) -> None:
    manifest_path = source / _MANIFEST
    if not manifest_path.is_file():
        raise CheckpointError(f"{source}: no {_MANIFEST}, so not a complete checkpoint")
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        version, files = manifest["format"], dict(manifest["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{manifest_path}: not a manifest of ours; {error}") from error
    if version != FORMAT:
        raise CheckpointError(f"{source}: format {version}, this version reads {FORMAT}")
    for name in (_WEIGHTS, _STATE, _RUN):
        if not (source / name).is_file():
            raise CheckpointError(f"{source}: {name} is missing")
        if _hash(source / name) != files.get(name):
            raise CheckpointError(
                f"{source / name}: does not match its hash in the manifest; the file is torn or "
                "was altered"
            )


def _check_weights(
    source: Path, model: torch.nn.Module, weights: Mapping[str, torch.Tensor]
) -> None:
    tensors = _named_tensors(model)
    if set(tensors) != set(weights):
        odd = sorted(set(tensors) ^ set(weights))
        raise CheckpointError(
            f"{source}: the model's tensors differ from the checkpoint's, first {odd[0]}"
        )
    for name, tensor in tensors.items():
        stored = weights[name]
        if stored.shape != tensor.shape or stored.dtype != tensor.dtype:
            raise CheckpointError(
                f"{source}: {name} is {tuple(stored.shape)} {stored.dtype} in the checkpoint and "
                f"{tuple(tensor.shape)} {tensor.dtype} in the model"
            )


def _spec_hash(private: PrivateTraining) -> str:
    spec = None if private.spec is None else private.spec.to_json()
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:32]


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
