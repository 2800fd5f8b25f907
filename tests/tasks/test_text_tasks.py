"""Text and image tasks from folders: encoding, padding, losses and a short private run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks import RunConfig, parse_config
from shuffled_dpsgd.tasks.audited import target_of
from shuffled_dpsgd.tasks.data.loading import Continuation, read_texts
from shuffled_dpsgd.tasks.run import execute, prepare
from shuffled_dpsgd.tasks.start import start_private
from shuffled_dpsgd.tasks.task import build_task
from shuffled_dpsgd.tasks.text import encode_continuations, evaluate_perplexity, uses_token_types
from shuffled_dpsgd.tasks.tokens import (
    PairIds,
    TokenCollate,
    Tokenizer,
    TokenRecords,
    continuation_labels,
    load_tokenizer,
)

pytest.importorskip("transformers")
SEPARATOR = 259


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [f"{'good' if i % 2 else 'bad'} film {i}\t{i % 2}" for i in range(16)]
    for split in ("train", "dev"):
        (tmp_path / f"{split}.tsv").write_text("sentence\tlabel\n" + "\n".join(rows) + "\n")
    rows = [f"food[{i}],It serves {i}." for i in range(16)]
    for split in ("trainset", "devset"):
        (tmp_path / f"{split}.csv").write_text("mr,ref\n" + "\n".join(rows) + "\n")
    images = np.random.default_rng(0).integers(0, 255, (12, 8, 8, 3), dtype=np.uint8)
    labels = np.arange(12) % 3
    np.savez(
        tmp_path / "images.npz",
        train_images=images,
        train_labels=labels,
        test_images=images,
        test_labels=labels,
    )
    return tmp_path


def config_for(task: str, model: str, layout: str, path: Path, **data: Any) -> RunConfig:
    return parse_config(
        {
            "task": task,
            "seed": 0,
            "model": {"name": model},
            "data": {"format": layout, "path": str(path), "max_length": 24} | data,
            "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "clip_norm": 1.0},
            "training": {"expected_batch_size": 6, "num_steps": 2, "evaluate_every": 1},
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "model", "layout", "score"),
    [
        ("text-classification", "bert-tiny", "sst2", "accuracy"),
        ("causal-lm", "gpt2-tiny", "e2e", "perplexity"),
        ("image-classification", "vit-tiny", "cifar", "accuracy"),
    ],
)
def test_every_task_trains_from_a_folder(
    data: Path, tmp_path: Path, task: str, model: str, layout: str, score: str
) -> None:
    stated = {"num_labels": 3} if layout == "cifar" else {}
    config = config_for(task, model, layout, data, **stated)
    result = execute(prepare(config, tmp_path / "out"))
    assert result.outcome.finished
    assert result.summary["score_name"] == score
    assert math.isfinite(result.summary["heldout_score"])
    assert result.summary["privacy_card"]["certified"]["kind"] == "proven"
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_low_rank_factors_train_and_are_saved_merged(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from transformers import AutoModelForSequenceClassification

    raw = config_for("text-classification", "bert-tiny", "sst2", data).to_json()
    config = parse_config(raw | {"model": {"name": "bert-tiny", "lora_rank": 2}})
    run = prepare(config, tmp_path / "out")
    trained = {n for n, p in run.task.model.named_parameters() if p.requires_grad}
    assert all("lora" in name or "classifier" in name for name in trained)
    last: dict[str, torch.Tensor] = {}
    inputs = {"input_ids": torch.tensor([[257, 97, 98, 258]])}

    def remember(record: Any, _: Any) -> None:
        with torch.no_grad():
            last["logits"] = run.task.model.eval()(**inputs).logits

    summary = execute(run, observers=(remember,)).summary
    assert 0 < summary["trainable_parameters"] < summary["total_parameters"] / 2
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "model")
    torch.testing.assert_close(saved.eval()(**inputs).logits, last["logits"], rtol=1e-3, atol=1e-4)


def test_limits_are_respected(data: Path) -> None:
    config = config_for("text-classification", "bert-tiny", "sst2", data, max_train_examples=7)
    assert len(build_task(config).train_data) == 7


def test_records_held_back_are_scored_and_not_trained_on(data: Path) -> None:
    config = config_for("text-classification", "bert-tiny", "sst2", data, heldout_from_train=6)
    splits = read_texts(config.data, 2)
    (back,) = splits.heldout.values()
    assert (len(splits.train), len(back)) == (10, 6)
    assert not {one.texts for one in splits.train} & {one.texts for one in back}
    assert list(build_task(config).evaluations) == ["held-back"]
    few = config_for(
        "text-classification", "bert-tiny", "sst2", data, heldout_from_train=6,
        max_heldout_examples=2, max_train_examples=7,
    )  # fmt: skip
    limited = read_texts(few.data, 2)
    assert (len(limited.train), len(limited.heldout["held-back"])) == (7, 2)
    assert {one.texts for one in limited.train} < {one.texts for one in splits.train}


def test_a_batch_larger_than_the_data_is_refused(data: Path) -> None:
    config = config_for("text-classification", "bert-tiny", "sst2", data, max_train_examples=5)
    with pytest.raises(InvalidArgumentError, match="expected_batch_size"):
        build_task(config)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"task": "causal-lm"}, r"data\.format"),
        ({"model": {"name": "vit-tiny"}}, r"model\.name"),
        ({"model": {"name": "no/such-model"}}, r"model\.name"),
        ({"data": {"format": "sst2"}}, r"data\.path"),
    ],
)
def test_mismatches_are_refused(data: Path, changes: dict[str, Any], match: str) -> None:
    raw = config_for("text-classification", "bert-tiny", "sst2", data).to_json()
    with pytest.raises(InvalidArgumentError, match=match):
        build_task(parse_config(raw | changes))


@pytest.mark.parametrize(
    ("task", "layout", "num_labels", "match"),
    [
        (
            "image-classification",
            "cifar",
            None,
            r"data\.num_labels: expected the number of classes",
        ),
        ("image-classification", "cifar", 2, "a class from 0 to 1"),
        ("text-classification", "sst2", 3, "2, as sst2 has"),
    ],
)
def test_the_number_of_classes_is_stated(
    data: Path, task: str, layout: str, num_labels: int | None, match: str
) -> None:
    stated = {} if num_labels is None else {"num_labels": num_labels}
    model = "bert-tiny" if layout == "sst2" else "vit-tiny"
    with pytest.raises(InvalidArgumentError, match=match):
        build_task(config_for(task, model, layout, data, **stated))


def test_a_file_says_whose_a_record_is(tmp_path: Path) -> None:
    for split in ("train", "dev"):
        rows = [f"film {i},{i % 2},p{i // 4}" for i in range(24)]
        (tmp_path / f"{split}.csv").write_text("\n".join(["text,label,owner", *rows]) + "\n")
    own: dict[str, Any] = {"text_columns": ["text"], "num_labels": 2}
    config = config_for("text-classification", "bert-tiny", "csv", tmp_path, **own)
    units = replace(config.privacy, unit="owner", records_per_unit=2)
    task = build_task(replace(config, privacy=units))
    assert (task.dataset_size, len(task.train_data)) == (6, 24)
    changed = replace(config, privacy=units)
    private = start_private(changed, task.model, dataset_size=task.dataset_size, units=task.units)
    for batch in private.batches(task.train_data, collate=task.collate):
        private.backward(task.losses(task.model, batch))
        private.step()
    assert private.ledger.spent == 2
    audited = target_of(changed, task)
    assert (audited.size, audited.start(audited.size).units) == (6, task.units)
    with pytest.raises(InvalidArgumentError, match=r"privacy\.records_per_unit"):
        start_private(changed, task.model, dataset_size=6)


def test_classes_of_an_own_file_may_have_names(tmp_path: Path) -> None:
    """Their order is stated, so nothing about the records is published with the model."""
    for split in ("train", "dev"):
        rows = [f"film {i},{'good' if i % 3 else 'bad'}" for i in range(12)]
        (tmp_path / f"{split}.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    own: dict[str, Any] = {"text_columns": ["text"], "label_names": ["bad", "good"]}
    task = build_task(config_for("text-classification", "bert-tiny", "csv", tmp_path, **own))
    assert task.model.config.id2label == {0: "bad", 1: "good"}  # type: ignore[union-attr]
    assert task.collate is not None
    assert task.collate([task.train_data[i] for i in range(4)])[1].tolist() == [0, 1, 1, 0]
    own["label_names"] = ["bad", "fair"]
    with pytest.raises(InvalidArgumentError, match=r"train\.csv:3: .* one of \['bad', 'fair'\]"):
        build_task(config_for("text-classification", "bert-tiny", "csv", tmp_path, **own))


@pytest.mark.parametrize(
    ("task", "layout"), [("text-classification", "sst2"), ("causal-lm", "e2e")]
)
def test_a_model_that_is_not_there_is_said_to_be_none(data: Path, task: str, layout: str) -> None:
    """The weights are looked for before the tokenizer, whose error says less."""
    with pytest.raises(InvalidArgumentError, match=r"model\.name: expected one of .*bert-tiny"):
        build_task(config_for(task, "bert-tinny", layout, data))


def test_a_record_of_a_class_of_its_own_changes_no_model(data: Path) -> None:
    """The classifier's width is published: counted, it would give that record away."""
    rows = [f"film {i}\t0" for i in range(16)]
    for split in ("train", "dev"):
        (data / f"{split}.tsv").write_text("sentence\tlabel\n" + "\n".join(rows) + "\n")
    one_class = build_task(config_for("text-classification", "bert-tiny", "sst2", data))
    images = dict(np.load(data / "images.npz"))
    images["train_labels"] = images["test_labels"] = np.zeros(12, dtype=np.int64)
    np.savez(data / "images.npz", **images)
    config = config_for("image-classification", "vit-tiny", "cifar", data, num_labels=3)
    widths = [
        task.model.config.num_labels  # type: ignore[union-attr]
        for task in (one_class, build_task(config))
    ]
    assert widths == [2, 3]


