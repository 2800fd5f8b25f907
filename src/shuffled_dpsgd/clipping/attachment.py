"""Puts the forwards of slots in place of their modules' own, and takes them off again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shuffled_dpsgd.clipping.capture.slot import Slot


class Attachment:
    """Puts slots' forwards into modules' `__dict__`, where they hide those of the classes."""

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
        """Look the forwards up again, after some slots were found to have folded inputs."""
        self._forwards = self._find_forwards()
        if self._is_on:
            self._put()

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Take the slots off inside the context, and restore what was before."""
        self._take()
        try:
            yield
        finally:
            if self._is_on:
                self._put()

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
