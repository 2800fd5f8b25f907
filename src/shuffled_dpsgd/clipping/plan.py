"""What the engine does for every parameter, and why, as data and as a table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shuffled_dpsgd.clipping.capture.slot import Slot
from shuffled_dpsgd.clipping.contributions import cost
from shuffled_dpsgd.clipping.finalize.shared_parameters import LayerGroup
from shuffled_dpsgd.runtime import backends


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One group of layers that share parameters; most are a single layer.

    `operations` holds, for a linear map already seen, the operations per sample of each way to its
    norm, as the cost rule weighs them: (Gram matrices, tiles).
    """

    modules: tuple[str, ...]
    kind: str
    parameters: tuple[str, ...]
    backend: str
    shape: tuple[int, int, int] | None
    operations: tuple[int, int] | None

    def why(self) -> str:
        """The reason for the backend, in words."""
        if len(self.modules) > 1:
            return "shared parameters: joint norm with cross terms"
        if self.kind == "generic":
            return "no rule of its own: one copy of its parameters per sample"
        if self.shape is None or self.operations is None:
            return "not a matrix product" if self.backend != "per call" else "decided by each call"
        T, R, C = self.shape
        gram, tiles = self.operations
        return f"T={T}, {R}x{C}: Gram {gram:,}, tiles {tiles:,} operations a sample"


class Plan(tuple[PlanRow, ...]):
    """All rows, in the order of the model, and the kernels that ran so far; prints as a table."""

    kernels: dict[str, tuple[str, ...]]

    def __str__(self) -> str:
        return "\n".join([self._table(), *self._kernel_lines()])

    def _kernel_lines(self) -> list[str]:
        lines = [f"  {task}: {', '.join(names)}" for task, names in self.kernels.items()]
        return ["kernels that ran:", *lines] if lines else []

    def _table(self) -> str:
        header = ("modules", "kind", "backend", "why")
        lines = [header, *((", ".join(r.modules), r.kind, r.backend, r.why()) for r in self)]
        widths = [max(len(line[i]) for line in lines) for i in range(3)]
        return "\n".join(
            "  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[3]])
            for line in lines
        )


def describe(groups: Iterable[LayerGroup], choose: cost.Chooser) -> Plan:
    """The plan for these groups, with the shapes of their latest calls."""
    plan = Plan(_row(group, choose) for group in groups)
    plan.kernels = backends.taken()
    return plan


def _row(group: LayerGroup, choose: cost.Chooser) -> PlanRow:
    first = group.slots[0]
    shape = first.last_shape if len(group.slots) == 1 else None
    operations = None
    if shape is not None:
        operations = cost.operations(*shape, first.last_device)[:2]
    return PlanRow(
        modules=tuple(slot.path or "<root>" for slot in group.slots),
        kind=" + ".join(dict.fromkeys(slot.kind for slot in group.slots)),
        parameters=group.names,
        backend=" + ".join(dict.fromkeys(_backend(slot, choose) for slot in group.slots)),
        shape=shape,
        operations=operations,
    )


def _backend(slot: Slot, choose: cost.Chooser) -> str:
    if slot.fixed_backend is not None:
        return slot.fixed_backend
    if slot.last_shape is None:
        return "per call"
    return choose(*slot.last_shape, slot.last_device).value
