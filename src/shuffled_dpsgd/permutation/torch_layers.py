"""PyTorch's own attention and Transformer layers."""

from __future__ import annotations

from typing import Any

from shuffled_dpsgd.permutation.blocks import HiddenUnits, Layer, add_attention
from shuffled_dpsgd.permutation.layers import Port, join
from shuffled_dpsgd.permutation.sketch import Sketch

_TRANSFORMER = "torch.nn.modules.transformer.Transformer"
ATTENTION = "torch.nn.modules.activation.MultiheadAttention"
# Their attention is described by itself.
_HIDDEN = HiddenUnits(up=("linear1",), down="linear2", activation="activation")
LAYERS = {f"{_TRANSFORMER}{side}Layer": Layer(hidden=_HIDDEN) for side in ("Encoder", "Decoder")}


def describe_attention(sketch: Sketch, path: str, module: Any) -> None:
    """Theorem 2 for `nn.MultiheadAttention`, whose projections may be fused or apart.

    Its heads stay in order: a caller may give each a mask of its own, or use the weights of each.
    """
    sketch.keep(path, "its caller may tell its heads apart", "heads")
    written: list[list[Port]] = []
    for index, name in enumerate("qkv"):
        start = index * module.embed_dim
        if module.in_proj_weight is not None:
            ports = [sketch.parameter(join(path, "in_proj_weight"), 0, start)]
        else:
            ports = [sketch.parameter(join(path, f"{name}_proj_weight"), 0)]
        if module.in_proj_bias is not None:
            ports.append(sketch.parameter(join(path, "in_proj_bias"), 0, start))
        if name != "q" and getattr(module, f"bias_{name}") is not None:
            ports.append(sketch.parameter(join(path, f"bias_{name}"), 2))
        written.append(ports)
    add_attention(
        sketch,
        path or "attention",
        (written[0], written[1], written[2], sketch.inputs(join(path, "out_proj"))),
        heads=module.num_heads,
        kv_heads=module.num_heads,
        size=module.head_dim,
    )
