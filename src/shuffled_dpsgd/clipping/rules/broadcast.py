"""Bare parameters that are broadcast over the batch: class tokens and position embeddings.

A parameter of shape (1, ...) that a module adds or concatenates to every sample can be replaced,
while that module runs, by one copy per sample; the module's children keep their own rules. For
classes known to do just that the replacement is taken as right. For any other it is checked on
every new kind of batch against the generic rule, with different values in every copy.

A sample may have several rows of the batch, side by side (folded inputs: views of an image, say).
In classes known, its copy then serves all of them; any other is refused.

Shapes: B samples, K rows of a sample, S the parameter's shape without its leading one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from shuffled_dpsgd.clipping.capture.samples import kind_of_call
from shuffled_dpsgd.clipping.capture.slot import size_of
from shuffled_dpsgd.clipping.rules.generic import (
    FAILURES,
    CopiesSlot,
    all_agree,
)
from shuffled_dpsgd.clipping.rules.mapping import at_once
from shuffled_dpsgd.clipping.rules.trial_runs import in_eval_mode
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
    """Whether a module may be one that broadcasts its bare `parameters`.

    They have a leading axis of length one, and its forward repeats nothing: a token repeated over
    the batch, instead of expanded, would be repeated once more.
    """
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    repeats = _REPEATING.intersection(code.co_names if code is not None else ())
    trusted = class_name(module) in KNOWN or not repeats
    return trusted and all(p.dim() >= 2 and p.shape[0] == 1 for p in parameters.values())


def class_name(module: nn.Module) -> str:
    """The exact qualified name of the module's class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


@functools.cache
def _untraced_refusal() -> Callable[[str, str], None]:
    """`_refuse_unchecked` for code that is compiled.

    Where a graph must be whole, the compiler tells its user the reason. Made on first use: it
    imports PyTorch's compiler, which takes more than a second.
    """
    reason = "bare parameters must be checked: first run one step without it"
    refuse: Callable[[str, str], None] = torch.compiler.disable(_refuse_unchecked, reason=reason)
    return refuse


def _refuse_unchecked(path: str, name: str) -> None:
    raise UnsupportedModuleError(
        path,
        expected="a module whose bare parameters are known to be broadcast",
        got=f"{name}, not yet checked",
        remedy="run one step without torch.compile first",
    )


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
        self.runs_module = not self._is_known
        self._verified: set[Hashable] = set()
        # For a compiler, which follows no set of such things.
        self._is_verified = False
        self._refuse_unchecked = None if self._is_known else _untraced_refusal()

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
        if not self._is_known and size_of(batch) > 0:
            self._verify_once(owned, args, kwargs, size_of(batch))
        rows = self._rows_each(batch, args, kwargs) if self.folded else 1
        copies = {key: copy.squeeze(1) for key, copy in self.copies(owned).items()}
        if rows > 1:
            copies = {key: c.repeat_interleave(rows, dim=0) for key, c in copies.items()}
        return self._with(copies, args, kwargs)

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
        if torch.compiler.is_compiling():
            # Not every version of the tracer follows changes to a module's dictionary.
            return self._unbound(StandIn(self.module, values), *args, **kwargs)
        # Shadowing in the instance dictionary leaves the registered parameter where it is.
        attributes = self.module.__dict__
        for key, value in values.items():
            attributes[key] = value
        try:
            return self.plain(*args, **kwargs)
        finally:
            for key in values:
                del attributes[key]

    def _verify_once(self, owned: dict[str, Any], args: Any, kwargs: Any, size: int) -> None:
        """Verify every kind of call: one sample, or one shape, hides what is wrong for others."""
        if torch.compiler.is_compiling():
            if not self._is_verified:
                assert self._refuse_unchecked is not None, "known modules need no check"
                self._refuse_unchecked(self.path, type(self.module).__name__)
            return
        kind = (*kind_of_call(args, kwargs, size), self.module.training)
        if kind not in self._verified:
            self._verify(owned, args, kwargs, size)
            self._verified.add(kind)
            self._is_verified = True

    def _verify(self, owned: dict[str, Any], args: Any, kwargs: Any, size: int) -> None:
        """Compare the replacement with one sample at a time, every sample its own parameters."""
        leaves, spec = tree_flatten((args, kwargs))
        with in_eval_mode(self.module), torch.random.fork_rng():
            self.plain(*args, **kwargs)  # An error of the module's own is raised here, as it is.
            copies = {
                key: p + torch.randn((size, *p.shape[1:]), dtype=p.dtype, device=p.device)
                for key, p in owned.items()
            }
            single = {key: copy.unsqueeze(1) for key, copy in copies.items()}
            try:
                together, _ = tree_flatten(self._with(copies, args, kwargs))
                alone, _ = at_once(self, single, leaves, spec, size)
            except FAILURES as error:
                reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                raise self._refusal(owned, reason) from error
        if not all_agree(alone, together):
            raise self._refusal(owned, "another use of their leading axis")

    def _refusal(self, owned: dict[str, Any], got: str) -> UnsupportedModuleError:
        return UnsupportedModuleError(
            self.path,
            expected=f"{', '.join(sorted(owned))} only broadcast over the batch",
            got=got,
            remedy="use expand, not repeat; store them without the leading axis of length one, and "
            "the generic rule applies; or freeze them",
        )
