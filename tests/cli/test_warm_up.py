"""`shuffled-dpsgd warm-up`: work in several processes, and a plain word where there is none."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from shuffled_dpsgd.cli import warm_up
from shuffled_dpsgd.cli.main import app
from shuffled_dpsgd.clipping.kernels import choices
from shuffled_dpsgd.runtime import backends
from shuffled_dpsgd.training import kernel_launches


@pytest.mark.parametrize("has_gpu", [False, True])
def test_without_a_gpu_or_triton_there_is_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(backends, "triton_available", lambda: not has_gpu)
    monkeypatch.setattr(warm_up, "run_in_processes", None)
    reason = "Triton is not available" if has_gpu else "there is no GPU"
    done = CliRunner().invoke(app, ["warm-up"])
    assert done.exit_code == 0
    assert done.stdout == f"Nothing to do: {reason}. Plain torch needs no warm-up.\n"
    done = CliRunner().invoke(app, ["warm-up", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["reason"] == reason


def test_work_that_fails_stops_no_other() -> None:
    """Every process is another one than this, and one that dies is told of."""
    work = [partial(int, "7"), partial(int, "seven"), partial(os.kill, os.getpid(), 0)]
    found = dict(warm_up.run_in_processes(work, 2))
    assert found[0] is found[2] is None
    assert str(found[1]).startswith("ValueError: invalid literal")
    (over,) = warm_up.run_in_processes([partial(os._exit, 3)], 1)
    assert over[0] == 0
    assert str(over[1]).startswith("BrokenProcessPool")


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """A made-up Hopper GPU on which every probe passes; yields what is given to processes."""
    pytest.importorskip("triton")
    choices.is_hopper.cache_clear()
    given: list[tuple[Any, ...]] = []

    def run(work: list[partial[None]], jobs: int) -> list[tuple[int, str | None]]:
        given.append((jobs, *(task.args for task in work)))
        return [(number, "why" if number == 1 else None) for number in range(len(work))]

    monkeypatch.setattr(warm_up, "run_in_processes", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A made-up GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(backends, "triton_available", lambda: True)
    monkeypatch.setattr(backends, "_reasons", {})
    monkeypatch.setattr(backends.Backend, "_judge", lambda route, device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield given
    choices.is_hopper.cache_clear()


def test_every_kernel_is_compiled_and_every_backend_probed(given: list[tuple[Any, ...]]) -> None:
    done = CliRunner().invoke(app, ["warm-up", "--length", "64", "--jobs", "3", "--json"])
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    names = [name for name, _ in kernel_launches.compiling_work(torch.device("cuda", 0), (64,))]
    assert given == [(3, *((number, (64,)) for number in range(len(names))))]
    assert found["done"] == len(names) - 1
    assert found["failed"] == [f"{names[1]}: why"]
    assert len(backends._reasons) == sum(name.startswith("probe: ") for name in names) == 8
    assert "T=64, 768 to 3072" in names


def test_people_are_told_what_failed(given: list[tuple[Any, ...]]) -> None:
    done = CliRunner().invoke(app, ["warm-up"])
    assert done.exit_code == 0, done.stderr
    first, failed = done.stdout.splitlines()
    total = len(kernel_launches.compiling_work(torch.device("cuda", 0)))
    assert first == f"A made-up GPU: {total - 1} of {total} probes and launches done."
    assert failed.startswith("failed: probe: ")
    assert given[0][0] == min(8, os.cpu_count() or 1)


@pytest.mark.usefixtures("given")
def test_other_gpus_have_no_gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = len(kernel_launches.compiling_work(torch.device("cuda", 0)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    choices.is_hopper.cache_clear()
    names = [name for name, _ in kernel_launches.compiling_work(torch.device("cuda", 0))]
    assert 50 < len(names) < everything
    assert not [name for name in names if "Gluon" in name]


@pytest.mark.gpu
def test_all_kernels_are_compiled_on_a_gpu() -> None:
    pytest.importorskip("triton")
    done = CliRunner().invoke(app, ["warm-up", "--json"])
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["failed"], found["off"]) == ([], {})
    assert found["done"] > 50
