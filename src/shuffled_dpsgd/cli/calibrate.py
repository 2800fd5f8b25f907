"""`shuffled-dpsgd calibrate`: the noise a budget needs, by every method, each with its kind."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shuffled_dpsgd.cli.accounting_options import (
    AdjacencyOption,
    BatchClip,
    BatchSize,
    DatasetSize,
    Delta,
    DeltaSplitOption,
    Dimension,
    Epochs,
    NumSteps,
    SamplingProb,
    parse_delta_split,
    resolve_sampling,
)
from shuffled_dpsgd.cli.accounting_tables import number, price_each, print_comparison
from shuffled_dpsgd.cli.output import AsJson, print_json, reports_errors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shuffled_dpsgd.accounting import Target

EPILOG = (
    "Example: [bold]shuffled-dpsgd calibrate --epsilon 1 --delta 5e-6 --dataset-size 50000 "
    "--batch-size 1000 --epochs 10 --dimension 85800000 --batch-clip 1[/bold]"
)


@reports_errors
def calibrate(
    epsilon: Annotated[float, typer.Option(help="Target ε of the whole run.")],
    delta: Delta,
    sampling_prob: SamplingProb = None,
    num_steps: NumSteps = None,
    dataset_size: DatasetSize = None,
    batch_size: BatchSize = None,
    epochs: Epochs = None,
    dimension: Dimension = None,
    batch_clip: BatchClip = None,
    delta_split: DeltaSplitOption = "0.5",
    adjacency: AdjacencyOption = "add-remove",
    as_json: AsJson = False,
) -> None:
    """Find the noise multiplier for a privacy budget.

    The certified row is the one to train with. The paper's row appears when --dimension and
    --batch-clip are given; it is an estimate, so the certified ε at its noise is printed too.
    """
    from shuffled_dpsgd.accounting import Target, accountants

    prob, steps = resolve_sampling(
        sampling_prob=sampling_prob,
        num_steps=num_steps,
        dataset_size=dataset_size,
        batch_size=batch_size,
        epochs=epochs,
    )
    target = Target(
        epsilon=epsilon, delta=delta, sampling_prob=prob, num_steps=steps, adjacency=adjacency
    )
    chosen = accountants(
        dimension=dimension, batch_clip=batch_clip, delta_split=parse_delta_split(delta_split)
    )
    rows = price_each(chosen, lambda each: each.calibrate(target).to_json(), quiet=as_json)
    at_paper = _certified_at_paper_noise(target, rows)
    if as_json:
        print_json({"target": asdict(target), "paper": None, **rows, **at_paper})
        return
    print_comparison(f"ε = {epsilon:g} at δ = {delta:g}, q = {prob:.6g}, T = {steps:,}", rows)
    for claim in at_paper.values():
        typer.echo(
            f"At the paper's noise {number(claim['noise_multiplier'])} what is proven is "
            f"ε = {number(claim['epsilon'])} (proven), against {epsilon:g} (heuristic)."
        )


def _certified_at_paper_noise(
    target: Target, rows: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """What can be relied on if one trains with the paper's noise; empty where it has none."""
    from shuffled_dpsgd.accounting import certified_claim

    noise = rows.get("paper", {}).get("noise_multiplier")
    if noise is None:
        return {}
    claim = certified_claim(**target.mechanism(noise).to_json(), delta=target.delta)
    return {"certified_at_paper_noise": {"noise_multiplier": noise, **claim.to_json()}}
