"""Weights and optimizer state of a sharded model in a checkpoint (`torch.distributed.checkpoint`).

Every rank writes its own rows into its own files, and any number of ranks can read them. Small data
(settings, step counts) are written by rank 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from shuffled_dpsgd.core.ledger import fsync_directory
from shuffled_dpsgd.distributed.world import World
from shuffled_dpsgd.errors import CheckpointError
from shuffled_dpsgd.runtime.shards import is_sharded
from shuffled_dpsgd.training.checkpoint import Kinds, compare_kinds, named_tensors, not_written
from shuffled_dpsgd.training.checkpoint_folder import hash_file

# The folder of the shards inside a checkpoint.
SHARDS = "shards"
_METADATA = ".metadata"


def write_shards(
    world: World,
    checkpoint: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    extras: Mapping[str, Any],
) -> dict[str, str]:
    """Have every rank write its rows of everything; the hashes of all files. Collective.

    `extras` are further states, of which sharded tensors are stored here.

    Raises:
        CheckpointError: some rank could not write.
    """
    folder = checkpoint / SHARDS
    try:
        save(
            _contents(model, optimizer, extras),
            storage_writer=FileSystemWriter(folder, sync_files=True),
        )
    except (CheckpointException, OSError) as error:
        failure = not_written(checkpoint, _first_cause(error))
        if isinstance(error, CheckpointException):
            world.is_any(True)  # Wait until all ranks have looked at the disk; one then tidies up.
        raise failure from error
    own = [*folder.glob(f"__{world.rank}_*"), *([folder / _METADATA] if world.leads else [])]
    found = world.gather({f"{SHARDS}/{path.name}": hash_file(path) for path in own})
    if world.leads:
        fsync_directory(folder)
    return {name: mark for hashes in found for name, mark in hashes.items()}


def read_shards(
    checkpoint: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    described: Mapping[str, Any],
    extras: Mapping[str, Any],
) -> None:
    """Read this rank's rows into the model and into the states, in place. Collective.

    `described` is the optimizer's state `without_shards`. Of `extras`, the sharded tensors are
    filled.

    Raises:
        CheckpointError: some rank could not read.
    """
    folder = checkpoint / SHARDS
    _prepare_optimizer(optimizer, described)
    wanted = _contents(model, optimizer, extras)
    try:
        load(wanted, storage_reader=FileSystemReader(folder))
    except (CheckpointException, OSError) as error:
        raise CheckpointError(f"{folder}: could not be read ({_first_cause(error)})") from error


def check_shards(source: Path, model: torch.nn.Module) -> None:
    """Refuse shards of another model.

    Raises:
        CheckpointError: naming the first tensor that is missing, new, or of another shape or type.
    """
    metadata: Metadata = FileSystemReader(source / SHARDS).read_metadata()
    stored: Kinds = {
        name.removeprefix("model."): (tuple(found.size), found.properties.dtype)
        for name, found in metadata.state_dict_metadata.items()
        if name.startswith("model.") and isinstance(found, TensorStorageMetadata)
    }
    compare_kinds(source, stored, model)


def without_shards(state: Any) -> Any:
    """A state in which sharded tensors are replaced by their types."""
    if isinstance(state, dict):
        return {key: without_shards(value) for key, value in state.items()}
    return {"sharded": str(state.dtype).removeprefix("torch.")} if _is_spread(state) else state


def with_shards(stored: Any, own: Any) -> Any:
    """A stored state with the sharded tensors of `own`, which `read_shards` has filled."""
    if isinstance(stored, dict) and isinstance(own, dict):
        return {key: with_shards(value, own.get(key)) for key, value in stored.items()}
    return own if _is_spread(own) else stored


def _prepare_optimizer(optimizer: torch.optim.Optimizer, described: Mapping[str, Any]) -> None:
    """Give the optimizer the stored settings, and a state with zeros for sharded tensors."""
    optimizer.load_state_dict({"state": {}, "param_groups": described["param_groups"]})
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, kept in described["state"].items():
        parameter = parameters[index]
        optimizer.state[parameter] = {
            key: torch.zeros_like(parameter.detach(), dtype=getattr(torch, value["sharded"]))
            if isinstance(value, dict) and "sharded" in value
            else value
            for key, value in kept.items()
        }


def _contents(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, extras: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """All tensors that are stored in shards, by name."""
    weights = {f"model.{name}": tensor.detach() for name, tensor in named_tensors(model).items()}
    state = optimizer.state_dict()["state"]
    return weights | dict(_spread_in(state, "optimizer")) | dict(_spread_in(extras, "extras"))


def _spread_in(state: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The sharded tensors inside nested dictionaries, by dotted path."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from _spread_in(value, f"{path}.{key}")
    elif _is_spread(state):
        yield path, state


def _is_spread(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_sharded(value)


def _first_cause(error: BaseException) -> BaseException:
    """What went wrong on the first rank that failed, without torch's traces."""
    causes = error.failures.values() if isinstance(error, CheckpointException) else ()
    return next((cause for cause, _ in causes), error)
