"""Loading ahead: a thread prepares the next items while the current one is worked on."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Iterator
from typing import TypeVar

import numpy as np
import torch

Item = TypeVar("Item")
# One to be worked on next, one after it.
DEPTH = 2
_POLL_SECONDS = 0.1


def loaded_ahead(items: Iterator[Item], *, depth: int = DEPTH) -> Iterator[Item]:
    """The same items in the same order, up to `depth` of them made in a thread beforehand.

    The first is made here. If that moved one of the global generators, the items are random, and
    a thread would draw from generators that the caller draws from as well, in no order: then all
    are made here, one by one. An exception is raised where its item was due.
    """
    before = _generators()
    try:
        first = next(items)
    except StopIteration:
        return
    is_random = _have_moved(before)
    yield first
    yield from items if is_random else _threaded(items, depth)


def _threaded(items: Iterator[Item], depth: int) -> Iterator[Item]:
    ready: queue.Queue[tuple[str, Item | BaseException | None]] = queue.Queue(maxsize=depth)
    stopped = threading.Event()

    def put(kind: str, value: Item | BaseException | None) -> bool:
        while not stopped.is_set():
            try:
                ready.put((kind, value), timeout=_POLL_SECONDS)
            except queue.Full:
                continue
            return True
        return False

    def work() -> None:
        try:
            for item in items:
                if not put("item", item):
                    return
        except BaseException as error:  # raised again in the thread that waits for the item
            put("error", error)
        else:
            put("end", None)

    thread = threading.Thread(target=work, name="loading ahead", daemon=True)
    thread.start()
    try:
        while (found := ready.get())[0] == "item":
            yield found[1]  # type: ignore[misc]  # an "item" is one
        if isinstance(found[1], BaseException):
            raise found[1]
    finally:
        stopped.set()
        thread.join()


def _generators() -> tuple[object, ...]:
    state = np.random.get_state(legacy=False)  # noqa: NPY002
    return (
        random.getstate(),
        state["state"]["key"].tobytes(),
        state["state"]["pos"],
        torch.get_rng_state(),
    )


def _have_moved(before: tuple[object, ...]) -> bool:
    *host, tensor = _generators()
    assert isinstance(tensor, torch.Tensor)
    return host != [*before[:-1]] or not torch.equal(tensor, before[-1])  # type: ignore[arg-type]
