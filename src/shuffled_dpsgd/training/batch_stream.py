"""What `private.batches` returns: an iterator that knows how many steps it will take."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any


class BatchStream(Iterator[Any]):
    """Physical batches; `len` counts logical ones, which are the steps, as schedulers need it.

    A logical batch may come in several physical ones, or, empty, in none.
    """

    def __init__(self, batches: Generator[Any, None, None], *, num_steps: int) -> None:
        self._batches = batches
        self._num_steps = num_steps

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def close(self) -> None:
        """Give the loop up; what was accumulated since the last step is dropped."""
        self._batches.close()
