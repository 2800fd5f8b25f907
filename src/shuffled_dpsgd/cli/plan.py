"""`shuffled-dpsgd plan`: memory, time and communication of a run, from its model's shapes."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shuffled_dpsgd.cli.inspect import Model
from shuffled_dpsgd.cli.output import AsJson, print_json, table, verb
from shuffled_dpsgd.errors import InvalidArgumentError

if TYPE_CHECKING:
    from shuffled_dpsgd.scaling import AdapterJob, Estimate, Gpu, ModelShapes
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
    ones a sharded copy in every node. Layers split over ranks (tensor parallel) are not planned.
    What ranks exchange was never measured.
    """
    from rich.console import Console

    from shuffled_dpsgd.models import build_model
    from shuffled_dpsgd.scaling import GPUS, AdapterJob, Job, estimate, largest_batch, shapes_of
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
    console = Console()
    chosen: dict[str, Any] = {"model": model, "gpu": kind.name}
    named = f"[bold]{model}[/bold], {shapes.parameters:,} parameters"
    run = f", on {gpus} × {kind.name}: batches of {batch_size} samples of {job.length} tokens"
    described: dict[str, dict[str, Any]] = {"split": {"supported": False}}
    if lora_rank is not None:
        if (records, half) != (RECORDS, False):
            raise InvalidArgumentError(
                "--lora-rank",
                expected="no --records or --half-weights beside it",
                got="one of them",
                remedy="of adapters, memory and messages are planned, and weights are bfloat16",
            )
        asked = AdapterJob(rank=lora_rank, bits=int(bits), length=job.length, batch=1, launch=job)  # type: ignore[arg-type]
        described |= _adapters(shapes, kind, asked, physical_batch)
        if as_json:
            print_json({**chosen, **described.pop("replicated"), **described})
            return
        how = f" in {bits} bits, LoRA of rank {lora_rank} with gradient checkpointing"
        console.print(named + how + run, _costs(described), sep="\n")
        refused = "" if bits == "16" else "Sharding quantised weights is refused. "
        console.print(f"{refused}By arithmetic, not measured.", style="dim")
        return
    if bits != "16":
        raise InvalidArgumentError(
            "--bits", expected="--lora-rank beside it: only frozen weights are quantised", got=bits
        )
    estimates: dict[Strategy, Estimate] = {}
    weak: list[dict[str, Any]] = [{"gpus": count} for count in COUNTS]
    for strategy in STRATEGIES:
        spread = replace(job, strategy=strategy)
        most = largest_batch(shapes, kind, spread)
        one = estimate(shapes, kind, replace(spread, physical_batch=physical_batch or max(1, most)))
        estimates[strategy], described[strategy] = one, _described(most, one)
        scaled = weak_scaling(shapes, kind, one.job, COUNTS, physical_batch=physical_batch)
        for row, each in zip(weak, scaled, strict=True):
            row[strategy] = _efficiency(each)
    if as_json:
        errors = {"time": TIME_ERROR, "memory": MEMORY_ERROR, "exchange": None}
        chosen = {**chosen, "largest_relative_error": errors}
        print_json({**chosen, **described, "weak_scaling": weak})
        return
    console.print(named + run, _costs(described), sep="\n")
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


def _adapters(
    shapes: ModelShapes, kind: Gpu, job: AdapterJob, batch: int | None
) -> dict[str, dict[str, Any]]:
    """What a rank holds and sends while adapters are trained on a frozen model."""
    from shuffled_dpsgd.scaling import adapter_memory, largest_adapter_batch
    from shuffled_dpsgd.scaling.adapters import adapter_exchange

    found: dict[str, dict[str, Any]] = {name: {"supported": False} for name in STRATEGIES}
    for strategy in STRATEGIES if job.bits == 16 else STRATEGIES[:1]:
        launch = replace(job.launch, strategy=strategy)
        most = largest_adapter_batch(shapes, kind, replace(job, launch=launch))
        launch = replace(launch, physical_batch=batch or max(1, most))
        asked = replace(job, launch=launch, batch=launch.physical_batch)
        sent, seconds = adapter_exchange(shapes, kind, asked)
        found[strategy] = {
            "supported": True,
            "physical_batch": asked.batch,
            "largest_physical_batch": most,
            "fits": asked.batch <= most,
            "memory": _in_gib(adapter_memory(shapes, asked)),
            "batches_per_rank": launch.batches[0],
            "exchange_gib": sent / GIB,
            "exchange_seconds": seconds,
        }
    return found


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


def _costs(described: dict[str, dict[str, Any]]) -> Any:
    """A table of what a rank needs."""
    named = {name: one for name, one in described.items() if one["supported"]}
    all_of = [*named.values()]
    rows: list[tuple[str, ...]] = []
    for name in all_of[0]["memory"]:
        label = name.removesuffix("_gib").replace("_", " ")
        rows.append((f"{label}, GiB", *(f"{one['memory'][name]:.2f}" for one in all_of)))
    rows.append(())
    for name in (name for name in SHOWN if name in all_of[0]):
        always = name in ("fits", "largest_physical_batch")
        cells = (_shown(one[name]) if one["fits"] or always else "–" for one in all_of)
        rows.append((SHOWN[name], *cells))
    return table(("", *named), rows, words=("",), title="one rank")


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
