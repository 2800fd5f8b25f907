"""Bad input, one table: exit status 2, one line that says what to do, nothing spent, nothing lost.

Every case runs the command in this process. A case prepares a folder and returns the arguments;
afterwards everything that was in the folder must be as it was, and nothing new may be there.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from shuffled_dpsgd.cli.main import app
from shuffled_dpsgd.training import PrivacyCard, PrivacyOptions, make_plan, write_card

pytest.importorskip("transformers")
pytest.importorskip("sklearn")

Arguments = list[str]
Case = Callable[[Path], Arguments]
MODELS = {
    "text-classification": "bert-tiny",
    "causal-lm": "gpt2-tiny",
    "image-classification": "vit-tiny",
    "digits": "vit-digits",
}
TASKS = {
    "sst2": "text-classification",
    "qnli": "text-classification",
    "csv": "text-classification",
    "jsonl": "text-classification",
    "e2e": "causal-lm",
    "dart": "causal-lm",
    "cifar": "image-classification",
    "cifar10": "image-classification",
    "qqp": "text-classification",
    "mnli": "text-classification",
    "digits": "digits",
}
COLUMNS: dict[str, Any] = {"text_columns": ["text"], "num_labels": 2}
EXTRA: dict[str, dict[str, Any]] = {"csv": COLUMNS, "jsonl": COLUMNS, "cifar": {"num_labels": 3}}
NUM_RECORDS = 12


# -- good data, and a run's file ------------------------------------------------------------------


def write_good(folder: Path) -> None:
    """Every layout in one folder, all of it fine."""
    numbers = range(NUM_RECORDS)
    for split in ("train", "dev"):
        lines(folder / f"{split}.tsv", [TSV, *GOOD_ROWS])
        lines(folder / f"{split}.csv", ["text,label", *(f"film {i},{i % 2}" for i in numbers)])
        items = [{"text": f"film {i}", "label": i % 2} for i in numbers]
        lines(folder / f"{split}.jsonl", map(json.dumps, items))
    for split in ("trainset", "devset"):
        lines(folder / f"{split}.csv", ["mr,ref", *(f"food[{i}],It serves {i}." for i in numbers)])


def lines(path: Path, content: Any, encoding: str = "utf-8") -> None:
    path.write_text("\n".join(content) + "\n", encoding=encoding)


def images(folder: Path, **changes: Any) -> None:
    """An `.npz` that is fine but for `changes`; None leaves an array out."""
    pixels = np.random.default_rng(0).integers(0, 255, (NUM_RECORDS, 8, 8, 3), dtype=np.uint8)
    labels = np.arange(NUM_RECORDS) % 3
    arrays = {
        "train_images": pixels,
        "train_labels": labels,
        "test_images": pixels,
        "test_labels": labels,
    }
    kept = {name: array for name, array in (arrays | changes).items() if array is not None}
    np.savez(folder / "images.npz", **kept)


def settings(layout: str, **changes: Any) -> dict[str, Any]:
    task = TASKS[layout]
    raw: dict[str, Any] = {
        "task": task,
        "seed": 0,
        "model": {"name": MODELS[task]},
        "data": {"format": layout, **EXTRA.get(layout, {})},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "clip_norm": 1.0},
        "optimizer": {},
        "training": {"expected_batch_size": 6, "num_steps": 2},
    }
    if layout != "digits":
        raw["data"]["path"] = "."
    for place, value in changes.items():
        section, _, key = place.rpartition("__")
        table = raw[section] if section else raw
        if value is None:
            table.pop(key)
        else:
            table[key] = value
    return raw


def toml(raw: dict[str, Any]) -> str:
    top = [f"{key} = {json.dumps(v)}" for key, v in raw.items() if not isinstance(v, dict)]
    for name, table in raw.items():
        if isinstance(table, dict):
            top += [f"[{name}]", *(f"{key} = {_value(v)}" for key, v in table.items())]
    return "\n".join(top) + "\n"


def _value(value: Any) -> str:
    return str(value) if isinstance(value, float) else json.dumps(value)


def run_file(folder: Path, layout: str, **changes: Any) -> Arguments:
    path = folder / "run.toml"
    path.write_text(toml(settings(layout, **changes)), encoding="utf-8")
    return ["train", "--config", str(path), "--output", str(folder / "out")]


# -- cases ----------------------------------------------------------------------------------------


def changed(layout: str, **changes: Any) -> Case:
    """Good data, and a run's file with these values."""

    def prepare(folder: Path) -> Arguments:
        write_good(folder)
        if layout == "cifar":
            images(folder)
        return run_file(folder, layout, **changes)

    return prepare


def flagged(layout: str, *flags: str, **changes: Any) -> Case:
    """Good data, a run's file with these values, and flags."""
    return lambda folder: [*changed(layout, **changes)(folder), *flags]


def text(layout: str, name: str, *content: str, encoding: str = "utf-8") -> Case:
    """Good data but for one file with these lines."""

    def prepare(folder: Path) -> Arguments:
        write_good(folder)
        lines(folder / name, content, encoding)
        return run_file(folder, layout)

    return prepare


