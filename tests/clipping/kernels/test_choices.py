"""Kernels are chosen by the device and by their trials, here with trials that are made up."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from shuffled_dpsgd.clipping.kernels import choices
from shuffled_dpsgd.runtime import backends
from shuffled_dpsgd.runtime.backends import Backend

GPU, HALF = torch.device("cuda:0"), torch.bfloat16
EVERY_BACKEND = [value for value in vars(choices).values() if isinstance(value, Backend)]


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, torch.device], str | None]:
    """All backends serve on a Hopper GPU with Triton, unless a test says otherwise."""
    reasons: dict[tuple[str, torch.device], str | None] = {}
    for backend in EVERY_BACKEND:
        reasons[backend.name, GPU] = None
    monkeypatch.setattr(backends, "_reasons", reasons)
    monkeypatch.setattr(choices, "triton_available", lambda: True)
    monkeypatch.setattr(choices, "is_hopper", lambda device: True)
    return reasons


def modules() -> list[str | None]:
    """The modules for sums and for norms by Gram matrices."""
    return [choices.outer_sums(GPU, HALF), choices.gram_norms(GPU, HALF, 768)]


@pytest.mark.usefixtures("verdicts")
def test_hopper_takes_gluon_where_it_serves() -> None:
    assert modules() == ["gluon.weighted_sums", "triton.linear"]


@pytest.mark.usefixtures("verdicts")
def test_other_gpus_take_plain_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "is_hopper", lambda device: False)
    assert modules() == ["triton.sums", "triton.linear"]
    for name in ("triton.sums", "triton.linear"):
        assert importlib.util.find_spec(f"{choices.PACKAGE}.{name}")


def test_what_fails_its_trial_is_not_taken(
    verdicts: dict[tuple[str, torch.device], str | None],
) -> None:
    verdicts[choices.GLUON_SUMS.name, GPU] = "wrong"
    assert modules() == ["triton.sums", "triton.linear"]
    verdicts[choices.KERNELS.name, GPU] = "wrong"
    assert modules() == [None, None]


@pytest.mark.usefixtures("verdicts")
def test_gluon_takes_no_float32() -> None:
    assert choices.outer_sums(GPU, torch.float32) == "triton.sums"


@pytest.mark.usefixtures("verdicts")
def test_very_wide_layers_of_halves_are_shared_out_in_plain_torch() -> None:
    assert choices.gram_norms(GPU, HALF, 50257) is None
    assert choices.gram_norms(GPU, torch.float32, 50257) == "triton.linear"


@pytest.mark.usefixtures("verdicts")
def test_without_triton_nothing_of_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "triton_available", lambda: False)
    assert modules() == [None, None]


def test_every_backend_has_a_name_of_its_own() -> None:
    assert len({backend.name for backend in EVERY_BACKEND}) == len(EVERY_BACKEND) == 3
