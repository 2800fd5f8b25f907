"""What `method = "certified"` chooses where a file is silent, and that everything says so."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cli.test_bad_input import run_file, write_good
from shuffled_dpsgd.cli.main import app
from shuffled_dpsgd.models import build_model
from shuffled_dpsgd.tasks import load_run, parse_config
from shuffled_dpsgd.tasks.advice import preview_shapes
from shuffled_dpsgd.tasks.config_files import AVERAGING
from shuffled_dpsgd.tasks.models import describe_choices
from shuffled_dpsgd_experiments.presets import PRESETS

RAW: dict[str, Any] = {
    "task": "text-classification",
    "model": {"name": "some/encoder"},
    "data": {"format": "sst2", "path": "."},
    "privacy": {"method": "certified", "epsilon": 1.0, "delta": 1e-5, "clip_norm": 1.0},
    "training": {"expected_batch_size": 10, "epochs": 1},
}


def stated(**changes: Any) -> dict[str, Any]:
    """A file that is silent but for `changes`, such as `model__freeze`."""
    raw = copy.deepcopy(RAW)
    for place, value in changes.items():
        section, _, key = place.rpartition("__")
        (raw.setdefault(section, {}) if section else raw)[key] = value
    return raw


@pytest.mark.parametrize(
    ("changes", "schedule", "averaging"),
    [
        ({}, "linear", 0.0),
        ({"optimizer__learning_rate": 0.1}, "linear", 0.0),
        ({"optimizer__schedule": "cosine"}, "cosine", 0.0),
        ({"optimizer__schedule": "constant"}, "constant", AVERAGING),
        ({"optimizer__schedule": "constant", "training__weight_averaging": 0.0}, "constant", 0.0),
        ({"training__weight_averaging": 0.9}, "constant", 0.9),
        ({"training__weight_averaging": 0.0}, "constant", 0.0),
        ({"privacy__method": "mixopt"}, "constant", 0.0),
        ({"privacy__method": "non-private", "privacy__epsilon": None}, "constant", 0.0),
    ],
)
def test_the_rate_falls_unless_the_file_says_otherwise(
    changes: dict[str, Any], schedule: str, averaging: float
) -> None:
    raw = stated(**changes)
    if raw["privacy"]["epsilon"] is None:
        raw["privacy"] = {"method": "non-private", "delta": 1e-5}
    config = parse_config(raw)
    assert (config.optimizer.schedule, config.training.weight_averaging) == (schedule, averaging)
    assert ("optimizer.schedule" in config.by_method) == (schedule == "linear")
    assert ("training.weight_averaging" in config.by_method) == (averaging == AVERAGING)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "freeze-if-found"),
        ({"model__from_scratch": False}, "freeze-if-found"),
        ({"model__freeze": []}, "train"),
        ({"model__train_only": ["classifier.*"]}, "train"),
        ({"model__embeddings": "train"}, "train"),
        ({"model__embeddings": "freeze"}, "freeze"),
        ({"model__from_scratch": True}, "train"),
        ({"model__lora_rank": 4}, "train"),
        ({"model__name": "bert-tiny"}, "train"),  # It has no weights but new ones.
        ({"model__name": "bert-base"}, "freeze-if-found"),
        ({"privacy__method": "mixopt"}, "train"),
        ({"task": "causal-lm", "data__format": "e2e"}, "train"),
    ],
)
def test_embeddings_are_frozen_where_they_are_worth_keeping(
    changes: dict[str, Any], expected: str
) -> None:
    config = parse_config(stated(**changes))
    assert config.model.embeddings == expected
    assert ("model.embeddings" in config.by_method) == (expected == "freeze-if-found")


def test_a_run_that_was_written_down_leaves_nothing_to_the_method() -> None:
    config = parse_config(RAW)
    again = parse_config(json.loads(json.dumps(config.to_json())))
    assert again == config
    assert again.by_method == ()
    older = config.to_json()
    del older["model"]["embeddings"]
    older["optimizer"]["schedule"] = "constant"
    assert parse_config(older).model.embeddings == "train"
    assert parse_config(older).training.weight_averaging == 0.0


def test_choices_are_told_in_words() -> None:
    pytest.importorskip("transformers")
    model = build_model("minilm-l6", num_labels=2)
    config = parse_config(RAW)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embeddings" not in name)
    assert describe_choices(config, model) == (
        "certified: linear schedule, embeddings frozen (10.8 of 22.7 million weights trained)"
    )
    constant = parse_config(stated(optimizer__schedule="constant", model__freeze=[]))
    assert describe_choices(constant, model) == "certified: weights averaged with decay 0.95"
    assert describe_choices(parse_config(stated(privacy__method="ghost")), model) is None
    told = describe_choices(config, torch.nn.Linear(2, 2))
    assert told == (
        "certified: linear schedule, all weights trained, no embeddings frozen (the model names no "
        "input embedding)"
    )


def invoked(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """A run from the weights of a small encoder that was saved; its file names no method."""
    pytest.importorskip("transformers")
    saved = tmp_path / "encoder"
    model = build_model("bert-tiny", device="cpu", num_labels=2)
    model.config.tokenizer_class = None
    model.save_pretrained(saved)
    write_good(tmp_path)
    return run_file(tmp_path, "sst2", model__name=str(saved), optimizer=None)


@pytest.mark.filterwarnings("ignore:the most frequent row")
@pytest.mark.slow
def test_the_plan_the_card_and_the_report_say_what_was_chosen(
    arguments: list[str], tmp_path: Path
) -> None:
    chosen = "certified: linear schedule, embeddings frozen ("
    arguments += ["--method", "certified"]
    plan = json.loads(invoked(*arguments, "--dry-run", "--json"))["run"]
    assert plan["chosen_by_method"].startswith(chosen)
    assert plan["trainable_parameters"] < plan["total_parameters"]
    shown = " ".join(invoked(*arguments).split())
    assert f"chosen by method {chosen}" in shown
    out = tmp_path / "out"
    for name in ("privacy_card.txt", "privacy_card.json", "report.html", "summary.json"):
        assert chosen in (out / name).read_text(encoding="utf-8"), name
    assert load_run(out).by_method == ("optimizer.schedule", "model.embeddings")
    transformers = pytest.importorskip("transformers")
    kind = transformers.BertForSequenceClassification
    before = kind.from_pretrained(tmp_path / "encoder").state_dict()
    after = kind.from_pretrained(out / "model").state_dict()
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert moved
    assert not any("embeddings" in name for name in moved)


def test_a_preset_is_planned_with_what_the_method_chooses() -> None:
    pytest.importorskip("transformers")
    preset = PRESETS["paper/bert-sst2"]
    raw = preset.to_run()
    raw["privacy"] = {"method": "certified", "epsilon": 1.0, "delta": 1e-5, "clip_norm": 0.1}
    plan = preview_shapes(
        parse_config(raw), model=preset.model, dataset_size=1000, num_labels=2
    ).to_json()
    assert plan["chosen_by_method"] == (
        "certified: linear schedule, embeddings frozen (85.6 of 109.5 million weights trained)"
    )
    noisy = sum(block["dimension"] for block in plan["blocks"].values())
    assert noisy == plan["trainable_parameters"]
