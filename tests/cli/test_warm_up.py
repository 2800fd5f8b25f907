"""`shuffled-dpsgd warm-up`: work in several processes, and a plain word where there is none."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from shuffled_dpsgd.cli import warm_up
from shuffled_dpsgd.cli.main import app
from shuffled_dpsgd.runtime import backends


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
    first, second, third = warm_up.run_in_processes(int, ["7", "seven", "8"], 2)
    assert (first, third) == (7, 8)
    assert second.startswith("ValueError: invalid literal")
    (over,) = warm_up.run_in_processes(os._exit, [3], 1)
    assert over.startswith("BrokenProcessPool")


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A made-up GPU, on which the second run fails; filled with what is given to processes."""
    given: list[tuple[Any, ...]] = []

    def run(_: Any, runs: list[Any], jobs: int) -> list[Any]:
        given.append((jobs, *runs))
        return ["why" if number == 1 else {"A": "bad"} for number in range(len(runs))]

    monkeypatch.setattr(warm_up, "run_in_processes", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A made-up GPU")
    monkeypatch.setattr(backends, "triton_available", lambda: True)
    return given


def test_models_of_every_kind_take_steps_at_every_length(given: list[tuple[Any, ...]]) -> None:
    arguments = ["warm-up", "--length", "64", "--length", "96", "--jobs", "3", "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    ((jobs, *runs),) = given
    assert (jobs, len(runs)) == (3, 14)
    assert {run.length for run in runs} == {64, 96, None}
    assert {run.model for run in runs} == {"gpt2", "bert-base", "minilm-l6", "vit-base"}
    assert (found["done"], found["off"]) == (13, {"A": "bad"})
    assert found["failed"] == ["gpt2 on 64 tokens in float32: why"]


@pytest.mark.usefixtures("given")
def test_people_are_told_what_failed() -> None:
    done = CliRunner().invoke(app, ["warm-up"])
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines() == [
        "A made-up GPU: 13 of 14 short runs done.",
        "failed: gpt2 on 128 tokens in float32: why",
        "off: A: bad",
    ]


@pytest.mark.parametrize(
    ("run", "settings"),
    [
        (warm_up.ShortRun("gpt2", 8, True), {"n_embd": 24, "n_head": 2, "vocab_size": 101}),
        (warm_up.ShortRun("vit-base", None, False), {"hidden_size": 24, "image_size": 32}),
    ],
    ids=str,
)
def test_a_short_run_takes_its_steps(run: warm_up.ShortRun, settings: dict[str, int]) -> None:
    assert warm_up.take_steps(run, "cpu", 4, **settings) == {}


@pytest.mark.gpu
def test_all_kernels_are_compiled_on_a_gpu() -> None:
    pytest.importorskip("triton")
    done = CliRunner().invoke(app, ["warm-up", "--json"])
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["done"], found["failed"], found["off"]) == (14, [], {})
