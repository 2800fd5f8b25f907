"""PyTorch's own attention and Transformer layers."""

from __future__ import annotations

from typing import Any

from shuffled_dpsgd.permutation.blocks import HiddenUnits, Layer, add_attention
from shuffled_dpsgd.permutation.layers import Port, class_name, join, stays
from shuffled_dpsgd.permutation.sketch import Sketch

_TRANSFORMER = "torch.nn.modules.transformer.Transformer"
ATTENTION = "torch.nn.modules.activation.MultiheadAttention"
ENCODERS = frozenset({f"{_TRANSFORMER}EncoderLayer", f"{_TRANSFORMER}Encoder"})
DECODERS = frozenset({f"{_TRANSFORMER}DecoderLayer", f"{_TRANSFORMER}Decoder"})
# Their attention is described by itself.
_HIDDEN = HiddenUnits(up=("linear1",), down="linear2", activation="activation")
LAYERS = {f"{_TRANSFORMER}{side}Layer": Layer(hidden=_HIDDEN) for side in ("Encoder", "Decoder")}


def describe_attention(sketch: Sketch, path: str, module: Any) -> None:
    """Theorem 2 for `nn.MultiheadAttention`, whose projections may be fused or apart."""
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


def attention_reads(sketch: Sketch, path: str, module: Any) -> tuple[list[Port], ...]:
    """Axes that read the query, key and value inputs."""
    if module.in_proj_weight is not None:
        fused = [sketch.parameter(join(path, "in_proj_weight"), 1)]
        return fused, fused, fused
    return tuple([sketch.parameter(join(path, f"{name}_proj_weight"), 1)] for name in "qkv")


def streams(sketch: Sketch, path: str, module: Any) -> tuple[list[Port], list[Port]]:
    """Axes on the stream of a layer, or of a stack of layers, and axes that read its memory.

    Raises `UnsupportedModuleError` if a part of it is not PyTorch's own.
    """
    stream: list[Port] = []
    memory: list[Port] = []
    if class_name(module) in LAYERS:
        _add_layer(sketch, path, module, stream, memory)
        return stream, memory
    for index, layer in enumerate(module.layers):
        _add_layer(sketch, join(path, f"layers.{index}"), layer, stream, memory)
    if module.norm is not None:
        stream += sketch.outputs(join(path, "norm"))
    return stream, memory


def _add_layer(
    sketch: Sketch, path: str, module: Any, stream: list[Port], memory: list[Port]
) -> None:
    for name, child in module.named_children():
        inside = join(path, name)
        if class_name(child) == ATTENTION:
            query, key, value = attention_reads(sketch, inside, child)
            stream += query
            (memory if name == "multihead_attn" else stream).extend([*key, *value])
            stream += sketch.outputs(join(inside, "out_proj"))
        elif name == "linear1":
            stream += sketch.inputs(inside)
        elif name == "linear2" or name.startswith("norm"):
            stream += sketch.outputs(inside)
        elif any(True for _ in child.parameters()):
            expected = "only the parts PyTorch's layer has"
            raise stays(inside, expected=expected, got=class_name(child))
