"""Groups of slots that share parameters, and what their entries amount to together.

Most groups are one layer. A tied embedding and head are one group, because the norm of their
parameter's gradient needs both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.capture.slot import Slot
from shuffled_dpsgd.clipping.contributions import cost
from shuffled_dpsgd.clipping.contributions.kinds import Contribution
from shuffled_dpsgd.clipping.contributions.tied import joint_sq_norms

Shapes = Mapping[str, torch.Size]
# A contribution and the parameter it goes to.
Named = tuple[str, Contribution]


class LayerGroup:
    """Slots connected by shared parameters; `names` are the parameters they hold."""

    def __init__(self, *, index: int, slots: Sequence[Slot], shapes: Shapes) -> None:
        self.index = index
        self.slots = tuple(slots)
        self.names = tuple(dict.fromkeys(n for slot in slots for n in slot.names.values()))
        self.shapes = {name: shapes[name] for name in self.names}
        uses = sum(len(slot.names) for slot in slots)
        self.shared = len(slots) > 1 or uses > len(self.names)
        for slot in slots:
            slot.group, slot.is_shared = index, self.shared

    def sq_norms(self, parts: Sequence[Named], choose: cost.Chooser) -> Tensor:
        """(B,) squared norms of what the group's `parts` add up to, cross terms included."""
        by_name: dict[str, list[Contribution]] = {}
        for name, part in parts:
            by_name.setdefault(name, []).append(part)
        norms = [joint_sq_norms(found, self.shapes[n], choose) for n, found in by_name.items()]
        return norms[0] if len(norms) == 1 else torch.stack(norms).sum(0)


def group_slots(slots: Sequence[Slot], shapes: Shapes) -> list[LayerGroup]:
    """Partition slots into groups connected by shared parameters, in order of appearance."""
    root_of = {slot.index: slot.index for slot in slots}

    def root(index: int) -> int:
        while root_of[index] != index:
            index = root_of[index]
        return index

    first_user: dict[str, int] = {}
    for slot in slots:
        for name in slot.names.values():
            user = root(first_user.setdefault(name, slot.index))
            mine = root(slot.index)
            root_of[max(user, mine)] = min(user, mine)
    members: dict[int, list[Slot]] = {}
    for slot in slots:
        members.setdefault(root(slot.index), []).append(slot)
    return [
        LayerGroup(index=index, slots=found, shapes=shapes)
        for index, found in enumerate(members.values())
    ]
