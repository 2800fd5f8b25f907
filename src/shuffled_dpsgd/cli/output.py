"""What every verb uses for its output: JSON, tables, and errors on one line.

Under torchrun every rank runs the command, and rank 0 prints. Nothing slow is imported.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, ParamSpec, TypeVar

import typer
from typer.core import TyperGroup

from shuffled_dpsgd.errors import ShuffledDPError

if TYPE_CHECKING:
    from rich.table import Table

P = ParamSpec("P")
R = TypeVar("R")
FAILED = 2
KIND_COLOURS = {"proven": "green", "heuristic": "yellow", "measured": "cyan"}
# Typer brings its own copy of click or uses the installed one; this is the right one of either.
UsageError: Any = typer.BadParameter.__mro__[1]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def json_text(value: Any) -> str:
    """`value` as one indented JSON object and a newline; non-finite numbers become null."""
    return json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def print_json(value: Any) -> None:
    """Write `json_text(value)` to standard output."""
    sys.stdout.write(json_text(value))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def facts(rows: Iterable[tuple[str, Any]]) -> Table:
    """A grid of labels and values."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for row in rows:
        grid.add_row(*row)
    return grid


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    words: Sequence[str] = (),
    **style: Any,
) -> Table:
    """A table of numbers; columns of `words` are aligned to the left, an empty row is a line."""
    from rich.table import Table

    found = Table(**style)
    for heading in headings:
        found.add_column(heading, justify="left" if heading in words else "right", overflow="fold")
    for row in rows:
        if row:
            found.add_row(*row)
        else:
            found.add_section()
    return found


EXAMPLES: dict[str, str] = {}
"""What the help of each verb ends with."""


def verb(*examples: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function a verb: errors are one line and status 2, and `--help` ends with examples."""

    def made(function: Callable[P, R]) -> Callable[P, R]:
        EXAMPLES[function.__name__] = shown_examples(*examples)
        return reports_errors(function)

    return made


def shown_examples(*examples: str) -> str:
    """Calls of the command, for the end of a help text.

    >>> shown_examples("train digits", "plan")
    'Examples: [bold]shuffled-dpsgd train digits[/] · [bold]shuffled-dpsgd plan[/]'
    """
    shown = (each.replace("[", "\\[") for each in examples)
    calls = " · ".join(f"[bold]shuffled-dpsgd {each}[/]" for each in shown)
    return f"Example{'s' * (len(examples) > 1)}: {calls}"


def reports_errors(verb: Callable[P, R]) -> Callable[P, R]:
    """Turn the library's errors, and those of the operating system, into one line and status 2."""

    verb.__doc__ = unwrapped(verb.__doc__ or "")

    @wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return verb(*args, **kwargs)
        except ShuffledDPError as error:
            if error.said_by_rank_0 and not is_first_rank():
                raise typer.Exit(FAILED) from error
            fail(str(error), type(error).__name__, as_json=bool(kwargs.get("as_json")))
        except BrokenPipeError:
            raise  # The reader of our output has stopped.
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            text = f"{place}{error.strerror or error}"
            fail(text, type(error).__name__, as_json=bool(kwargs.get("as_json")))

    return run


def unwrapped(text: str) -> str:
    """Paragraphs on one line each, so that the terminal breaks the lines.

    >>> unwrapped("One line.\\n\\n    Two,\\n    of it.")
    'One line.\\n\\nTwo, of it.'
    """
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def fail(message: str, kind: str, *, as_json: bool) -> NoReturn:
    """End the command: one line on stderr for people, one JSON object on stdout for machines.

    Of several ranks, only rank 0 writes to stdout.
    """
    number = rank()
    line = " ".join(message.split())
    line = line if number is None else f"rank {number}: {line}"
    if as_json:
        file = sys.stdout if is_first_rank() else sys.stderr
        file.write(json.dumps({"error": line, "kind": kind}, ensure_ascii=False) + "\n")
    else:
        typer.secho(f"error: {line}", fg=typer.colors.RED, err=True)
    raise typer.Exit(FAILED)


def rank() -> int | None:
    """The rank of this process among several; None if it is the only one."""
    size, number = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK", "")
    return int(number) if number.isdigit() and size.isdigit() and int(size) > 1 else None


def is_first_rank() -> bool:
    """Whether this process is the only one, or rank 0."""
    return not rank()


class OneLineGroup(TyperGroup):
    """Reports an unknown or malformed flag on one line, like every other error."""

    def make_context(self, info_name: Any, args: Any, *rest: Any, **extra: Any) -> Any:
        given = list(args)
        with _usage_errors_on_one_line(given):
            context = super().make_context(info_name, args, *rest, **extra)
        context.meta["arguments"] = given
        return context

    def invoke(self, ctx: Any) -> Any:
        with _usage_errors_on_one_line(ctx.meta.get("arguments", [])):
            return super().invoke(ctx)


@contextmanager
def _usage_errors_on_one_line(arguments: list[str]) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        verb = "shuffled-dpsgd" if error.ctx is None else error.ctx.command_path
        text = f"{error.format_message().rstrip('.')}; see `{verb} --help`"
        fail(text, "UsageError", as_json="--json" in arguments)
