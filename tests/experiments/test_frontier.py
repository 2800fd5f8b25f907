"""The frontier: its file of cells, a committed cell repeated, and curves whose answer is known."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shuffled_dpsgd.core.streams import STREAM_VERSION
from shuffled_dpsgd.errors import CheckpointError, ShuffledDPError
from shuffled_dpsgd_experiments.exhibits import Request
from shuffled_dpsgd_experiments.frontier import reproducing, sst2
from shuffled_dpsgd_experiments.frontier.cells import CellFile, Record, Stage, point_of, run_cell
from shuffled_dpsgd_experiments.frontier.curves import curves_of, statement
from shuffled_dpsgd_experiments.frontier.figure import caption, draw
from shuffled_dpsgd_experiments.frontier.reproducing import read
from shuffled_dpsgd_experiments.frontier.running import (
    cells_of,
    missing,
    run,
    tried_rates,
    tuned_rates,
)
from shuffled_dpsgd_experiments.frontier.workloads import (
    LESS_NOISE,
    OPACUS,
    OURS,
    WORKLOADS,
    Material,
    Point,
    Workload,
    settings_digest,
)

ROOT = Path(__file__).parents[2]
WORKLOAD = WORKLOADS["digits"]
POINT = WORKLOAD.points()[0]
SMALL = replace(
    WORKLOADS["digits"],
    budgets=(0.5, 2.0, 8.0, 128.0),
    claims=(1.0,),
    num_tuning_seeds=1,
    ingredients_at=None,
)


def accuracy(epsilon: float) -> float:
    return 0.5 + 0.1 * math.log2(1.0 + epsilon)


def made_up(
    workload: Workload,
    point: Point,
    *,
    certified: float | None = None,
    score: float | None = None,
    seed: int = 100,
    stage: Stage = "figure",
    rate: float | None = None,
) -> Record:
    """One record; DP-SGD by default lies on the curve at the ε that it was asked for."""
    certified = point.epsilon if certified is None else certified
    score = accuracy(certified) if score is None else score
    found: dict[str, Any] = {
        "workload": workload.name,
        "stage": stage,
        "algorithm": "paper" if point.is_paper else "dp-sgd",
        "epsilon": point.epsilon,
        "batch_clip_ratio": point.batch_clip_ratio,
        "learning_rate": workload.middle_rate if rate is None else rate,
        "seed": seed,
        "streams": 2,
        "settings": settings_digest(workload, "made up"),
        "data": "made up",
        "accuracy": {"held back" if stage == "tuning" else "test": score + 0.001 * (seed % 3 - 1)},
        "certified_epsilon": certified,
        "paper_epsilon": point.epsilon,
        "noise_multipliers": {"rest": 1.0},
        "commit": "0123456789",
        "date": "2026-11-18",
    }
    return found


def whole(workload: Workload, *, loss: float = 0.05) -> list[Record]:
    """Every point with three seeds; the paper's lie `loss` below the curve."""
    found = []
    for point in workload.points():
        certified = None if point.batch_clip_ratio is None else 100.0 / point.batch_clip_ratio
        score = accuracy(certified or point.epsilon) - (loss if point.is_paper else 0.0)
        found += [
            made_up(workload, point, certified=certified, score=score, seed=seed)
            for seed in (100, 101, 102)
        ]
        found += [
            made_up(workload, point, stage="tuning", seed=seed, rate=workload.middle_rate * power)
            for power in (0.5, 1.0, 2.0, 4.0)
            for seed in range(workload.num_tuning_seeds)
        ]
    return found


def test_cells_are_appended_and_never_changed(tmp_path: Path) -> None:
    file = CellFile(tmp_path / "cells.jsonl", WORKLOAD)
    first = made_up(WORKLOAD, POINT, seed=100)
    file.add(first)
    other = CellFile(file.path, WORKLOAD)
    other.add(made_up(WORKLOAD, POINT, seed=101))
    with pytest.raises(CheckpointError, match="never changed"):
        file.add(made_up(WORKLOAD, POINT, seed=101, score=0.99))
    assert [each["seed"] for each in file.read()] == [100, 101]
    assert file.find(first) == first


