"""Fingerprints: every bit counts, on any device, and nothing is said without the key."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shuffled_dpsgd.training.fingerprints import compress, fingerprint

KEY = bytes(32)
OTHER_KEY = bytes([1]) * 32


def one_bit(tensor: torch.Tensor) -> torch.Tensor:
    words = tensor.clone().view(torch.int32)
    words[len(words) // 2] ^= 1
    return words.view(tensor.dtype)


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negative": torch.neg,
    "reversed": lambda t: t.flip(0),
    "one bit": one_bit,
    "two swapped": lambda t: torch.cat([t[1:2], t[:1], t[2:]]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_that_differ_have_other_fingerprints(
    change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    values = torch.tensor([1.0, -1.0, 2.0, -2.0, 0.5], dtype=dtype)
    changed = change(values)
    assert fingerprint({"w": values}, KEY) == fingerprint({"w": values.clone()}, KEY)
    assert fingerprint({"w": values}, KEY) != fingerprint({"w": changed}, KEY)
    assert torch.equal(compress([values], 3), compress([values.clone()], 3))
    upper = (compress([values], 3) >> 32) == (compress([changed], 3) >> 32)
    assert not upper.any()


def test_names_shapes_and_the_key_count() -> None:
    values = torch.arange(6.0)
    known = fingerprint({"w": values}, KEY)
    assert known != fingerprint({"v": values}, KEY)
    assert known != fingerprint({"w": values.view(2, 3)}, KEY)
    assert known != fingerprint({"w": values}, OTHER_KEY)
    assert not torch.equal(compress([values], 3), compress([values], 4))


def test_long_vectors_are_compressed_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shuffled_dpsgd.training.fingerprints._CHUNK", 4)
    values = torch.arange(10.0)
    seen = {tuple(compress([values.roll(by)], 3).tolist()) for by in range(10)}
    assert len(seen) == 10


def test_how_a_vector_is_cut_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shuffled_dpsgd.training.fingerprints._CHUNK", 4)
    values = torch.arange(11.0)
    whole = compress([values], 3)
    for sizes in ([11], [4, 4, 3], [1, 6, 0, 4], [5, 6]):
        assert torch.equal(compress(values.split(sizes), 3), whole)


def test_compressed_words_are_products_with_random_numbers() -> None:
    """By hand, in Python's integers: sums of entries times the generator's numbers modulo 2^64."""
    values = torch.tensor([1.5, -2.25, 7.0])
    generator = torch.Generator().manual_seed(3)
    factors = torch.empty(4, 3, dtype=torch.int64).random_(-(2**63), None, generator=generator)
    entries = values.view(torch.int32).tolist()
    expected = [
        sum(f * e for f, e in zip(row, entries, strict=True)) % 2**64 for row in factors.tolist()
    ]
    assert [word % 2**64 for word in compress([values], 3).tolist()] == expected


@pytest.mark.parametrize("values", [torch.empty(0), torch.tensor(2.0)])
def test_empty_tensors_and_scalars_have_one_too(values: torch.Tensor) -> None:
    assert len(fingerprint({"w": values}, KEY)) == 64
    assert compress([values.view(-1)], 3).shape == (4,)
