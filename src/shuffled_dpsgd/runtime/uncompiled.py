"""Compiled models, run without their compiler for a while."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shuffled_dpsgd.errors import UnsupportedModuleError


def refuse_compiled_whole() -> None:
    """Refuse a sharded model that is compiled as a whole; may be called while it is traced.

    Raises:
        UnsupportedModuleError: always.
    """
    raise UnsupportedModuleError(
        "",
        expected="a sharded model whose blocks are compiled one by one",
        got="torch.compile of the model as a whole, in the middle of which ranks meet",
        remedy="call block.compile() on each block before fully_shard, and pass the model as it is",
    )


@contextmanager
def eagerly() -> Iterator[None]:
    """Run compiled models without their compiler."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
