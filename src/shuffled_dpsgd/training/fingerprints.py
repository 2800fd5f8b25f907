"""Keyed fingerprints of tensors: equal for equal bits, and different for different bits.

The ledger recognises a repeated release by the fingerprint of the sums it is computed from. Two
norms per tensor are not enough: data and their negative have gradients of the same norm. So the
fingerprint depends on every bit, under a secret key. Without the key it reveals nothing about the
tensors, not even to somebody who guesses them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from shuffled_dpsgd.core.ledger import fingerprint as core_fingerprint

# One word collides with probability 2^-32 at most, four of them with 2^-128.
_WORDS = 4
_CHUNK = 1 << 21


def fingerprint(tensors: Mapping[str, torch.Tensor], key: bytes) -> str:
    """The core's fingerprint, computed so that little is copied from an accelerator.

    Copying all sums from a GPU would take longer than the step. There they are first compressed by
    a universal hash, and only the result is copied.
    """
    described: dict[str, torch.Tensor] = {}
    on_devices: dict[torch.device, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.device.type == "cpu":
            described[name] = tensor
        else:
            described[f"{name}:{tuple(tensor.shape)}:{tensor.dtype}"] = torch.empty(0)
            flat = tensor.detach().contiguous().view(-1)
            on_devices.setdefault(tensor.device, []).append(flat)
    for index, whole in enumerate(on_devices.values()):
        words = compress(whole, _subkey(key, index))
        described[f"words of device {index}"] = words.cpu()
    return core_fingerprint(described, key)


def summary(tensors: list[torch.Tensor]) -> str:
    """Two norms of each tensor, to the last bit: a quick comparison, not a proof of equality."""
    norms = [norm for order in (1, 2) for norm in torch._foreach_norm(tensors, order)]
    return repr(torch.stack([norm.double() for norm in norms]).tolist())


def compress(flats: Sequence[torch.Tensor], seed: int) -> torch.Tensor:
    """Four 64-bit words of vectors of 32-bit or wider entries, computed where they lie.

    The vectors are hashed as if they were concatenated. Multilinear hashing (Lemire
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
