"""`shuffled-dpsgd plan`: memory, time and communication of a run, from its model's shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shuffled_dpsgd.cli.inspect import MODEL_HELP
from shuffled_dpsgd.cli.output import AsJson, print_json, reports_errors
from shuffled_dpsgd.errors import InvalidArgumentError

if TYPE_CHECKING:
    from rich.table import Table

    from shuffled_dpsgd.scaling import Estimate, Gpu, Job, ModelShapes

EPILOG = (
    "Examples: [bold]shuffled-dpsgd plan --model gpt2-large --gpus 8 --gpu h200[/bold] · "
    "[bold]shuffled-dpsgd plan --model llama-7b --gpus 64 --gpu h100 --length 512[/bold]"
)
# By strategy: the largest physical batch that fits, and the estimate.
Found = dict[str, "tuple[int, Estimate]"]
GIB = 2.0**30
LENGTHS = {"vit": 197}
DEFAULT_LENGTH = 128
COUNTS = [2**power for power in range(11)]
Kind = Literal["h200", "h100", "a100"]
Model = Annotated[str, typer.Option(help=MODEL_HELP)]
Gpus = Annotated[int, typer.Option(min=1, help="Number of GPUs, a rank each.")]
GpuKind = Annotated[Kind, typer.Option("--gpu", help="Kind of GPU, eight of them in a node.")]
Length = Annotated[
    int | None, typer.Option(min=1, help="Tokens of a sample; 128, or an image's patches.")
]
BatchSize = Annotated[int, typer.Option(min=1, help="Expected logical batch over all ranks.")]
Physical = Annotated[
    int | None,
    typer.Option("--physical-batch", min=1, help="Samples at once on a rank; the most that fit."),
]
Records = Annotated[int, typer.Option(min=1, help="Training records, for epochs a day.")]


@reports_errors
def plan(
    model: Model = "gpt2-large",
    gpus: Gpus = 1,
    gpu: GpuKind = "h200",
    length: Length = None,
    batch_size: BatchSize = 1000,
    physical_batch: Physical = None,
    records: Records = 50_000,
    as_json: AsJson = False,
) -> None:
    """Estimate what a private run takes, by a stated cost model fitted to one H200.

    Replicated ranks have the whole model each, sharded ones some rows of every parameter. What
    ranks exchange was never measured.
    """
    from shuffled_dpsgd.models import build_model
    from shuffled_dpsgd.scaling import GPUS, shapes_of
    from shuffled_dpsgd.scaling.estimate import MEMORY_ERROR, TIME_ERROR

    shapes = shapes_of(build_model(model))
    tokens = length or _default_length(model, shapes)
    if shapes.length is not None and tokens > shapes.length:
        raise InvalidArgumentError(
            "--length", expected=f"at most {shapes.length} tokens of {model}", got=tokens
        )
    found = {
        strategy: _estimated(
            shapes, GPUS[gpu], strategy, gpus=gpus, length=tokens, logical_batch=batch_size,
            physical_batch=physical_batch, records=records,
        )
        for strategy in ("replicated", "sharded")
    }  # fmt: skip
    if as_json:
        described = {name: _described(*one) for name, one in found.items()}
        weak = _weak(shapes, GPUS[gpu], found, physical_batch)
        errors = {"time": TIME_ERROR, "memory": MEMORY_ERROR, "exchange": None}
        chosen = {"model": model, "gpu": GPUS[gpu].name, "largest_relative_error": errors}
        print_json({**chosen, **described, "weak_scaling": weak})
    else:
        _print(model, shapes, GPUS[gpu], found, physical_batch)


def _default_length(model: str, shapes: ModelShapes) -> int:
    """The tokens of an image are fixed; texts are cut where the caller likes."""
    images = model.startswith("vit") or not shapes.length
    usual = LENGTHS["vit"] if images else DEFAULT_LENGTH
    return min(usual, shapes.length or usual)


def _estimated(
    shapes: ModelShapes, gpu: Gpu, strategy: Any, *, physical_batch: int | None, **sizes: int
) -> tuple[int, Estimate]:
    """The largest physical batch that fits, and the estimate for it or for the one asked for."""
    from shuffled_dpsgd.scaling import Job, estimate, largest_batch

    job = Job(strategy=strategy, physical_batch=physical_batch or 1, **sizes)
    most = largest_batch(shapes, gpu, job)
    return most, estimate(shapes, gpu, _with_batch(job, physical_batch or max(1, most)))


def _with_batch(job: Job, physical_batch: int) -> Job:
    from dataclasses import replace

    return replace(job, physical_batch=physical_batch)


def _described(most: int, one: Estimate) -> dict[str, Any]:
    from dataclasses import asdict

    memory = {f"{name}_gib": value / GIB for name, value in asdict(one.memory).items()}
    return {
        "supported": True,
        "fits": one.fits,
        "largest_physical_batch": most,
        "memory": memory | {"peak_gib": one.memory.peak / GIB},
        "batches_per_rank": one.batches_per_rank,
        "compute_seconds": one.compute_seconds,
        "update_seconds": one.update_seconds,
        "exchange_seconds": one.exchange_seconds,
        "exchange_gib": one.exchange_bytes / GIB,
        "step_seconds": one.step_seconds,
        "samples_per_second": one.samples_per_second,
        "epochs_per_day": one.epochs_per_day,
    }


def _weak(
    shapes: ModelShapes, gpu: Gpu, found: Found, physical_batch: int | None
) -> list[dict[str, Any]]:
    """Efficiency against one GPU's compute, for the work per rank of the job."""
    from shuffled_dpsgd.scaling.estimate import weak_scaling

    rows = {
        name: weak_scaling(shapes, gpu, one.job, COUNTS, physical_batch=physical_batch)
        for name, (_, one) in found.items()
    }
    return [
        {"gpus": count}
        | {
            name: {
                "efficiency": 1.0 - ones[index].exchange_seconds / ones[index].step_seconds,
                "fits": ones[index].fits,
            }
            for name, ones in rows.items()
        }
        for index, count in enumerate(COUNTS)
    ]


