"""`shuffled-dpsgd train` under a launcher: one run, one voice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from distributed.launching import Launcher
from distributed.test_resume import entries

HERE = "distributed.command"
SHORT = ["train", "digits", "--epochs", "1", "--batch-size", "720", "--seed", "1", "--json"]


@pytest.mark.slow
def test_a_refusal_is_said_once(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "taken.txt").touch()
    arguments = [*SHORT, "--output", str(tmp_path)]
    one, two = launcher.run(HERE, "call", arguments=arguments)
    assert (one["status"], two) == (2, {"status": 2, "out": "", "err": ""})
    assert "rank 0: --output: expected an empty or new folder" in json.loads(one["out"])["error"]


@pytest.mark.slow
def test_two_ranks_train_and_one_speaks(launcher: Launcher, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    one, two = launcher.run(HERE, "call", arguments=[*SHORT, "--output", str(folder)])
    assert (one["status"], two) == (0, {"status": 0, "out": "", "err": ""})
    summary = json.loads(one["out"])
    assert summary["finished"]
    assert summary["steps_taken"] == entries(folder) == 2
    assert {"model", "report.html", "privacy_card.json", "ledger.jsonl"} <= {
        path.name for path in folder.iterdir()
    }
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    again = ["train", "--resume", str(folder), "--json"]
    one, two = launcher.run(HERE, "call", arguments=again)
    assert json.loads(one["out"])["already_finished"]
    assert two["out"] == ""


SHARDED = """
task = "digits"
seed = 1
model.name = "vit-digits"
data.format = "digits"
privacy.epsilon = 3.0
privacy.delta = 1e-4
privacy.clip_norm = 1.0
training.epochs = 1
training.expected_batch_size = 720
training.evaluate_every = 1
"""


AVERAGED = 'privacy.shuffle = "off"\ntraining.weight_averaging = 0.5\n'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharding", "ranks", "more", "call"),
    [
        ("sharded", 2, "", "call"),
        ("sharded", 2, AVERAGED, "call_without_room"),
        ("hybrid", 4, "", "call"),
    ],
)
def test_a_key_of_the_file_shards_the_model(
    launcher: Launcher, tmp_path: Path, sharding: str, ranks: int, more: str, call: str
) -> None:
    """The same scores as one process, a whole model in the folder, and nothing left to resume."""
    found = {}
    node = {"LOCAL_WORLD_SIZE": "2"}
    for kind, count in (("replicated", 1), (sharding, ranks)):
        path, folder = tmp_path / f"{kind}.toml", tmp_path / kind
        path.write_text(f'{SHARDED}{more}training.sharding = "{kind}"\n')
        arguments = ["train", "--config", str(path), "--output", str(folder), "--json"]
        one, *others = launcher.run(HERE, call, ranks=count, environment=node, arguments=arguments)
        assert one["status"] == 0, one
        assert all(other == {"status": 0, "out": "", "err": ""} for other in others)
        found[kind] = json.loads(one["out"])
    whole, parts = found["replicated"], found[sharding]
    assert parts["finished"]
    assert parts["steps_taken"] == entries(tmp_path / sharding) == 2
    assert parts["heldout_loss"] == pytest.approx(whole["heldout_loss"], rel=1e-4)
    assert parts["trainable_parameters"] == whole["trainable_parameters"]
    with (
        safe_open(tmp_path / sharding / "model" / "model.safetensors", "pt") as mine,
        safe_open(tmp_path / "replicated" / "model" / "model.safetensors", "pt") as theirs,
    ):
        assert set(mine.keys()) == set(theirs.keys())
        for name in mine.keys():  # noqa: SIM118  (it is no dictionary)
            assert torch.allclose(mine.get_tensor(name), theirs.get_tensor(name), atol=1e-4)
    again = ["train", "--resume", str(tmp_path / sharding), "--json"]
    one, *_ = launcher.run(HERE, "call", ranks=ranks, environment=node, arguments=again)
    assert json.loads(one["out"])["already_finished"]


@pytest.mark.slow
def test_torchrun_restarts_go_on_without_losing_count(tmp_path: Path) -> None:
    """A rank kills itself at step 2; torchrun starts both again, and the run goes on."""
    folder = tmp_path / "run"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "--max-restarts", "1", "-m", "shuffled_dpsgd"),
            *(*SHORT, "--output", str(folder), "--tracker", "distributed.command:die_once"),
        ],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout[done.stdout.index("{") :])
    assert summary["finished"]
    assert summary["steps_taken"] == entries(folder) == 2


@pytest.mark.slow
def test_torchrun_trains_digits(tmp_path: Path) -> None:
    """The command of the documentation, as people see it."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "shuffled_dpsgd"),
            *("train", "digits", "--epochs", "1", "--output", str(tmp_path / "run")),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.count("Training privately") == 1
    assert "2, each with a part of every batch" in done.stdout
    assert done.stdout.count("step 5/5") == 1