def test_a_half_written_line_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    CellFile(path, WORKLOAD).add(made_up(WORKLOAD, POINT, seed=100))
    with path.open("a") as file:
        file.write('{"workload": "dig')
    file = CellFile(path, WORKLOAD)
    assert len(file.read()) == 1
    file.add(made_up(WORKLOAD, POINT, seed=101))
    assert [json.loads(line)["seed"] for line in path.read_text().splitlines()] == [100, 101]


def test_a_damaged_line_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    path.write_text('{"seed": 1}\n')
    with pytest.raises(CheckpointError, match="no cell"):
        CellFile(path, WORKLOAD)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("streams", 3),
        ("data", "other"),
        ("settings", "other"),
        ("workload", "sst2-lora"),
        ("learning_rate", 0.01),
    ],
)
def test_a_foreign_cell_is_refused(tmp_path: Path, key: str, value: object) -> None:
    """By whoever reads the file: curves, the means that tune, pairs and floors."""
    cells = cells_of(WORKLOAD, tmp_path)
    cells.add(made_up(WORKLOAD, POINT, seed=100))
    foreign = made_up(WORKLOAD, POINT, seed=101, score=0.1) | {key: value}
    with cells.path.open("a") as file:
        file.write(json.dumps(foreign) + "\n")
    for read_it in (cells.read, lambda: cells_of(WORKLOAD, tmp_path)):
        with pytest.raises(CheckpointError, match=f"a cell of {key} {value}"):
            read_it()


def test_nothing_is_added_to_cells_of_other_data(tmp_path: Path) -> None:
    cells = cells_of(WORKLOAD, tmp_path)
    cells.add(made_up(WORKLOAD, POINT, seed=100))
    material = Material(tuning=Any, scored=Any, digest="other")  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="a cell of settings"):
        run(WORKLOAD, material, cells, say=print)
    with pytest.raises(CheckpointError, match="a cell of streams 3"):
        cells.add(made_up(WORKLOAD, POINT, seed=101) | {"streams": 3})
    assert len(cells_of(WORKLOAD, tmp_path).read()) == 1


def test_features_are_kept_for_the_sentences_that_they_are_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def encoded(texts: list[Any]) -> Any:
        seen.append(len(texts))
        return np.full((len(texts), 2), len(seen), dtype=np.float32)

    monkeypatch.setattr(sst2, "_encoded", encoded)
    cache = tmp_path / "features.npz"
    for name, words in (("one", "good"), ("other", "bad")):
        folder = tmp_path / name
        folder.mkdir()
        for split in ("train.tsv", "dev.tsv", "test_labelled_from_SST.tsv"):
            (folder / split).write_text(f"sentence\tlabel\n{words}\t1\n", encoding="utf-8")
    first = sst2.features(tmp_path / "one", cache)
    assert np.array_equal(sst2.features(tmp_path / "one", cache)["dev"][0], first["dev"][0])
    other = sst2.features(tmp_path / "other", cache)
    assert not np.array_equal(other["dev"][0], first["dev"][0])
    assert len(seen) == 2 * len(sst2.SPLITS)
    with pytest.raises(ShuffledDPError, match="nowhere"):
        sst2.features(tmp_path / "nowhere", cache)


def test_what_is_missing_is_named_and_a_stop_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = whole(SMALL)
    assert "c' = 10c (47 runs)" in missing(SMALL, records)
    assert "c' = 10c (50 runs and its tuning)" in missing(SMALL, [])
    assert not missing(replace(SMALL, num_seeds=3), records)
    monkeypatch.setattr(reproducing, "run", lambda *given, **named: False)
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        reproducing.reproduce(Request(output=tmp_path, say=said.append))
    assert said[0].startswith("to be run: digits-demo")
    assert "the same command goes on from here" in said[-1]


