"""Slots in place of their modules: put on, taken off, and changed for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shuffled_dpsgd.clipping.capture.slot import Slot


class Attachment:
    """The slots' forwards in the place of their modules' own.

    A forward in a module's `__dict__` hides that of its class; nothing else of a module changes.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._is_on = False
        self._forwards = self._find_forwards()

    def put_on(self) -> None:
        """Have the modules called through their slots."""
        self._is_on = True
        self._put()

    def take_off(self) -> None:
        """Leave the modules as they were."""
        self._is_on = False
        self._take()

    def renew(self) -> None:
        """Take note that some slots see folded inputs now."""
        self._forwards = self._find_forwards()
        if self._is_on:
            self._put()

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Off inside, and afterwards as before."""
        self._take()
        try:
            yield
        finally:
            if self._is_on:
                self._put()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """On inside, and afterwards as before."""
        self._put()
        try:
            yield
        finally:
            if not self._is_on:
                self._take()

    def _find_forwards(self) -> list[tuple[dict[str, Any], Callable[..., Any]]]:
        return [
            (slot.module.__dict__, slot.folded_forward() if slot.folded else slot.forward)
            for slot in self._slots
        ]

    def _put(self) -> None:
        for attributes, forward in self._forwards:
            attributes["forward"] = forward

    def _take(self) -> None:
        for attributes, _ in self._forwards:
            attributes.pop("forward", None)
