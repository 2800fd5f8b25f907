"""Where every random number of a run comes from: ChaCha20 under keys of 256 bits.

Fact established here: whoever does not know a key cannot tell its stream from random bits, nor
compute one part of it from another (ChaCha20, RFC 8439). A statistical generator does not give
that: its state can be solved for from its outputs, and noise that can be computed can be
subtracted. A key belongs to one purpose at one step, and to one attempt at it.

Without a seed, the key of the noise of a release comes from the operating system when the release
is made and is kept nowhere, or in memory to the end of its block (`banded`). Keys of batches and
permutations are derived from the ledger's secret and the number of releases of their step, so that
the same records come again until the step is released, in another process too: a batch that was
drawn and given up must not be replaced by a luckier one. A step that is released again, because its
update was lost, is drawn anew.

With a seed, every key is derived from it, and whoever knows the seed can remove the noise. The
attempt is part of the key. So the same step released again with other sums has other noise.

OpenSSL computes the stream (`cryptography`). What is left to believe is the system's entropy.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

from shuffled_dpsgd.errors import require

# Seeded runs of another version draw other numbers. Records and checkpoints carry it.
STREAM_VERSION = 2
KEY_BYTES = 32
WORDS_PER_BLOCK = 16
MOST_WORDS = WORDS_PER_BLOCK << 32

Purpose = Literal[
    "sampling", "block", "cut", "noise", "permutation", "checks", "loader", "augmentation"
]


def words(
    key: bytes, first: int, count: int, *, stream: int = 0, group: int = 0
) -> NDArray[np.int32]:
    """Words `first` to `first + count` of one of a key's streams, as signed numbers of 32 bits.

    Word w is in block w // 16, which is computed from the key and its own number alone. `stream`
    and `group` are words of the nonce, so that streams of different numbers never overlap.

    >>> whole = words(bytes(32), 0, 40)
    >>> (words(bytes(32), 19, 3) == whole[19:22]).all()
    np.True_
    """
    assert first >= 0
    last = first + count
    require(last <= MOST_WORDS, "count", f"at most {MOST_WORDS} words of one stream", last)
    block, skipped = divmod(first, WORDS_PER_BLOCK)
    nonce = b"".join(part.to_bytes(4, "little") for part in (block, stream, group, 0))
    cipher = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor()
    buffer = bytearray(4 * (skipped + count))
    cipher.update_into(buffer, buffer)
    return np.frombuffer(buffer, dtype="<i4")[skipped:]


@dataclass(eq=False, repr=False)
class RandomStreams:
    """The keys of one run; `seed=None` means that nobody can compute them: it is `secure`.

    `secret` is the ledger's, and `releases` says how often a step has been released.

    >>> RandomStreams(seed=1).key("noise", 0) == RandomStreams(seed=1).key("noise", 0)
    True
    >>> RandomStreams(seed=1).key("noise", 0) == RandomStreams(seed=1).key("noise", 0, attempt=1)
    False
    """

    seed: int | None = None
    _: KW_ONLY
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES))
    releases: Callable[[int], int] = lambda step: 0

    def __post_init__(self) -> None:
        require(self.seed is None or self.seed >= 0, "seed", "a non-negative integer", self.seed)
        self.secure = self.seed is None

    def key(self, purpose: Purpose, step: int, index: int = 0, *, attempt: int = 0) -> bytes:
        """The key of one purpose at one step; that of noise is another at every call.

        In a seeded run it is the same at every call, and depends on the attempt.
        """
        if self.seed is None:
            if purpose == "noise":
                return secrets.token_bytes(KEY_BYTES)
            # A block is drawn once, whichever of its steps are released.
            attempt = 0 if purpose == "block" else self.releases(step)
        root = self.secret if self.seed is None else f"seed:{self.seed}".encode()
        label = f"shuffled-dpsgd:{STREAM_VERSION}:{purpose}:{step}:{index}:{attempt}"
        return hmac.new(root, label.encode(), hashlib.sha256).digest()

    def coin(self, step: int, rate: float) -> bool:
        """Whether a step is looked at closely: the same on all processes of a run."""
        drawn = int.from_bytes(self.key("checks", step)[:6], "little")
        return drawn < rate * 2**48


def uniform_keys(key: bytes, count: int) -> NDArray[np.int64]:
    """Independent uniform numbers of 63 bits: sorting them gives a uniform permutation.

    Two of n are equal with probability below n²/2^64.
    """
    wide = words(key, 0, 2 * count).view("<i8")
    return wide & np.iinfo(np.int64).max
