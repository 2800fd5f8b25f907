"""The figures show the numbers they were given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shuffled_dpsgd.reports import RunView
from shuffled_dpsgd.reports.figures import FIGURES, draw, draw_all, smooth
from shuffled_dpsgd.reports.style import on_white, save_figure, to_svg


def test_every_figure_is_drawn_when_everything_was_measured(view: RunView) -> None:
    assert set(draw_all(view)) == set(FIGURES)


def test_nothing_is_drawn_from_nothing(view: RunView) -> None:
    empty = replace(view, records=[])
    assert draw_all(empty) == {}


def test_epsilon_curves_carry_their_kind(view: RunView) -> None:
    figure = draw("epsilon", view)
    assert figure is not None
    (axes,) = figure.axes
    lines = {str(line.get_label()): line for line in axes.lines}
    certified = lines["certified, spent so far"]
    paper = lines["paper's estimate (heuristic), noise not its own"]
    assert list(certified.get_ydata()) == [record.certified_epsilon for record in view.records]
    assert list(paper.get_ydata()) == [record.paper_epsilon for record in view.records]
    assert certified.get_linestyle() == "-"
    assert paper.get_linestyle() != "-"
    assert paper.get_linewidth() < certified.get_linewidth()
    assert lines["budget (proven)"].get_ydata()[0] == 3.0  # type: ignore[index]
    own = draw("epsilon", replace(view, budget_kind="heuristic"))
    assert own is not None
    assert "paper's estimate (heuristic)" in {str(line.get_label()) for line in own.axes[0].lines}


def test_histogram_counts_all_samples_and_marks_the_clipped(view: RunView) -> None:
    figure = draw("gradient_norms", view)
    assert figure is not None
    (axes,) = figure.axes
    heights = [patch.get_height() for patch in axes.patches]  # type: ignore[attr-defined]
    assert sum(heights) == 3 * len(view.records)
    colours = {
        patch.get_x() >= 1.0: patch.get_facecolor()  # type: ignore[attr-defined]
        for patch in axes.patches
        if patch.get_height()  # type: ignore[attr-defined]
    }
    assert colours[True] != colours[False]


def test_unmeasured_steps_are_left_out(view: RunView) -> None:
    steps, scores = view.series("heldout_score")
    assert steps == [3, 6, 9]
    assert scores == pytest.approx([0.3, 0.6, 0.9])


def test_smoothing_follows_a_constant_from_the_start() -> None:
    assert smooth([5.0] * 10) == pytest.approx([5.0] * 10)
    rising = smooth([0.0, 1.0, 1.0, 1.0])
    assert rising == sorted(rising)


def test_files_are_written_and_svg_is_repeatable(view: RunView, tmp_path: Path) -> None:
    figure = draw("epsilon", view)
    again = draw("epsilon", view)
    assert figure is not None
    assert again is not None
    png, svg = save_figure(figure, tmp_path / "figures", "epsilon")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert svg.read_text() == on_white(to_svg(again)) == on_white(to_svg(figure))
    assert svg.read_text().startswith("<svg")
