"""A linear model of pixels, or a head on a frozen encoder: trained, used again, and advised."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from typer.testing import CliRunner

from shuffled_dpsgd.cli.main import app
from shuffled_dpsgd.models import build_model, load_model
from shuffled_dpsgd.tasks import digits
from shuffled_dpsgd.tasks.advice import SIMPLE_WINS_BELOW, SIMPLE_WINS_ON, advise_run
from shuffled_dpsgd.tasks.config import DataConfig, ModelConfig
from shuffled_dpsgd.tasks.models import simpler_model
from shuffled_dpsgd.tasks.tokens import load_tokenizer
from shuffled_dpsgd_experiments.advice_runs import by_target
from shuffled_dpsgd_experiments.exhibits import Request
from shuffled_dpsgd_experiments.frontier.reproducing import read
from slow_cases import one_in

pytest.importorskip("transformers")
RESULTS = Path(__file__).resolve().parents[2] / "results"


def run(*arguments: object) -> Any:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_linear_model_of_pixels_is_trained_and_used_again(tmp_path: Path) -> None:
    datasets, image = pytest.importorskip("sklearn.datasets"), pytest.importorskip("PIL.Image")
    folder = tmp_path / "run"
    recipe = ("--preset", "recipe/digits-linear", "--epsilon", 8, "--epochs", 5)
    summary = run("train", *recipe, "--output", folder)
    assert summary["trainable_parameters"] == 650
    assert summary["privacy_card"]["certified"]["kind"] == "proven"
    assert summary["heldout_score"] > 0.6
    found = run("evaluate", folder)
    assert found["score"] == pytest.approx(summary["heldout_score"], abs=1e-6)
    seen = datasets.load_digits()
    for number in range(10):
        # Pixels of 0 to 16 as a grey image of 0 to 255.
        picture = image.fromarray((seen.images[number] * 255 / 16).round().astype("uint8"))
        picture.save(tmp_path / f"{number}.png")
    answers = run("predict", folder, *(tmp_path / f"{n}.png" for n in range(10)))["answers"]
    right = sum(a["class"] == label for a, label in zip(answers, seen.target, strict=False))
    assert right >= 6


def test_the_advice_names_the_simple_model_where_the_committed_runs_say_so() -> None:
    named = {"large": "advice_digits.json", "small": "linear_digits.json"}
    found = {
        name: by_target(json.loads((RESULTS / file).read_text())["runs"])
        for name, file in named.items()
    }
    for large, small in zip(found["large"], found["small"], strict=True):
        assert large["target"] == small["target"]
        below = large["signal_to_noise_over_run"] < SIMPLE_WINS_ON["digits"]
        assert small["heldout_accuracy"] > large["heldout_accuracy"] or not below
    curves = read(Request(output=RESULTS, from_results=True))
    assert curves is not None
    (digits_mlp,) = (each for each in curves if each.workload.name == "digits")
    noise = {each.point.epsilon: each.noise_multipliers["rest"] for each in digits_mlp.plain()}
    steps, batch = digits_mlp.workload.num_steps, digits_mlp.workload.expected_batch_size
    dimension = (64 + 1) * 128 + (128 + 1) * 10
    for each in digits_mlp.floor_comparisons():
        if each.point.epsilon in noise and each.verdict == "below DP-SGD":
            bound = batch * math.sqrt(steps / dimension) / noise[each.point.epsilon]
            assert bound >= SIMPLE_WINS_ON["digits"]


def bound_and_score(path: Path) -> tuple[float, float]:
    cell = json.loads(path.read_text())
    batch, steps = cell["config"]["training"]["expected_batch_size"], cell["num_steps"]
    noise = math.hypot(*(b["noise_multiplier"] * b["dimension"] ** 0.5 for b in cell["blocks"]))
    return math.sqrt(steps) * batch / noise, cell["score"]


@pytest.mark.parametrize(
    ("sweep", "floor", "split"),
    [
        ("sst2", "sst2-linear", "dev"),
        ("cifar100", "cifar100-linear", "test"),
        ("cifar100_scratch", "cifar100-linear", "test"),
    ],
)
def test_elsewhere_it_is_named_only_where_it_won_on_record(
    sweep: str, floor: str, split: str
) -> None:
    lines = (RESULTS / "frontier" / f"{floor}.jsonl").read_text().splitlines()
    cells = [cell for cell in map(json.loads, lines) if cell["stage"] == "figure"]
    named = {True: 0, False: 0}
    for path in sorted((RESULTS / sweep).glob("main_shuffled-certified_*")):
        asked = json.loads(path.read_text())["epsilon"]
        small = [cell["accuracy"][split] for cell in cells if cell["epsilon"] == asked]
        if small:
            bound, large = bound_and_score(path)
            named[bound < SIMPLE_WINS_BELOW] += 1
            assert bound >= SIMPLE_WINS_BELOW or fmean(small) > large + stdev(small)
    assert all(named.values()), "the records have both"


@pytest.mark.parametrize("found", one_in(2, [(0.1, True), (8.0, False)]))
@pytest.mark.slow
def test_the_verb_names_a_linear_model_where_it_won_everywhere(found: tuple[float, bool]) -> None:
    epsilon, said = found
    sizes = ("--dataset-size", 67349, "--batch-size", 1000, "--epochs", 3, "--dimension", 22713986)
    options = ("--epsilon", epsilon, "--delta", 7.4e-6, *sizes)
    result = CliRunner().invoke(app, ["advise", *map(str, options)])
    assert result.exit_code == 0, result.output
    assert ("a linear model won in all our runs" in " ".join(result.stdout.split())) == said


@pytest.mark.slow
def test_advice_on_the_digits_at_a_small_and_at_a_large_budget() -> None:
    pytest.importorskip("sklearn")
    config = digits.default_config()
    simpler = advise_run(config).simpler
    assert simpler is not None
    assert (simpler.keys, simpler.prospect.dimension) == ('name = "linear-digits"', 650)
    ample = replace(config, privacy=replace(config.privacy, epsilon=8.0))
    assert advise_run(ample).simpler is None
    linear = replace(config, model=ModelConfig(name="linear-digits"))
    assert simpler_model(linear, build_model("linear-digits", num_labels=10)) is None


def test_of_a_text_classifier_the_head_alone_is_named(tmp_path: Path) -> None:
    model: Any = load_model("bert-tiny", head="sequence", num_labels=3)
    base = digits.default_config()
    data = DataConfig(format="sst2", path="nowhere")
    config = replace(base, task="text-classification", data=data)
    assert simpler_model(replace(config, model=ModelConfig(name="bert-tiny")), model) is None
    model.save_pretrained(tmp_path)
    load_tokenizer("bert-tiny").save(tmp_path)
    saved = replace(config, model=ModelConfig(name=str(tmp_path)))
    assert simpler_model(saved, model) == ('train_only = ["*classifier*"]', 3 * 64 + 3)


def test_a_small_mlp_has_a_hidden_layer() -> None:
    model: Any = build_model("mlp-digits", num_labels=10)
    assert [tuple(p.shape) for p in model.parameters()] == [(32, 64), (32,), (10, 32), (10,)]
