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
        self.renew()

    def put_on(self) -> None:
        """Have the modules called through their slots."""
        self._is_on = True
        for attributes, forward in self._forwards:
            attributes["forward"] = forward

    def take_off(self) -> None:
        """Leave the modules as they were."""
        self._is_on = False
        for attributes, _ in self._forwards:
            attributes.pop("forward", None)

    def renew(self) -> None:
        """Look the forwards up again, after some slots were found to have folded inputs."""
        self._forwards: list[tuple[dict[str, Any], Callable[..., Any]]] = [
            (slot.module.__dict__, slot.folded_forward() if slot.folded else slot.forward)
            for slot in self._slots
        ]
        if self._is_on:
            self.put_on()

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Take the slots off inside the context, and restore what was before."""
        was_on = self._is_on
        self.take_off()
        try:
            yield
        finally:
            if was_on:
                self.put_on()
