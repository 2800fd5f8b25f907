"""`shuffled-dpsgd advise`: the signal-to-noise ratio of a plan, before anything is spent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shuffled_dpsgd.cli.accounting import Delta, resolve_sampling
from shuffled_dpsgd.cli.output import AsJson, facts, print_json, table, verb
from shuffled_dpsgd.cli.plan_rows import plan_rows
from shuffled_dpsgd.cli.privacy_options import stated
from shuffled_dpsgd.errors import InvalidArgumentError

if TYPE_CHECKING:
    from shuffled_dpsgd.accounting import UnitComparison
    from shuffled_dpsgd.tasks import RunConfig
    from shuffled_dpsgd.tasks.advice import Advice, Preview

COLOURS = {"hopeless": "bold red", "doubtful": "yellow", "promising": "green"}
RecordsPerUnit = Annotated[int | None, stated("records_per_unit")]
NumRecords = Annotated[
    int | None, typer.Option(help="Records of all units together, with --records-per-unit.")
]
MostOwned = Annotated[
    int | None, typer.Option(help="Records of one unit at most, with --records-per-unit.")
]


@verb(
    "advise --epsilon 8 --delta 1e-5 --dataset-size 20000 --batch-size 256 --epochs 3 "
    "--dimension 22700000"
)
def advise(
    epsilon: Annotated[float, stated("epsilon")],
    delta: Delta,
    dataset_size: Annotated[int, stated("dataset_size")],
    batch_size: Annotated[int, typer.Option(help="Expected batch size B.")],
    epochs: Annotated[float, typer.Option(help="T = epochs · ⌈N/B⌉ steps.")],
    dimension: Annotated[int, typer.Option(help="Number d of trainable parameters.")],
    records_per_unit: RecordsPerUnit = None,
    num_records: NumRecords = None,
    most_owned: MostOwned = None,
    as_json: AsJson = False,
) -> None:
    """Predict the signal-to-noise ratio of a plan, and suggest batch, clip, rate and epochs.

    From public sizes alone; `train --dry-run` says it of a task, a file or a preset. The ratio is
    an upper bound, reached only if all gradients agree; docs/advice.md says what it is worth.

    With --records-per-unit, --num-records and --most-owned, sizes count units (people, say), and
    drawing units is compared with drawing records and accounting for the group.
    """
    from shuffled_dpsgd.tasks.advice import advise_numbers

    _, steps = resolve_sampling(
        sampling_prob=None,
        num_steps=None,
        dataset_size=dataset_size,
        batch_size=batch_size,
        epochs=epochs,
    )
    found = advise_numbers(
        epsilon=epsilon,
        delta=delta,
        dataset_size=dataset_size,
        expected_batch_size=batch_size,
        num_steps=steps,
        dimension=dimension,
    )
    owned = {
        "records_per_unit": records_per_unit,
        "num_records": num_records,
        "most_owned": most_owned,
    }
    units = None if set(owned.values()) == {None} else _units(found, **owned)
    _print(replace(found, units=units), as_json=as_json)


def advise_on(config: RunConfig, *, as_json: bool, preset: str | None = None) -> None:
    """What `train --dry-run` prints.

    A preset whose data are not at hand is judged by its model's shapes and the paper's N.
    """
    from shuffled_dpsgd.tasks.advice import advise_run, advise_shapes

    if preset is None:
        _print(advise_run(config), as_json=as_json)
        return
    from shuffled_dpsgd.cli.experiments import find_preset

    row = find_preset(preset)
    known = {name: getattr(row, name) for name in ("model", "dataset_size", "num_labels")}
    _print(advise_shapes(config, **known), as_json=as_json)


def _units(advice: Advice, **owned: int | None) -> UnitComparison:
    from shuffled_dpsgd.accounting import compare_units

    missing = next((name for name, value in owned.items() if value is None), None)
    if missing is not None:
        flag = f"--{missing.replace('_', '-')}"
        raise InvalidArgumentError(
            flag, expected="a value beside the two others that tell of units", got=None
        )
    assert advice.epsilon is not None, "given"
    return compare_units(
        epsilon=advice.epsilon,
        delta=advice.delta,
        num_units=advice.now.dataset_size,
        expected_units=advice.now.expected_batch_size,
        num_steps=advice.now.num_steps,
        **owned,  # type: ignore[arg-type]
    )


def _print(advice: Advice, *, as_json: bool) -> None:
    """Print the verdict, similar plans and suggestions."""
    if as_json:
        print_json(advice.to_json())
        return
    from rich.console import Console
    from rich.text import Text

    from shuffled_dpsgd.training.planning import large_delta

    console, now = Console(), advice.now
    if advice.preview is not None:
        console.print(facts(_about(advice.preview)))
        warning = large_delta(advice.preview.plan)
        if warning is not None:
            console.print(Text(warning, style="bold red"))
    if not now.noise_multiplier:
        console.print("no noise: nothing to weigh against it, and no privacy")
        return
    console.print(Text(f"{now.verdict}: {now.explanation}", style=COLOURS[now.verdict]))
    headings = ("batch", "steps", "noise multiplier", "a step", "the run", "")
    style: dict[str, Any] = {"box": None, "padding": (0, 2, 0, 0)}
    console.print(table(headings, _neighbours(advice), words=("",), **style))
    console.print(
        "Signal to noise is an upper bound, reached if all gradients agree; in practice it is "
        "several times smaller."
    )
    if advice.alternatives:
        rows = [
            (each.change, f"{each.noise:.2f}", f"{each.records:.3g}", each.note)
            for each in advice.alternatives
        ]
        console.print("Over plain DP-SGD with this batch and these steps, at the same ε (proven):")
        names = ("what else", "noise in the last weights", "records computed", "")
        console.print(table(names, rows, words=("what else", ""), **style))
    for line in _suggestions(advice):
        console.print(f"· {line}")


def _suggestions(advice: Advice) -> Iterator[str]:
    """What to change, the most useful first."""
    from shuffled_dpsgd.tasks.advice import SIMPLE_WINS_BELOW

    now, batch, needs = advice.now, advice.batch, advice.needs
    if advice.units is not None:
        yield f"units: {advice.units.describe()}"
    if advice.simpler is not None:
        other = advice.simpler.prospect
        yield (
            f"model: `{advice.simpler.keys}` trains {other.dimension:,} weights instead of "
            f"{now.dimension:,}: the ratio rises from {now.over_run:.2g} to {other.over_run:.2g}. "
            f"Below a ratio of {advice.simpler.below:g} the simpler model won in our runs of this "
            "task (docs/advice.md)"
        )
    elif advice.preview is None and now.over_run < SIMPLE_WINS_BELOW:
        yield (
            "model: under so much noise a linear model won in all our runs, of pixels or of a "
            "frozen encoder's features (docs/advice.md)"
        )
    if batch.expected_batch_size != now.expected_batch_size:
        yield (
            f"batch: {batch.expected_batch_size:,} instead of {now.expected_batch_size:,}, in "
            f"{batch.num_steps:,} steps: the ratio rises from {now.over_run:.2g} to "
            f"{batch.over_run:.2g} at the same ε and the same epochs"
        )
    if advice.twice_as_long is not None:
        gain = advice.twice_as_long.over_run / now.over_run - 1.0
        worth = "worth it if time allows" if gain > 0.1 else "hardly worth the time"
        yield f"epochs: twice as many change the ratio by {gain:+.0%}; {worth}"
    if advice.clip_norm is not None:
        yield (
            f"clip norm: {advice.clip_norm:g}. It cancels from the ratio as long as gradients are "
            "longer; do not search for a better one, every try spends privacy"
        )
    if advice.learning_rate is not None:
        yield (
            f"learning rate: about {advice.learning_rate:g}; at that rate the noise moves a weight "
            "by half of its size over the run"
        )
    if now.verdict != "promising":
        reach = "; no ε up to 64 is enough"
        reach = reach if needs.epsilon is None else f", or ε = {needs.epsilon:g}"
        yield (
            f"to be promising without any other change: {needs.dataset_size:,} records instead of "
            f"{now.dataset_size:,}, or {needs.dimension:,} trainable parameters instead of "
            f"{now.dimension:,} (lora_rank, freeze){reach}"
        )


def _about(preview: Preview) -> Iterator[tuple[str, str]]:
    """Plan, noise, claims and memory of a run."""
    plan = preview.plan
    yield from plan_rows(plan, preview.chosen)
    none = f"none: {'; '.join(plan.uncertifiable)}"
    yield "certified ε", none if preview.certified is None else preview.certified.describe()
    size = preview.memory_bytes / 2**20
    yield (
        "memory",
        f"{f'{size / 1024:.2f} GiB' if size >= 256 else f'{size:.2f} MiB'} for weights, sums and "
        f"moments of {preview.total_parameters:,} parameters; activations come on top, as many "
        "samples at once as fit",
    )


def _neighbours(advice: Advice) -> Iterator[tuple[str, ...]]:
    rows = [(advice.now, "this plan: "), *((other, "") for other in advice.batches)]
    if advice.twice_as_long is not None:
        rows.append((advice.twice_as_long, "twice the epochs: "))
    for found, note in rows:
        sizes = (f"{found.expected_batch_size:,}", f"{found.num_steps:,}")
        ratios = (f"{found.per_step:.2g}", f"{found.over_run:.2g}")
        yield (*sizes, f"{found.noise_multiplier:.3g}", *ratios, f"{note}{found.verdict}")
