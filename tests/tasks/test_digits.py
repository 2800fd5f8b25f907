"""The embedded default: fixed split, a model that learns, runs that resume to the same bits."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from curves import DRAW_ALL
from shuffled_dpsgd.errors import CheckpointError, InvalidArgumentError
from shuffled_dpsgd.permutation import discover, verify
from shuffled_dpsgd.reports import MetricsLog
from shuffled_dpsgd.tasks import execute, load_run, prepare
from shuffled_dpsgd.tasks.config import ModelConfig, RunConfig
from shuffled_dpsgd.tasks.digits import (
    NUM_TRAIN,
    build_model,
    build_task,
    default_config,
    load_digits,
)
from shuffled_dpsgd.tasks.models import prepare_model

pytest.importorskip("transformers")
pytest.importorskip("sklearn")


def short_config(**privacy: Any) -> RunConfig:
    """Five steps of noise given, so that nothing has to be calibrated."""
    config = default_config()
    given = {"epsilon": None, "noise_multiplier": 1.0} | privacy
    return replace(
        config,
        privacy=replace(config.privacy, **given),
        training=replace(
            config.training,
            epochs=None,
            num_steps=5,
            expected_batch_size=64,
            evaluate_every=2,
            checkpoint_every=2,
        ),
    )


def test_the_model_section_is_honoured_or_refused() -> None:
    task = build_task(replace(default_config(), model=ModelConfig(name="vit-digits", lora_rank=2)))
    assert any("lora" in name for name, p in task.model.named_parameters() if p.requires_grad)
    with pytest.raises(InvalidArgumentError, match=r"model\.name: expected a model whose head"):
        build_task(replace(default_config(), model=ModelConfig(name="bert-tiny")))


def test_the_factors_of_adapters_follow_the_seed() -> None:
    pytest.importorskip("peft")
    made = [
        prepare_model(ModelConfig(name="vit-digits", lora_rank=2), head="image", seed=seed)
        for seed in (1, 1, 2)
    ]
    first, again, other = (
        {name: p for name, p in model.named_parameters() if "lora_A" in name} for model in made
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_dropout_follows_the_seed_of_a_run(tmp_path: Path) -> None:
    def drawn(folder: str, seed: int | None) -> torch.Tensor:
        prepare(
            replace(short_config(epsilon=None, noise_multiplier=1.0), seed=seed), tmp_path / folder
        )
        return torch.rand(4)

    assert torch.equal(drawn("a", 1), drawn("b", 1))
    assert not torch.equal(drawn("c", 1), drawn("d", 2))
    assert not torch.equal(drawn("e", None), drawn("f", None))


def test_split_is_fixed_and_complete() -> None:
    train, heldout = load_digits()
    assert (len(train), len(heldout)) == (NUM_TRAIN, 360)
    again, _ = load_digits()
    assert torch.equal(train.tensors[0], again.tensors[0])
    rows = torch.cat([train.tensors[0], heldout.tensors[0]]).flatten(1)
    assert len(rows) == 1797
    assert rows.shape[1:] == (64,)
    assert abs(rows.mean()) < 0.1
    assert abs(rows.std() - 1) < 0.1


def test_every_class_is_held_out() -> None:
    _, heldout = load_digits()
    assert torch.bincount(heldout.tensors[1], minlength=10).min() >= 20


def test_weights_follow_the_seed_and_leave_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    first, second, other = build_model(0), build_model(0), build_model(1)
    assert torch.equal(torch.get_rng_state(), state)
    same = [torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)]
    assert all(same)
    assert not all(
        torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.parametrize("scope", ["paper", "full"])
def test_shuffling_leaves_the_model_alone(scope: Any) -> None:
    model = build_model().double()
    spec = discover(model, scope=scope)
    if scope == "full":
        assert set(spec.unmoved) == {"classifier.bias"}
    else:
        assert 0.9 < spec.shuffle_ratio < 1.0
    images = load_digits()[1].tensors[0][:4].double()
    verify(model, {"pixel_values": images}, spec=spec)


def test_default_is_calibrated_to_certified_epsilon() -> None:
    config = default_config()
    assert config.privacy.accounting == "certified"
    assert config.privacy.batch_clip_norm is None
    assert config.privacy.delta < 1 / NUM_TRAIN
    task = build_task(config)
    assert 10_000 < sum(p.numel() for p in task.model.parameters()) < 50_000


def test_a_run_without_noise_and_clip_is_written_down_as_not_private(tmp_path: Path) -> None:
    config = short_config(noise_multiplier=0.0, clip_norm=math.inf)
    result = execute(prepare(config, tmp_path))
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert result.summary["config"]["privacy"]["clip_norm"] == "inf"
    assert result.summary["privacy_card"]["private"] is False
    for name in ("privacy_card.txt", "privacy_card.html", "report.html"):
        assert "this run is not private" in (tmp_path / name).read_text(encoding="utf-8")
    assert "Infinity" not in (tmp_path / "run.json").read_text(encoding="utf-8")
    assert load_run(tmp_path) == config


def test_the_model_is_saved_before_any_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("shuffled_dpsgd.tasks.results.write_report", fail)
    with pytest.raises(OSError, match="disk full"):
        execute(prepare(short_config(), tmp_path))
    assert (tmp_path / "model" / "model.safetensors").stat().st_size > 0


def test_run_writes_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shuffled_dpsgd.reports.run_report.draw_all", DRAW_ALL)
    result = execute(prepare(short_config(), tmp_path))
    assert result.outcome.finished
    for name in (
        "model/model.safetensors",
        "model/config.json",
        "metrics.jsonl",
        "summary.json",
        "privacy_card.txt",
        "privacy_card.json",
        "privacy_card.html",
        "report.html",
        "figures/epsilon.png",
        "figures/epsilon.svg",
        "run.json",
        "ledger.jsonl",
    ):
        assert (tmp_path / name).stat().st_size > 0, name
    records = MetricsLog(tmp_path / "metrics.jsonl").read()
    assert [record.step for record in records] == [1, 2, 3, 4, 5]
    assert [record.step for record in records if record.heldout_score is not None] == [2, 4, 5]
    spent = [record.certified_epsilon for record in records]
    assert spent == sorted(spent)  # type: ignore[type-var]
    assert all(sum((record.norm_counts or {}).values()) == record.batch_size for record in records)
    summary = json.loads((tmp_path / "summary.json").read_text())
    card = summary["privacy_card"]
    assert card["certified"]["epsilon"] == pytest.approx(spent[-1], rel=1e-6)
    assert (card["certified"]["kind"], card["paper"]["kind"]) == ("proven", "heuristic")
    assert "seed" not in summary["config"]
    recorded = {"shuffled_dpsgd", "torch", "python", "device", "hardware", "date"}
    assert recorded <= summary["environment"].keys()
    assert summary["heldout_score"] == records[-1].heldout_score


@pytest.mark.slow
def test_interrupted_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    whole = prepare(short_config(), tmp_path / "whole")
    execute(whole)

    def interrupt(record: Any, _: Any) -> None:
        if record.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    first = execute(prepare(short_config(), tmp_path / "parts"), observers=(interrupt,))
    assert not first.outcome.finished
    assert first.outcome.interrupted_by == "SIGTERM"
    assert not (tmp_path / "parts" / "model").exists()
    config = load_run(tmp_path / "parts")
    assert config == short_config()
    second = execute(prepare(config, tmp_path / "parts", resume=True))
    assert second.outcome.finished
    expected, got = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "parts")
    )
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    steps = [record.step for record in MetricsLog(tmp_path / "parts" / "metrics.jsonl").read()]
    assert steps == [1, 2, 3, 4, 5]


def test_a_used_folder_is_not_started_over(tmp_path: Path) -> None:
    prepare(short_config(), tmp_path)
    with pytest.raises(InvalidArgumentError, match="--resume"):
        prepare(short_config(), tmp_path)


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"run\.json"):
        load_run(tmp_path)


@pytest.mark.slow
def test_the_model_can_learn_without_privacy() -> None:
    task = build_task(default_config())
    images, labels = task.train_data.tensors  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        rows = torch.randperm(NUM_TRAIN, generator=generator)[:128]
        optimizer.zero_grad()
        task.losses(task.model, (images[rows], labels[rows])).mean().backward()
        optimizer.step()
    assert task.evaluate(task.model).score > 0.9


@pytest.mark.slow
def test_the_default_run_reaches_a_decent_accuracy(tmp_path: Path) -> None:
    result = execute(prepare(default_config(), tmp_path))
    assert result.summary["heldout_score"] > 0.82
    assert result.summary["privacy_card"]["certified"]["epsilon"] <= 3.0
