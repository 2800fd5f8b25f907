"""Tables as they are shown: paper, ours, certified ε and a verdict; nothing that was not run."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shuffled_dpsgd.environment import environment
from shuffled_dpsgd.errors import ShuffledDPError
from shuffled_dpsgd.tasks import parse_config
from shuffled_dpsgd.tasks.data.published import PUBLISHED
from shuffled_dpsgd_experiments.exhibits import (
    NOT_RUN,
    Exhibit,
    ExhibitRow,
    Reproduced,
    Request,
)
from shuffled_dpsgd_experiments.reproductions import REPRODUCTIONS, find, write_page
from shuffled_dpsgd_experiments.tables import table1, table2, table6, table7, table8, training
from shuffled_dpsgd_experiments.tables.printed import RESULTS
from shuffled_dpsgd_experiments.tables.training_rows import lost_samples, rows_from

ROOT = Path(__file__).parents[3]
ENVIRONMENT = environment()


def test_every_exhibit_of_the_paper_has_a_name() -> None:
    figures = [f"fig{number}" for number in range(1, 5)]
    tables = [f"table{number}" for number in range(1, 9)]
    assert list(REPRODUCTIONS) == ["frontier", *figures, *tables, "claims"]
    assert [each.name for each in find(["all"])] == list(REPRODUCTIONS)
    assert all(each.name == name for name, each in REPRODUCTIONS.items())


def test_an_exhibit_is_markdown_and_escaped_html() -> None:
    row = ExhibitRow(what="a|b", paper="<1>", ours="2", certified="3", verdict="& so")
    shown = Exhibit(name="t", title="T", origin="here", rows=(row,), notes=("n",))
    assert "| a/b | <1> | 2 | 3 | & so |" in shown.to_markdown()
    assert '<td data-heading="paper">&lt;1&gt;</td>' in shown.to_html()
    assert "&amp; so" in shown.to_html()


def test_without_results_nothing_is_shown_but_the_paper(tmp_path: Path) -> None:
    request = Request(output=tmp_path, from_results=True)
    for name in ("frontier", "table1", "table2", "table6", "table7", "table8", "claims"):
        found = REPRODUCTIONS[name].reproduce(request)
        assert found.exhibit is None
        assert found.missing is not None
    for name in ("table3", "table4", "table5"):
        found = REPRODUCTIONS[name].reproduce(request)
        exhibit = found.exhibit
        assert exhibit is not None
        assert found.drawing is None
        assert {row.ours for row in exhibit.rows} == {NOT_RUN}
        assert len(exhibit.rows) == len(RESULTS[name])
    assert list(tmp_path.iterdir()) == []


def test_committed_results_make_a_page(tmp_path: Path) -> None:
    request = Request(output=ROOT / "results", from_results=True)
    names = [name for name in REPRODUCTIONS if name.startswith("table")]
    found = [REPRODUCTIONS[name].reproduce(request) for name in names]
    drawing = "<svg><g/></svg>"
    shown = Exhibit(name="fig2", title="both", origin="", rows=())
    found.append(Reproduced(name="fig2", title="both", drawing=drawing, exhibit=shown))
    text = write_page(found, tmp_path).read_text(encoding="utf-8")
    # Ours, and a plot of each of the tables 3 to 5.
    assert text.count("<figure>") == 4
    # Names of vocabularies in the figures are addresses, and nothing is fetched from anywhere.
    assert not re.search(r"(?:src|href)=.?http", text)
    assert all(f'id="{name}"' in text for name in names)


def row_of(method: str, accounting: str, score: float, certified: float) -> dict[str, Any]:
    return {
        "sweep": "sst2",
        "method": method,
        "epsilon": 0.1,
        "seed": 0,
        "tuned": {},
        "score_name": "accuracy",
        "score": score,
        "baseline": 0.5,
        "certified": {"epsilon": certified},
        "paper": None,
        "config": {
            "model": {"name": "MiniLM"},
            "data": {"format": "sst2"},
            "privacy": {"method": method.split(",")[0], "accounting": accounting},
        },
        "environment": ENVIRONMENT,
    }


def test_cells_stand_beside_the_printed_method_with_what_is_proven(tmp_path: Path) -> None:
    cells = [
        row_of("mixopt, certified", "certified", 0.8, 0.1),
        row_of("shuffled, c' = c", "paper", 0.5, 57.0),
    ]
    for number, cell in enumerate(cells):
        (tmp_path / "sst2").mkdir(exist_ok=True)
        (tmp_path / "sst2" / f"main_{number}.json").write_text(json.dumps(cell))
    shown = REPRODUCTIONS["table4"].reproduce(Request(output=tmp_path, from_results=True)).exhibit
    assert shown is not None
    mixopt, shuffled = shown.rows[:2]
    assert mixopt.paper == "BERT accuracy 64.56; RoBERTa accuracy 87.62"
    assert (mixopt.ours, mixopt.certified) == ("accuracy 80.0 (n = 1)", "0.1")
    assert mixopt.verdict == "ε is proven"
    assert shuffled.paper == "BERT accuracy 87.5; RoBERTa accuracy 92.32"
    assert shuffled.certified == "57"
    assert "claimed, not proven" in shuffled.verdict
    assert "DP-SGD" not in shuffled.verdict
    assert "learnt nothing" in shuffled.verdict
    assert "learnt nothing" not in mixopt.verdict
    # What has no cell keeps the paper's line and says so; SST-2 has cells.
    rest = shown.rows[2:]
    assert all(row.ours == NOT_RUN for row in rest)
    assert not any("SST-2" in row.what for row in rest)
    assert len(rest) == 6


def test_what_is_printed_is_about_data_sets_by_the_names_of_their_cells() -> None:
    for name, table in training.TABLES.items():
        titles = {PUBLISHED[format_].title for format_ in table.formats}
        assert {data for _, data, _ in RESULTS[name]} == titles


def test_committed_cells_of_e2e_stand_beside_the_printed_scores() -> None:
    request = Request(output=ROOT / "results", from_results=True)
    shown = REPRODUCTIONS["table5"].reproduce(request).exhibit
    assert shown is not None
    rows = {row.what.removeprefix("gpt2-dart on E2E NLG, "): row for row in shown.rows}
    paths = list((ROOT / "results/e2e").glob("main_shuffled-paper-c-c_eps1_seed*.json"))
    cells = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    perplexity = statistics.mean(cell["score"] for cell in cells)
    bleu = statistics.mean(cell["generation"]["bleu"] for cell in cells)
    shuffled = rows["shuffled, paper, c' = c, ε = 1"]
    assert "GPT-2 BLEU 54.93" in shuffled.paper
    assert f"perplexity {perplexity:.2f} " in shuffled.ours
    assert f"(n = {len(cells)})" in shuffled.ours
    assert f"BLEU {bleu:.3g};" in shuffled.ours
    assert shuffled.certified == f"{cells[0]['certified']['epsilon']:.3g}"
    assert "claimed, not proven" in shuffled.verdict
    assert "the paper prints it ahead of both its baselines" in shuffled.verdict
    assert "GPT-2 BLEU 46.29" in rows["mixopt, certified by PLD, ε = 1"].paper
    assert not any("E2E" in what for what, row in rows.items() if row.ours == NOT_RUN)
    assert not any("did not count" in note for note in shown.notes)


def test_a_guess_is_compared_with_nothing() -> None:
    cells = [row_of("mixopt, certified", "certified", 0.511, 0.1)]
    cells.append(row_of("shuffled, c' = c", "paper", 0.513, 57.0))
    cells.append(row_of("shuffled, c' = 10c", "paper", 0.8, 5.7))
    for cell in cells:
        cell["baseline"] = 0.505
    _, better, guess = rows_from("table4", cells)
    assert better.verdict == "ε = 0.1 is claimed, not proven"
    assert guess.verdict.endswith("the commonest class alone gives 50.5")
    assert "DP-SGD" not in guess.verdict


def test_a_verdict_needs_seeds_and_a_difference_beyond_their_spread() -> None:
    plain = [row_of("mixopt, certified", "certified", score, 0.1) for score in (0.8, 0.81)]
    paper = [row_of("shuffled, c' = c", "paper", score, 57.0) for score in (0.79, 0.82)]
    assert "a single seed, so not compared" in rows_from("table4", plain + paper[:1])[1].verdict
    assert "no difference beyond the spread" in rows_from("table4", plain + paper)[1].verdict
    for cell in plain:
        cell["score"] -= 0.1
    assert "; scores better than DP-SGD" in rows_from("table4", plain + paper)[1].verdict
    for cell in plain:
        cell["score"] += 0.2
    assert "; scores worse than DP-SGD" in rows_from("table4", plain + paper)[1].verdict
    for cell in plain:
        cell["sweep"] = "another recipe"
    assert "DP-SGD" not in rows_from("table4", plain + paper)[1].verdict


def test_samples_that_contributed_nothing_are_told_of() -> None:
    cell = row_of("mixopt, certified", "certified", 0.8, 0.1)
    cell["environment"] = {**ENVIRONMENT, "hardware": "NVIDIA H200"}
    assert "1 of the runs" in lost_samples([cell])[0]
    assert lost_samples([{**cell, "samples_without_finite_gradient": 0}]) == []
    (note,) = lost_samples([{**cell, "samples_without_finite_gradient": 7}])
    assert note.startswith("7 times")


def test_parts_random_weights_and_texts_are_named_as_such(tmp_path: Path) -> None:
    whole, part, scratch = (row_of("mixopt, certified", "certified", 0.8, 0.1) for _ in range(3))
    part["config"]["data"]["name"] = "SST-2, a part"
    scratch["config"]["model"]["from_scratch"] = True
    scratch |= {"generation": {"bleu": 12.5, "rouge_l": 0.5}}
    shown = training.TABLES["table4"].show(([whole, part, scratch], "paper"))
    model = whole["config"]["model"]["name"]
    assert [row.what.removesuffix(", mixopt, certified, ε = 0.1") for row in shown.rows[:3]] == [
        f"{model} on SST-2",
        f"{model} on SST-2, a part",
        f"{model} from scratch on SST-2",
    ]
    assert [row.ours for row in shown.rows[1:3]] == [
        "accuracy 80.0 (n = 1)",
        "accuracy 80.0 (n = 1); BLEU 12.5; ROUGE-L 0.5",
    ]


def test_a_plot_has_a_panel_for_every_sweep_with_the_papers_method() -> None:
    cells = [row_of("mixopt, certified", "certified", score, 0.1) for score in (0.8, 0.81)]
    cells.append(row_of("shuffled, c' = c", "paper", 0.5, 57.0))
    other = {**cells[0], "sweep": "ingredients alone"}
    figure = training.draw(([*cells, other], "paper"))
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == ["MiniLM on SST-2"]
    assert panels[0].get_legend_handles_labels()[1] == ["mixopt, certified", "shuffled, c' = c"]
    assert panels[0].containers[0].lines[0].get_ydata() == pytest.approx([80.5])


def test_settings_say_how_much_really_moves() -> None:
    pytest.importorskip("transformers")
    row = table1._row(table1.PRESETS["paper/bert-sst2"])
    raw = {"scale": "demo", "rows": [row], "environment": ENVIRONMENT}
    (shown,) = table1.show(raw).rows
    assert "shuffled 78%" in shown.ours
    assert "204 steps" in shown.ours
    assert float(shown.certified) > 50


@pytest.fixture(scope="module")
def invariance() -> dict[str, Any]:
    pytest.importorskip("sklearn")
    pytest.importorskip("transformers")
    raw = table2.demo_config().to_json()
    raw["training"] = {"expected_batch_size": 200, "num_steps": 3, "device": "cpu"}
    return table2.run("demo", parse_config(raw))


@pytest.mark.slow
def test_shuffled_and_unshuffled_runs_agree_in_the_common_frame(
    invariance: dict[str, Any],
) -> None:
    for sides in invariance["modes"].values():
        assert sides["shuffled"]["loss"] == pytest.approx(sides["unshuffled"]["loss"], rel=1e-4)
        assert sides["shuffled"]["score"] == sides["unshuffled"]["score"]
        # The weights themselves lie elsewhere.
        assert sides["shuffled"]["distance_from_start"] > sides["unshuffled"]["distance_from_start"]
    assert invariance["modes"]["DPSGD"]["shuffled"]["certified_epsilon"] <= 1.0
    assert invariance["modes"]["non-private"]["shuffled"]["certified_epsilon"] is None
    distance = invariance["weight_distance"]
    assert distance["shuffled"] > 1.0
    assert distance["undone"] == 0.0


def test_table_2_at_full_scale_is_the_run_of_its_file(tmp_path: Path) -> None:
    """Its folders are the user's to name: those of the file are not there."""
    with pytest.raises(ShuffledDPError, match=r"examples/sst2|MiniLM"):
        REPRODUCTIONS["table2"].reproduce(Request(output=tmp_path, scale="paper"))


