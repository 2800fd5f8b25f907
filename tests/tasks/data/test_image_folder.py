"""Task `image-folder`: images in folders named after their classes, of any size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from shuffled_dpsgd.cli.main import app
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks import parse_config
from shuffled_dpsgd.tasks.data.loading import read_images
from shuffled_dpsgd.tasks.images import collate_images
from shuffled_dpsgd.tasks.task import build_task

image = pytest.importorskip("PIL.Image")
pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, count in (("train", 8), ("val", 4)):
        for label, name in enumerate(("cat", "dog", "none yet")):
            place = tmp_path / split / name
            place.mkdir(parents=True)
            for number in range(count if label < 2 else 0):
                kind, colour = ("L", 90) if number % 2 else ("RGB", (200, 10 * number, 90 * label))
                picture = image.new(kind, (8 + number, 9), colour)
                picture.save(place / f"{number}.png")
    return tmp_path


def settings(folder: Path, **data: Any) -> dict[str, Any]:
    return {
        "task": "image-folder",
        "seed": 0,
        "model": {"name": "vit-tiny"},
        "data": {"path": str(folder)} | data,
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "clip_norm": 1.0},
        "training": {"expected_batch_size": 6, "num_steps": 2},
    }


def test_folders_are_classes_also_empty_ones(folder: Path) -> None:
    task = build_task(parse_config(settings(folder)))
    model: Any = task.model
    assert model.config.id2label == {0: "cat", 1: "dog", 2: "none yet"}
    assert len(task.train_data) == 16
    assert [label for _, label in task.train_data] == [0] * 8 + [1] * 8
    assert len(task.heldout_data) == 8


def test_images_of_any_size_are_collated_one_by_one(folder: Path) -> None:
    data = read_images(parse_config(settings(folder)).data, 3).train
    samples = [data[index] for index in range(6)]
    images, labels = collate_images(samples, 8)
    assert images.shape == (6, 3, 8, 8)
    assert labels.tolist() == [0] * 6
    alone = [collate_images([sample], 8)[0] for sample in samples]
    assert torch.equal(images, torch.cat(alone))


@pytest.mark.parametrize(
    ("break_it", "data", "match"),
    [
        (lambda f: (f / "val").rename(f / "other"), {}, "expected a folder dev"),
        (lambda f: (f / "val" / "emu").mkdir(), {}, "emu"),
        (lambda f: (f / "train").rename(f / "all"), {}, "train/CLASS"),
        (lambda f: None, {"num_labels": 4}, "4 different names"),
        (lambda f: None, {"format": "cifar10"}, r"data\.format"),
    ],
)
def test_what_does_not_fit_is_refused(
    folder: Path, break_it: Any, data: dict[str, Any], match: str
) -> None:
    break_it(folder)
    with pytest.raises(InvalidArgumentError, match=match):
        build_task(parse_config(settings(folder, **data)))


def test_a_run_classifies_a_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        f'task = "image-folder"\nseed = 0\n[model]\nname = "vit-tiny"\n[data]\npath = "{folder}"\n'
        "[privacy]\nnoise_multiplier = 1.0\ndelta = 1e-3\nclip_norm = 1.0\n"
        "[training]\nexpected_batch_size = 6\nnum_steps = 2\n"
    )
    broken = folder / "train" / "cat" / "notes.txt"
    broken.write_text("not an image")
    arguments = ["train", "--config", tmp_path / "run.toml", "--output", tmp_path / "out", "--json"]
    refused = CliRunner().invoke(app, [*map(str, arguments)])
    assert (refused.exit_code, not (tmp_path / "out").exists()) == (2, True)
    assert "notes.txt" in refused.stdout
    broken.unlink()
    assert CliRunner().invoke(app, [*map(str, arguments)]).exit_code == 0
    picture = str(folder / "val" / "dog" / "0.png")
    found = CliRunner().invoke(app, ["predict", str(tmp_path / "out"), picture, "--json"])
    assert json.loads(found.stdout)["answers"][0]["name"] in ("cat", "dog", "none yet")
