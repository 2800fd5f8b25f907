"""Rows of tables 3 to 5: a sweep's cells beside what the paper printed, with a verdict in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from shuffled_dpsgd.tasks.data.published import PUBLISHED
from shuffled_dpsgd_experiments.exhibits import ExhibitRow
from shuffled_dpsgd_experiments.sweeps.search import LOWER_IS_BETTER
from shuffled_dpsgd_experiments.sweeps.table import TEXT_METRICS, SweepRow, rows_of
from shuffled_dpsgd_experiments.tables.printed import EPSILONS, METHODS, RESULTS, Scores

Record = Mapping[str, Any]
Printed: TypeAlias = Mapping[tuple[str, str, str], Scores]
# A classifier this close to the share of the commonest class has not shown that it learnt anything.
_CLOSE = 0.01
_OWN = METHODS.index("shuffled")


def rows_from(table: str, records: Iterable[Record]) -> list[ExhibitRow]:
    """The cells of each model, data set and sweep, by budget and method."""
    return [
        row
        for (what, format_, _), group in grouped(records).items()
        for row in _rows(what, _printed_for(table, format_), group)
    ]


def grouped(records: Iterable[Record]) -> dict[tuple[str, str, str], list[Record]]:
    """By model and data set in words, format and sweep."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        what = f"{_model_of(record)} on {_data_of(record)}"
        key = what, record["config"]["data"]["format"], record["sweep"]
        groups.setdefault(key, []).append(record)
    return groups


def missing_rows(table: str, there: set[str]) -> list[ExhibitRow]:
    """What the paper printed for the data sets that no cell is about."""
    titles = {_title_of(format_) for format_ in there}
    return [
        ExhibitRow(
            what=f"{model} on {data}, {metric}",
            paper=f"non-private {scores[0]:g}; "
            + "; ".join(
                f"ε = {epsilon:g}: "
                + ", ".join(f"{m} {v:g}" for m, v in zip(METHODS, values, strict=True))
                for epsilon, values in zip(EPSILONS, scores[1:], strict=True)
            ),
        )
        for (model, data, metric), scores in RESULTS[table].items()
        if data not in titles
    ]


def lost_samples(records: Sequence[Record]) -> list[str]:
    """A note if samples contributed nothing for want of a finite gradient, or if nobody counted."""
    counts = [record.get("samples_without_finite_gradient") for record in records]
    notes = []
    if lost := sum(count or 0 for count in counts):
        notes.append(f"{lost} times a sample had no finite gradient and contributed nothing.")
    uncounted = sum(
        count is None and record["environment"]["hardware"].startswith("NVIDIA")
        for count, record in zip(counts, records, strict=True)
    )
    if uncounted:
        notes.append(
            f"{uncounted} of the runs were free to use cuDNN's attention and did not count samples "
            "without a finite gradient, which contribute nothing: docs/results.md has more."
        )
    return notes


def _model_of(record: Record) -> str:
    """The model's name; runs from its checkpoint and from random weights are told apart."""
    model = record["config"]["model"]
    return f"{model['name']} from scratch" if model.get("from_scratch") else str(model["name"])


def _data_of(record: Record) -> str:
    """The data set's title, or what the run itself called its data: a part is no whole set."""
    data = record["config"]["data"]
    format_ = str(data["format"])
    given = str(data.get("name") or format_)
    if given != format_ and not given.startswith(f"{format_} ("):
        return given
    return _title_of(format_)


def _title_of(format_: str) -> str:
    return PUBLISHED[format_].title if format_ in PUBLISHED else format_


def _printed_for(table: str, format_: str) -> Printed:
    """What the paper has for a data set; a demonstration on another stands beside the only one."""
    title, titles = _title_of(format_), {data for _, data, _ in RESULTS[table]}
    if title not in titles and len(titles) == 1:
        return {
            (f"{model} on {data},", data, metric): scores
            for (model, data, metric), scores in RESULTS[table].items()
        }
    return {key: scores for key, scores in RESULTS[table].items() if key[1] == title}


