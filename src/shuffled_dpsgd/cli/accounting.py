"""What `account`, `calibrate`, `budget` and `examine` share: options, and how figures are shown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shuffled_dpsgd.cli.output import KIND_COLOURS, table
from shuffled_dpsgd.cli.privacy_options import stated
from shuffled_dpsgd.errors import InvalidArgumentError, ShuffledDPError, require
from shuffled_dpsgd.options import Adjacency

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shuffled_dpsgd.accounting import Accountant

Delta = Annotated[float, stated("delta")]
SamplingProb = Annotated[
    float | None, typer.Option(help="Probability q that an example joins a step.")
]
NumSteps = Annotated[int | None, typer.Option(help="Number of optimizer steps T.")]
DatasetSize = Annotated[int | None, stated("dataset_size")]
BatchSize = Annotated[int | None, typer.Option(help="Expected batch size B; q = B/N.")]
Epochs = Annotated[float | None, typer.Option(help="T = epochs · ⌈N/B⌉.")]
Dimension = Annotated[
    int | None, typer.Option(help="Number d of shuffled coordinates, for the paper's estimate.")
]
BatchClip = Annotated[
    float | None,
    typer.Option(help="Ratio c'/c of batch clip to per-example clip; the paper never states it."),
]
DeltaSplitOption = Annotated[
    float, typer.Option("--delta-split", help="Share of δ for composition.")
]
AdjacencyOption = Annotated[Adjacency, stated("adjacency", "--adjacency")]
LargestBatch = Annotated[
    int | None,
    typer.Option(help="M: of a larger draw so many are kept. Wants --dataset-size and the like."),
]
Bands = Annotated[int | None, typer.Option(help="Steps in a block of banded noise.")]
REMARKS = {"certified": "rely on this", "gdp": "no bound of ε", "paper": "estimate"}


def resolve_sampling(
    *,
    sampling_prob: float | None,
    num_steps: int | None,
    dataset_size: int | None,
    batch_size: int | None,
    epochs: float | None,
) -> tuple[float, int]:
    """(q, T) from themselves or from data-set size, batch size and epochs; never half of each."""
    direct = {"sampling_prob": sampling_prob, "num_steps": num_steps}
    derived = {"dataset_size": dataset_size, "batch_size": batch_size, "epochs": epochs}
    given = {name: value for name, value in (direct | derived).items() if value is not None}
    if sampling_prob is not None and num_steps is not None and len(given) == 2:
        return sampling_prob, num_steps
    if dataset_size is None or batch_size is None or epochs is None or len(given) != 3:
        raise InvalidArgumentError(
            "sampling",
            expected="either --sampling-prob and --num-steps, "
            "or --dataset-size, --batch-size and --epochs",
            got=given,
            remedy="give exactly one of the two sets",
        )
    if dataset_size < 1 or not 1 <= batch_size <= dataset_size:
        raise InvalidArgumentError(
            "batch_size",
            expected=f"between 1 and the data-set size {dataset_size}",
            got=batch_size,
            remedy="the expected batch cannot hold more than the data",
        )
    require(math.isfinite(epochs) and epochs > 0.0, "epochs", "a positive number", epochs)
    steps = math.ceil(epochs * math.ceil(dataset_size / batch_size))
    return batch_size / dataset_size, max(1, steps)


def released(
    *, adjacency: Adjacency, largest_batch: int | None, bands: int | None, **sizes: Any
) -> dict[str, Any]:
    """What accountants price, but for the noise. Of banded noise a release is a block of steps."""
    prob, steps = resolve_sampling(**sizes)
    found: dict[str, Any] = {"adjacency": adjacency}
    if bands is not None:
        alone = largest_batch is None
        require(alone, "--largest-batch", "none beside --bands: nothing is proven", largest_batch)
        require(bands > 1, "--bands", "2 steps or more", bands)
        prob, steps, found["steps_per_block"] = bands * prob, math.ceil(steps / bands), bands
    if largest_batch is not None:
        expected = "a number, with --batch-size and --epochs, beside --largest-batch"
        require(sizes["dataset_size"] is not None, "--dataset-size", expected, None)
        found |= {"largest_batch": largest_batch, "dataset_size": sizes["dataset_size"]}
    return {"sampling_prob": prob, "num_steps": steps, **found}


def price_each(
    accountants: Sequence[Accountant], row: Callable[[Accountant], dict[str, Any]], quiet: bool
) -> dict[str, dict[str, Any]]:
    """One JSON object per accountant, with a progress bar on stderr.

    The certified accountant must answer; another that refuses keeps its row, with its reason.
    """
    from rich.console import Console
    from rich.progress import track

    rows: dict[str, dict[str, Any]] = {}
    console = Console(stderr=True)
    silent = quiet or not console.is_terminal
    for each in track(accountants, "pricing", console=console, transient=True, disable=silent):
        try:
            rows[each.name] = row(each)
        except ShuffledDPError as error:
            if each.name == "certified":
                raise
            nothing = {"epsilon": None, "noise_multiplier": None}
            rows[each.name] = {**nothing, "kind": each.kind, "refusal": str(error)}
    return rows


def print_comparison(title: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """A table for people, one row a method, its kind always shown; notes under it."""
    from rich.console import Console

    words = ("method", "kind", "remark")
    shown = [
        (
            name.replace("_", " "),
            f"[{KIND_COLOURS[row['kind']]}]{row['kind']}[/]",
            number(row["epsilon"]),
            number(row["noise_multiplier"]),
            _remark(name, row),
        )
        for name, row in rows.items()
    ]
    headings = ("method", "kind", "ε", "noise multiplier", "remark")
    console = Console()
    console.print(table(headings, shown, words=words, title=title, title_justify="left"))
    for line in _notes(rows):
        console.print(line, highlight=False)


def number(value: float | None) -> str:
    """Four digits, a sign for infinity, a dash for nothing."""
    if value is None:
        return "–"
    if math.isinf(value):
        return "∞"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.3e}"


def _remark(name: str, row: Mapping[str, Any]) -> str:
    if "refusal" in row or math.isinf(row["epsilon"]):
        return "refused" if "refusal" in row else "claims nothing"
    if name == "paper" and row["epsilon"] == 0.0:
        return "cannot be: noise never gives ε = 0"
    return REMARKS.get(name, "")


def _notes(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Why a method refused, and what the paper's estimate rests on."""
    lines = [f"{name}: {row['refusal']}" for name, row in rows.items() if "refusal" in row]
    paper = rows.get("paper", {})
    if paper.get("step_epsilon") is not None:
        inputs = paper["inputs"]
        lines.append(
            f"paper (heuristic, no guarantee): d = {inputs['dimension']:,}, "
            f"c'/c = {inputs['batch_clip']:g}, share of δ for composition "
            f"{inputs['delta_split']:.3g}; one step before sampling is said to be "
            f"({number(paper['step_epsilon'])}, {number(paper['step_delta'])}); unshuffled "
            f"coordinates need σ0 = {number(paper['unshuffled_noise_multiplier'])}"
            + ("; falls back to σ0" if paper["falls_back"] else "")
        )
    return lines
