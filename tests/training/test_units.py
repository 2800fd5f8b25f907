"""Rows are not persons: repeated rows are found, priced and named before anything is released."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from shuffled_dpsgd.accounting import certified_claim
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training import PrivacyOptions, PrivateTraining, make_plan, make_private, rows
from shuffled_dpsgd.training.rows import claim_for_rows, shared_rows, survey
from training.cases import Case, classify, make_mlp, run, vectors


class Augmented(TensorDataset):
    """Draws another view at every load, so that no two loads of a row are equal."""

    def __getitem__(self, index: int) -> Any:
        inputs, label = super().__getitem__(index)
        return inputs + torch.randn_like(inputs), label


def start(data: Any, **changes: Any) -> PrivateTraining:
    model = make_mlp()
    settings: dict[str, Any] = {
        "dataset_size": len(data),
        "expected_batch_size": 4,
        "num_steps": 2,
        "delta": 1e-3,
        "noise_multiplier": 1.0,
        "shuffle": "off",
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return make_private(model, optimizer, **(settings | changes))


def plan_of(**changes: Any) -> Any:
    settings: dict[str, Any] = {
        "dataset_size": 100,
        "expected_batch_size": 10,
        "num_steps": 20,
        "delta": 1e-5,
        "noise_multiplier": 2.0,
        "shuffle": "off",
    }
    return make_plan(PrivacyOptions(**(settings | changes)), sizes={"a": 10}, moved=frozenset())


def hub_rows() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"a": list(range(40))}).select([0, 1, 2, 2, 3, 2])


@pytest.mark.parametrize(
    ("make", "largest"),
    [
        (vectors, 1),
        (lambda: Subset(vectors(), [*range(40), 3, 3]), 3),
        (lambda: ConcatDataset([vectors()] * 3), 3),
        (lambda: Subset(Augmented(*vectors().tensors), [0, 1, 2, 1]), 2),
        (lambda: ConcatDataset([vectors(), vectors()]), 2),
        (lambda: [(1, "a"), (2, "b"), (1, "a")], 2),
        (lambda: [{"text": "a", "label": i % 2} for i in range(6)], 3),
        (hub_rows, 3),
    ],
)
def test_repeated_rows_and_indices_are_found(make: Any, largest: int) -> None:
    data = make()
    found = survey(data)
    assert found.largest == largest
    assert (found.compared, found.total) == (len(data), len(data))


def test_looking_is_limited_in_time_and_leaves_the_generators_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = Augmented(*vectors(count=1000).tensors)
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    monkeypatch.setattr(rows, "_SECONDS", 0.0)
    found = survey(data)
    assert torch.rand(1) == expected
    assert 0 < found.compared < found.total
    assert found.looked_at == f"{found.compared:,} of 1,000 rows compared"


def test_rows_of_two_data_sets_are_compared() -> None:
    data = vectors()
    assert shared_rows(data, data) == 40
    assert shared_rows(data, Subset(vectors(), [3, 5])) == 2
    assert shared_rows(data, TensorDataset(data.tensors[0] + 1, data.tensors[1])) == 0


def test_the_warning_comes_before_the_first_release() -> None:
    data = Subset(vectors(), [*range(20), 7, 7])
    private = start(data)
    with pytest.warns(UserWarning, match="the most frequent row is there 3 times"):
        private.batches(data)
    assert private.ledger.spent == 0
    run(private, Case(make=make_mlp, data=data, loss=classify))
    claim = claim_for_rows(private.plan, 3)
    assert claim is not None
    assert f"for whoever owns it: ε = {claim.epsilon:.4g} (proven)" in str(private.card())


def test_rows_that_stand_there_once_are_not_warned_of() -> None:
    private = start(vectors())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        private.batches(vectors())
    assert "one row; no row was found twice (all rows compared)" in str(private.card())


def test_the_card_says_one_row_until_it_is_named() -> None:
    assert start(vectors()).card().subject["unit"] == "one row"
    named = start(vectors(), unit="patient").card()
    assert named.subject["unit"] == "one patient, as stated: one row each"
    assert "one patient" in str(named)
    with pytest.raises(InvalidArgumentError, match="unit"):
        start(vectors(), unit=" ")


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_several_rows_cost_more_than_their_number(adjacency: Any) -> None:
    plan = plan_of(adjacency=adjacency)
    one, ten = plan.certified(), claim_for_rows(plan, 10)
    assert ten is not None
    assert ten.epsilon > 10 * one.epsilon
    assert claim_for_rows(plan, 1000) is None


def test_the_mixture_agrees_where_the_answer_is_known() -> None:
    """Without sampling, k rows are one row of k times the clip."""
    plan = plan_of(expected_batch_size=100, num_steps=3)
    found = claim_for_rows(plan, 4)
    known = certified_claim(noise_multiplier=0.5, sampling_prob=1.0, num_steps=3, delta=1e-5)
    assert found is not None
    assert known.epsilon * (1 - 1e-4) <= found.epsilon <= known.epsilon * 1.01
    sampled = plan_of(sampling="poisson")
    single = claim_for_rows(sampled, 1)
    assert single is not None
    assert sampled.certified().epsilon * (1 - 1e-4) <= single.epsilon
    assert single.epsilon <= 1.05 * sampled.certified().epsilon