def test_no_verdict_is_given_where_hardly_anything_was_learnt() -> None:
    """From guessing, 10 %, to 30 % of 128's 120 %: less than a quarter of the way."""
    point = next(each for each in SMALL.points() if each.batch_clip_ratio == 10.0)
    plain = [each for each in whole(SMALL) if not each["batch_clip_ratio"]]
    seeds = (100, 101, 102)
    for score, verdict in ((0.3, "hardly anything learnt"), (0.5, "below DP-SGD")):
        records = [made_up(SMALL, point, certified=8.0, score=score, seed=seed) for seed in seeds]
        curves = curves_of(SMALL, plain + records)
        assert [each.verdict for each in curves.comparisons()] == [verdict]
        assert ("no verdict" in statement([curves])) == (score == 0.3)


@pytest.mark.parametrize("point", [Point(epsilon=0.5, batch_clip_ratio=10.0), POINT])
def test_a_committed_cell_comes_out_again(point: Point) -> None:
    """Its noise, its first losses and its score; other processors may round the losses apart.

    A certified cell has its noise from a calibration that has come closer to its target since.
    """
    committed = cells_of(WORKLOAD, ROOT / "results").read()
    record = next(
        each
        for each in committed
        if each["stage"] == "figure" and point_of(each) == point and each["seed"] == 100
    )
    assert record["streams"] == STREAM_VERSION
    again = run_cell(
        WORKLOAD,
        WORKLOAD.load(None),
        point,
        stage="figure",
        rate=record["learning_rate"],
        seed=record["seed"],
    )
    assert again is not None
    exact = ("data", "initial_weights", "settings", "dimensions")
    assert {key: again[key] for key in exact} == {key: record[key] for key in exact}
    if point.is_paper:
        assert again["noise_multipliers"] == record["noise_multipliers"]
    else:
        assert again["certified_epsilon"] <= point.epsilon
    for key in ("noise_multipliers", "certified_epsilon"):
        closest = 1e-9 if point.is_paper else 1e-3
        assert again[key] == pytest.approx(record[key], rel=closest)
    assert again["first_losses"] == pytest.approx(record["first_losses"], rel=1e-3)
    # Of 360 images, those on the edge between two classes may change sides.
    assert again["accuracy"]["test"] == pytest.approx(record["accuracy"]["test"], abs=5 / 360)


def test_every_committed_record_says_what_made_it() -> None:
    wanted = {
        "commit",
        "versions",
        "streams",
        "data",
        "initial_weights",
        "first_losses",
        "settings",
    }
    for path in sorted((ROOT / "results" / "frontier").glob("*.jsonl")):
        for record in CellFile(path, WORKLOADS[path.stem]).read():
            assert wanted <= record.keys()
            assert not record["commit"].endswith("changed")
            assert len(record["first_losses"]) == 5


def test_the_page_says_where_the_floor_is_ahead() -> None:
    curves = read(Request(output=ROOT / "results", from_results=True))
    assert curves is not None
    found = {
        (each.workload.name, verdict): [
            one.point.epsilon for one in each.floor_comparisons() if one.verdict == verdict
        ]
        for each in curves
        for verdict in ("above DP-SGD", "below DP-SGD")
    }
    (digits,) = found["digits", "above DP-SGD"]
    sst2, behind = max(found["sst2-features", "above DP-SGD"]), min(found["digits", "below DP-SGD"])
    page = " ".join((ROOT / "docs" / "results.md").read_text(encoding="utf-8").split())
    assert f"ahead of the MLP on digits at {digits:g} and on SST-2 up to {sst2:g}; from" in page
    assert f"from {behind:g} on the MLP is ahead on digits" in page


def test_a_floor_is_of_the_data_of_what_it_stands_under() -> None:
    for each in WORKLOADS.values():
        if each.floor is not None:
            ours, floor = (
                cells_of(w, ROOT / "results").read() for w in (each, WORKLOADS[each.floor])
            )
            assert ours[0]["settings"] == floor[0]["settings"]


