"""Programs that are started with `python -m`: their errors are the command's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from shuffled_dpsgd.errors import ShuffledDPError

FAILED = 2
"""Exit status of a program that was asked for something it cannot do; the command's own."""


@contextmanager
def errors_on_one_line() -> Iterator[None]:
    """End the process with one line for an error that the library raised on purpose."""
    try:
        yield
    except ShuffledDPError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(FAILED)
