"""A model's weights in a checkpoint: the tensors, or a digest of tensors kept elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from shuffled_dpsgd.errors import CheckpointError
from shuffled_dpsgd.training.fingerprints import fingerprint

WEIGHTS = "model.safetensors"
_DIGEST = "digest"


def save_weights(model: torch.nn.Module, folder: Path, *, whole: bool) -> None:
    """Write the weights into `folder`, or, unless `whole`, only their digest."""
    tensors = _weights(model)
    kept = tensors if whole else {}
    save_file(kept, folder / WEIGHTS, metadata=None if whole else {_DIGEST: _digest(tensors)})


def read_weights(source: Path, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The checkpoint's weights; where it has their digest only, the model's, if they agree.

    Raises:
        CheckpointError: they do not fit the model, or are not the ones that it has.
    """
    weights = _stored_weights(source, model)
    _check_weights(source, model, weights)
    return weights


def restore_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy weights that fit into the model."""
    with torch.no_grad():
        for name, tensor in named_tensors(model).items():
            tensor.copy_(weights[name])


def _stored_weights(source: Path, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    with safe_open(source / WEIGHTS, framework="pt") as file:
        digest = (file.metadata() or {}).get(_DIGEST)
    if digest is None:
        return load_file(source / WEIGHTS)
    present = _weights(model)
    if _digest(present) != digest:
        raise CheckpointError(
            f"{source}: the weights in the model are not those of the checkpoint; load the ones "
            "that were saved with it first"
        )
    return present


def _digest(weights: Mapping[str, torch.Tensor]) -> str:
    return fingerprint(dict(sorted(weights.items())), b"weights of a checkpoint")


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    # Tied tensors appear once in named_parameters(), as safetensors requires.
    return {name: t.detach().cpu().contiguous() for name, t in named_tensors(model).items()}


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All that is stored of a model: parameters, each once, and persistent buffers."""
    persistent = model.state_dict(keep_vars=True)
    buffers = {name: b for name, b in model.named_buffers() if name in persistent}
    return {**dict(model.named_parameters()), **buffers}


def _check_weights(
    source: Path, model: torch.nn.Module, weights: Mapping[str, torch.Tensor]
) -> None:
    tensors = named_tensors(model)
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