def test_a_point_below_the_curve_is_found_below_it() -> None:
    """Between its neighbours the line is below a curve that bends upwards, never by 5 points."""
    curves = curves_of(SMALL, whole(SMALL, loss=0.15))
    found = curves.comparisons()
    assert len(found) == len(SMALL.ratios)
    assert {each.verdict for each in found} == {"below DP-SGD"}
    at_ten = next(each for each in found if each.point.batch_clip_ratio == 10.0)
    assert at_ten.at_the_claim == pytest.approx(100 * (accuracy(10) - 0.15 - accuracy(1)), abs=3)
    assert "5 of its 5 points are below, 0 above, and 0 within" in statement([curves])


def test_a_gain_is_reported_as_well() -> None:
    curves = curves_of(SMALL, whole(SMALL, loss=-0.15))
    assert {each.verdict for each in curves.comparisons()} == {"above DP-SGD"}
    assert "0 of its 5 points are below, 5 above, and 0 within" in statement([curves])


def test_no_difference_is_claimed_within_two_errors() -> None:
    """Three seeds differ by 0.1 points from each other, so the error is 0.08."""
    point = next(each for each in SMALL.points() if each.batch_clip_ratio == 10.0)
    plain = [each for each in whole(SMALL) if not each["batch_clip_ratio"]]
    for loss, verdict in ((0.0005, "no difference shown"), (0.01, "below DP-SGD")):
        score = accuracy(8.0) - loss
        records = [
            made_up(SMALL, point, certified=8.0, score=score, seed=seed) for seed in (100, 101, 102)
        ]
        curves = curves_of(SMALL, plain + records)
        (found,) = curves.comparisons()
        assert found.verdict == verdict
        most = f"{found.difference + 2 * found.error:+.1f}".replace("-", "−")
        assert f"and to {most} with two standard errors added)." in statement([curves])


def test_points_that_learnt_hardly_anything_are_left_out_of_the_count() -> None:
    little = SMALL.points()[-1]
    records = [
        each | {"accuracy": {"test": 0.12 + 0.001 * each["seed"] % 3}}
        if each["stage"] == "figure" and point_of(each) == little
        else each
        for each in whole(SMALL, loss=0.15)
    ]
    said = statement([curves_of(SMALL, records)])
    assert "4 of its 4 points are below" in said
    assert "; 1 more learnt less than a quarter of DP-SGD's best lead on guessing." in said


def test_a_point_stands_for_the_largest_epsilon_of_its_runs() -> None:
    runs = [made_up(SMALL, POINT, certified=e, seed=s) for s, e in ((100, 0.499), (101, 0.4995))]
    (found,) = curves_of(SMALL, runs).measured
    assert found.certified_epsilon == 0.4995


def test_a_point_of_one_seed_is_not_drawn() -> None:
    single = [each for each in whole(SMALL) if each["seed"] == 100]
    assert curves_of(SMALL, single).measured == ()


def test_nothing_is_compared_beyond_the_points_of_dp_sgd() -> None:
    records = whole(replace(SMALL, budgets=(2.0, 8.0)))
    found = curves_of(replace(SMALL, budgets=(2.0, 8.0)), records).comparisons()
    assert {each.point.batch_clip_ratio for each in found} == {30.0}
    assert found[0].at_the_claim is None


def test_a_grid_is_extended_until_its_best_rate_is_inside() -> None:
    point = SMALL.points()[0]
    scores = {0.01: 0.1, 0.02: 0.2, 0.04: 0.3, 0.08: 0.4}
    records = [
        made_up(SMALL, point, stage="tuning", seed=1, rate=rate, score=score)
        for rate, score in scores.items()
    ]
    assert point not in tuned_rates(SMALL, records)
    records.append(made_up(SMALL, point, stage="tuning", seed=1, rate=0.16, score=0.35))
    assert tuned_rates(SMALL, records)[point] == pytest.approx(0.08)
    assert list(tried_rates(SMALL, records, point)) == pytest.approx([*scores, 0.16])


