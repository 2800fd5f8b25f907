"""Warnings name the line of the user's program that led to them."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests.training.cases import CLASSES, RECORDS, vectors
from torch.nn import functional as F
from torch.utils.data import DataLoader

from shuffled_dpsgd import make_private
from shuffled_dpsgd.runtime import notices


def test_warnings_of_a_run_name_lines_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_said", set())
    model = torch.nn.Linear(6, CLASSES)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        private = make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            dataset_size=RECORDS,
            expected_batch_size=8,
            num_steps=1,
            noise_multiplier=1.0,
            delta=1e-3,
        )
        for x, y in private.batches(DataLoader(vectors(), batch_size=8)):
            private.backward(F.cross_entropy(model(x), y, reduction="none") / 4)
            private.step()
    parts = (
        "no weights of this Linear",
        "of the DataLoader",
        "loss is not checked",
        "divided by 4",
    )
    assert all(any(part in str(each.message) for each in caught) for part in parts)
    assert {each.filename for each in caught} == {__file__}
