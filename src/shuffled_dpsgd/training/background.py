"""Prefetching: a thread loads the next batches while the current one is used."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shuffled_dpsgd.runtime.random_states import RandomStates

Item = TypeVar("Item")
DEPTH = 2


def loaded_ahead(items: Iterator[Item], *, depth: int = DEPTH) -> Iterator[Item]:
    """The same items in the same order, up to `depth` of them prefetched in a thread.

    The first item is made by the caller. If it used a global random generator, so are all others:
    two threads would draw from that generator in no fixed order. An exception is raised where its
    item was due.
    """
    before = RandomStates.now().plain()
    for first in items:
        is_random = before != RandomStates.now().plain()
        yield first
        yield from items if is_random else _threaded(items, depth)


def _threaded(items: Iterator[Item], depth: int) -> Iterator[Item]:
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="loading ahead") as thread:
        waiting = deque(thread.submit(next, items, end) for _ in range(depth))
        while (item := waiting.popleft().result()) is not end:
            waiting.append(thread.submit(next, items, end))
            yield item  # type: ignore[misc]  # it is an item, as it is not the end
