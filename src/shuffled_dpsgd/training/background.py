"""Loading ahead: a thread prepares the next items while the current one is worked on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shuffled_dpsgd.runtime.random_states import RandomStates

Item = TypeVar("Item")
# One to be worked on next, one after it.
DEPTH = 2


def loaded_ahead(items: Iterator[Item], *, depth: int = DEPTH) -> Iterator[Item]:
    """The same items in the same order, up to `depth` of them made in a thread beforehand.

    The first is made here. If that moved one of the global generators, the items are random, and
    a thread would draw from generators that the caller draws from as well, in no order: then all
    are made here, one by one. An exception is raised where its item was due.
    """
    before = RandomStates.now().digest()
    for first in items:
        is_random = before != RandomStates.now().digest()
        yield first
        yield from items if is_random else _threaded(items, depth)


def _threaded(items: Iterator[Item], depth: int) -> Iterator[Item]:
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="loading ahead") as thread:
        waiting = deque(thread.submit(next, items, end) for _ in range(depth))
        while (item := waiting.popleft().result()) is not end:
            waiting.append(thread.submit(next, items, end))
            yield item  # type: ignore[misc]  # it is an item, as it is not the end
