"""Public pre-training on tiny data: what is learnt from, what is written, what is never read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from shuffled_dpsgd.errors import DivergenceError, InvalidArgumentError
from shuffled_dpsgd.tasks import parse_config
from shuffled_dpsgd.tasks.task import build_task
from shuffled_dpsgd_experiments.pretraining import language_model, vision
from shuffled_dpsgd_experiments.pretraining.common import refuse_divergence
from shuffled_dpsgd_experiments.pretraining.language_model import read_corpus

transformers = pytest.importorskip("transformers")
SMALL = ["--hidden", "16", "--layers", "1", "--heads", "2", "--batch-size", "8", "--epochs", "2"]


@pytest.fixture
def dart(tmp_path: Path) -> Path:
    for split in ("train", "dev"):
        rows = [
            {
                "tripleset": [[f"Place {i}", "serves", "Thai"]],
                "annotations": [
                    {"source": "webnlg", "text": f"Place {i} serves Thai food."},
                    {"source": "e2e", "text": "a secret"},
                ],
            }
            for i in range(20)
        ]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        words = "sentence\tlabel\n" + "".join(f"a film of {i} hours\t1\n" for i in range(5))
        (tmp_path / f"{split}.tsv").write_text(words)
    return tmp_path


def test_a_language_model_learns_from_public_text_alone(dart: Path) -> None:
    out = dart / "out"
    more = ["--vocabulary", "300", "--positions", "64", "--max-length", "48", "--device", "cpu"]
    sets = ["--public", "dart", "--data", str(dart), "--texts", f"sst2={dart}", "--out", str(out)]
    path = language_model.main([*sets, *SMALL, *more, "--learning-rate", "0.01"])
    record = json.loads(path.read_text())
    assert "not private" in record["what"]
    assert (record["private_later"], record["excluded_sources"]) == ("e2e", ["e2e"])
    assert (record["train_records"], record["other_public_texts"]) == (20, 5)
    assert len(record["curve"]) == 2
    best = min(one["heldout_loss"] for one in record["curve"])
    assert record["heldout_loss"] == pytest.approx(best, abs=1e-3)
    assert record["curve"][1]["heldout_loss"] < record["curve"][0]["heldout_loss"]
    assert record["environment"]["hardware"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    text = "Café Adriatic: £30 ☂"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer(" secret")["input_ids"]) > len(tokenizer(" serves")["input_ids"])


def test_the_checkpoint_is_a_model_to_fine_tune(dart: Path) -> None:
    out = dart / "out"
    sets = ["--public", "dart", "--data", str(dart), "--out", str(out), "--max-records", "8"]
    language_model.main([*sets, *SMALL, "--vocabulary", "280", "--positions", "64"])
    config = parse_config(
        {
            "task": "causal-lm",
            "model": {"name": str(out)},
            "data": {"format": "dart", "path": str(dart), "max_length": 48},
            "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "clip_norm": 1.0},
            "training": {"expected_batch_size": 4, "num_steps": 1},
        }
    )
    task = build_task(config)
    assert task.model.config.resid_pdrop == 0.0  # type: ignore[union-attr]
    assert task.evaluate(task.model).score > 1.0


def test_the_private_set_is_never_part_of_the_corpus(dart: Path) -> None:
    corpus = read_corpus("dart", dart, {})
    assert not any("secret" in one.target for one in (*corpus.train, *corpus.heldout))
    with pytest.raises(InvalidArgumentError, match="--texts"):
        read_corpus("dart", dart, {"e2e": dart})


def test_a_vision_transformer_learns_cifar10(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(48) % 10
    images = np.repeat(labels * 25, 32 * 32 * 3).reshape(48, 32, 32, 3) + rng.integers(0, 5)
    arrays = {"train_images": images, "test_images": images[:20]}
    classes = {"train_labels": labels, "test_labels": labels[:20]}
    np.savez(tmp_path / "all.npz", **{k: v.astype(np.uint8) for k, v in arrays.items()}, **classes)
    out = tmp_path / "out"
    path = vision.main(
        ["--data", str(tmp_path / "all.npz"), "--out", str(out), *SMALL, "--stored", "bf16"]
    )
    record = json.loads(path.read_text())
    assert record["public"] == "cifar10"
    assert record["steps"] == 12
    assert 0.0 <= record["heldout_accuracy"] <= 1.0
    model = transformers.AutoModelForImageClassification.from_pretrained(out)
    assert model.config.id2label[3] == "cat"
    from shuffled_dpsgd.models import load_model

    weights = load_model(str(out), head="image", num_labels=10).state_dict().values()
    assert all(w.dtype == torch.float32 and torch.equal(w, w.bfloat16().float()) for w in weights)


def test_augmented_images_are_parts_of_the_image() -> None:
    images = torch.arange(32 * 32, dtype=torch.int64).reshape(1, 32, 32, 1) % 251 + 4
    images = images.expand(40, 32, 32, 3).to(torch.uint8)
    found = vision.augmented(images, torch.Generator().manual_seed(0))
    assert found.shape == (40, 3, 32, 32)
    seen = ((found + 1.0) * 127.5).round().to(torch.int64)
    # Pixels that are shown are as they were, in rows that are shifted and maybe turned round.
    middle = seen[:, 0, 15]
    kept = middle != 128
    steps = (middle[:, 1:] - middle[:, :-1]).abs()
    both = kept[:, 1:] & kept[:, :-1]
    assert set(steps[both].tolist()) <= {1, 250}
    grey = (seen[:, 0] == 128).float().mean(dim=(1, 2))
    assert grey.min() > 0.01
    assert grey.max() < 0.35
    assert len({tuple(row) for row in middle.tolist()}) > 10


@pytest.mark.slow
def test_nothing_is_needed_but_torch_transformers_and_numpy() -> None:
    """What a GPU machine may lack: typer, pydantic, datasets, dp-accounting, matplotlib."""
    code = (
        "import sys; absent = ['typer', 'rich', 'pydantic', 'datasets', 'dp_accounting', "
        "'matplotlib', 'sacrebleu', 'peft']; sys.modules.update(dict.fromkeys(absent)); "
        "import shuffled_dpsgd_experiments.pretraining.language_model, "
        "shuffled_dpsgd_experiments.pretraining.vision"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_padding_behind_a_text_changes_nothing_before_it_without_a_mask() -> None:
    options = language_model.parser().parse_args(
        ["--public", "dart", "--data", "x", "--out", "x", *SMALL]
    )
    tokenizer = language_model.learn_tokenizer(["a b c d"], 300)
    model = language_model.build(options, tokenizer).double().eval()
    ids = torch.tensor([[5, 6, 7], [5, 6, tokenizer.pad_token_id]])
    whole, alone = model(input_ids=ids).logits, model(input_ids=ids[1:, :2]).logits
    assert torch.allclose(whole[1:, :2], alone, rtol=1e-12, atol=1e-12)


def test_a_loss_that_is_no_number_ends_the_run_at_once() -> None:
    refuse_divergence(torch.tensor(1.0), 3)
    with pytest.raises(DivergenceError, match="nan after 3 steps"):
        refuse_divergence(torch.tensor(float("nan")), 3)
