"""Options that `calibrate`, `account` and `examine` share, and the facts they resolve to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import typer

from shuffled_dpsgd.cli.privacy_options import stated
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.options import Adjacency

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
    str, typer.Option("--delta-split", help="Share of δ for composition, or 'optimised'.")
]
AdjacencyOption = Annotated[Adjacency, stated("adjacency", "--adjacency")]


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
    if sampling_prob is not None and num_steps is not None and not any(derived.values()):
        return sampling_prob, num_steps
    if dataset_size is not None and batch_size is not None and epochs is not None:
        if any(value is not None for value in direct.values()):
            raise _contradiction(direct)
        return _from_sizes(dataset_size, batch_size, epochs)
    given = {name: value for name, value in (direct | derived).items() if value is not None}
    raise _contradiction(given)


def parse_delta_split(text: str) -> float | Literal["optimised"]:
    """A share or the word `optimised`."""
    if text == "optimised":
        return "optimised"
    try:
        return float(text)
    except ValueError:
        raise InvalidArgumentError(
            "delta_split", expected="a share in (0, 1) or 'optimised'", got=text
        ) from None


def _from_sizes(dataset_size: int, batch_size: int, epochs: float) -> tuple[float, int]:
    if dataset_size < 1 or not 1 <= batch_size <= dataset_size:
        raise InvalidArgumentError(
            "batch_size",
            expected=f"between 1 and the data-set size {dataset_size}",
            got=batch_size,
            remedy="the expected batch cannot hold more than the data",
        )
    if not (math.isfinite(epochs) and epochs > 0.0):
        raise InvalidArgumentError("epochs", expected="a positive number", got=epochs)
    steps_per_epoch = math.ceil(dataset_size / batch_size)
    return batch_size / dataset_size, max(1, math.ceil(epochs * steps_per_epoch))


def _contradiction(given: Mapping[str, object]) -> InvalidArgumentError:
    return InvalidArgumentError(
        "sampling",
        expected="either --sampling-prob and --num-steps, "
        "or --dataset-size, --batch-size and --epochs",
        got=given,
        remedy="give exactly one of the two sets",
    )
