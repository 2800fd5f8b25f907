"""Keyed fingerprints of tensors: equal for equal bits, and for different bits never by accident.

A ledger tells a repeated release from a new one by what it is computed from. Two numbers per tensor
will not do: data and their negative have gradients of one norm, and often of one sum. So every bit
counts, under a key that the data do not know. Without the key a fingerprint says nothing about the
tensors, not even to somebody who guesses them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from shuffled_dpsgd.training.flat import merged

# Each word tells two tensors apart but for a chance of 2^-32; four of them but for 2^-128.
_WORDS = 4
_CHUNK = 1 << 21


def fingerprint(tensors: Mapping[str, torch.Tensor], key: bytes) -> str:
    """A digest of names, shapes, dtypes and every bit of the tensors, 64 hexadecimal digits.

    Tensors in main memory are hashed by BLAKE2b. Copying a model from an accelerator at every step
    would take longer than the step; there vectors are first compressed by a universal hash, and
    all that is left of them is copied at once.
    """
    whole = hashlib.blake2b(key=key, digest_size=32)
    for name, tensor in tensors.items():
        whole.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}:".encode())
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for flat in merged([tensor.detach().contiguous() for tensor in tensors.values()]):
        by_device.setdefault(flat.device, []).append(flat)
    for index, (device, flats) in enumerate(by_device.items()):
        if device.type == "cpu":
            for flat in flats:
                whole.update(flat.view(torch.uint8).numpy().data)
        else:
            whole.update(compress(flats, _subkey(key, index)).cpu().numpy().data)
    return whole.hexdigest()


def summary(tensors: list[torch.Tensor]) -> str:
    """Two norms of each tensor, to the last bit: for finding a release, not for telling two."""
    norms = [norm for order in (1, 2) for norm in torch._foreach_norm(tensors, order)]
    return repr(torch.stack([norm.double() for norm in norms]).tolist())


def compress(flats: Sequence[torch.Tensor], seed: int) -> torch.Tensor:
    """Four 64-bit words of vectors of 32-bit or wider entries, computed where they lie.

    Vectors count as one, end to end: how it is cut makes no difference. Multilinear hashing (Lemire
    and Kaser, 2014): the sum of entries times random 64-bit numbers, modulo 2^64. For any two
    different vectors fixed before the numbers are drawn, the upper 32 bits of a word agree with
    probability 2^-32 at most.
    """
    device = flats[0].device
    generator = torch.Generator(device).manual_seed(seed)
    total = torch.zeros(_WORDS, dtype=torch.int64, device=device)
    entries = [flat.view(torch.int32) for flat in flats]
    length = min(_CHUNK, sum(part.numel() for part in entries))
    factors = torch.empty((_WORDS, length), dtype=torch.int64, device=device)
    used = 0
    for whole in entries:
        left = whole
        while left.numel():
            if used == 0:
                factors.random_(-(2**63), None, generator=generator)
            part = left[: length - used]
            total += (factors[:, used : used + part.numel()] * part).sum(dim=1)
            used = (used + part.numel()) % length
            left = left[part.numel() :]
    return total


def _subkey(key: bytes, index: int) -> int:
    digest = hashlib.blake2b(index.to_bytes(8, "little"), key=key, digest_size=8).digest()
    return int.from_bytes(digest, "little")
