"""Trial runs of a module: no gradients, no dropout, and every flag and buffer put back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shuffled_dpsgd.runtime.attention import without_fast_attention


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """No gradients, dropout or warnings inside, which the real forward will repeat."""
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        with (
            torch.no_grad(),
            without_fast_attention(),
            warnings.catch_warnings(action="ignore"),
        ):
            yield
    finally:
        for child, mode in modes:
            child.training = mode


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[Callable[[], bool]]:
    """Put back buffers changed or replaced inside; yields a function that says if any were."""
    before = {
        name: (buffer, buffer._version, buffer.clone()) for name, buffer in module.named_buffers()
    }

    def have_changed() -> bool:
        found = dict(module.named_buffers())
        return any(
            found.get(name) is not buffer or buffer._version != version
            for name, (buffer, version, _) in before.items()
        )

    try:
        yield have_changed
    finally:
        if have_changed():
            with torch.no_grad():
                for name, (buffer, _, value) in before.items():
                    owner, _, own_name = name.rpartition(".")
                    setattr(module.get_submodule(owner), own_name, buffer.copy_(value))
