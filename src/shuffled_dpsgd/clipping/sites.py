"""Which module handles which trainable parameter: the engine's slots, or a refusal.

Every trainable parameter of the model ends up in exactly one slot per place it is used; a
parameter no rule can handle exactly is refused here, before any training.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shuffled_dpsgd.clipping.recorder import Recorder
from shuffled_dpsgd.clipping.rules import find_rule
from shuffled_dpsgd.clipping.rules.base import Slot
from shuffled_dpsgd.errors import UnsupportedModuleError


def canonical_names(model: nn.Module) -> dict[int, str]:
    """id of each trainable parameter -> its first name in the model; tied ones share it."""
    return {id(p): name for name, p in model.named_parameters() if p.requires_grad}


def build_slots(model: nn.Module, recorder: Recorder) -> list[Slot]:
    """A slot for every module that must book-keep.

    Raises:
        UnsupportedModuleError: some trainable parameter cannot be handled exactly.
    """
    names = canonical_names(model)
    slots: list[Slot] = []
    for path, module, owned in _handled(model, "", names):
        rule = find_rule(module)
        if rule is None:
            raise UnsupportedModuleError(
                path, expected="a module with a rule", got=type(module), remedy="freeze it"
            )
        slots.append(
            rule(index=len(slots), path=path, module=module, names=owned, recorder=recorder)
        )
    return slots


def _handled(
    module: nn.Module, path: str, names: dict[int, str]
) -> Iterator[tuple[str, nn.Module, dict[str, str]]]:
    if not any(id(p) in names for p in module.parameters()):
        return
    if "forward" in module.__dict__:
        raise UnsupportedModuleError(
            path,
            expected="a module whose forward is its class's",
            got="a forward replaced on the instance",
            remedy="undo the replacement (another engine or a dispatch hook) first",
        )
    own = {key: names[id(p)] for key, p in module.named_parameters(recurse=False) if id(p) in names}
    if own:
        yield path, module, own
        return
    for key, child in module.named_children():
        yield from _handled(child, f"{path}.{key}" if path else key, names)


def refuse_batch_statistics(model: nn.Module) -> None:
    """Refuse layers whose output for one sample depends on the others.

    Raises:
        UnsupportedModuleError: a batch norm in training mode.
    """
    for path, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats):
            raise UnsupportedModuleError(
                path,
                expected="layers that treat every sample on its own",
                got=f"{type(module).__name__} with batch statistics",
                remedy="replace it by GroupNorm or LayerNorm, or put it in eval mode",
            )
