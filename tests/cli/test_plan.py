"""`shuffled-dpsgd plan`: a table for people, JSON for machines."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shuffled_dpsgd.cli.main import app

PAGE = Path(__file__).resolve().parents[2] / "docs" / "huggingface.md"


def test_json_has_memory_time_and_communication() -> None:
    arguments = ["plan", "--model", "gpt2-large", "--gpus", "8", "--gpu", "h200", "--json"]
    found = json.loads(CliRunner().invoke(app, arguments).stdout)
    replicated = found["replicated"]
    assert replicated["supported"]
    assert found["sharded"]["supported"]
    assert found["sharded"]["memory"]["state_gib"] == replicated["memory"]["state_gib"] / 8
    assert replicated["fits"]
    assert replicated["largest_physical_batch"] > 64
    assert set(replicated["memory"]) == {
        "weights_gib", "gathered_gib", "half_copies_gib", "state_gib", "sums_gib",
        "activations_gib", "captures_gib", "peak_gib",
    }  # fmt: skip
    assert found["largest_relative_error"] == {"time": 0.45, "memory": 0.08, "exchange": None}
    assert replicated["step_seconds"] > replicated["exchange_seconds"] > 0
    assert [row["gpus"] for row in found["weak_scaling"]][-1] == 1024


def test_the_table_says_what_does_not_fit() -> None:
    done = CliRunner().invoke(app, ["plan", "--model", "llama-70b", "--gpus", "64"])
    words = " ".join(done.stdout.split())
    assert "The whole model does not fit on a rank: shard it." in words
    assert "Communication takes longer than computing: put more tokens into" in words
    assert done.exit_code == 0
    words = " ".join(
        CliRunner().invoke(app, ["plan", "--model", "llama-70b", "--gpus", "8"]).stdout.split()
    )
    assert "Neither way fits: shard it over 16 GPUs, train adapters (LoRA)" in words


def test_eight_billion_weights_in_four_bits_fit_in_24_gib() -> None:
    asked = ["plan", "--model", "llama-8b", "--lora-rank", "16", "--gpu", "rtx4090"]
    asked += ["--length", "1024"]
    found = json.loads(CliRunner().invoke(app, [*asked, "--bits", "4", "--json"]).stdout)
    memory = found["memory"]
    assert found["fits"]
    assert found["largest_physical_batch"] == 4
    terms = sum(value for name, value in memory.items() if name != "peak_gib")
    assert memory["peak_gib"] == terms <= 0.8 * 24
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert memory.pop("gathered_gib") == 0
    *parts, peak = [f"{value:.1f}" for value in memory.values()]
    told = page.partition("texts at once take")[2].partition(". ")[0]
    assert re.findall(r"\d+\.\d", told) == [peak, *parts]
    shown = CliRunner().invoke(app, [*asked, "--bits", "4"]).stdout
    assert f"{memory['peak_gib']:.2f}" in shown
    assert "not measured" in shown
    two = [*asked, "--bits", "16", "--physical-batch", "2", "--json"]
    assert not json.loads(CliRunner().invoke(app, two).stdout)["fits"]


def test_adapters_on_several_gpus() -> None:
    """Top-level keys are those of replicated ranks; quantised weights are not sharded."""
    asked = ["plan", "--model", "gpt2", "--lora-rank", "8", "--gpus", "16"]
    found = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    assert found["batches_per_rank"] == 1
    assert 0 < found["exchange_gib"] < found["sharded"]["exchange_gib"]
    assert found["hybrid"]["memory"]["peak_gib"] > found["sharded"]["memory"]["peak_gib"]
    assert not found["split"]["supported"]
    quantised = json.loads(CliRunner().invoke(app, [*asked, "--bits", "8", "--json"]).stdout)
    assert quantised["exchange_gib"] == found["exchange_gib"]
    assert quantised["sharded"] == quantised["hybrid"] == {"supported": False}
    words = " ".join(CliRunner().invoke(app, [*asked, "--bits", "8"]).stdout.split())
    assert "replicated" in words
    assert "hybrid" not in words
    assert "Sharding quantised weights is refused." in words


@pytest.mark.parametrize(
    "further",
    [
        ["--lora-rank", "8", "--records", "9"],
        ["--lora-rank", "8", "--half-weights"],
        ["--bits", "4"],
    ],
)
def test_options_that_would_change_nothing_are_refused(further: list[str]) -> None:
    done = CliRunner().invoke(app, ["plan", "--model", "gpt2", *further])
    assert done.exit_code == 2
    assert "--lora-rank" in done.output