@pytest.mark.slow
def test_table_2_quotes_the_paper_and_says_equal(invariance: dict[str, Any]) -> None:
    rows = table2.show(invariance).rows
    assert "0.6362 / 89.68 %" in rows[0].paper
    assert all("equal to rounding" in row.verdict for row in rows[:2])
    assert "1063.02" in rows[2].paper
    other = json.loads(json.dumps(invariance))
    other["modes"]["DPSGD"]["shuffled"]["loss"] *= 2
    assert "differ by" in table2.show(other).rows[1].verdict


def test_matrix_ways_agree_and_compare_by_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table7, "SIZES", {"demo": 16})
    matrix, (rows, cols), ways = table7.ways_to_shuffle(torch.device("cpu"), 16)
    for way in ways.values():
        assert torch.allclose(way(), matrix[rows][:, cols])
    raw = table7.run("demo")
    raw["milliseconds"] = {"index": 1.0, "dense matmul": 50.0, "sparse matmul": 7.0}
    shown = table7.show(raw).rows
    assert shown[0].verdict == "the fastest, as printed"
    assert shown[1].verdict == "50 times indexing; the paper has 1344 times"


def test_epochs_compare_by_share() -> None:
    raw = {
        "scale": "paper",
        "batch_size": 1000,
        "precision": "bf16",
        "epoch": "extrapolated",
        "environment": ENVIRONMENT,
        "rows": [
            {
                "label": "BERT, QNLI",
                "model": "bert-base",
                "unshuffled_epoch_seconds": 50.0,
                "shuffled_epoch_seconds": 50.4,
                "steps_per_epoch": 108,
                "ratios": [1.008, 1.007, 1.009],
                "ratio": 1.008,
            }
        ],
    }
    rows = {row.what: row for row in table8.show(raw).rows}
    assert rows["BERT, QNLI"].paper == "28:28 → 28:53 (+1.5%)"
    assert rows["BERT, QNLI"].ours == "50.0 s → 50.4 s (+0.80%; 3 of 108 steps timed)"
    assert rows["BERT, QNLI"].verdict == ("costs less than printed (rounds from +0.7% to +0.9%)")
    assert rows["ViT, CIFAR"].ours == NOT_RUN