def test_pairs_say_which_text_a_token_belongs_to(tmp_path: Path) -> None:
    for split in ("train", "dev"):
        rows = [f"who {i}?\the {'did' * (i % 3)}.\tentailment" for i in range(12)]
        (tmp_path / f"{split}.tsv").write_text("question\tsentence\tlabel\n" + "\n".join(rows))
    task = build_task(config_for("text-classification", "bert-tiny", "qnli", tmp_path))
    assert task.collate is not None
    inputs, _ = task.collate([task.train_data[0], task.train_data[2]])
    for ids, types, mask in zip(
        inputs["input_ids"], inputs["token_type_ids"], inputs["attention_mask"], strict=True
    ):
        second = ids.tolist().index(SEPARATOR) + 1
        expected = [int(second <= place < int(mask.sum())) for place in range(len(ids))]
        assert types.tolist() == expected
    embeddings = task.model.get_submodule("bert.embeddings.token_type_embeddings")
    task.losses(task.model, (inputs, torch.tensor([0, 0]))).sum().backward()
    gradient = embeddings.get_parameter("weight").grad
    assert gradient is not None
    assert gradient.abs().sum(dim=1).min() > 0


def test_token_types_are_left_out_where_a_model_has_none() -> None:
    from shuffled_dpsgd.models import build_model

    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "n_embd": 8}
    uses = {
        name: uses_token_types(build_model(name, device="meta", settings=small))
        for name in ("bert-tiny", "roberta-base", "distilbert-base", "gpt2-tiny")
    }
    assert uses == {
        "bert-tiny": True,
        "roberta-base": False,
        "distilbert-base": False,
        "gpt2-tiny": False,
    }


