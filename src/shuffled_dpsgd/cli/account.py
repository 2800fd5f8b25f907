"""`shuffled-dpsgd account` and `calibrate`: the ε of a run, the noise for one, by every method."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shuffled_dpsgd.cli.accounting import (
    AdjacencyOption,
    Bands,
    BatchClip,
    BatchSize,
    DatasetSize,
    Delta,
    DeltaSplitOption,
    Dimension,
    Epochs,
    LargestBatch,
    NumSteps,
    SamplingProb,
    number,
    price_each,
    print_comparison,
    released,
)
from shuffled_dpsgd.cli.output import AsJson, print_json, verb

WIDE = 0.1
"""A share of ε: an interval that is wider says too little to be printed."""

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shuffled_dpsgd.accounting import Accountant, PrivacyClaim, SampledGaussian, Target


@verb(
    "account --noise-multiplier 2.33 --sampling-prob 0.02 --num-steps 500 --delta 5e-6 "
    "--dimension 85800000 --batch-clip 100"
)
def account(
    noise_multiplier: Annotated[float, typer.Option(help="σ: noise std over the clip norm.")],
    delta: Delta,
    sampling_prob: SamplingProb = None,
    num_steps: NumSteps = None,
    dataset_size: DatasetSize = None,
    batch_size: BatchSize = None,
    epochs: Epochs = None,
    dimension: Dimension = None,
    batch_clip: BatchClip = None,
    delta_split: DeltaSplitOption = 0.5,
    adjacency: AdjacencyOption = "add-remove",
    largest_batch: LargestBatch = None,
    bands: Bands = None,
    as_json: AsJson = False,
) -> None:
    """Price a run that was, or will be, trained with this noise.

    The certified row is what may be claimed, with the interval its exact value lies in. Below it:
    ε by both adjacencies, what the best attacker can achieve, and ε of whoever owns several
    records. The paper's row appears when --dimension and --batch-clip are given (null in JSON
    otherwise).
    """
    from shuffled_dpsgd.accounting import (
        SampledGaussian,
        accountants,
        certified_bracket,
        what_it_means,
    )

    run = released(
        sampling_prob=sampling_prob,
        num_steps=num_steps,
        dataset_size=dataset_size,
        batch_size=batch_size,
        epochs=epochs,
        adjacency=adjacency,
        largest_batch=largest_batch,
        bands=bands,
    )
    mechanism = SampledGaussian(noise_multiplier=noise_multiplier, **run)
    chosen = accountants(dimension=dimension, batch_clip=batch_clip, delta_split=delta_split)
    rows = price_each(chosen, lambda each: _row(each, mechanism, delta), quiet=as_json)
    bracket = None
    if largest_batch is None and bands is None:  # Those are priced by pairs that no run attains.
        bracket = certified_bracket(**mechanism.to_json(), delta=delta)
        rows["certified"]["bracket"] = [bracket.lower, bracket.upper]
    meaning = what_it_means((mechanism,), delta)
    if as_json:
        facts = {**mechanism.to_json(), "delta": delta}
        print_json({"run": facts, "paper": None, **rows, "meaning": meaning.to_json()})
        return
    print_comparison(f"σ = {noise_multiplier:g}, δ = {delta:g}, {_said(mechanism)}", rows)
    if bracket is not None and bracket.upper - bracket.lower <= WIDE * bracket.upper < math.inf:
        ends = f"{number(bracket.lower)} and {number(bracket.upper)}"
        typer.echo(f"The exact ε lies between {ends} (proven).")
    for line in meaning.describe():
        typer.echo(line)


def _said(run: SampledGaussian) -> str:
    most, block = run.largest_batch, run.steps_per_block
    more = f", each a block of {block} steps" if block else f", batches of {most}" if most else ""
    return f"{run.adjacency}, q = {run.sampling_prob:.6g}, T = {run.num_steps:,}{more}"


def _row(accountant: Accountant, mechanism: SampledGaussian, delta: float) -> dict[str, Any]:
    claim = accountant.claim(mechanism, delta)
    row = {"noise_multiplier": mechanism.noise_multiplier, **claim.to_json()}
    return {**row, **_paper_fields(claim)} if accountant.name == "paper" else row


def _paper_fields(claim: PrivacyClaim) -> dict[str, Any]:
    """The paper's per-step figures, and the σ0 that its route asks for at the same ε with d = 1."""
    from shuffled_dpsgd.accounting import calibrate_paper

    inputs = claim.inputs
    unshuffled = None
    if 0.0 < claim.epsilon < float("inf"):
        unshuffled = calibrate_paper(
            epsilon=claim.epsilon,
            delta=claim.delta,
            sampling_prob=inputs["sampling_prob"],
            num_steps=inputs["num_steps"],
            dimension=1,
            batch_clip=inputs["batch_clip"],
            delta_split=inputs["delta_split"],
        ).noise_multiplier
    return {
        "step_epsilon": inputs.get("step_epsilon"),
        "step_delta": inputs.get("step_delta"),
        "unshuffled_noise_multiplier": unshuffled,
        "falls_back": inputs.get("falls_back", False),
    }


@verb(
    "calibrate --epsilon 1 --delta 5e-6 --dataset-size 50000 --batch-size 1000 --epochs 10 "
    "--dimension 85800000 --batch-clip 1"
)
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
    delta_split: DeltaSplitOption = 0.5,
    adjacency: AdjacencyOption = "add-remove",
    largest_batch: LargestBatch = None,
    bands: Bands = None,
    as_json: AsJson = False,
) -> None:
    """Find the noise multiplier for a privacy budget.

    The certified row is the one to train with. The paper's row appears when --dimension and
    --batch-clip are given; it is an estimate, so the certified ε at its noise is printed too.
    """
    from shuffled_dpsgd.accounting import Target, accountants

    run = released(
        sampling_prob=sampling_prob,
        num_steps=num_steps,
        dataset_size=dataset_size,
        batch_size=batch_size,
        epochs=epochs,
        adjacency=adjacency,
        largest_batch=largest_batch,
        bands=bands,
    )
    target = Target(epsilon=epsilon, delta=delta, **run)
    chosen = accountants(dimension=dimension, batch_clip=batch_clip, delta_split=delta_split)
    rows = price_each(chosen, lambda each: each.calibrate(target).to_json(), quiet=as_json)
    at_paper = _certified_at_paper_noise(target, rows)
    if as_json:
        facts = {name: value for name, value in asdict(target).items() if value is not None}
        print_json({"target": facts, "paper": None, **rows, **at_paper})
        return
    title = f"ε = {epsilon:g} at δ = {delta:g}, {_said(target.mechanism(1.0))}"
    print_comparison(title, rows)
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
