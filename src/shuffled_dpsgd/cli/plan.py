"""`shuffled-dpsgd plan`: memory, time and communication of a run, from its model's shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shuffled_dpsgd.cli.inspect import Model
from shuffled_dpsgd.cli.output import AsJson, print_json, table, verb
from shuffled_dpsgd.errors import InvalidArgumentError

if TYPE_CHECKING:
    from shuffled_dpsgd.scaling import Estimate, Gpu, Job, ModelShapes
    from shuffled_dpsgd.scaling.estimate import Strategy

GIB = 2.0**30
IMAGE_TOKENS, USUAL_TOKENS = 197, 128
BATCH_SIZE, RECORDS = 1000, 50_000
STRATEGIES: tuple[Strategy, ...] = ("replicated", "sharded", "hybrid")
COUNTS = [2**power for power in range(11)]
SHOWN = {
    "fits": "fits",
    "largest_physical_batch": "largest physical batch",
    "batches_per_rank": "physical batches a step",
    "exchange_gib": "exchanged in a step, GiB",
    "compute_seconds": "compute, s",
    "update_seconds": "noise, update, shuffle, s",
    "exchange_seconds": "exchange, s",
    "step_seconds": "step, s",
    "hidden_step_seconds": "step if FSDP hides what it can, s",
    "samples_per_second": "samples/s, all ranks",
    "epochs_per_day": "epochs a day",
}
Gpus = Annotated[int, typer.Option(min=1, help="Number of GPUs, a rank each.")]
GpuKind = Annotated[
    Literal["h200", "h100", "a100", "rtx4090"],
    typer.Option("--gpu", help="Kind of GPU, eight of them in a node."),
]
Length = Annotated[
    int | None, typer.Option(min=1, help="Tokens of a sample; 128, or an image's patches.")
]
BatchSize = Annotated[int, typer.Option(min=1, help="Expected logical batch over all ranks.")]
Physical = Annotated[
    int | None,
    typer.Option("--physical-batch", min=1, help="Samples at once on a rank; the most that fit."),
]
LoraRank = Annotated[
    int | None, typer.Option(min=1, help="Train LoRA of this rank on all linear maps instead.")
]
Bits = Annotated[
    Literal["4", "8", "16"], typer.Option(help="Of each frozen weight, beside --lora-rank.")
]
Half = Annotated[
    bool, typer.Option("--half-weights", help="Sharded weights are gathered in bfloat16.")
]
Records = Annotated[int, typer.Option(min=1, help="Training records, for epochs a day.")]


@verb(
    "plan --model gpt2-large --gpus 8 --gpu h200",
    "plan --model llama-7b --gpus 64 --gpu h100 --length 512",
    "plan --model llama-8b --lora-rank 16 --bits 4 --gpu rtx4090",
)
def plan(
    model: Model = "gpt2-large",
    gpus: Gpus = 1,
    gpu: GpuKind = "h200",
    length: Length = None,
    batch_size: BatchSize = BATCH_SIZE,
    physical_batch: Physical = None,
    records: Records = RECORDS,
    lora_rank: LoraRank = None,
    bits: Bits = "16",
    half: Half = False,
    as_json: AsJson = False,
) -> None:
    """Estimate what a private run takes, by a stated cost model fitted to one H200.

    Replicated ranks have the whole model each, sharded ones some rows of every parameter, hybrid
    ones a sharded copy in every node. What ranks exchange was never measured.
    """
    from shuffled_dpsgd.models import build_model
    from shuffled_dpsgd.scaling import GPUS, Job, estimate, largest_batch, shapes_of
    from shuffled_dpsgd.scaling.estimate import MEMORY_ERROR, TIME_ERROR, fewest_gpus, weak_scaling

    shapes, kind = shapes_of(build_model(model)), GPUS[gpu]
    # The tokens of an image are fixed; texts are cut where the caller likes.
    usual = IMAGE_TOKENS if model.startswith("vit") or not shapes.length else USUAL_TOKENS
    job = Job(
        gpus=gpus,
        length=length or min(usual, shapes.length or usual),
        logical_batch=batch_size,
        records=records,
        physical_batch=physical_batch or 1,
        half=half,
    )
    if shapes.length is not None and job.length > shapes.length:
        raise InvalidArgumentError(
            "--length", expected=f"at most {shapes.length} tokens of {model}", got=job.length
        )
    if lora_rank is not None:
        if (gpus, batch_size, records, half) != (1, BATCH_SIZE, RECORDS, False):
            raise InvalidArgumentError(
                "--lora-rank",
                expected="no --gpus, --batch-size, --records or --half-weights beside it",
                got="one of them",
                remedy="adapters are planned on one GPU, and their memory alone",
            )
        _plan_adapters(model, shapes, kind, job, physical_batch, lora_rank, bits, as_json=as_json)
        return
    if bits != "16":
        raise InvalidArgumentError(
            "--bits", expected="--lora-rank beside it: only frozen weights are quantised", got=bits
        )
    estimates: dict[Strategy, Estimate] = {}
    described: dict[str, dict[str, Any]] = {}
    weak: list[dict[str, Any]] = [{"gpus": count} for count in COUNTS]
    for strategy in STRATEGIES:
        asked = replace(job, strategy=strategy)
        most = largest_batch(shapes, kind, asked)
        one = estimate(shapes, kind, replace(asked, physical_batch=physical_batch or max(1, most)))
        estimates[strategy], described[strategy] = one, _described(most, one)
        scaled = weak_scaling(shapes, kind, one.job, COUNTS, physical_batch=physical_batch)
        for row, each in zip(weak, scaled, strict=True):
            row[strategy] = _efficiency(each)
    if as_json:
        errors = {"time": TIME_ERROR, "memory": MEMORY_ERROR, "exchange": None}
        chosen = {"model": model, "gpu": kind.name, "largest_relative_error": errors}
        print_json({**chosen, **described, "weak_scaling": weak})
        return
    from rich.console import Console

    console = Console()
    console.print(
        f"[bold]{model}[/bold], {shapes.parameters:,} parameters, on {gpus} × {kind.name}: "
        f"batches of {batch_size} samples of {job.length} tokens"
    )
    console.print(table(("", *STRATEGIES), _costs(described), words=("",), title="one rank"))
    title = "weak scaling: share of a step that is not communication, hidden by nothing or by FSDP"
    shares = [(f"{row['gpus']:,}", *(_share(row[name]) for name in STRATEGIES)) for row in weak]
    console.print(table(("GPUs", *STRATEGIES), shares, title=title))
    more = fewest_gpus(shapes, kind, estimates["sharded"].job)
    console.print(
        f"Fitted to eager steps on one H200: time was off by at most {TIME_ERROR:.0%}, memory by "
        f"{MEMORY_ERROR:.0%} (docs/distributed.md). Other GPUs and communication are assumed, not "
        f"measured. {_advice(estimates, more)}",
        style="dim",
    )


def _plan_adapters(
    model: str,
    shapes: ModelShapes,
    kind: Gpu,
    job: Job,
    batch: int | None,
    rank: int,
    bits: str,
    *,
    as_json: bool,
) -> None:
    """Print what one GPU holds while adapters are trained on a frozen model."""
    from shuffled_dpsgd.scaling import AdapterJob, adapter_memory, largest_adapter_batch

    asked = AdapterJob(rank=rank, bits=int(bits), length=job.length, batch=1)  # type: ignore[arg-type]
    most = largest_adapter_batch(shapes, kind, asked)
    asked = replace(asked, batch=batch or max(1, most))
    found = _in_gib(adapter_memory(shapes, asked))
    if as_json:
        chosen = {"model": model, "gpu": kind.name, "physical_batch": asked.batch}
        fits = {"largest_physical_batch": most, "fits": asked.batch <= most}
        print_json({**chosen, **fits, "memory": found})
        return
    from rich.console import Console

    console = Console()
    console.print(
        f"[bold]{model}[/bold], {shapes.parameters:,} parameters in {bits} bits, LoRA of rank "
        f"{rank} with gradient checkpointing: {asked.batch} × {job.length} tokens at once"
    )
    title = f"GiB of {kind.memory / GIB:.0f} on one {kind.name}"
    rows = ((n.removesuffix("_gib").replace("_", " "), f"{v:.2f}") for n, v in found.items())
    console.print(table(("", title), rows, words=("",)))
    says = f"At most {most} samples fit" if most else "Not even one sample fits"
    console.print(f"{says}, with a fifth left free. By arithmetic, not measured.", style="dim")


def _described(most: int, one: Estimate) -> dict[str, Any]:
    return {
        "supported": True,
        "largest_physical_batch": most,
        "memory": _in_gib(one.memory),
        "exchange_gib": one.exchange_bytes / GIB,
        **{name: getattr(one, name) for name in SHOWN if hasattr(one, name)},
    }


def _in_gib(memory: Any) -> dict[str, float]:
    parts = {f"{name}_gib": value / GIB for name, value in asdict(memory).items()}
    return parts | {"peak_gib": memory.peak / GIB}


def _efficiency(one: Estimate) -> dict[str, Any]:
    """Efficiency against one GPU's compute, for the work per rank of the job."""
    busy = one.compute_seconds + one.update_seconds
    return {
        "efficiency": busy / one.step_seconds,
        "efficiency_hidden": busy / one.hidden_step_seconds,
        "fits": one.fits,
    }


