"""Hooks that run before all others of a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


def put_first(module: nn.Module, hook: Callable[..., Any]) -> RemovableHandle:
    """Run `hook(module, args, kwargs)` before every forward, and before the hooks there are.

    `prepend=True` alone moves a hook within an ordered dict. The compiler of torch 2.11 reads such
    a dict in the order of insertion, and then takes one hook for another. So the hooks are inserted
    again in the order in which they run.
    """
    handle = module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    hooks = module._forward_pre_hooks
    in_order = list(hooks.items())
    hooks.clear()
    hooks.update(in_order)
    return handle
