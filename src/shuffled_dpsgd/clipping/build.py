"""Which module handles which trainable parameter: the engine's slots, or a refusal.

Every trainable parameter of the model ends up in exactly one slot per place it is used; a
parameter no rule can handle exactly is refused here, before any training.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from shuffled_dpsgd.clipping.capture.recorder import CaptureRecorder
from shuffled_dpsgd.clipping.capture.slot import Slot
from shuffled_dpsgd.clipping.checks import refusals
from shuffled_dpsgd.clipping.rules import find_rule
from shuffled_dpsgd.clipping.rules.broadcast import BroadcastSlot, can_broadcast
from shuffled_dpsgd.clipping.rules.generic import GenericSlot, is_container
from shuffled_dpsgd.clipping.rules.linear import LinearSlot
from shuffled_dpsgd.clipping.rules.split_linear import SplitLinearSlot


def build_slots(
    model: nn.Module, recorder: CaptureRecorder, split: Set[str] = frozenset()
) -> list[Slot]:
    """A slot for every module that must book-keep, in the order of the tree; or a refusal.

    Of the parameters named by `split` every rank has a part.
    """
    # The first name of each trainable parameter; tied ones share it.
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    refusals.refuse_hooks(model)
    slots: list[Slot] = []
    for path, module, rule in _handled(model, "", names, split):
        held = module.named_parameters(recurse=rule.takes_children)
        owned = {key: names[id(p)] for key, p in held if id(p) in names}
        slots.append(
            rule(index=len(slots), path=path, module=module, names=owned, recorder=recorder)
        )
    refusals.refuse_unreachable(names, slots)
    return slots


def _handled(
    module: nn.Module, path: str, names: dict[int, str], split: Set[str]
) -> Iterator[tuple[str, nn.Module, type[Slot]]]:
    """Every module that needs a slot, with its rule, from the outside in."""
    if not any(id(p) in names for p in module.parameters()):
        return
    refusals.refuse_known(module, path)
    rule = find_rule(module)
    if rule is LinearSlot and split & {names.get(id(p)) for p in module.parameters()}:
        rule = SplitLinearSlot
    if rule is None:
        rule = _rule_for_bare_parameters(module, names)
    if rule is not None:
        if "forward" in module.__dict__:
            raise refusals.already_replaced(path)
        yield path, module, rule
        if rule.takes_children:
            return
    for key, child in module.named_children():
        yield from _handled(child, f"{path}.{key}" if path else key, names, split)


def _rule_for_bare_parameters(module: nn.Module, names: dict[int, str]) -> type[Slot] | None:
    """How to handle parameters a module without a rule holds itself, or in a container.

    A parameter that some descendant holds too is left to that descendant (BERT's prediction bias
    is its decoder's); if the module used it after all, the engine would notice the gradient.
    """
    if is_container(module):
        return None
    # DoRA multiplies its factors with each other before any sample comes in.
    if is_parametrized(module) or len(getattr(module, "lora_magnitude_vector", ())) > 0:
        return GenericSlot
    held = dict(module.named_parameters(recurse=False))
    own = {key: p for key, p in held.items() if id(p) in names}
    contained = [
        p
        for child in module.children()
        if isinstance(child, nn.ParameterList | nn.ParameterDict)
        for p in child.parameters()
        if id(p) in names
    ]
    if contained:
        return GenericSlot
    below = {id(p) for child in module.children() for p in child.parameters()}
    own = {key: p for key, p in own.items() if id(p) not in below}
    if not own:
        return None
    return BroadcastSlot if can_broadcast(module, own) else GenericSlot
