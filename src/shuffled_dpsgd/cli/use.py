"""`evaluate`, `predict` and `generate`: what a finished run's folder is for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shuffled_dpsgd.cli.output import AsJson, print_json, reports_errors

EVALUATE_EPILOG = (
    "Examples: [bold]shuffled-dpsgd evaluate runs/sst2[/bold] · "
    "[bold]shuffled-dpsgd evaluate runs/sst2 --data data/other[/bold]"
)
PREDICT_EPILOG = (
    'Examples: [bold]shuffled-dpsgd predict runs/sst2 "a fine film"[/bold] · '
    "[bold]shuffled-dpsgd predict runs/cifar cat.png dog.png[/bold]"
)
GENERATE_EPILOG = (
    'Example: [bold]shuffled-dpsgd generate runs/e2e "name[[The Mill]], food[[Thai]]"[/bold]'
)

Run = Annotated[Path, typer.Argument(help="The folder of a finished run.")]
Data = Annotated[
    Path | None, typer.Option(help="Another folder of the same layout; its held-out data.")
]
Inputs = Annotated[
    list[str], typer.Argument(help="Texts (a pair is separated by a tab), or image files.")
]
Prompts = Annotated[list[str], typer.Argument(help="Prompts to continue.")]
MaxNewTokens = Annotated[int, typer.Option(help="Stop after so many tokens.")]


@reports_errors
def evaluate(run: Run, data: Data = None, as_json: AsJson = False) -> None:
    """Score the model a run left on held-out data; nothing private is touched or spent."""
    from shuffled_dpsgd.tasks.inference import evaluate_run

    name, result = evaluate_run(run, data=None if data is None else data.resolve())
    found = {"score_name": name, "score": result.score, "loss": result.loss}
    if as_json:
        print_json(found | {"baseline": result.baseline, "run": str(run)})
        return
    commonest = "" if result.baseline is None else f" (commonest class alone {result.baseline:.4f})"
    typer.echo(f"held-out {name} {result.score:.4f}{commonest}, loss {result.loss:.4f}")


@reports_errors
def predict(run: Run, inputs: Inputs, as_json: AsJson = False) -> None:
    """Classify texts or images with the model a run left."""
    from shuffled_dpsgd.tasks import inference

    answers = inference.predict(run, inputs)
    if as_json:
        print_json({"answers": answers})
        return
    for answer in answers:
        typer.echo(f"{answer['name']}\t{answer['share']:.3f}\t{answer['input']}")


@reports_errors
def generate(
    run: Run, prompts: Prompts, max_new_tokens: MaxNewTokens = 64, as_json: AsJson = False
) -> None:
    """Continue prompts with the language model a run left, greedily."""
    from shuffled_dpsgd.tasks import inference

    results = inference.generate(run, prompts, max_new_tokens=max_new_tokens)
    if as_json:
        print_json({"continuations": results})
        return
    for result in results:
        typer.echo(result["text"])