def test_only_the_target_is_scored() -> None:
    tokenizer = load_tokenizer("gpt2-tiny", marked=False)
    samples = encode_continuations(
        [Continuation(prompt="ab", target="c"), Continuation(prompt="a" * 50, target="xyz")],
        tokenizer,
        max_length=16,
    )
    inputs, labels = TokenCollate(pad_id=tokenizer.pad_id, labels=continuation_labels)(samples)
    assert inputs["input_ids"].shape == labels.shape
    assert inputs["input_ids"].shape[1] <= 16
    first = labels[0][labels[0] != -100].tolist()
    assert bytes(first[:-1]).decode() == " c"
    assert first[-1] == tokenizer.end_id
    assert torch.equal(inputs["attention_mask"][0].sum(), torch.tensor(len(samples[0][0])))
    assert bytes(labels[1][labels[1] != -100].tolist()[:-1]).decode() == " xyz"


class Diverged(torch.nn.Module):
    """A language model that is sure of the first token, wherever it is."""

    def __init__(self) -> None:
        super().__init__()
        self.sure = torch.nn.Parameter(torch.tensor(1e4))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
        logits = torch.zeros(*input_ids.shape, 260)
        logits[..., 0] = self.sure
        return SimpleNamespace(logits=logits)


def test_a_perplexity_beyond_any_float_is_infinite_and_no_error() -> None:
    records = TokenRecords([([97, 98, 99], 1)])
    collate = TokenCollate(pad_id=256, labels=continuation_labels)
    found = evaluate_perplexity(Diverged(), records, collate)
    assert found.score == math.inf
    assert found.loss == pytest.approx(1e4)


def test_many_texts_are_encoded_as_one_by_one() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[SEP]", "a", "b", "c"]
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]")
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A [SEP]", pair="$A [SEP] $B [SEP]", special_tokens=[("[SEP]", 2)]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", sep_token="[SEP]", unk_token="[UNK]"
    )
    tokenizer = Tokenizer(fast)
    for texts in ([("a b c a b",), ("d",), ("",)], [("a b c", "c b"), ("a", "b c a b c")]):
        one_by_one = [fast(*each, truncation=True, max_length=5)["input_ids"] for each in texts]
        assert tokenizer.encode(texts, max_length=5) == one_by_one
    plain = ["a b", "", "c d"]
    one_by_one = [fast(text, add_special_tokens=False)["input_ids"] for text in plain]
    assert tokenizer.encode_plain(plain) == one_by_one
    assert tokenizer.encode([], max_length=5) == tokenizer.encode_plain([]) == []


def test_bytes_are_their_own_ids_between_marks() -> None:
    tokenizer = load_tokenizer("bert-tiny")
    assert tokenizer.encode([("hi",)], max_length=8) == [[257, 104, 105, 258]]
    assert tokenizer.encode([("hi there",)], max_length=4) == [[257, 104, 105, 258]]
    (pair,) = tokenizer.encode([("a", "b")], max_length=8, typed=True)
    assert pair == PairIds([257, 97, SEPARATOR, 98, 258], [0, 0, 0, 1, 1])
    for text in ("café — ☂", "<end> <pad>", " a  b\n", ""):
        (ids,) = tokenizer.encode_plain([text])
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text
    assert load_tokenizer("gpt2-tiny", marked=False).encode([("a",)], max_length=4) == [[97]]
