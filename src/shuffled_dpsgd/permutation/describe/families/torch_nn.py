"""PyTorch's own attention and Transformer layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shuffled_dpsgd.errors import UnsupportedModuleError
from shuffled_dpsgd.permutation.describe.elementwise import is_elementwise
from shuffled_dpsgd.permutation.describe.families.blocks import Attention, attention, feed_forward
from shuffled_dpsgd.permutation.describe.ports import Port, class_name
from shuffled_dpsgd.permutation.describe.sketch import Sketch, join

ATTENTION = "torch.nn.modules.activation.MultiheadAttention"
LAYERS = frozenset(
    {
        "torch.nn.modules.transformer.TransformerEncoderLayer",
        "torch.nn.modules.transformer.TransformerDecoderLayer",
    }
)
ENCODERS = frozenset(
    {
        "torch.nn.modules.transformer.TransformerEncoderLayer",
        "torch.nn.modules.transformer.TransformerEncoder",
    }
)
DECODERS = frozenset(
    {
        "torch.nn.modules.transformer.TransformerDecoderLayer",
        "torch.nn.modules.transformer.TransformerDecoder",
    }
)


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Axes on a layer's residual stream, and axes that read its memory (decoders only)."""

    stream: list[Port]
    memory: list[Port]


def describe_attention(sketch: Sketch, path: str, module: Any) -> None:
    """Theorem 2 for `nn.MultiheadAttention`, whose projections may be fused or apart."""
    query, key, value = _projections(sketch, path, module)
    attention(
        sketch,
        path or "attention",
        Attention(
            query=query,
            key=key,
            value=value,
            output=sketch.inputs(join(path, "out_proj")),
            num_heads=module.num_heads,
            num_kv_heads=module.num_heads,
            head_dim=module.head_dim,
            rotary=False,
        ),
    )


def describe_feed_forward(sketch: Sketch, path: str, module: Any) -> None:
    """Theorem 1 inside an encoder or decoder layer; its attention is described by itself."""
    if is_elementwise(module.activation):
        up = sketch.outputs(join(path, "linear1"))
        feed_forward(sketch, join(path, "mlp"), [up], sketch.inputs(join(path, "linear2")))
        return
    name = getattr(module.activation, "__name__", class_name(module.activation))
    for part in ("linear1", "linear2"):
        sketch.refuse(join(path, part), f"activation {name} is not known to be elementwise")


def attention_reads(sketch: Sketch, path: str, module: Any) -> tuple[list[Port], ...]:
    """Axes that read the query, key and value inputs."""
    if module.in_proj_weight is not None:
        fused = [sketch.parameter(join(path, "in_proj_weight"), 1)]
        return fused, fused, fused
    return tuple(
        [sketch.parameter(join(path, f"{name}_proj_weight"), 1)] for name in ("q", "k", "v")
    )


def streams(sketch: Sketch, path: str, module: Any) -> Streams:
    """The streams of a layer, or of a stack of layers with its closing norm.

    Raises `UnsupportedModuleError` if a part of it is not PyTorch's own.
    """
    if class_name(module) in LAYERS:
        return _layer_streams(sketch, path, module)
    stream: list[Port] = []
    memory: list[Port] = []
    for index, layer in enumerate(module.layers):
        found = _layer_streams(sketch, join(path, f"layers.{index}"), layer)
        stream += found.stream
        memory += found.memory
    if module.norm is not None:
        stream += sketch.outputs(join(path, "norm"))
    return Streams(stream=stream, memory=memory)


def _layer_streams(sketch: Sketch, path: str, module: Any) -> Streams:
    stream: list[Port] = []
    memory: list[Port] = []
    for name, child in module.named_children():
        inside = join(path, name)
        kind = class_name(child)
        if kind == ATTENTION:
            query, key, value = attention_reads(sketch, inside, child)
            stream += query
            (memory if name == "multihead_attn" else stream).extend([*key, *value])
            stream += sketch.outputs(join(inside, "out_proj"))
        elif name == "linear1":
            stream += sketch.inputs(inside)
        elif name == "linear2" or name.startswith("norm"):
            stream += sketch.outputs(inside)
        elif any(True for _ in child.parameters()):
            raise UnsupportedModuleError(
                inside,
                expected="only the parts PyTorch's layer has",
                got=kind,
                remedy="the stream through this layer stays where it is",
            )
    return Streams(stream=stream, memory=memory)


def _projections(
    sketch: Sketch, path: str, module: Any
) -> tuple[list[Port], list[Port], list[Port]]:
    width = module.embed_dim
    found: dict[str, list[Port]] = {"q": [], "k": [], "v": []}
    for index, (name, ports) in enumerate(found.items()):
        if module.in_proj_weight is not None:
            port = sketch.parameter(join(path, "in_proj_weight"), 0)
            ports.append(Port(parameter=port.parameter, axis=0, start=index * width))
        else:
            ports.append(sketch.parameter(join(path, f"{name}_proj_weight"), 0))
        if module.in_proj_bias is not None:
            port = sketch.parameter(join(path, "in_proj_bias"), 0)
            ports.append(Port(parameter=port.parameter, axis=0, start=index * width))
        if name != "q" and getattr(module, f"bias_{name}") is not None:
            ports.append(sketch.parameter(join(path, f"bias_{name}"), 2))
    return found["q"], found["k"], found["v"]
