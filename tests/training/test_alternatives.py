"""The table of what else a plan could do, and units beside groups, from public sizes alone."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shuffled_dpsgd.accounting import SampledGaussian, calibrate_certified, compare_units
from shuffled_dpsgd.accounting.banded import Banded, best_banded
from shuffled_dpsgd.core.pld import price
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training import alternatives as table
from shuffled_dpsgd.training.alternatives import alternatives
from shuffled_dpsgd.training.prospect import calibrated_prospect
from slow_cases import one_in

KNOWN: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-6}


@pytest.mark.slow
def test_rows_have_the_noise_that_their_plans_are_calibrated_to() -> None:
    sizes = {"dataset_size": 67_349, "expected_batch_size": 1000, "num_steps": 200}
    now = calibrated_prospect(**KNOWN, **sizes, dimension=1000)
    rows = {row.change: row for row in alternatives(now, **KNOWN, embeddings=750)}

    def noise(batch: int, steps: int) -> float:
        rate = batch / 67_349
        return calibrate_certified(**KNOWN, sampling_prob=rate, num_steps=steps).noise_multiplier

    whole = rows["4 times the batch, as many steps"]
    assert whole.noise == pytest.approx(noise(4000, 200) / noise(1000, 200) / 4, rel=1e-6)
    assert whole.noise == pytest.approx(0.4, abs=0.01)
    assert whole.records == 4
    fewer = rows["4 times the batch, 1/4 of the steps"]
    expected = noise(4000, 50) / noise(1000, 200) / 4 * math.sqrt(4)
    assert fewer.noise == pytest.approx(expected, rel=1e-6)
    (banded,) = (row for name, row in rows.items() if name.startswith("noise="))
    assert fewer.noise < 1 > banded.noise
    assert rows["largest_batch=1189"].noise == pytest.approx(1.0, abs=2e-3)
    (given,) = (
        row
        for row in alternatives(now, **KNOWN, largest_batch=1050)
        if row.change.startswith("largest_batch")
    )
    cut = calibrate_certified(
        **KNOWN, sampling_prob=1000 / 67_349, num_steps=200, largest_batch=1050, dataset_size=67_349
    )
    assert given.change == "largest_batch=1050"
    assert given.noise == pytest.approx(cut.noise_multiplier / noise(1000, 200), rel=1e-6)
    assert given.noise > 1.3
    assert rows['embeddings = "freeze"'].noise == 0.5
    assert rows["rates that fall to zero, of the same sum"].noise == pytest.approx(1.1547, abs=1e-4)


def test_banded_noise_is_in_the_table_where_it_is_refused() -> None:
    known: dict[str, Any] = {"epsilon": 0.5, "delta": 1e-5}
    sizes = {"dataset_size": 1000, "expected_batch_size": 100, "num_steps": 60}
    now = calibrated_prospect(**known, **sizes, dimension=10)
    (row,) = (r for r in alternatives(now, **known) if r.change.startswith("noise="))
    assert row.noise > 1.0
    assert "refused" in row.note


@pytest.mark.parametrize("ratio", [0.97, 0.995])
@pytest.mark.slow
def test_the_table_refuses_banded_noise_where_a_run_does(
    ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Banded(rows=((1.0,),), noise_multiplier=1.0, ratio=ratio, batch_ratio=1.0)]
    monkeypatch.setattr(table, "banded_noise", lambda **_: found)
    sizes = {"dataset_size": 1000, "expected_batch_size": 100, "num_steps": 6}
    now = calibrated_prospect(**KNOWN, **sizes, dimension=10)
    (row,) = (r for r in alternatives(now, **KNOWN) if r.change.startswith("noise="))
    if row.note:
        with pytest.raises(InvalidArgumentError, match="gains nothing"):
            best_banded(found)
    else:
        assert best_banded(found).ratio == ratio


@pytest.mark.parametrize("owned", one_in(2, [4, 1, 32]))
@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_units_and_groups_meet_the_same_epsilon(owned: int, epsilon: float) -> None:
    found = compare_units(
        epsilon=epsilon, delta=1e-6, num_units=5000, num_records=20_000, most_owned=owned,
        expected_units=100, records_per_unit=1, num_steps=200,
    )  # fmt: skip
    run = SampledGaussian(
        noise_multiplier=found.noise_of_records, sampling_prob=100 / 20_000, num_steps=200
    )
    assert epsilon * 0.99 < price(run, 1e-6, 1e-4, records=owned) <= epsilon * 1.0005
    assert found.ratio == pytest.approx(found.noise_of_units / found.noise_of_records)
    assert (found.better == "units") == (owned > 1)


def test_sizes_that_cannot_be_are_refused() -> None:
    sizes: dict[str, Any] = {
        "num_units": 10, "num_records": 40, "most_owned": 4, "expected_units": 2,
        "records_per_unit": 2, "num_steps": 5,
    }  # fmt: skip
    for name, value in (("num_units", 41), ("records_per_unit", 5), ("most_owned", 41)):
        with pytest.raises(InvalidArgumentError, match=name):
            compare_units(**KNOWN, **(sizes | {name: value}))