def _costs(described: dict[str, dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    both = described.values()
    for name in described["replicated"]["memory"]:
        label = name.removesuffix("_gib").replace("_", " ")
        yield f"{label}, GiB", *(f"{one['memory'][name]:.2f}" for one in both)
    yield ()
    for name, label in SHOWN.items():
        always = name in ("fits", "largest_physical_batch")
        yield label, *(_shown(one[name]) if one["fits"] or always else "–" for one in both)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}"


def _share(one: dict[str, Any]) -> str:
    if not one["fits"]:
        return "does not fit"
    least, most = f"{one['efficiency']:.0%}", f"{one['efficiency_hidden']:.0%}"
    return least if least == most else f"{least} to {most}"


def _advice(estimates: dict[Strategy, Estimate], enough: int | None) -> str:
    whole, parts = estimates["replicated"], estimates["sharded"]
    if not whole.fits and not parts.fits:
        more = f"shard it over {enough} GPUs, " if enough and enough > parts.job.gpus else ""
        return (
            f"Neither way fits: {more}train adapters (LoRA), use shorter samples or gradient "
            "checkpointing, or a smaller model."
        )
    one = whole if whole.fits else parts
    says = "" if whole.fits else "The whole model does not fit on a rank: shard it. "
    if one.exchange_seconds <= one.compute_seconds:
        return says.strip()
    remedy = (
        "put more tokens into a physical batch, for each of which all weights are gathered: "
        "gradient checkpointing, more GPUs, or adapters (LoRA)"
    )
    if one is whole:
        remedy = (
            "use a larger logical batch, which is exchanged once a step however many physical "
            "batches it has, or fewer ranks"
        )
    return f"{says}Communication takes longer than computing: {remedy}."
