"""The weights and moments of a sharded model in a checkpoint, by `torch.distributed.checkpoint`.

Every rank writes its own rows into files of its own, and none ever holds the whole. Any number of
ranks reads them again. What is small (settings, step counts) is kept beside them by rank 0.
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
from shuffled_dpsgd.training.checkpoint_folder import hash_file
from shuffled_dpsgd.training.checkpoint_weights import named_tensors

# The folder of the shards inside a checkpoint.
SHARDS = "shards"
_METADATA = ".metadata"
Tensors = dict[str, torch.Tensor]


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
            _contents(named_tensors(model), optimizer) | dict(_spread_in(extras, "extras")),
            storage_writer=FileSystemWriter(folder, sync_files=True),
        )
    except (CheckpointException, OSError) as error:
        raise CheckpointError(f"{folder}: could not be written ({_line(error)})") from error
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

    `described` is what `describe_optimizer` said of the optimizer. Of `extras`, the sharded tensors
    are filled.

    Raises:
        CheckpointError: some rank could not read.
    """
    folder = checkpoint / SHARDS
    _prepare_optimizer(optimizer, described)
    wanted = _contents(named_tensors(model), optimizer) | dict(_spread_in(extras, "extras"))
    try:
        load(wanted, storage_reader=FileSystemReader(folder))
    except (CheckpointException, OSError) as error:
        raise CheckpointError(f"{folder}: could not be read ({_line(error)})") from error


def check_shards(source: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse shards of another model.

    Raises:
        CheckpointError: naming the first tensor that is missing, new, or of another shape or type.
    """
    metadata: Metadata = FileSystemReader(source / SHARDS).read_metadata()
    stored = {
        name.removeprefix("model."): (tuple(found.size), found.properties.dtype)
        for name, found in metadata.state_dict_metadata.items()
        if name.startswith("model.") and isinstance(found, TensorStorageMetadata)
    }
    wanted = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    if stored.keys() != wanted.keys():
        odd = sorted(stored.keys() ^ wanted.keys())
        raise CheckpointError(
            f"{source}: the model's tensors differ from the checkpoint's, first {odd[0]}"
        )
    for name, kind in wanted.items():
        if stored[name] != kind:
            raise CheckpointError(
                f"{source}: {name} is {stored[name][0]} {stored[name][1]} in the checkpoint and "
                f"{kind[0]} {kind[1]} in the model"
            )


def without_shards(state: Any) -> Any:
    """A state whose sharded tensors are replaced by what is said of them."""
    if isinstance(state, dict):
        return {key: without_shards(value) for key, value in state.items()}
    return _described(state)


def with_shards(stored: Any, own: Any) -> Any:
    """A stored state with the sharded tensors of one's own, which `read_shards` has filled."""
    if isinstance(stored, dict) and isinstance(own, dict):
        return {key: with_shards(value, own.get(key)) for key, value in stored.items()}
    return own if _is_spread(own) else stored


def describe_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's settings, and its state without the tensors that are sharded."""
    found = optimizer.state_dict()
    state = {
        index: {key: _described(value) for key, value in kept.items()}
        for index, kept in found["state"].items()
    }
    return {"param_groups": found["param_groups"], "state": state}


def _prepare_optimizer(optimizer: torch.optim.Optimizer, described: Mapping[str, Any]) -> None:
    """Give the optimizer the settings and a state of the shape described, sharded tensors empty."""
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


def _contents(tensors: Tensors, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Everything that is stored in shards, under names of its own; the tensors themselves."""
    state = optimizer.state_dict()["state"]
    moments = {
        f"optimizer.{index}.{key}": value
        for index, kept in state.items()
        for key, value in kept.items()
        if _is_spread(value)
    }
    return {f"model.{name}": tensor.detach() for name, tensor in tensors.items()} | moments


def _spread_in(state: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The sharded tensors inside nested dictionaries, by where they are."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from _spread_in(value, f"{path}.{key}")
    elif _is_spread(state):
        yield path, state


def _described(value: Any) -> Any:
    """The value, or the type of a sharded tensor."""
    return {"sharded": str(value.dtype).removeprefix("torch.")} if _is_spread(value) else value


def _is_spread(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_sharded(value)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