def test_a_demonstration_stands_beside_the_only_set_that_the_paper_has() -> None:
    cell = row_of("mixopt, certified", "certified", 0.8, 0.1)
    cell["config"]["data"] = {"format": "digits"}
    cell["config"]["privacy"]["method"] = "mixopt"
    (row,) = training.TABLES["table3"].show(([cell], "demo")).rows
    assert row.paper == "ViT on CIFAR-100, accuracy 1.26"
    # Table 4 has several sets, and digits are none of them.
    (row,) = training.TABLES["table4"].show(([cell], "demo")).rows
    assert row.paper == "not printed"


def test_the_audit_stands_beside_pure_noise() -> None:
    raw = json.loads((ROOT / "results" / table6.RESULT).read_text(encoding="utf-8"))
    rows = table6.show(raw).rows
    assert [row.paper for row in rows] == ["audited 0.4771", "audited 0.7005"]
    assert all("pure noise" in row.verdict for row in rows)


def test_the_demonstration_is_a_grid_of_the_papers_methods(tmp_path: Path) -> None:
    (sweep,) = training.TABLES["table3"].sweeps("demo", tmp_path, None)
    assert len(list(sweep.main_cells({}))) == 1 + 3 * 3
    presets = training.TABLES["table4"].sweeps("paper", tmp_path, tmp_path / "data")
    assert len(presets) == 8
    cell = next(iter(presets[0].main_cells({})))
    assert cell.config.data.path == str(tmp_path / "data" / "sst2")


