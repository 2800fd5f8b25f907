"""`evaluate`, `predict`, `generate` and `report`: verbs that use a finished run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shuffled_dpsgd.cli.output import AsJson, print_json, verb

Run = Annotated[Path, typer.Argument(help="The folder of a finished run.")]
Data = Annotated[
    Path | None, typer.Option(help="Another folder of the same layout; its held-out data.")
]
Inputs = Annotated[
    list[str], typer.Argument(help="Texts (a pair is separated by a tab), or image files.")
]
Prompts = Annotated[list[str], typer.Argument(help="Prompts to continue.")]
MaxNewTokens = Annotated[int, typer.Option(help="Stop after so many tokens.")]
NumBeams = Annotated[int, typer.Option("--beams", help="Beams to search with; 1 is greedy.")]
Plain = Annotated[bool, typer.Option("--plain", help="Leave the chat template out.")]
Split = Annotated[
    str | None, typer.Option(help="The held-out split to score; the run's own if not given.")
]
Generation = Annotated[
    bool,
    typer.Option("--generation/--no-generation", help="Whether a language model writes texts."),
]
MaxPrompts = Annotated[
    int | None, typer.Option(min=1, help="Write texts for at most so many prompts, drawn.")
]
Texts = Annotated[Path | None, typer.Option(help="Keep the texts in this .jsonl file.")]


@verb(
    "evaluate runs/sst2",
    "evaluate runs/sst2 --data data/other",
    "evaluate runs/e2e --split test --beams 5 --texts e2e.jsonl",
)
def evaluate(
    run: Run,
    data: Data = None,
    split: Split = None,
    generate_texts: Generation = True,
    num_beams: NumBeams = 1,
    max_new_tokens: MaxNewTokens = 64,
    max_prompts: MaxPrompts = None,
    texts: Texts = None,
    as_json: AsJson = False,
) -> None:
    """Score the model a run left on held-out data; nothing private is touched or spent.

    A language model also continues the held-out prompts, and its texts are compared with all their
    references: BLEU, METEOR, ROUGE-L, NIST.
    """
    from shuffled_dpsgd.tasks.config import GenerationConfig
    from shuffled_dpsgd.tasks.inference import evaluate_run

    settings = GenerationConfig(
        max_new_tokens=max_new_tokens, num_beams=num_beams, max_prompts=max_prompts
    )
    name, results, generation = evaluate_run(
        run,
        data=None if data is None else data.resolve(),
        split=split,
        generation=settings if generate_texts else None,
        texts_to=texts if generate_texts else None,
    )
    if as_json:
        fields = ("score", "loss", "baseline")
        splits = {s: {key: getattr(one, key) for key in fields} for s, one in results.items()}
        # The split scored during training comes first, then every split.
        place, first = next(iter(splits.items()))
        found = {"score_name": name, **first, "run": str(run), "split": place, "splits": splits}
        print_json(found if generation is None else found | {"generation": generation})
        return
    for place, result in results.items():
        share = result.baseline
        commonest = "" if share is None else f" (commonest class alone {share:.4f})"
        score = f"held-out {name} {result.score:.4f} on {place}{commonest}"
        typer.echo(f"{score}, loss {result.loss:.4f}")
    if generation is not None:
        typer.echo(
            f"{generation['num_prompts']} texts generated on {generation['split']}, against "
            f"{generation['num_references']} references:"
        )
        for metric, variant in generation["variants"].items():
            typer.echo(f"  {metric} {generation[metric]:.4f}  ({variant})")


@verb("report runs/a runs/b --output runs.html")
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs, two or more.")],
    output: Annotated[Path, typer.Option(help="Write the page to this file.")] = Path("runs.html"),
    as_json: AsJson = False,
) -> None:
    """Put finished runs beside each other on one page: results, claims, settings, curves.

    The curves were computed from the training data without noise: the page is not for publishing.
    """
    from shuffled_dpsgd.reports.comparison import comparison_page, differing, read_runs

    found = read_runs(runs)
    output.write_text(comparison_page(found), encoding="utf-8")
    if as_json:
        print_json({"output": str(output), "runs": [run.name for run in found]})
        return
    typer.echo(f"{output}: {len(found)} runs; settings that differ: {len(differing(found))}")


@verb('predict runs/sst2 "a fine film"', "predict runs/cifar cat.png dog.png")
def predict(run: Run, inputs: Inputs, as_json: AsJson = False) -> None:
    """Classify texts or images with the model a run left."""
    from shuffled_dpsgd.tasks import inference

    answers = inference.predict(run, inputs)
    if as_json:
        print_json({"answers": answers})
        return
    for answer in answers:
        typer.echo(f"{answer['name']}\t{answer['share']:.3f}\t{answer['input']}")


@verb(
    'generate runs/e2e "name[The Mill], food[Thai]"',
    'generate runs/chat "Where is my parcel?"',
)
def generate(
    run: Run,
    prompts: Prompts,
    max_new_tokens: MaxNewTokens = 64,
    num_beams: NumBeams = 1,
    plain: Plain = False,
    as_json: AsJson = False,
) -> None:
    """Continue prompts with the language model a run left, greedily or by beam search.

    After `task = "sft"` a prompt is a user's message, put into the tokenizer's chat template.
    """
    from shuffled_dpsgd.tasks import inference
    from shuffled_dpsgd.tasks.config import GenerationConfig

    settings = GenerationConfig(max_new_tokens=max_new_tokens, num_beams=num_beams)
    results = inference.generate(run, prompts, settings, plain=plain)
    if as_json:
        print_json({"continuations": results, "decoding": settings.search})
        return
    for result in results:
        typer.echo(result["text"])
