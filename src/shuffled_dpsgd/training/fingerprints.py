"""Keyed fingerprints of tensors: equal for equal bits, and for different bits never by accident.

A ledger tells a repeated release from a new one by what it is computed from. Two numbers per tensor
will not do: data and their negative have gradients of one norm, and often of one sum. So every bit
counts, under a key that the data do not know. Without the key a fingerprint says nothing about the
tensors, not even to somebody who guesses them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

# Each word tells two tensors apart but for a chance of 2^-32; four of them but for 2^-128.
_WORDS = 4
_CHUNK = 1 << 21


def fingerprint(tensors: Mapping[str, torch.Tensor], key: bytes) -> str:
    """A digest of names, shapes, dtypes and every bit of the tensors, 64 hexadecimal digits.

    Tensors in main memory are hashed by BLAKE2b. Copying a model from an accelerator at every step
    would take longer than the step; there each tensor is first compressed by a universal hash.
    """
    whole = hashlib.blake2b(key=key, digest_size=32)
    for index, (name, tensor) in enumerate(tensors.items()):
        flat = tensor.detach().contiguous().view(-1)
        described = f"{name}:{tuple(tensor.shape)}:{tensor.dtype}:"
        whole.update(described.encode())
        if flat.device.type == "cpu":
            whole.update(flat.view(torch.uint8).numpy().data)
        else:
            words = compress(flat, _subkey(key, index)).cpu()
            whole.update(words.numpy().data)
    return whole.hexdigest()


def summary(tensors: list[torch.Tensor]) -> str:
    """Norm and sum of each tensor, to the last bit: for finding a release, not for telling two."""
    norms = [norm.double() for norm in torch._foreach_norm(tensors, 2)]
    totals = [tensor.sum(dtype=torch.float64) for tensor in tensors]
    return repr(torch.stack(norms + totals).tolist())


def compress(flat: torch.Tensor, seed: int) -> torch.Tensor:
    """Four 64-bit words of a vector of 32-bit or wider entries, computed where it lies.

    Multilinear hashing (Lemire and Kaser, 2014): the sum of entries times random 64-bit
    numbers, modulo 2^64. For any two different vectors fixed before the numbers are drawn,
    the upper 32 bits of a word agree with probability 2^-32 at most.
    """
    entries = flat.view(torch.int32)
    generator = torch.Generator(flat.device).manual_seed(seed)
    total = torch.zeros(_WORDS, dtype=torch.int64, device=flat.device)
    shape = (_WORDS, min(_CHUNK, entries.numel()))
    factors = torch.empty(shape, dtype=torch.int64, device=flat.device)
    for part in entries.split(_CHUNK):
        factors.random_(-(2**63), None, generator=generator)
        total += (factors[:, : part.numel()] * part).sum(dim=1)
    return total


def _subkey(key: bytes, index: int) -> int:
    digest = hashlib.blake2b(index.to_bytes(8, "little"), key=key, digest_size=8).digest()
    return int.from_bytes(digest, "little")