def _print(
    model: str, shapes: ModelShapes, gpu: Gpu, found: Found, physical_batch: int | None
) -> None:
    from rich.console import Console

    console = Console()
    job = found["replicated"][1].job
    console.print(
        f"[bold]{model}[/bold], {shapes.parameters:,} parameters, on {job.gpus} × {gpu.name}: "
        f"batches of {job.logical_batch} samples of {job.length} tokens"
    )
    console.print(_costs(found))
    console.print(_scaling(_weak(shapes, gpu, found, physical_batch)))
    console.print(f"{_errors()} {_advice(shapes, gpu, found)}", style="dim")


def _costs(found: Found) -> Table:
    from rich.table import Table

    table = Table(title="one rank")
    table.add_column("")
    table.add_column("replicated", justify="right")
    table.add_column("sharded", justify="right")
    described = [_described(*one) for one in found.values()]
    for name in described[0]["memory"]:
        label = name.removesuffix("_gib").replace("_", " ")
        table.add_row(f"{label}, GiB", *(f"{one['memory'][name]:.2f}" for one in described))
    table.add_section()
    rows = {
        "fits": "fits",
        "largest_physical_batch": "largest physical batch",
        "batches_per_rank": "physical batches a step",
        "exchange_gib": "exchanged in a step, GiB",
        "compute_seconds": "compute, s",
        "update_seconds": "noise, update, shuffle, s",
        "exchange_seconds": "exchange, s",
        "step_seconds": "step, s",
        "samples_per_second": "samples/s, all ranks",
        "epochs_per_day": "epochs a day",
    }
    always = ("fits", "largest_physical_batch")
    for name, label in rows.items():
        shown = (_shown(d[name]) if d["fits"] or name in always else "–" for d in described)
        table.add_row(label, *shown)
    return table


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}"


def _scaling(rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table(title="weak scaling: share of a step that is not communication")
    table.add_column("GPUs", justify="right")
    table.add_column("replicated", justify="right")
    table.add_column("sharded", justify="right")
    for row in rows:
        cells = [
            f"{one['efficiency']:.0%}" if one["fits"] else "does not fit"
            for one in (row["replicated"], row["sharded"])
        ]
        table.add_row(f"{row['gpus']:,}", *cells)
    return table


def _errors() -> str:
    from shuffled_dpsgd.scaling.estimate import MEMORY_ERROR, TIME_ERROR

    return (
        f"Fitted to eager steps on one H200: time was off by at most {TIME_ERROR:.0%}, memory by "
        f"{MEMORY_ERROR:.0%} (docs/distributed.md). Other GPUs and communication are assumed, not "
        "measured."
    )


def _advice(shapes: ModelShapes, gpu: Gpu, found: Found) -> str:
    from shuffled_dpsgd.scaling.estimate import fewest_gpus

    whole, parts = found["replicated"][1], found["sharded"][1]
    if not whole.fits and not parts.fits:
        enough = fewest_gpus(shapes, gpu, parts.job)
        more = f"shard it over {enough} GPUs, " if enough and enough > parts.job.gpus else ""
        return (
            f"Neither way fits: {more}train adapters (LoRA), use shorter samples or gradient "
            "checkpointing, or a smaller model."
        )
    one = whole if whole.fits else parts
    says = "" if whole.fits else "The whole model does not fit on a rank: shard it. "
    if one.exchange_seconds <= one.compute_seconds:
        return says.strip()
    if one is whole:
        remedy = (
            "use a larger logical batch, which is exchanged once a step however many physical "
            "batches it has, or fewer ranks"
        )
    else:
        remedy = (
            "put more tokens into a physical batch, for each of which all weights are gathered: "
            "gradient checkpointing, more GPUs, or adapters (LoRA)"
        )
    return f"{says}Communication takes longer than computing: {remedy}."
