"""Bare parameters that are broadcast over the batch: class tokens and position embeddings.

A parameter of shape (1, ...) that a module adds or concatenates to every sample can be replaced,
while that module runs, by one copy per sample; the module's children keep their own rules. For
classes known to do just that samples may also be folded. Whether another class does more with the
parameter shows when the referee compares the sums with plain autograd.

A sample may have several rows of the batch, side by side (folded inputs: views of an image, say).
In classes known, its copy then serves all of them; any other is refused.

Shapes: B samples, K rows of a sample, S the parameter's shape without its leading one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shuffled_dpsgd.clipping.capture.slot import size_of
from shuffled_dpsgd.clipping.rules.generic import FAILURES, CopiesSlot
from shuffled_dpsgd.errors import UnsupportedModuleError

if TYPE_CHECKING:
    from shuffled_dpsgd.clipping.capture.batch import CapturedBatch

KNOWN = frozenset(
    {
        "transformers.models.vit.modeling_vit.ViTEmbeddings",
        "transformers.models.deit.modeling_deit.DeiTEmbeddings",
        "torchvision.models.vision_transformer.VisionTransformer",
        "torchvision.models.vision_transformer.Encoder",
    }
)
_REPEATING = frozenset({"repeat", "repeat_interleave", "tile"})


def can_broadcast(module: nn.Module, parameters: dict[str, nn.Parameter]) -> bool:
    """Whether a module may be one that broadcasts its bare `parameters` over the batch.

    They must have a leading axis of length one. The forward must not call `repeat`: it is given one
    copy per sample, and would repeat all of them.
    """
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    repeats = _REPEATING.intersection(code.co_names if code is not None else ())
    trusted = class_name(module) in KNOWN or not repeats
    return trusted and all(p.dim() >= 2 and p.shape[0] == 1 for p in parameters.values())


def class_name(module: nn.Module) -> str:
    """The exact qualified name of the module's class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


class StandIn:
    """Takes a module's place as `self` in its forward, with some attributes replaced."""

    def __init__(self, module: nn.Module, values: dict[str, Tensor]) -> None:
        self._module = module
        self._values = values

    def __getattr__(self, name: str) -> Any:
        return self._values[name] if name in self._values else getattr(self._module, name)


class BroadcastSlot(CopiesSlot):
    """A module that broadcasts its own bare parameters over the batch."""

    kind = "broadcast"
    takes_children = False

    def __init__(self, **site: Any) -> None:
        super().__init__(**site)
        self._unbound: Any = type(self.module).forward
        self._is_known = class_name(self.module) in KNOWN
        self.may_fold = self._is_known

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        if kwargs.get("interpolate_pos_encoding"):
            raise UnsupportedModuleError(
                self.path,
                expected="position embeddings used as they are",
                got="interpolate_pos_encoding=True",
                remedy="resize the position embeddings once before training, or freeze them",
            )
        owned = {key: cast(Tensor, self.parameters[key]) for key in self.names}
        batch = self.recorder.batch or self.recorder.recomputed_batch(self.path)
        rows = self._rows_each(batch, args, kwargs) if self.folded else 1
        copies = {key: copy.squeeze(1) for key, copy in self.copies(owned).items()}
        if rows > 1:
            copies = {key: c.repeat_interleave(rows, dim=0) for key, c in copies.items()}
        if torch.compiler.is_compiling():
            # Not every version of the tracer follows changes to a module's dictionary.
            return self._unbound(StandIn(self.module, copies), *args, **kwargs)
        try:
            return self._with(copies, args, kwargs)
        except FAILURES as error:
            with torch.no_grad():
                self.plain(*args, **kwargs)  # An error of the module's own is raised as it is.
            raise self._refusal(owned, f"{type(error).__name__}: {error}") from error

    def folded_forward(self) -> Callable[..., Any]:
        return self.forward

    def _rows_each(self, batch: CapturedBatch, args: Any, kwargs: Any) -> int:
        """K: how many rows of its inputs a sample has."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        lengths = {len(leaf) for leaf in given}
        if self.recorder.batch is not None and not torch.compiler.is_compiling():
            self.refuse_other_rows(batch, len(given[0]))
        size = size_of(batch)
        if size == 0:
            return 1
        if len(lengths) != 1 or len(given[0]) % size:
            raise self.refuse_batch_axis(size, given[0].shape)
        return len(given[0]) // size

    def _with(self, values: dict[str, Tensor], args: Any, kwargs: Any) -> Any:
        # Shadowing in the instance dictionary leaves the registered parameter where it is.
        attributes = self.module.__dict__
        for key, value in values.items():
            attributes[key] = value
        try:
            return self.plain(*args, **kwargs)
        finally:
            for key in values:
                del attributes[key]

    def _refusal(self, owned: dict[str, Any], got: str) -> UnsupportedModuleError:
        return UnsupportedModuleError(
            self.path,
            expected=f"{', '.join(sorted(owned))} only broadcast over the batch",
            got=got,
            remedy="use expand, not repeat; store them without the leading axis of length one, and "
            "the generic rule applies; or freeze them",
        )
