"""What every verb shares: printing JSON for machines, and errors without a traceback."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, ParamSpec, TypeVar

import typer

from shuffled_dpsgd.errors import ShuffledDPError

P = ParamSpec("P")
R = TypeVar("R")

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


def reports_errors(verb: Callable[P, R]) -> Callable[P, R]:
    """Turn the library's own errors into one line on stderr and exit status 2."""

    @wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return verb(*args, **kwargs)
        except ShuffledDPError as error:
            typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
            raise typer.Exit(2) from error

    return run
