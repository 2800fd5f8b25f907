"""Each named data set, tiny: two private steps, then the finished run classifies or generates."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks import load_run, parse_config, results
from shuffled_dpsgd.tasks.config import GenerationConfig
from shuffled_dpsgd.tasks.data.published import PUBLISHED
from shuffled_dpsgd.tasks.generation import Generated, score_generated
from shuffled_dpsgd.tasks.inference import evaluate_run, generate, predict
from shuffled_dpsgd.tasks.run import execute, prepare
from slow_cases import one_in

pytest.importorskip("transformers")
pytest.importorskip("sacrebleu")

COUNT = 12
MODELS = {
    "text-classification": "bert-tiny",
    "causal-lm": "gpt2-tiny",
    "image-classification": "vit-tiny",
}


def table(folder: Path, name: str, *columns: str) -> None:
    """Texts in all columns but the last, which has a class or what stands for one."""
    rows = [[*(f"{c} {i}" for c in columns[:-1]), str(i % 2)] for i in range(COUNT)]
    separator = "\t" if name.endswith("tsv") else ","
    lines = [separator.join(row) for row in (columns, *rows)]
    (folder / name).write_text("\n".join(lines) + "\n")


def sst2(folder: Path) -> None:
    for split in ("train", "dev"):
        table(folder, f"{split}.tsv", "sentence", "label")


def qqp(folder: Path) -> None:
    for split in ("train", "dev"):
        table(folder, f"{split}.tsv", "id", "question1", "question2", "is_duplicate")


def mnli(folder: Path) -> None:
    rows = ["sentence1\tsentence2\tgold_label", *["a b\tc d\tneutral"] * COUNT]
    for name in ("train", "dev_matched", "dev_mismatched"):
        (folder / f"{name}.tsv").write_text("\n".join(rows))


def qnli(folder: Path) -> None:
    rows = ["question\tsentence\tlabel", *["who?\the did.\tentailment"] * COUNT]
    for name in ("train", "dev"):
        (folder / f"{name}.tsv").write_text("\n".join(rows))


def e2e(folder: Path) -> None:
    for name in ("trainset", "devset", "testset_w_refs"):
        rows = [f"food[{i // 2}],It serves {i}." for i in range(COUNT)]
        (folder / f"{name}.csv").write_text("\n".join(["mr,ref", *rows]))


def dart(folder: Path) -> None:
    notes = [{"source": "webnlg", "text": "A is B."}, {"source": "e2e", "text": "B it is."}]
    item = {"tripleset": [["A", "is", "B"]], "annotations": notes}
    for split in ("train", "dev", "test"):
        path = folder / f"dart-v1.1.1-full-{split}.json"
        path.write_text(json.dumps([item] * (COUNT // 2), indent=2))


def cifar10(folder: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (COUNT, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(COUNT, dtype=np.uint8) % 10
    arrays = {"train_images": images, "train_labels": labels}
    np.savez(folder / "images.npz", **arrays, test_images=images, test_labels=labels)


def cifar100(folder: Path) -> None:
    cifar10(folder)


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures take longer than these runs do, and have tests of their own."""
    monkeypatch.setattr(results, "write_report", lambda *_, **__: None)


WRITERS = (sst2, qqp, mnli, qnli, e2e, dart, cifar10, cifar100)


def test_every_named_set_is_tried_here() -> None:
    assert {write.__name__ for write in WRITERS} == set(PUBLISHED)


@pytest.mark.parametrize("write", one_in(3, WRITERS), ids=lambda write: write.__name__)
@pytest.mark.filterwarnings("ignore:the most frequent row")
def test_a_run_on_a_named_set(write: Callable[[Path], None], tmp_path: Path) -> None:
    name, folder, run = write.__name__, tmp_path / "data", tmp_path / "run"
    folder.mkdir()
    write(folder)
    facts = PUBLISHED[name]
    config = parse_config(
        {
            "task": facts.task,
            "seed": 0,
            "model": {"name": MODELS[facts.task]},
            "data": {"format": name, "path": str(folder), "max_length": 48},
            "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "clip_norm": 1.0},
            "training": {"expected_batch_size": 6, "num_steps": 2, "evaluate_every": 2},
        }
    )
    summary = execute(prepare(config, run)).summary
    assert summary["finished"]
    settings = GenerationConfig(max_new_tokens=4, num_beams=2)
    speaks = facts.task == "causal-lm"
    score, splits, generation = evaluate_run(
        run, generation=settings if speaks else GenerationConfig()
    )
    assert tuple(splits) == facts.heldout
    first = splits[facts.heldout[0]]
    assert first.score == pytest.approx(summary["heldout_score"], rel=1e-4)
    assert list(summary["heldout_scores"]) == list(splits)
    assert score == ("perplexity" if speaks else "accuracy")
    check_use(run, facts.task, generation)


def check_use(run: Path, task: str, generation: dict[str, Any] | None) -> None:
    if task == "causal-lm":
        assert generation is not None
        assert generation["num_references"] == COUNT
        assert generation["num_prompts"] == COUNT // 2
        assert all(math.isfinite(generation[metric]) for metric in generation["variants"])
        (answer,) = generate(run, ["A : is : B"], GenerationConfig(max_new_tokens=3, num_beams=2))
        assert isinstance(answer["text"], str)
    elif task == "text-classification":
        (answer,) = predict(run, ["a text\tand another"])
        assert answer["name"]
        if load_run(run).data.format == "sst2":
            assert predict(run, ["a text"])[0]["name"]
        else:
            # One text would be judged like a pair, and the answer would mean nothing.
            with pytest.raises(InvalidArgumentError, match="two texts with a tab between"):
                predict(run, ["a text"])


def test_texts_are_kept_for_scoring_elsewhere(tmp_path: Path) -> None:
    e2e(tmp_path)
    config = {
        "task": "causal-lm",
        "seed": 0,
        "model": {"name": "gpt2-tiny"},
        "data": {"format": "e2e", "path": str(tmp_path), "heldout_from_train": 4},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "clip_norm": 1.0},
        "training": {"expected_batch_size": 4, "num_steps": 1},
        "generation": {"split": "test", "max_new_tokens": 2, "max_prompts": 3, "bleu": "plain"},
    }
    summary = execute(prepare(parse_config(config), tmp_path / "run")).summary
    assert (summary["generation"]["split"], summary["generation"]["num_prompts"]) == ("test", 3)
    assert "tok:13a" in summary["generation"]["bleu_signature"]
    kept = tmp_path / "texts.jsonl"
    asked: dict[str, Any] = {"generation": GenerationConfig(max_new_tokens=2), "texts_to": kept}
    _, splits, held_back = evaluate_run(tmp_path / "run", **asked)
    assert held_back is not None
    assert list(splits) == ["held-back"]
    assert held_back["num_references"] == 4
    again = score_generated(
        [Generated(**json.loads(line)) for line in kept.read_text().splitlines()]
    )
    assert again.items() <= held_back.items()
    _, splits, test = evaluate_run(tmp_path / "run", split="test", **asked)
    assert test is not None
    assert (list(splits), test["split"], test["num_references"]) == (["test"], "test", COUNT)
