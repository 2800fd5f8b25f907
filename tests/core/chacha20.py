"""ChaCha20 written out from RFC 8439, in Python's own integers: what OpenSSL's is compared with."""

from __future__ import annotations

_MASK = 0xFFFFFFFF
_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)


def chacha20_block(key: bytes, counter: int, nonce: bytes) -> list[int]:
    """The sixteen words of one block (RFC 8439, section 2.3)."""
    words = [int.from_bytes(key[i : i + 4], "little") for i in range(0, 32, 4)]
    start = [
        *_CONSTANTS,
        *words,
        counter,
        *(int.from_bytes(nonce[i : i + 4], "little") for i in range(0, 12, 4)),
    ]
    state = list(start)
    for _ in range(10):
        for a, b, c, d in ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)):
            _quarter_round(state, a, b, c, d)
        for a, b, c, d in ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)):
            _quarter_round(state, a, b, c, d)
    return [(one + other) & _MASK for one, other in zip(state, start, strict=True)]


def chacha20_word(key: bytes, stream: int, group: int, word: int) -> int:
    """A word of a stream as the core's streams are laid out."""
    nonce = b"".join(part.to_bytes(4, "little") for part in (stream, group, 0))
    return chacha20_block(key, word // 16, nonce)[word % 16]


def _quarter_round(state: list[int], a: int, b: int, c: int, d: int) -> None:
    for one, other, target, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        state[one] = (state[one] + state[other]) & _MASK
        mixed = state[target] ^ state[one]
        state[target] = ((mixed << turn) | (mixed >> (32 - turn))) & _MASK