def test_tables_of_texts_show_the_runs_that_are_there_and_run_none(tmp_path: Path) -> None:
    (tmp_path / "sst2").mkdir()
    cell = row_of("mixopt, certified", "certified", 0.8, 0.1)
    (tmp_path / "sst2" / "main_0.json").write_text(json.dumps(cell))
    said: list[str] = []
    request = Request(output=tmp_path, say=said.append)
    shown = REPRODUCTIONS["table4"].reproduce(request).exhibit
    assert said == [f"table4 has no demonstration: runs in {tmp_path} are shown"]
    assert shown is not None
    assert shown.rows[0].ours == "accuracy 80.0 (n = 1)"
    assert [path.name for path in tmp_path.rglob("*.json")] == ["main_0.json"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["table1", "table2", "table6", "table7"])
def test_a_table_is_run_at_small_size(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("transformers")
    monkeypatch.setattr(table1, "DEMO", ("paper/bert-sst2",))
    raw = table2.demo_config().to_json()
    raw["training"] = {"expected_batch_size": 200, "num_steps": 2, "device": "cpu"}
    small = parse_config(raw)
    monkeypatch.setattr(table2, "demo_config", lambda: small)
    few = partial(table6.PaperSetting, num_observations=200)
    monkeypatch.setattr(
        table6, "PaperSetting", lambda repetitions: few(repetitions=repetitions // 10)
    )
    monkeypatch.setattr(table7, "SIZES", {"demo": 16})
    found = REPRODUCTIONS[name].reproduce(Request(output=tmp_path))
    assert [path.name for path in found.written] == [f"{name}_demo.json"]
    assert found.exhibit is not None
    assert found.exhibit.rows
    assert all(row.ours != NOT_RUN for row in found.exhibit.rows)
    shown = REPRODUCTIONS[name].reproduce(Request(output=tmp_path, from_results=True))
    assert shown.exhibit == found.exhibit


@pytest.mark.slow
def test_a_table_of_runs_is_run_at_small_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(training, "EPSILONS", (1.0,))
    small = {**training.DEMO, "training": {"expected_batch_size": 100, "num_steps": 1}}
    table, request = replace(training.TABLES["table3"], demo=small), Request(output=tmp_path)
    assert table.run(request) == []
    found = table.show(table.read(request))
    methods = [row.what.split(", ", 1)[1] for row in found.rows]
    own = "shuffled, paper, c' = c"
    assert methods == ["non-private", *(f"{m}, ε = 1" for m in ("ghost", "mixopt", own))]
    assert all(row.ours != NOT_RUN for row in found.rows)
    assert found.origin.startswith("Scale: demo. 4 runs")
    assert table.show(table.read(replace(request, from_results=True))) == found
