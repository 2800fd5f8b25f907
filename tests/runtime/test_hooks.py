"""Hooks that run before all others."""

from __future__ import annotations

import torch
from torch import nn

from shuffled_dpsgd.runtime.hooks import put_first


def test_hooks_put_first_are_stored_in_the_order_in_which_they_run() -> None:
    model, ran = nn.Linear(2, 2), list[str]()
    model.register_forward_pre_hook(lambda *_: ran.append("the user's"))
    put_first(model, lambda *_: ran.append("second"))
    handle = put_first(model, lambda *_: ran.append("first"))
    model(torch.zeros(1, 2))
    assert ran == ["first", "second", "the user's"]
    # As the compiler of torch 2.11 reads them.
    assert list(dict.keys(model._forward_pre_hooks)) == list(model._forward_pre_hooks)
    handle.remove()
    ran.clear()
    model(torch.zeros(1, 2))
    assert ran == ["second", "the user's"]