def test_everything_drawn_is_in_the_caption_or_the_file() -> None:
    curves = curves_of(SMALL, whole(SMALL))
    figure = draw([curves])
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert labels == ["DP-SGD", "paper's algorithm, ε = 1 claimed"]
    assert "3 seeds a point" in caption([curves])
    raw = curves.to_json()
    assert len(raw["points"]) == len(SMALL.points())
    assert all(each["verdict"] for each in raw["comparisons"])


def test_points_say_what_make_private_is_told() -> None:
    assert Point(epsilon=1.0).options()["accounting"] == "certified"
    options = Point(epsilon=1.0, batch_clip_ratio=10.0).options()
    assert (options["accounting"], options["batch_clip_norm"]) == ("paper", 10.0)


def test_the_readme_says_what_the_figure_shows() -> None:
    """Over nine points at the claim on digits, and no point above DP-SGD at its certified ε."""
    raw = json.loads((ROOT / "results" / "frontier.json").read_text(encoding="utf-8"))
    claimed = [each["at_the_claim"] for each in raw["workloads"]["digits"]["comparisons"]]
    assert 9 < max(each for each in claimed if each is not None) < 10
    found = [each for name in raw["workloads"] for each in raw["workloads"][name]["comparisons"]]
    assert found
    assert "above DP-SGD" not in {each["verdict"] for each in found}
    page = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert "over 9 points more accurate on digits than DP-SGD certified at 0.5" in page
    best = max(claimed, key=lambda each: each or 0.0)
    at = claimed.index(best)
    point = raw["workloads"]["digits"]["comparisons"][at]["point"]
    proven = next(
        each["certified_epsilon"]
        for each in raw["workloads"]["digits"]["points"]
        if each["point"] == point
    )
    assert f"what is proven of it there is {proven:.2f}" in page
    assert "none of its points is above DP-SGD" in page


def test_the_committed_numbers_follow_from_the_records() -> None:
    raw = json.loads((ROOT / "results" / "frontier.json").read_text(encoding="utf-8"))
    curves = read(Request(output=ROOT / "results", from_results=True))
    assert curves is not None
    again = {each.workload.name: each.to_json() for each in curves}
    assert json.loads(json.dumps(again)) == raw["workloads"]


def test_a_linear_model_is_compared_at_the_same_certified_epsilon() -> None:
    """One that is 5 points better where little is spent and 5 worse where much is."""
    linear = replace(SMALL, name="linear", budgets=(0.5, 2.0, 128.0), claims=())
    records = [
        made_up(linear, point, score=accuracy(point.epsilon) + gain, seed=seed)
        for point, gain in zip(linear.points(), (0.05, 0.0, -0.05), strict=True)
        for seed in (100, 101, 102)
    ]
    curves = curves_of(SMALL, whole(SMALL), curves_of(linear, records))
    found = [round(each.difference) for each in curves.floor_comparisons()]
    assert found == [5, 0, -5]
    assert "regression by DP-SGD is above it at ε = 0.5 and below it at ε = 128." in statement(
        [curves]
    )
    assert "DP-SGD, logistic regression" in draw([curves]).axes[0].get_legend_handles_labels()[1]


def test_other_ingredients_are_points_of_their_own_and_no_part_of_the_curve() -> None:
    """Opacus' has noise by Rényi DP; at its ε every ingredient has as many seeds."""
    own, opacus, constant = (
        Point(epsilon=1.0, ingredients=each) for each in (OURS, OPACUS, LESS_NOISE)
    )
    workload = replace(SMALL, budgets=(0.5, 1.0), claims=(), ingredients_at=1.0)
    assert workload.points()[1:] == [own, opacus, constant]
    assert {workload.seeds_of(each) for each in (own, opacus, constant)} == {50}
    assert opacus.options()["accounting"] == "rdp"
    records = [
        {**made_up(workload, point, seed=seed), "ingredients": point.ingredients}
        for point in workload.points()
        for seed in (100, 101)
    ]
    assert [point_of(record) for record in records[::2]] == workload.points()
    curves = curves_of(workload, records)
    assert len(curves.measured) == 4
    assert [each.point for each in curves.plain()] == workload.points()[:2]
