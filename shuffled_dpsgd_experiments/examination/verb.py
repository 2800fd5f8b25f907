"""`shuffled-dpsgd examine`: the paper's claim for one step against the truth on actual pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shuffled_dpsgd.cli.accounting import (
    BatchSize,
    DatasetSize,
    Delta,
    Epochs,
    NumSteps,
    SamplingProb,
    number,
    resolve_sampling,
)
from shuffled_dpsgd.cli.output import AsJson, print_json, table, verb
from shuffled_dpsgd.errors import InvalidArgumentError, require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shuffled_dpsgd.accounting import PrivacyClaim
    from shuffled_dpsgd_experiments.examination.exact import Examination


@verb(
    "examine --epsilon 1 --delta 5e-6 --dataset-size 50000 --batch-size 1000 --epochs 10 "
    "--dimension 85800000 --batch-clip 1"
)
def examine(
    delta: Delta,
    dimension: Annotated[int, typer.Option(help="Number d of shuffled coordinates.")],
    batch_clip: Annotated[float, typer.Option(help="Ratio c'/c; never assumed.")],
    epsilon: Annotated[
        float | None, typer.Option(help="Calibrate the noise to this ε by the paper's formula.")
    ] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="Or: this noise.")] = None,
    sampling_prob: SamplingProb = None,
    num_steps: NumSteps = None,
    dataset_size: DatasetSize = None,
    batch_size: BatchSize = None,
    epochs: Epochs = None,
    draws: Annotated[int, typer.Option(min=2, help="Draws per direction.")] = 20_000,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Hold the paper's claim for one step against the exact truth, even with an ideal shuffle.

    The theorem's own worst-case pair and constant vectors: the true δ in both directions with
    confidence intervals, and what is proven for the whole run. Needs a clone.
    """
    prob, steps = resolve_sampling(
        sampling_prob=sampling_prob,
        num_steps=num_steps,
        dataset_size=dataset_size,
        batch_size=batch_size,
        epochs=epochs,
    )
    run = {"sampling_prob": prob, "num_steps": steps, "delta": delta}
    claim = _claim(epsilon, noise_multiplier, run, dimension=dimension, batch_clip=batch_clip)
    result, found = _examine(claim, draws, seed)
    if as_json:
        print_json(result)
        return
    _print(claim, result, found)


def _examine(
    claim: PrivacyClaim, draws: int, seed: int
) -> tuple[dict[str, Any], list[Examination]]:
    """The JSON object, and the examinations it came from."""
    from shuffled_dpsgd.accounting import certified_bracket, certified_claim
    from shuffled_dpsgd.accounting.bracket import CONDITIONS, STATEMENT
    from shuffled_dpsgd_experiments.examination.exact import examine_pair
    from shuffled_dpsgd_experiments.examination.pairs import constant_pair, spike_pair

    inputs = claim.inputs
    step = {name: inputs[name] for name in ("noise_multiplier", "step_epsilon", "step_delta")}
    pairs = [
        make(inputs["dimension"], inputs["batch_clip"]) for make in (spike_pair, constant_pair)
    ]
    found = [examine_pair(pair, **step, draws=draws, seed=seed) for pair in pairs]
    run = {name: inputs[name] for name in ("noise_multiplier", "sampling_prob", "num_steps")}
    run["delta"] = claim.delta
    certified = certified_claim(**run)
    attained = None
    if inputs["batch_clip"] >= 1.0:
        attained = {
            "epsilon": certified_bracket(**run).lower,
            "kind": "proven",
            "statement": STATEMENT,
            "conditions": list(CONDITIONS),
        }
    result: dict[str, Any] = {
        "claim": claim.to_json(),
        "certified": certified.to_json(),
        "attained": attained,
        "examinations": [each.to_json() for each in found],
        "verdict": next((e.verdict for e in found if e.refuted), "not refuted by these pairs"),
    }
    return result, found


def _claim(
    epsilon: float | None, noise: float | None, run: dict[str, Any], **of_theorem: Any
) -> PrivacyClaim:
    from shuffled_dpsgd.accounting import calibrate_paper, paper_claim

    if (epsilon is None) == (noise is None):
        raise InvalidArgumentError(
            "epsilon",
            expected="exactly one of --epsilon and --noise-multiplier",
            got={"epsilon": epsilon, "noise_multiplier": noise},
            remedy="give a budget to calibrate to, or the noise that was used",
        )
    if epsilon is not None:
        return calibrate_paper(epsilon=epsilon, **run, **of_theorem).claim
    remedy = "without noise there is no claim to examine"
    require(noise, "noise_multiplier", "a positive number", noise, remedy)
    return paper_claim(noise_multiplier=noise or 0.0, **run, **of_theorem)


def _print(claim: PrivacyClaim, result: dict[str, Any], found: Sequence[Examination]) -> None:
    from rich.console import Console

    from shuffled_dpsgd.accounting import PrivacyClaim

    inputs = claim.inputs
    rows = [
        (
            each.pair,
            "P‖Q" if truth.world == "first" else "Q‖P",
            number(each.claimed_delta),
            f"{truth.delta:.3g}",
            "exact" if truth.kind == "proven" else f"{truth.low:.3f}–{truth.high:.3f}",
            truth.kind,
            "refuted" if truth.low > each.claimed_delta else "not refuted",
        )
        for each in found
        for truth in each.truth
    ]
    words = ("pair", "direction", "interval", "kind", "verdict")
    title = (
        f"one step at σ = {number(inputs['noise_multiplier'])}, said to be "
        f"({number(inputs['step_epsilon'])}, {number(inputs['step_delta'])})"
    )
    headings = (*words[:2], "claimed δ", "true δ", *words[2:])
    console = Console()
    console.print(table(headings, rows, words=words, title=title, title_justify="left"))
    console.print(f"whole run, paper:     {claim.describe()}", highlight=False)
    certified = PrivacyClaim.from_json(result["certified"])
    console.print(f"whole run, certified: {certified.describe()}", highlight=False)
    if result["attained"] is not None:
        console.print(
            f"  {result['attained']['statement']} (attained: at least "
            f"ε = {number(result['attained']['epsilon'])}, proven)",
            highlight=False,
        )
    relation = "above" if certified.epsilon > claim.epsilon else "below"
    console.print(
        f"  at c' = {inputs['batch_clip']:g} c the certified ε is {relation} the claimed one; "
        "a black box sees the same distribution with the shuffle and without",
        highlight=False,
    )
    console.print(f"verdict: [bold]{result['verdict']}[/bold]")
