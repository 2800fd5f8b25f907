"""`shuffled-dpsgd inspect`: which weights of a model a shuffle can move; allocates none."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from shuffled_dpsgd.cli.output import AsJson, print_json, table, verb
from shuffled_dpsgd.cli.privacy_options import stated
from shuffled_dpsgd.models import CATALOGUE
from shuffled_dpsgd.options import Scope

if TYPE_CHECKING:
    from shuffled_dpsgd.permutation import PermutationSpec

Model = Annotated[
    str,
    typer.Option(
        help=f"One of {', '.join(CATALOGUE)}, the folder of a saved model, or a hub name."
    ),
]
NumLabels = Annotated[int | None, typer.Option(min=1, help="Number of classes of a classifier.")]
Unmoved = Annotated[bool, typer.Option("--unmoved", help="List all that stays, with the reason.")]


@verb("inspect --model gpt2 --scope full")
def inspect(
    model: Model = "gpt2",
    scope: Annotated[Scope, stated("scope")] = "paper",
    num_labels: NumLabels = None,
    show_unmoved: Unmoved = False,
    as_json: AsJson = False,
) -> None:
    """Show which weights can be permuted without changing the model's function."""
    from shuffled_dpsgd.models import build_model
    from shuffled_dpsgd.permutation import discover

    spec = discover(build_model(model, num_labels=num_labels), scope=scope)
    if as_json:
        print_json({"model": model, **spec.to_json()})
        return
    from rich.console import Console

    console = Console()
    headings = ("kind", "groups", "slots each", "in tensors it moves", "log10 of order")
    title = f"{model}, scope {spec.scope}"
    console.print(table(headings, _kinds(spec), words=("kind",), title=title))
    console.print(
        f"{spec.moved_parameters:,} of {spec.total_parameters:,} parameters live in tensors that "
        f"move: shuffle ratio {spec.shuffle_ratio:.6%}"
    )
    if spec.unmoved:
        rows, words = _unmoved(spec, show_all=show_unmoved), ("tensors", "reason")
        console.print(table(("parameters", *words), rows, words=words, title="what stays"))
    for note in spec.notes:
        console.print(f"note: {note}")


def _kinds(spec: PermutationSpec) -> Iterator[tuple[str, ...]]:
    for kind, row in spec.count_by_kind().items():
        sizes = sorted({group.size for group in spec.groups if group.kind == kind})
        yield (
            kind,
            f"{row['groups']:,}",
            ", ".join(map(str, sizes)),
            f"{row['moved_parameters']:,}",
            f"{row['log10_group_order']:,.1f}",
        )
    yield ()
    moved, order = f"{spec.moved_parameters:,}", f"{spec.log10_group_order:,.1f}"
    yield "all", f"{len(spec.groups):,}", "", moved, order


def _unmoved(spec: PermutationSpec, *, show_all: bool) -> Iterator[tuple[str, ...]]:
    reasons: dict[str, list[str]] = {}
    for name, reason in spec.unmoved.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        count = sum(math.prod(spec.shapes[name]) for name in names)
        shown = names if show_all else names[:2]
        more = f"\n… {len(names) - len(shown)} more" if len(names) > len(shown) else ""
        yield f"{count:,}", "\n".join(shown) + more, reason