def raw(layout: str, name: str, content: bytes) -> Case:
    """Good data but for one file with these bytes, in place of any of the same stem."""

    def prepare(folder: Path) -> Arguments:
        write_good(folder)
        (folder / name.removesuffix(".xz")).unlink(missing_ok=True)
        (folder / name).write_bytes(content)
        return run_file(folder, layout)

    return prepare


def without(layout: str, name: str) -> Case:
    def prepare(folder: Path) -> Arguments:
        write_good(folder)
        (folder / name).unlink()
        return run_file(folder, layout)

    return prepare


def arrays(**changes: Any) -> Case:
    def prepare(folder: Path) -> Arguments:
        images(folder, **changes)
        return run_file(folder, "cifar")

    return prepare


def truncated_npz(folder: Path) -> Arguments:
    images(folder)
    path = folder / "images.npz"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return run_file(folder, "cifar")


def two_npz(folder: Path) -> Arguments:
    images(folder)
    shutil.copy(folder / "images.npz", folder / "more.npz")
    return run_file(folder, "cifar")


def npz_of_text(folder: Path) -> Arguments:
    (folder / "images.npz").write_text("not a zip")
    return run_file(folder, "cifar")


def npz_empty(folder: Path) -> Arguments:
    (folder / "images.npz").touch()
    return run_file(folder, "cifar")


def npz_is_npy(folder: Path) -> Arguments:
    with open(folder / "images.npz", "wb") as file:
        np.save(file, np.zeros(3))
    return run_file(folder, "cifar")


def digits(*flags: str) -> Case:
    return lambda folder: ["train", "digits", "--output", str(folder / "out"), *flags]


def verb(*words: str) -> Case:
    return lambda folder: list(words)


def resume(broken: Callable[[Path], object]) -> Case:
    """A folder that looks like a run's, but for what `broken` does to it."""

    def prepare(folder: Path) -> Arguments:
        run = folder / "run"
        run.mkdir()
        (run / "run.json").write_text(json.dumps(settings("digits")))
        broken(run)
        return ["train", "--resume", str(run)]

    return prepare


def output_at(place: str, *, file: str = "") -> Case:
    def prepare(folder: Path) -> Arguments:
        if file:
            (folder / file).write_text("in the way")
        return ["train", "digits", "--output", str(folder / place)]

    return prepare


def toml_bytes(content: bytes) -> Case:
    def prepare(folder: Path) -> Arguments:
        (folder / "run.toml").write_bytes(content)
        return ["train", "--config", str(folder / "run.toml"), "--output", str(folder / "out")]

    return prepare


def model_folder(config: str, weights: bytes | None) -> Case:
    def prepare(folder: Path) -> Arguments:
        write_good(folder)
        (folder / "saved").mkdir()
        (folder / "saved" / "config.json").write_text(config)
        if weights is not None:
            (folder / "saved" / "model.safetensors").write_bytes(weights)
        return run_file(folder, "sst2", model__name="./saved")

    return prepare


def beside_a_file(*words: str) -> Case:
    def prepare(folder: Path) -> Arguments:
        (folder / "file").write_text("in the way")
        return list(words)

    return prepare


def a_run(
    *words: str, summary: Any, more: Sequence[str] = (), card: PrivacyCard | None = None
) -> Case:
    """A verb on a run's folder with this summary; only a finished one has a model's folder."""

    def prepare(folder: Path) -> Arguments:
        run = folder / "run"
        run.mkdir()
        (run / "run.json").write_text(json.dumps(settings("digits")))
        if summary is not None:
            (run / "model").mkdir()
            (run / "model" / "model.safetensors").write_bytes(b"weights")
            found = {"finished": True, **summary} if isinstance(summary, dict) else summary
            if card is not None:
                (run / "privacy_card.json").write_text(card.dumps())
            (run / "summary.json").write_text(json.dumps(found))
        return [*words, "run", *more]

    return prepare


PLAN = make_plan(
    PrivacyOptions(
        dataset_size=100,
        expected_batch_size=10,
        num_steps=2,
        noise_multiplier=1.0,
        delta=1e-3,
        shuffle="off",
    ),
    sizes={"w": 4},
    moved=frozenset(),
)
CARD = write_card(PLAN, num_steps=2).about(weights="others")
PIXELS = np.zeros((NUM_RECORDS, 8, 8, 3), dtype=np.uint8)
NAN = PIXELS.astype(np.float32) * np.nan
ONE_NAN = PIXELS.astype(np.float32)
ONE_NAN[3, 0, 0, 0] = np.nan
TSV = "sentence\tlabel"
GOOD_ROWS = [f"film {i}\t{i % 2}" for i in range(NUM_RECORDS)]
XZ = lzma.compress("\n".join([TSV, *GOOD_ROWS, ""]).encode())
WORDS = np.array(["cat"] * NUM_RECORDS)
OBJECTS = np.array([{}] * NUM_RECORDS, dtype=object)
IN_EPOCHS: dict[str, Any] = {"training__num_steps": None, "training__epochs": 3}
PLAN = ["--noise-multiplier", "1", "--delta", "1e-5"]
CALIBRATE = ["calibrate", "--delta", "1e-5", "--dataset-size", "100", "--epochs", "1"]
ADVISE = ["advise", "--delta", "1e-5", "--dataset-size", "10", "--epochs", "1", "--dimension", "5"]
EXAMINE = ["examine", "--delta", "1e-5", "--dataset-size", "100", "--epochs", "1", "--epsilon", "1"]

