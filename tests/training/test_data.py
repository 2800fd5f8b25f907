"""Data: any map-style data set, logical batches split and put together again, none lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shuffled_dpsgd.training.data import Batch, LogicalBatch, physical_batches, shaped, to_device
from shuffled_dpsgd.training.layout import Layout
from training.cases import Sentences, vectors

LOGICAL = ([4, 1, 7, 2, 9], [], [3], [], [])


def load(data: Any, size: int, **options: Any) -> list[Any]:
    logical = [LogicalBatch(step=i, indices=tuple(rows)) for i, rows in enumerate(LOGICAL)]
    layout = Layout(batch_size=size, expected=4)
    return list(physical_batches(data, logical, layout=layout, **options))


@pytest.mark.parametrize(("size", "workers"), [(1, 0), (2, 0), (2, 1), (5, 0), (100, 0)])
def test_parts_are_in_order_and_know_when_a_logical_batch_is_complete(
    size: int, workers: int
) -> None:
    parts = load(list(range(10)), size, num_workers=workers)
    found: dict[int, list[int]] = {step: [] for step in range(len(LOGICAL))}
    done: list[int] = []
    for part in parts:
        assert part.step not in done
        assert part.size <= size
        found[part.step] += [] if part.data is None else part.data.tolist()
        if part.completes:
            done.append(part.step)
    assert list(found.values()) == [list(rows) for rows in LOGICAL]
    assert done == list(range(len(LOGICAL)))


def test_tuples_dictionaries_and_tensors_keep_their_shape() -> None:
    part = shaped(load(vectors(), 5)[0].data)
    assert isinstance(part, Batch)
    inputs, labels = part
    assert inputs is part.x
    assert labels is part.y
    assert part.x.shape == (5, 6)
    words = shaped(load(Sentences(), 5)[0].data)
    assert type(words) is dict
    assert words["input_ids"].shape == (5, 8)
    assert shaped(load(torch.arange(10.0), 5)[0].data).x.tolist() == [4, 1, 7, 2, 9]


def test_hugging_face_data_sets_and_their_collators_work() -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"input_ids": [[i, i + 1] for i in range(10)], "label": list(range(10))}
    data = datasets.Dataset.from_dict(rows)
    part = load(data.with_format("torch"), 5)[0].data
    assert part["input_ids"][:, 0].tolist() == [4, 1, 7, 2, 9]

    def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {"label": torch.tensor([sample["label"] for sample in samples])}

    assert load(data, 5, collate=collate)[0].data["label"].tolist() == [4, 1, 7, 2, 9]


def test_devices_are_changed_inside_containers() -> None:
    meta = torch.device("meta")
    batch = to_device(Batch((torch.ones(2), [torch.ones(1)], "text")), meta)
    assert isinstance(batch, Batch)
    assert batch.x.device == batch[1][0].device == meta
    assert batch[2] == "text"
    assert to_device({"a": torch.ones(1)}, meta)["a"].device == meta
