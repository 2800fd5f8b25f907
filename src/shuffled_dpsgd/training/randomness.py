"""Where every random stream of a run comes from: sampling, noise, permutations, augmentation.

A seeded run derives each stream from (seed, purpose, step, position), so that no generator has a
position to lose: resuming at step t draws exactly what the uninterrupted run drew at step t. A
secure run derives each stream from fresh operating-system entropy, so nothing on disk can
reproduce it and no stream is ever used twice. Several ranks of a secure run must draw the same
batches and permutations: those streams come from a secret that rank 0 draws from the operating
system and sends to the others, anew for every pass over the data, and that no file ever holds.
Noise never does: each rank draws that of its own coordinates from its own operating system.

Torch's CPU generator keeps only the low 32 bits of a seed, few enough to try them all and to
collide by chance in a long run. Streams here therefore carry at least 128 bits of key: Philox in
the GPU kernel and through numpy on the CPU, the full Mersenne state where a `torch.Generator` is
required. Only torch's own Philox on an accelerator takes no more than 64. Noise on the CPU, by far
the most numbers a run draws, comes from SFC64: it has 192 bits of key, passes the same statistical
tests, and takes half of Philox's time. None of these generators is meant for cryptography.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from shuffled_dpsgd.distributed.world import World
from shuffled_dpsgd.errors import InvalidArgumentError

Purpose = Literal["sampling", "noise", "permutation", "loader", "augmentation"]
_PURPOSES: dict[Purpose, int] = {
    "sampling": 0,
    "noise": 1,
    "permutation": 2,
    "loader": 3,
    "augmentation": 4,
}
_MERSENNE_WORDS = 624
_MERSENNE_OFFSET = 24
_MERSENNE_BYTES = 5056


_SECRET_BYTES = 32
_COMMON: tuple[Purpose, ...] = ("sampling", "permutation")


class CommonSecret:
    """What the ranks of a secure run derive common draws from; in memory only."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._secret = b""
        self.renew()

    def renew(self) -> None:
        """Another secret, the same on all ranks; every rank calls this at the same point."""
        drawn = secrets.token_bytes(_SECRET_BYTES) if self._world.leads else None
        self._secret = self._world.from_first(drawn)

    def entropy(self, key: tuple[int, ...]) -> int:
        """256 bits for one stream."""
        digest = hmac.new(self._secret, repr(key).encode(), hashlib.sha256).digest()
        return int.from_bytes(digest, "little")


@dataclass(frozen=True, kw_only=True)
class RandomStreams:
    """The random streams of one run; `seed=None` means secure.

    A seeded run is reproducible by anyone who knows the seed, and its noise removable: use it for
    experiments, or keep the seed as secret as the data.
    """

    seed: int | None = None
    common: CommonSecret | None = None

    def __post_init__(self) -> None:
        if self.seed is not None and self.seed < 0:
            raise InvalidArgumentError("seed", expected="a non-negative integer", got=self.seed)

    @property
    def secure(self) -> bool:
        """Whether every stream is drawn from the operating system."""
        return self.seed is None

    def numpy(
        self, purpose: Purpose, step: int, index: int = 0, part: int = 0
    ) -> np.random.Generator:
        """The stream of one purpose at one step, as a numpy generator."""
        kind = np.random.SFC64 if purpose == "noise" else np.random.Philox
        return np.random.Generator(kind(self._sequence(purpose, step, index, part)))

    def torch(
        self, purpose: Purpose, step: int, index: int = 0, *, device: torch.device | str = "cpu"
    ) -> torch.Generator:
        """The stream of one purpose at one step, as a torch generator on `device`."""
        sequence = self._sequence(purpose, step, index)
        generator = torch.Generator(device)
        if generator.device.type == "cpu":
            _fill_mersenne_state(generator, sequence)
        else:
            low, high = (int(word) for word in sequence.generate_state(2, np.uint32))
            generator.manual_seed(low | high << 32)
        return generator

    def words(self, purpose: Purpose, step: int, index: int = 0) -> tuple[int, int, int, int]:
        """The key of one purpose at one step as four 32-bit words, for a generator of our own.

        They have nothing in common with the key of `torch` at the same place.
        """
        state = self._sequence(purpose, step, index, part=1).generate_state(4, np.uint32)
        first, second, third, fourth = (int(word) for word in state)
        return first, second, third, fourth

    def token(
        self, step: int, *, key: bytes = b"", start: str = "", sums: str | None = None
    ) -> str:
        """What the ledger knows a release by: the step, the weights it starts from, the sums.

        Equal tokens are the same release: a seeded run repeats itself after a crash, so its
        repeated steps reveal nothing new. The same noise on other sums (changed data, other
        dropout masks) is a new release. Without `sums`, what the tokens of all releases at this
        step from these weights begin with. In a secure run no two tokens are equal. Under a
        secret `key` a token says nothing about what it was made from.
        """
        if self.seed is None:
            return secrets.token_hex(16)
        beginning = _keyed(key, f"{self.seed}:{step}:{start}")
        return beginning if sums is None else beginning + _keyed(key, f"{beginning}:{sums}")

    def renew(self) -> None:
        """Before a pass over the data: what was drawn in an earlier one is not drawn again."""
        if self.common is not None:
            self.common.renew()

    def _sequence(
        self, purpose: Purpose, step: int, index: int, part: int = 0
    ) -> np.random.SeedSequence:
        key = (_PURPOSES[purpose], step, index, part)
        if self.seed is None:
            if self.common is not None and purpose in _COMMON:
                return np.random.SeedSequence(self.common.entropy(key))
            return np.random.SeedSequence(secrets.randbits(256))
        return np.random.SeedSequence(self.seed, spawn_key=key)


def _fill_mersenne_state(generator: torch.Generator, sequence: np.random.SeedSequence) -> None:
    state = generator.get_state()
    assert state.numel() == _MERSENNE_BYTES, "torch changed the layout of its CPU generator"
    words = sequence.generate_state(_MERSENNE_WORDS, np.uint32).astype(np.int64)
    size = 8 * _MERSENNE_WORDS
    state[_MERSENNE_OFFSET : _MERSENNE_OFFSET + size] = torch.from_numpy(words).view(torch.uint8)
    generator.set_state(state)


def _keyed(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()[:32]
