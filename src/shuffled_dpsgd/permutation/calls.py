"""How a traced forward calls the blocks that families describe, and what must stay because of it.

A family describes a block as its own code runs it. A parent may tell its heads apart, by a mask or
by weights of each, or may reach past the block to a layer inside.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx, nn

from shuffled_dpsgd.permutation import torch_layers
from shuffled_dpsgd.permutation.families import LAYERS
from shuffled_dpsgd.permutation.layers import class_name, join
from shuffled_dpsgd.permutation.sketch import Sketch

_BLOCKS = frozenset({torch_layers.ATTENTION, *torch_layers.LAYERS, *LAYERS})
# Position and name of every argument that may hold a mask for each head.
_MASKS: dict[str, tuple[tuple[int, str], ...]] = {
    torch_layers.ATTENTION: ((5, "attn_mask"),),
    "torch.nn.modules.transformer.TransformerEncoder": ((1, "mask"),),
    "torch.nn.modules.transformer.TransformerEncoderLayer": ((1, "src_mask"),),
    **dict.fromkeys(torch_layers.DECODERS, ((2, "tgt_mask"), (3, "memory_mask"))),
}


def note_call(sketch: Sketch, root: str, node: fx.Node) -> None:
    """Tell the sketch what stays because of this node of the traced module at `root`."""
    if node.op not in ("call_module", "get_attr"):
        return
    path = join(root, str(node.target))
    block = _block_around(sketch, root, path)
    if block is not None:
        sketch.keep(block, f"{path} is used from outside of {block}")
    if node.op == "call_module":
        module = sketch.modules[path]
        for position, name in _MASKS.get(class_name(module), ()):
            if _may_be_per_head(sketch, root, argument(node, position, name)):
                sketch.keep(path, f"{name} of {path} may be another one for each head", "heads")
        if class_name(module) == torch_layers.ATTENTION and _uses_weights_per_head(node):
            sketch.keep(path, f"the weights of each head of {path} are used", "heads")


def argument(node: fx.Node, position: int, name: str) -> Any:
    """What a call is given, by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _block_around(sketch: Sketch, root: str, path: str) -> str | None:
    """The outermost described block below `root` that `path` lies inside of."""
    parts = path.split(".")
    start = len(root.split(".")) if root else 0
    for end in range(start + 1, len(parts)):
        outer = ".".join(parts[:end])
        if class_name(sketch.modules.get(outer)) in _BLOCKS:
            return outer
    return None


def _may_be_per_head(sketch: Sketch, root: str, mask: Any) -> bool:
    """A mask of two axes is one for all heads; of what cannot be seen nothing is known."""
    if mask is None:
        return False
    if isinstance(mask, fx.Node) and mask.op == "get_attr":
        owner, _, name = join(root, str(mask.target)).rpartition(".")
        held = getattr(sketch.modules.get(owner, nn.Module()), name, None)
        return getattr(held, "ndim", 3) != 2
    return True


def _uses_weights_per_head(node: fx.Node) -> bool:
    if argument(node, 6, "average_attn_weights") in (None, True):
        return False
    if argument(node, 4, "need_weights") is False:
        return False
    takes_values = [user.target is operator.getitem and user.args[1] == 0 for user in node.users]
    unused = [not user.users for user in node.users]
    return not all(map(operator.or_, takes_values, unused))