CASES: dict[str, tuple[Case, str]] = {
    # Text that cannot be read.
    "toml in latin-1": (toml_bytes("task = 'café'".encode("latin-1")), "UTF-8"),
    "toml in utf-16": (toml_bytes("task = 'x'".encode("utf-16")), "UTF-8"),
    "toml that is none": (toml_bytes(b"task ="), "TOML"),
    "toml that is empty": (toml_bytes(b""), "model.name"),
    "toml with a null": (toml_bytes(b"task = 'x'\0"), "TOML"),
    "toml that is a folder": (lambda f: ["train", "--config", str(f)], "a TOML file"),
    "toml that is not there": (verb("train", "--config", "absent.toml"), "a TOML file"),
    "tsv in latin-1": (text("sst2", "train.tsv", TSV, "café\t1", encoding="latin-1"), "tsv:2"),
    "tsv in utf-16": (text("sst2", "train.tsv", TSV, "a\t1", encoding="utf-16"), "tsv:1"),
    "csv in latin-1": (text("csv", "dev.csv", "text,label", "é,1", encoding="latin-1"), "csv:2"),
    "jsonl in latin-1": (text("jsonl", "train.jsonl", '{"é": 1}', encoding="latin-1"), "jsonl:1"),
    "xz that is none": (raw("sst2", "train.tsv.xz", b"sentence\tlabel\n"), ".xz file"),
    "xz cut short": (raw("sst2", "train.tsv.xz", XZ[:-20]), ".xz file"),
    "xz cut to nothing": (raw("sst2", "train.tsv.xz", b""), "train.tsv.xz"),
    "xz with a flipped byte": (
        raw("sst2", "train.tsv.xz", XZ[:40] + bytes([XZ[40] ^ 255]) + XZ[41:]),
        ".xz file",
    ),
    # Tables.
    "no training file": (without("sst2", "train.tsv"), "train.tsv"),
    "no held-out file": (without("sst2", "dev.tsv"), "dev.tsv"),
    "no held-out csv": (without("csv", "dev.csv"), "heldout_from_train"),
    "an empty file": (text("sst2", "train.tsv"), "columns"),
    "a header alone": (text("sst2", "train.tsv", TSV), "expected_batch_size"),
    "held-out header alone": (text("sst2", "dev.tsv", TSV), "held-out record"),
    "held-out jsonl empty": (raw("jsonl", "dev.jsonl", b""), "held-out record"),
    "another header": (text("sst2", "train.tsv", "text\tlabel", "a\t1"), "sentence"),
    "a column twice": (text("sst2", "train.tsv", "label\tsentence\tlabel", "1\ta\t0"), "twice"),
    "a cell too many": (text("sst2", "train.tsv", TSV, "a\tb\t1"), "tsv:2"),
    "a cell too few": (text("sst2", "dev.tsv", TSV, "a\t1", "b"), "dev.tsv:3"),
    "a blank line": (text("sst2", "train.tsv", TSV, "a\t1", "", "b\t0"), "tsv:3"),
    "csv with an open quote": (text("csv", "train.csv", "text,label", '"a,1', "b,0"), "csv:2"),
    "csv with a short row": (text("csv", "train.csv", "text,label", "a"), "csv:2"),
    "csv with other columns": (text("csv", "train.csv", "words,label", "a,1"), "text"),
    "csv separated by semicolons": (text("csv", "train.csv", "text;label", "a;1"), "columns"),
    "e2e with a short row": (text("e2e", "trainset.csv", "mr,ref", "a"), "csv:2"),
    "e2e without a column": (text("e2e", "trainset.csv", "mr,text", "a,b"), "ref"),
    "jsonl that is json": (text("jsonl", "train.jsonl", "[", "]"), "jsonl:1"),
    "jsonl of lists": (text("jsonl", "train.jsonl", "[1, 2]"), "JSON object"),
    "jsonl without a key": (text("jsonl", "train.jsonl", '{"text": "a"}'), "label"),
    "jsonl with a null text": (text("jsonl", "train.jsonl", '{"text": null, "label": 1}'), "text"),
    "jsonl with a number": (text("jsonl", "train.jsonl", '{"text": 3, "label": 1}'), "jsonl:1"),
    "dart without triples": (text("dart", "train.jsonl", '{"annotations": []}'), "tripleset"),
    "dart with flat triples": (
        text("dart", "train.jsonl", '{"tripleset": ["a"], "annotations": []}'),
        "tripleset",
    ),
    "dart with a pair": (
        text("dart", "train.jsonl", '{"tripleset": [["a", "b"]], "annotations": []}'),
        "jsonl:1: expected lists of three texts",
    ),
    "dart with a bare note": (
        text("dart", "train.jsonl", '{"tripleset": [["a", "b", "c"]], "annotations": ["b"]}'),
        "annotations",
    ),
    # Classes.
    "a word for a class": (text("sst2", "train.tsv", TSV, "a\tpos"), "train.tsv:2"),
    "a fraction for a class": (text("sst2", "train.tsv", TSV, "a\t1", "b\t1.0"), "tsv:3"),
    "a negative class": (text("sst2", "train.tsv", TSV, *GOOD_ROWS, "b\t-1"), "tsv:14"),
    "a class too high": (text("sst2", "train.tsv", TSV, *GOOD_ROWS, "b\t5"), "from 0 to 1"),
    "a held-out class too high": (text("sst2", "dev.tsv", TSV, "b\t2"), "dev.tsv:2"),
    "no class": (text("sst2", "train.tsv", TSV, "a\t"), "tsv:2"),
    "a class with a space": (text("sst2", "train.tsv", TSV, "a\t 1"), "tsv:2"),
    "a word for a class, csv": (text("csv", "train.csv", "text,label", "a,pos"), "csv:2"),
    "a text for a class, jsonl": (
        text("jsonl", "train.jsonl", '{"text": "a", "label": "1"}'),
        "whole number",
    ),
    "a fraction, jsonl": (text("jsonl", "train.jsonl", '{"text": "a", "label": 1.0}'), "jsonl:1"),
    "a truth, jsonl": (text("jsonl", "train.jsonl", '{"text": "a", "label": true}'), "jsonl:1"),
    "a null class, jsonl": (
        text("jsonl", "train.jsonl", '{"text": "a", "label": null}'),
        "jsonl:1",
    ),
    "another word in qnli": (
        text("qnli", "train.tsv", "question\tsentence\tlabel", "a\tb\tmaybe"),
        "entailment",
    ),
    "another word in mnli": (
        text("mnli", "train.tsv", "sentence1\tsentence2\tgold_label", "a\tb\tmaybe"),
        "train.tsv:2",
    ),
    "a broken line in qqp": (
        text("qqp", "train.tsv", "id\tquestion1\tquestion2\tis_duplicate", "1\ta\tb\t1", "2\ta"),
        "train.tsv:3",
    ),
    "dart that is no list": (raw("dart", "dev.json", b"{}"), "tripleset"),
    "no cifar": (without("cifar10", "dev.csv"), "exactly one .npz"),
    "classes not stated": (changed("csv", data__num_labels=None), "num_labels"),
    "one class": (changed("csv", data__num_labels=1), "num_labels"),
    "three classes of sst2": (changed("sst2", data__num_labels=3), "2, as sst2"),
    # Images.
    "npz cut short": (truncated_npz, "images.npz"),
    "npz of text": (npz_of_text, "images.npz"),
    "npz of no bytes": (npz_empty, "images.npz"),
    "npz that is npy": (npz_is_npy, "single array"),
    "two npz": (two_npz, "exactly one"),
    "no npz": (lambda folder: run_file(folder, "cifar"), "exactly one"),
    "npz without labels": (arrays(train_labels=None), "train_labels"),
    "npz without a test set": (arrays(test_images=None), "test_images"),
    "npz of objects": (arrays(train_images=OBJECTS), "objects"),
    "npz of no images": (
        arrays(train_images=PIXELS[:0], train_labels=np.arange(0)),
        "expected_batch_size",
    ),
    "npz of no held-out images": (
        arrays(test_images=PIXELS[:0], test_labels=np.arange(0)),
        "held-out record",
    ),
    "grey images": (arrays(train_images=PIXELS[..., 0]), "numpy.repeat"),
    "grey images of one channel": (arrays(train_images=PIXELS[..., :1]), "numpy.repeat"),
    "channels first": (arrays(train_images=PIXELS.transpose(0, 3, 1, 2)), "transpose"),
    "four channels": (arrays(train_images=np.concatenate([PIXELS, PIXELS[..., :1]], -1)), "3)"),
    "flat images": (arrays(train_images=PIXELS.reshape(NUM_RECORDS, -1)), "3)"),
    "images of no width": (arrays(train_images=PIXELS[:, :, :0]), "3)"),
    "images in [0, 1]": (arrays(train_images=PIXELS / 255.0), "* 255"),
    "images of 64 bits": (arrays(test_images=PIXELS.astype(np.int64)), "uint8"),
    "not a number in an image": (arrays(train_images=ONE_NAN), "uint8"),
    "no number in any image": (arrays(test_images=NAN), "uint8"),
    "words for classes": (arrays(train_labels=WORDS), "whole number"),
    "fractions for classes": (arrays(train_labels=np.arange(NUM_RECORDS) % 3 / 1.0), "whole"),
    "one-hot classes": (arrays(train_labels=np.eye(NUM_RECORDS, dtype=int)), "whole number"),
    "a negative class, npz": (arrays(train_labels=np.arange(NUM_RECORDS) % 3 - 1), "record 0"),
    "a class too high, npz": (arrays(test_labels=np.arange(NUM_RECORDS)), "record 3"),
    "fewer classes than images": (arrays(train_labels=np.arange(3)), "12 images"),
    # Settings of a file.
    "a negative learning rate": (changed("sst2", optimizer__learning_rate=-1), "learning_rate"),
    "no learning rate": (changed("sst2", optimizer__learning_rate=0), "learning_rate"),
    "learning rate nan": (changed("sst2", optimizer__learning_rate=float("nan")), "learning_rate"),
    "learning rate inf": (changed("sst2", optimizer__learning_rate=float("inf")), "learning_rate"),
    "learning rate in words": (changed("sst2", optimizer__learning_rate="1e-3"), "learning_rate"),
    "negative decay": (changed("sst2", optimizer__weight_decay=-0.1), "weight_decay"),
    "momentum of adam": (changed("sst2", optimizer__momentum=0.9), "momentum"),
    "momentum of one": (
        changed("sst2", optimizer__name="sgd", optimizer__momentum=1.0),
        "momentum",
    ),
    "another optimizer": (changed("sst2", optimizer__name="lion"), "optimizer.name"),
    "negative warm-up": (changed("sst2", optimizer__warmup_steps=-1), "warmup_steps"),
    "a warm-up beyond the steps": (
        changed("sst2", optimizer__warmup_steps=99),
        "optimizer.warmup_steps: expected at most ",
    ),
    "a warm-up beyond the epochs": (
        changed("sst2", optimizer__warmup_steps=7, **IN_EPOCHS),
        "optimizer.warmup_steps: expected at most 6, the number of steps of the run, got 7; lower",
    ),
    "a warm-up beyond the flags": (
        flagged("sst2", "--epochs", "1", optimizer__warmup_steps=4, **IN_EPOCHS),
        "optimizer.warmup_steps: expected at most 2",
    ),
    "cuda that is not there": (changed("sst2", training__device="cuda:99"), "training.device"),
    "another device": (changed("sst2", training__device="tpu"), "training.device"),
    "the meta device": (changed("sst2", training__device="meta"), "training.device"),
    "never evaluated": (changed("sst2", training__evaluate_every=0), "evaluate_every"),
    "never saved": (changed("sst2", training__checkpoint_every=0), "checkpoint_every"),
    "no threads": (changed("sst2", training__num_threads=0), "num_threads"),
    "sharded by one process": (
        changed("sst2", training__sharding="sharded"),
        "start the command with torchrun --nproc-per-node 2 or more",
    ),
    "copies without nodes": (
        changed("sst2", training__sharding="hybrid"),
        "'hybrid' on several nodes of as many ranks",
    ),
    "sharding unheard of": (changed("sst2", training__sharding="fsdp"), "sharding"),
    "views of a sentence": (
        changed("sst2", training__augmentation_multiplicity=2),
        "only images have views",
    ),
    "views in shards": (
        changed("cifar", training__augmentation_multiplicity=2, training__sharding="sharded"),
        "0 for a sharded model",
    ),
    "half a precision": (changed("sst2", training__precision="fp16"), "precision"),
    "a batch too large": (changed("sst2", training__expected_batch_size=13), "12"),
    "no batch": (changed("sst2", training__expected_batch_size=0), "expected_batch_size"),
    "steps and epochs": (changed("sst2", training__epochs=1), "exactly one"),
    "no end": (changed("sst2", training__num_steps=None), "exactly one"),
    "negative steps": (changed("sst2", training__num_steps=-3), "num_steps"),
    "no delta": (changed("sst2", privacy__delta=None), "privacy.delta"),
    "delta of one": (changed("sst2", privacy__delta=1.0), "privacy.delta"),
    "delta nan": (changed("sst2", privacy__delta=float("nan")), "privacy.delta"),
    "epsilon and noise": (changed("sst2", privacy__epsilon=1.0), "exactly one"),
    "epsilon in words": (changed("sst2", privacy__epsilon="one"), "privacy.epsilon"),
    "no clip": (changed("sst2", privacy__clip_norm=None), "privacy.clip_norm"),
    "a clip of nothing": (changed("sst2", privacy__clip_norm=0.0), "clip_norm"),
    "a clip nan": (changed("sst2", privacy__clip_norm=float("nan")), "clip_norm"),
    "another accounting": (changed("sst2", privacy__accounting="gdp"), "accounting"),
    "another method": (changed("sst2", privacy__method="dpsgd"), "privacy.method"),
    "a method misspelt": (changed("sst2", privacy__method="certifed"), "mean `certified`"),
    "a key misspelt": (changed("sst2", privacy__delta=None, privacy__delt=1e-3), "mean `delta`"),
    "no budget": (changed("sst2", privacy__noise_multiplier=None), "--epsilon"),
    "no table": (changed("sst2", privacy=3), "a table [privacy]"),
    "a section misspelt": (changed("sst2", training=None, trainig={}), "mean `training`"),
    "a method and its contrary": (
        changed("sst2", privacy__method="ghost", privacy__shuffle="every-step"),
        "privacy.shuffle",
    ),
    "non-private with noise": (
        changed("sst2", privacy__method="non-private"),
        "privacy.noise_multiplier",
    ),
    "embeddings in other words": (changed("sst2", model__embeddings="no"), "model.embeddings"),
    "embeddings that a head shares": (
        changed("e2e", model__embeddings="freeze"),
        "lm_head.weight shares",
    ),
    "embeddings and patterns": (
        changed("sst2", model__embeddings="freeze", model__freeze=["*.bias"]),
        "nothing beside freeze",
    ),
    "a negative seed": (changed("sst2", seed=-1), "seed"),
    "a seed in words": (changed("sst2", seed="now"), "seed"),
    "another task": (changed("sst2", task="translation"), "task"),
    "no task": (changed("sst2", task=None), "task"),
    "a misspelt key": (changed("sst2", privacy__epsilom=1.0), "did you mean `epsilon`"),
    "a misspelt section": (changed("sst2", privcy={"epsilon": 1.0}), "privcy"),
    "data of another task": (changed("sst2", task="causal-lm"), "data.format"),
    "digits from elsewhere": (changed("sst2", task="digits"), "data.format"),
    "a path for the digits": (changed("digits", data__path="here"), "data.path"),
    "columns for sst2": (changed("sst2", data__text_columns=["a"]), "does not use"),
    "no path": (changed("sst2", data__path=None), "data.path"),
    "a path that is not there": (changed("sst2", data__path="absent"), "data.path"),
    "no columns": (changed("csv", data__text_columns=[]), "text_columns"),
    "a split of no kind": (changed("sst2", data__heldout_split="train"), "data.heldout_split"),
    "two things to score": (
        changed("sst2", data__heldout_split="dev", data__heldout_from_train=2),
        "data.heldout_split",
    ),
    "all held back": (changed("sst2", data__heldout_from_train=12), "data.heldout_from_train"),
    "sources of sst2": (changed("sst2", data__exclude_sources=["e2e"]), "does not use"),
    "a source of no kind": (changed("dart", data__exclude_sources=["x"]), "data.exclude_sources"),
    "texts of a classifier": (changed("sst2", generation={"num_beams": 2}), "generation"),
    "no beams": (changed("e2e", generation={"num_beams": 0}), "generation.num_beams"),
    "texts of no split": (changed("e2e", generation={"split": "train"}), "heldout_split"),
    "no length": (changed("sst2", data__max_length=0), "max_length"),
    "a length beyond the model": (
        lambda folder: _long(folder, data__max_length=4000),
        "512 positions",
    ),
    "no examples": (changed("sst2", data__max_train_examples=0), "max_train_examples"),
    "no held-out examples": (changed("sst2", data__max_heldout_examples=0), "max_heldout"),
    "an image model for text": (changed("sst2", model__name="vit-tiny"), "model.name"),
    "a model that is not there": (changed("sst2", model__name="./absent"), "model.name"),
    "an empty name": (changed("sst2", model__name=""), "model.name"),
    "rank zero": (changed("sst2", model__lora_rank=0), "lora_rank"),
    "a model of no kind": (model_folder("{}", None), "model.name"),
    "a model's broken json": (model_folder("{", None), "model.name"),
    # Folders to write to and to resume from.
    "output is a file": (output_at("out", file="out"), "--output"),
    "output below a file": (output_at("file/out", file="file"), "--output"),
    "output in use": (output_at(".", file="something"), "--resume"),
    "output in a place nobody can write": (verb("train", "digits", "--output", "/proc/out"), "--o"),
    "resume nothing": (verb("train", "--resume", "absent"), "no run.json"),
    "resume a file": (lambda f: ["train", "--resume", str(f / "x")], "no run.json"),
    "resume with a setting": (verb("train", "--resume", "absent", "--epsilon", "2"), "epsilon"),
    "resume no json": (resume(lambda run: (run / "run.json").write_text("{")), "run.json"),
    "resume a list": (resume(lambda run: (run / "run.json").write_text("[]")), "run.json"),
    "resume in latin-1": (resume(lambda run: (run / "run.json").write_bytes(b"\xe9")), "run.json"),
    "resume without its data's digest": (resume(lambda run: None), "_data.json"),
    # Flags.
    "a task of no kind": (verb("train", "cifar"), "digits"),
    "no task at all": (verb("train"), "digits"),
    "a task and a file": (verb("train", "digits", "--config", "x.toml"), "--config"),
    "a flag of no kind": (digits("--bogus"), "--bogus"),
    "a flag without its value": (digits("--epsilon"), "--epsilon"),
    "epochs in words": (digits("--epochs", "ten"), "--epochs"),
    "half an epoch": (digits("--epochs", "0.5"), "--epochs"),
    "negative epsilon": (digits("--epsilon", "-1"), "epsilon"),
    "epsilon nan": (digits("--epsilon", "nan"), "epsilon"),
    "epsilon inf": (digits("--epsilon", "inf"), "epsilon"),
    "delta above one": (digits("--delta", "2"), "delta"),
    "a seed and security": (digits("--seed", "1", "--secure"), "--secure"),
    "a shuffle of no kind": (digits("--shuffle", "never"), "every-step"),
    "a scope of no kind": (digits("--scope", "all"), "scope"),
    "a negative rate": (digits("--learning-rate", "-1"), "learning_rate"),
    "a batch beyond the digits": (digits("--batch-size", "5000"), "1437"),
    # Other verbs.
    "no such verb": (verb("trian"), "trian"),
    "account half a plan": (verb("account", *PLAN, "--num-steps", "3"), "--sampling-prob"),
    "account two plans": (
        verb("account", *PLAN, "--num-steps", "3", "--epochs", "2", "--sampling-prob", "0.1"),
        "exactly one",
    ),
    "account probability of two": (
        verb("account", *PLAN, "--num-steps", "3", "--sampling-prob", "2"),
        "sampling_prob",
    ),
    "account no steps": (
        verb("account", *PLAN, "--num-steps", "0", "--sampling-prob", "0.1"),
        "num_steps",
    ),
    "account without delta": (verb("account", "--noise-multiplier", "1"), "--delta"),
    "account negative noise": (
        verb("account", "--noise-multiplier=-1", "--delta", "1e-5", "--num-steps", "3"),
        "",
    ),
    "calibrate no epsilon": (verb(*CALIBRATE, "--batch-size", "10"), "--epsilon"),
    "calibrate a large batch": (
        verb(*CALIBRATE, "--epsilon", "1", "--batch-size", "1000"),
        "batch_size",
    ),
    "calibrate epsilon zero": (verb(*CALIBRATE, "--epsilon", "0", "--batch-size", "9"), "epsilon"),
    "examine half a formula": (verb(*EXAMINE, "--batch-size", "10"), "--dimension"),
    "inspect another model": (verb("inspect", "--model", "no-such-model"), "model"),
    "inspect another scope": (verb("inspect", "--model", "gpt2", "--scope", "all"), "scope"),
    "plan another model": (verb("plan", "--model", "no-such-model"), "model"),
    "plan another GPU": (verb("plan", "--gpu", "b200"), "h200"),
    "plan no GPU": (verb("plan", "--gpus", "0"), "--gpus"),
    "plan too long": (verb("plan", "--model", "gpt2", "--length", "5000"), "at most 1024 tokens"),
    "audit nothing": (verb("audit", "step"), "--dimension"),
    "another preset": (verb("train", "--preset", "paper/t5"), "paper/vit-cifar100"),
    "a preset without epsilon": (verb("train", "--preset", "paper/bert-sst2"), "--epsilon"),
    "a preset and a task": (verb("train", "digits", "--preset", "paper/bert-sst2"), "TASK"),
    "data without a preset": (digits("--data", "sst2"), "--preset"),
    "sweep nothing": (verb("sweep", "no-such.toml"), "no-such.toml"),
    "reproduce another figure": (verb("reproduce", "fig9"), "fig9"),
    "reproduce nothing": (verb("reproduce"), "fig1"),
    "reproduce into a file": (beside_a_file("reproduce", "fig1", "--output", "file"), "a folder"),
    # A finished run's folder.
    "audit no folder": (verb("audit", "run-folder"), "DIR"),
    "audit a folder that is not there": (verb("audit", "run-folder", "absent"), "no run.json"),
    "audit a file": (beside_a_file("audit", "run-folder", "file"), "no run.json"),
    "audit what is not finished": (a_run("audit", "run-folder", summary=None), "not finished"),
    "audit a summary of no kind": (a_run("audit", "run-folder", summary=[]), "not finished"),
    "audit without a card": (a_run("audit", "run-folder", summary={}), "no privacy card"),
    "audit an older card": (
        a_run("audit", "run-folder", summary={"privacy_card": {}}),
        "no privacy",
    ),
    "audit other weights": (
        a_run("audit", "run-folder", summary={}, card=CARD),
        "weights",
    ),
    "audit surely": (verb("audit", "run-folder", "x", "--confidence", "1"), "confidence"),
    "audit never": (verb("audit", "run-folder", "x", "--confidence", "0"), "confidence"),
    "audit nan": (verb("audit", "run-folder", "x", "--confidence", "nan"), "confidence"),
    "audit one canary": (verb("audit", "run-folder", "x", "--canaries", "1"), "canaries"),
    "audit fewer than none": (
        verb("audit", "run-folder", "x", "--input-canaries", "-1"),
        "canaries",
    ),
    "audit another canary": (verb("audit", "run-folder", "x", "--input-canary", "odd"), "odd"),
    "evaluate what left no model": (a_run("evaluate", summary=None), "no model/"),
    "predict with what left no model": (a_run("predict", more=["a"], summary=None), "no model/"),
    "generate from nothing": (verb("generate", "absent", "a"), "no run.json"),
    # Audits by their numbers.
    "audit in another mode": (verb("audit", "run", "--mode", "odd"), "--mode"),
    "audit a run surely": (verb("audit", "run", "--confidence", "1"), "confidence"),
    "audit no dimension": (verb("audit", "step", "--dimension", "0", "--sigma", "1"), "dimension"),
    "audit no seeds": (verb("audit", "blackbox", "--seeds", "0"), "seeds"),
    "replay one record": (verb("audit", "sensitivity", "--records", "1"), "--records"),
    "replay another model": (verb("audit", "sensitivity", "--model", "none"), "model"),
    # Recipes.
    "a recipe without epsilon": (verb("train", "--preset", "recipe/digits"), "epsilon"),
    "a recipe of no kind": (
        verb("train", "--preset", "recipe/x", "--epsilon", "1"),
        "recipe/digits",
    ),
    "a recipe without a name": (verb("train", "--preset", "", "--epsilon", "1"), "recipe/digits"),
    "a recipe and its own data": (
        verb("train", "--preset", "recipe/digits", "--epsilon", "1", "--data", "x"),
        "brings its own",
    ),
    "a recipe and its own model": (
        verb("train", "--preset", "recipe/digits", "--epsilon", "1", "--model", "x"),
        "brings its own",
    ),
    "a recipe without its data": (
        verb("train", "--preset", "recipe/sst2-minilm", "--epsilon", "1", "--data", "absent"),
        "train.tsv",
    ),
    # Numbers that are none.
    "a hundred million in words": (
        verb("account", *PLAN, "--sampling-prob", "0.1", "--num-steps", "1e8"),
        "--num-steps",
    ),
    "a hundred million backwards": (
        verb("account", *PLAN, "--sampling-prob", "0.1", "--num-steps", "-100000000"),
        "num_steps",
    ),
    "account noise nan": (
        verb(
            "account",
            "--noise-multiplier",
            "nan",
            "--delta",
            "1e-5",
            "--sampling-prob",
            "0.1",
            "--num-steps",
            "3",
        ),
        "noise_multiplier",
    ),
    "account a delta too fine": (
        verb(
            "account",
            "--noise-multiplier",
            "1",
            "--delta",
            "1e-31",
            "--sampling-prob",
            "0.1",
            "--num-steps",
            "3",
        ),
        "delta",
    ),
    "advise half a plan": (verb("advise", "--epsilon", "8"), "--delta"),
    "advise without end": (verb(*ADVISE, "--epsilon", "inf", "--batch-size", "2"), "epsilon"),
    "advise a large batch": (verb(*ADVISE, "--epsilon", "8", "--batch-size", "20"), "batch_size"),
    "inspect a file": (beside_a_file("inspect", "--model", "./file"), "model"),
    # Followers and seeds.
    "a tracker of no kind": (digits("--tracker", "nothing"), "--tracker"),
    "a tracker that is not in its module": (digits("--tracker", "os:nothing"), "--tracker"),
    "a tracker of no module": (digits("--tracker", "absent_module:f"), "--tracker"),
    "a seed below zero": (digits("--seed", "-1"), "seed"),
    "a seed too long": (digits("--seed", "99999999999999999999999"), "seed"),
    "a checkpoint of nothing": (digits("--checkpoint", "x"), "--checkpoint"),
    "a method of no kind": (digits("--method", "magic"), "method"),
}