def _rows(what: str, printed: Printed, records: Sequence[Record]) -> list[ExhibitRow]:
    guess = max((record.get("baseline") or 0.0 for record in records), default=0.0)
    found = sorted(rows_of(records), key=lambda row: (row.epsilon or 0.0, row.name))
    rows = []
    for row in found:
        texts = [f"{TEXT_METRICS[name]} {value:.3g}" for name, value in row.texts.items()]
        rows.append(
            ExhibitRow(
                what=f"{what}, {row.name}"
                + ("" if row.epsilon is None else f", ε = {row.epsilon:g}"),
                paper=_beside(row, printed),
                ours="; ".join([f"{row.score_name} {row.describe()}", *texts]),
                certified=row.describe_certified(),
                verdict=_verdict(row, found, printed, guess),
            )
        )
    return rows


def _beside(row: SweepRow, printed: Printed) -> str:
    """What the paper has for the method and budget, by model and metric.

    Its own method counts as calibrated by its own formula. Baselines certified by PLD stand beside
    the printed ones as well: they meet the same ε.
    """
    method = row.privacy.get("method")
    theirs = method != "shuffled" or row.privacy.get("accounting") == "paper"
    parts = []
    for (model, _, metric), scores in printed.items():
        if method == "non-private":
            value = scores[0]
        elif row.epsilon in EPSILONS and method in METHODS and theirs:
            value = scores[1:][EPSILONS.index(row.epsilon)][METHODS.index(method)]
        else:
            continue
        parts.append(f"{model} {metric} {value:g}")
    return "; ".join(parts) or "not printed"


def _verdict(row: SweepRow, rows: Sequence[SweepRow], printed: Printed, guess: float) -> str:
    """What is proven, and whether anything was learnt; of the paper's method also a comparison."""
    if row.epsilon is None:
        return "no privacy"
    if row.certified is None:
        return "nothing is proven"
    if not row.scores:
        return "no run has a finite score"
    proven = row.certified <= 1.001 * row.epsilon
    words = "ε is proven" if proven else f"ε = {row.epsilon:g} is claimed, not proven"
    if _is_a_guess(row, guess):
        return f"{words}; it has learnt nothing: the commonest class alone gives {100 * guess:.1f}"
    if row.privacy.get("accounting") == "paper":
        words += _compared(row, [each for each in rows if not _is_a_guess(each, guess)], printed)
    return words


def _is_a_guess(row: SweepRow, guess: float) -> bool:
    return bool(guess) and row.mean <= guess + _CLOSE


def _compared(row: SweepRow, rows: Sequence[SweepRow], printed: Printed) -> str:
    """How the paper's method compares with the best DP-SGD of the same sweep, so of its recipe.

    Nothing is said of a single seed, nor of means that are no further apart than one of them
    spreads over its seeds.
    """
    same = (other for other in rows if other.scores and other.epsilon == row.epsilon)
    honest = [other for other in same if other.privacy.get("accounting") != "paper"]
    if not honest:
        return ""
    lower = row.score_name in LOWER_IS_BETTER
    best = (min if lower else max)(honest, key=lambda other: other.mean)
    other = f"DP-SGD with a proven ε ({best.score_name} {best.describe()})"
    if row.spread is None or best.spread is None:
        return f"; a single seed, so not compared with {other}"
    ahead = (row.mean - best.mean) * (-1 if lower else 1)
    if abs(ahead) <= max(row.spread, best.spread):
        return f"; no difference beyond the spread over seeds to {other}"
    words = f"; scores {'better' if ahead > 0 else 'worse'} than {other}"
    if ahead < 0 and row.epsilon in EPSILONS and _printed_ahead(printed, row.epsilon):
        words += ", while the paper prints it ahead of both its baselines"
    return words


def _printed_ahead(printed: Printed, epsilon: float) -> bool:
    """Whether the paper's method is ahead of both baselines in everything printed at a budget."""
    at = [scores[1:][EPSILONS.index(epsilon)] for scores in printed.values()]
    return bool(at) and all(each[_OWN] > max(each[:_OWN] + each[_OWN + 1 :]) for each in at)
