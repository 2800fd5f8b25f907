"""The thirteen rows of Table 1 as printed, and the noise the reference table has for them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from typer.testing import CliRunner

from shuffled_dpsgd.accounting import calibrate_paper
from shuffled_dpsgd.cli.main import app
from shuffled_dpsgd.tasks import parse_config
from shuffled_dpsgd_experiments.presets import PRESETS, SIX, find_preset

# name: (checkpoint, parameters, N, learning rate, epochs, δ or None for 1/(2N), clip, steps)
TABLE_1: dict[str, tuple[str, float, int, float, int, float | None, float, int]] = {
    "vit-cifar100": (
        "google/vit-base-patch16-224", 85.8e6, 50_000, 2e-3, 10, 5e-6, 1.0, 500,
    ),
    "bert-sst2": ("bert-base-uncased", 110e6, 67_349, 5e-4, 3, None, 0.1, 204),
    "bert-qqp": ("bert-base-uncased", 110e6, 363_846, 5e-4, 18, None, 0.1, 6552),
    "bert-mnli": ("bert-base-uncased", 110e6, 392_702, 5e-4, 18, None, 0.1, 7074),
    "bert-qnli": ("bert-base-uncased", 110e6, 108_000, 5e-4, 6, None, 0.1, 648),
    "roberta-sst2": ("roberta-base", 125e6, 67_349, 5e-4, 3, None, 0.1, 204),
    "roberta-qqp": ("roberta-base", 125e6, 363_846, 5e-4, 18, None, 0.1, 6552),
    "roberta-mnli": ("roberta-base", 125e6, 392_702, 5e-4, 18, None, 0.1, 7074),
    "roberta-qnli": ("roberta-base", 125e6, 108_000, 5e-4, 6, None, 0.1, 648),
    "gpt2-e2e": ("gpt2", 124e6, 42_043, 2e-3, 10, 8e-6, 0.1, 430),
    "gpt2-dart": ("gpt2", 124e6, 60_591, 5e-4, 15, 1e-5, 0.1, 915),
    "gpt2-large-e2e": ("gpt2-large", 838e6, 42_043, 2e-3, 10, 8e-6, 0.1, 430),
    "gpt2-large-dart": ("gpt2-large", 838e6, 60_591, 5e-4, 15, 1e-5, 0.1, 915),
}  # fmt: skip
# The reference table: (preset, ε, ε_s, δ_s, σ0, σ at c' = c, 10c, 100c), three digits.
REFERENCE = [
    ("vit-cifar100", 0.1, 0.0430, 2.50e-7, 87.1, 0.274, 0.752, 2.352),
    ("vit-cifar100", 1.0, 0.3604, 2.50e-7, 11.75, 0.273, 0.746, 2.329),
    ("bert-sst2", 0.5, 0.3842, 1.23e-6, 10.19, 0.271, 0.741, 2.311),
    ("gpt2-large-e2e", 0.25, 0.0965, 3.91e-7, 39.73, 0.258, 0.708, 2.213),
]


def test_there_are_thirteen() -> None:
    assert [name.removeprefix("paper/") for name in PRESETS] == list(TABLE_1)


@pytest.mark.parametrize("name", TABLE_1)
def test_a_preset_is_its_row_of_table_1(name: str) -> None:
    checkpoint, dimension, size, rate, epochs, delta, clip, steps = TABLE_1[name]
    preset = find_preset(f"paper/{name}")
    assert (preset.dimension, preset.dataset_size) == (dimension, size)
    run = preset.to_run()
    run["privacy"]["epsilon"] = 1.0
    config = parse_config(run)
    assert config.model.name == checkpoint
    assert config.optimizer.learning_rate == rate
    assert config.privacy.delta == (1 / (2 * size) if delta is None else delta)
    assert config.privacy.accounting == "paper"
    assert (config.privacy.clip_norm, config.privacy.batch_clip_norm) == (clip, clip)
    assert config.training.expected_batch_size == 1000
    assert config.training.epochs == epochs
    assert preset.num_steps == steps
    assert config.data.format == name.rsplit("-", 1)[1]


@pytest.mark.parametrize("row", REFERENCE, ids=lambda row: f"{row[0]} {row[1]}")
def test_the_noise_is_that_of_the_reference_table(row: tuple[Any, ...]) -> None:
    name, epsilon, step_epsilon, step_delta, unshuffled, *shuffled = row
    preset = find_preset(f"paper/{name}")
    for clip, noise in zip((1.0, 10.0, 100.0), shuffled, strict=True):
        found = calibrate_paper(
            epsilon=epsilon,
            delta=preset.delta,
            sampling_prob=preset.sampling_prob,
            num_steps=preset.num_steps,
            dimension=preset.dimension,
            batch_clip=clip,
        )
        assert found.noise_multiplier == pytest.approx(noise, abs=5.1e-4)
        assert found.unshuffled_noise_multiplier == pytest.approx(unshuffled, rel=1e-3)
        assert found.step_epsilon == pytest.approx(step_epsilon, abs=5.1e-5)
        assert found.step_delta == pytest.approx(step_delta, rel=5e-3)


@pytest.mark.parametrize(
    "method", ["shuffled", pytest.param("ghost", marks=pytest.mark.slow), "non-private"]
)
def test_a_dry_run_needs_neither_data_nor_checkpoint(method: str) -> None:
    pytest.importorskip("transformers")
    arguments = ["train", "--preset", "paper/vit-cifar100", "--dry-run", "--method", method]
    if method != "non-private":
        arguments += ["--epsilon", "1"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    run = json.loads(done.stdout)["run"]
    assert run["num_steps"] == 500
    assert run["total_parameters"] == 85_875_556
    assert run["memory_bytes_without_activations"] == 16 * run["trainable_parameters"]
    if method == "shuffled":
        assert run["noise_multipliers"]["shuffled"] == pytest.approx(0.273, abs=5e-4)
        assert run["noise_multipliers"]["rest"] == pytest.approx(11.75, abs=5e-3)
        assert run["certified"]["epsilon"] == pytest.approx(108, abs=1)
        assert run["blocks"]["shuffled"]["batch_clip_norm"] == 1.0
    elif method == "ghost":
        assert run["certified"]["epsilon"] < 1.0 < 1.2 * run["certified"]["epsilon"]
        assert list(run["noise_multipliers"]) == ["rest"]
    else:
        assert run["certified"] is None


def test_a_dry_run_prints_the_plan() -> None:
    pytest.importorskip("transformers")
    arguments = ["train", "--preset", "paper/bert-sst2", "--epsilon", "0.5", "--dry-run"]
    said = " ".join(CliRunner().invoke(app, arguments, env={"COLUMNS": "200"}).stdout.split())
    for part in (
        "204, Poisson",
        "σ (shuffled)",
        "σ0 (rest)",
        "ε = 0.5 (heuristic)",
        "(proven)",
        "GiB",
    ):
        assert part in said


def test_settings_of_the_figures_are_presets() -> None:
    assert all(PRESETS[setting.name] is setting for setting in SIX)
    assert math.isclose(SIX[1].delta, 1 / (2 * 67_349))