def _long(folder: Path, **changes: Any) -> Arguments:
    write_good(folder)
    lines(folder / "train.tsv", [TSV, *GOOD_ROWS, f"{'long ' * 400}\t1"])
    return run_file(folder, "sst2", **changes)


def state_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    } | {str(path.relative_to(folder)): "folder" for path in folder.rglob("*") if path.is_dir()}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def test_the_table_is_long_enough() -> None:
    assert len(CASES) >= 250


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name: str, tmp_path: Path) -> None:
    case, expected = CASES[name]
    arguments = case(tmp_path)
    before = state_of(tmp_path)
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert expected in result.stderr
    assert state_of(tmp_path) == before, "something was lost, or left behind"


@pytest.mark.parametrize("name", ["a negative class", "half an epoch", "resume nothing"])
def test_failures_are_json_for_machines(name: str, tmp_path: Path) -> None:
    case, expected = CASES[name]
    result = CliRunner().invoke(app, [*case(tmp_path), "--json"])
    assert result.exit_code == 2
    assert result.stderr == ""
    failure = json.loads(result.stdout)
    assert expected in failure["error"]
    assert failure["kind"]


class FullDisk:
    """What `shutil.disk_usage` says of a disk without room."""

    free = 1000


def test_a_full_disk_is_noticed_before_anything_is_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: FullDisk)
    result = CliRunner().invoke(app, digits()(tmp_path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "MiB free" in result.stderr
    assert state_of(tmp_path) == {}


SHORT = ("--epochs", "1", "--batch-size", "480")


@pytest.mark.slow
def test_a_disk_that_fills_up_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first checkpoint nothing is spent; later the run goes on when there is room."""
    from shuffled_dpsgd.training import checkpoint

    write, written = checkpoint.save_file, []

    def full_at(number: int) -> None:
        def save_file(tensors: Any, path: Path, **options: Any) -> None:
            if len(written) == number:
                raise OSError(28, "No space left on device")
            written.append(path)
            write(tensors, path, **options)

        monkeypatch.setattr(checkpoint, "save_file", save_file)

    full_at(0)
    result = CliRunner().invoke(app, digits(*SHORT)(tmp_path))
    assert result.exit_code == 2
    assert "No space left" in result.stderr
    assert state_of(tmp_path) == {}

    full_at(1)
    result = CliRunner().invoke(app, digits(*SHORT)(tmp_path))
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    full_at(-1)
    done = CliRunner().invoke(app, ["train", "--resume", str(tmp_path / "out"), "--json"])
    assert done.exit_code == 0, done.output
    card = json.loads(done.stdout)["privacy_card"]
    assert card["steps_released"] == card["steps_planned"]


def test_a_run_is_resumed_with_its_own_data_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shuffled_dpsgd.tasks import load_config, prepare

    write_good(tmp_path)
    run_file(tmp_path, "sst2")
    prepare(load_config(tmp_path / "run.toml"), tmp_path / "out")
    assert (tmp_path / "out" / "_data.json").stat().st_mode & 0o777 == 0o600
    before = state_of(tmp_path / "out")
    for rows, expected in (
        (["other film\t1", *GOOD_ROWS[1:]], "not the ones"),
        (GOOD_ROWS[:-1], "began with 12 training records, now there are 11"),
    ):
        lines(tmp_path / "train.tsv", [TSV, *rows])
        result = CliRunner().invoke(app, ["train", "--resume", str(tmp_path / "out")])
        assert result.exit_code == 2
        assert expected in result.stderr
        assert state_of(tmp_path / "out") == before
