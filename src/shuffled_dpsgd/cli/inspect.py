"""`shuffled-dpsgd inspect`: what of a model a shuffle can move, without allocating its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shuffled_dpsgd.cli.output import AsJson, print_json, reports_errors
from shuffled_dpsgd.cli.privacy_options import stated
from shuffled_dpsgd.models import CATALOGUE
from shuffled_dpsgd.options import Scope

if TYPE_CHECKING:
    from rich.console import Console

    from shuffled_dpsgd.permutation import PermutationSpec

MODEL_HELP = f"One of {', '.join(CATALOGUE)}, the folder of a saved model, or a hub name."


@reports_errors
def inspect(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "gpt2",
    scope: Annotated[Scope, stated("scope")] = "paper",
    num_labels: Annotated[
        int | None, typer.Option(min=1, help="Number of classes of a classifier.")
    ] = None,
    show_unmoved: Annotated[
        bool, typer.Option("--unmoved", help="List every parameter that stays, with the reason.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show which weights can be permuted without changing the model's function.

    Example: shuffled-dpsgd inspect --model gpt2 --scope full
    """
    from shuffled_dpsgd.models import build_model
    from shuffled_dpsgd.permutation import discover

    spec = discover(build_model(model, num_labels=num_labels), scope=scope)
    if as_json:
        print_json({"model": model, **spec.to_json()})
    else:
        _print_tables(model, spec, show_unmoved=show_unmoved)


def _print_tables(model: str, spec: PermutationSpec, *, show_unmoved: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"{model}, scope {spec.scope}")
    table.add_column("kind")
    for heading in ("groups", "slots each", "in tensors it moves", "log10 of order"):
        table.add_column(heading, justify="right")
    for kind, row in spec.count_by_kind().items():
        sizes = sorted({group.size for group in spec.groups if group.kind == kind})
        table.add_row(
            kind,
            f"{row['groups']:,}",
            ", ".join(map(str, sizes)),
            f"{row['moved_parameters']:,}",
            f"{row['log10_group_order']:,.1f}",
        )
    table.add_section()
    table.add_row(
        "all",
        f"{len(spec.groups):,}",
        "",
        f"{spec.moved_parameters:,}",
        f"{spec.log10_group_order:,.1f}",
    )
    console.print(table)
    console.print(
        f"{spec.moved_parameters:,} of {spec.total_parameters:,} parameters live in tensors that "
        f"move: shuffle ratio {spec.shuffle_ratio:.6%}"
    )
    _print_unmoved(console, spec, show_unmoved=show_unmoved)
    for note in spec.notes:
        console.print(f"note: {note}")


def _print_unmoved(console: Console, spec: PermutationSpec, *, show_unmoved: bool) -> None:
    import math

    from rich.table import Table

    if not spec.unmoved:
        return
    reasons: dict[str, list[str]] = {}
    for name, reason in spec.unmoved.items():
        reasons.setdefault(reason, []).append(name)
    table = Table(title="what stays")
    table.add_column("parameters", justify="right")
    table.add_column("tensors", overflow="fold")
    table.add_column("reason")
    for reason, names in reasons.items():
        count = sum(math.prod(spec.shapes[name]) for name in names)
        shown = names if show_unmoved else names[:2]
        more = f"\n… {len(names) - len(shown)} more" if len(names) > len(shown) else ""
        table.add_row(f"{count:,}", "\n".join(shown) + more, reason)
    console.print(table)
