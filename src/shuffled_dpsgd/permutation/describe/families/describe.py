"""An architecture as data, and the one walk that turns such data into groups.

`Layer` names the parts of one Transformer block, `Stem` those around the blocks, `Head` what reads
the residual stream at the top. All names are relative to the module they describe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from torch import nn

from shuffled_dpsgd.errors import UnsupportedModuleError
from shuffled_dpsgd.permutation.describe.elementwise import is_elementwise
from shuffled_dpsgd.permutation.describe.families.blocks import Attention, attention, feed_forward
from shuffled_dpsgd.permutation.describe.ports import Port, class_name
from shuffled_dpsgd.permutation.describe.sketch import Sketch, join
from shuffled_dpsgd.permutation.spec import Block


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One block. With `fused`, one projection writes query, key and value side by side."""

    query: str = ""
    key: str = ""
    value: str = ""
    fused: str = ""
    output: str
    up: tuple[str, ...]
    down: str
    activation: str
    norms: tuple[str, ...]
    num_heads: str
    num_kv_heads: str = ""
    head_dim: str
    rotary: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        """Modules that read the residual stream."""
        projections = (self.fused,) if self.fused else (self.query, self.key, self.value)
        return (*projections, *self.up)

    @property
    def writes(self) -> tuple[str, ...]:
        """Modules that add to the residual stream, or scale it."""
        return (self.output, self.down, *self.norms)

    def fits(self, module: nn.Module) -> bool:
        """Whether every part exists: library versions name them differently."""
        return all(_has(module, name) for name in (*self.reads, *self.writes))


@dataclass(frozen=True, kw_only=True)
class HiddenUnits:
    """A feed-forward part that several kinds of blocks have: gated with more than one `up`."""

    up: tuple[str, ...]
    down: str
    activation: str


@dataclass(frozen=True, kw_only=True)
class AttentionPart:
    """An attention module that several kinds of blocks have, one or two in each.

    `fixed_heads` says why whole heads must not trade places, where something else knows them by
    their number.
    """

    query: str
    key: str
    value: str
    output: str
    num_heads: str
    head_dim: str
    fixed_heads: str = ""


@dataclass(frozen=True, kw_only=True)
class Stem:
    """What surrounds the blocks: modules and bare parameters whose last axis is the stream."""

    layers: tuple[str, ...]
    writes: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Chain:
    """`up`, an elementwise activation, perhaps a norm, `down`; not part of any block."""

    up: str
    down: str
    activation: str = ""
    norms: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Head:
    """A complete model: where its stem is, what reads the stream, and chains above it.

    `copies` are second names of parameters that only serve saving and loading.
    """

    stem: str
    reads: tuple[str, ...]
    chains: tuple[Chain, ...] = ()
    copies: tuple[str, ...] = ()


def describe_layer(sketch: Sketch, path: str, alternatives: Sequence[Layer]) -> None:
    """Add the groups inside one block: Theorem 1 and Theorem 2."""
    names = fitting(sketch, path, alternatives)
    block = sketch.modules[path]
    hidden = HiddenUnits(up=names.up, down=names.down, activation=names.activation)
    describe_hidden_units(sketch, path, hidden)
    num_heads = int(attribute(block, names.num_heads))
    kv = int(attribute(block, names.num_kv_heads)) if names.num_kv_heads else num_heads
    query, key, value = _projections(sketch, path, names)
    attention(
        sketch,
        join(path, "attention"),
        Attention(
            query=query,
            key=key,
            value=value,
            output=sketch.inputs(join(path, names.output)),
            num_heads=num_heads,
            num_kv_heads=kv,
            head_dim=int(attribute(block, names.head_dim)),
            rotary=names.rotary,
        ),
    )


def describe_hidden_units(sketch: Sketch, path: str, names: HiddenUnits) -> None:
    """Theorem 1, if the activation in between maps every entry by itself."""
    activation = attribute(sketch.modules[path], names.activation)
    if is_elementwise(activation):
        feed_forward(
            sketch,
            join(path, "mlp"),
            [sketch.outputs(join(path, up)) for up in names.up],
            sketch.inputs(join(path, names.down)),
        )
        return
    reason = f"activation {class_name(activation)} is not known to be elementwise"
    for name in (*names.up, names.down):
        sketch.refuse(join(path, name), reason)


def describe_attention(sketch: Sketch, path: str, names: AttentionPart) -> None:
    """Theorem 2 for one attention module, whether it attends to its own stream or to another."""
    module = sketch.modules[path]
    num_heads = int(attribute(module, names.num_heads))
    query, key, value = (
        sketch.outputs(join(path, name)) for name in (names.query, names.key, names.value)
    )
    if names.fixed_heads:
        sketch.keep(path, names.fixed_heads, "heads")
    attention(
        sketch,
        path,
        Attention(
            query=query,
            key=key,
            value=value,
            output=sketch.inputs(join(path, names.output)),
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=int(attribute(module, names.head_dim)),
            rotary=False,
        ),
    )


def describe_chain(sketch: Sketch, root: str, chain: Chain) -> None:
    """Theorem 1 above the blocks; a norm in between needs scope 'full'."""
    if chain.activation:
        found = attribute(sketch.modules[root], chain.activation)
        if not is_elementwise(found):
            reason = f"activation {class_name(found)} is not known to be elementwise"
            sketch.refuse(join(root, chain.up), reason)
            return
    up = sketch.outputs(join(root, chain.up))
    down = sketch.inputs(join(root, chain.down))
    if not chain.norms:
        feed_forward(sketch, join(root, chain.up), [up], down)
    elif sketch.scope == "full":
        norms = [port for norm in chain.norms for port in sketch.outputs(join(root, norm))]
        places = [(ports, Block()) for ports in (up, norms, down)]
        sketch.add("residual", join(root, chain.up), sketch.size(up[0]), places)


def describe_stream(
    sketch: Sketch, root: str, head: Head, stem: Stem, layers: dict[str, tuple[Layer, ...]]
) -> None:
    """Add the residual stream of a complete model, if every parameter below is accounted for."""
    base = join(root, head.stem)
    module = sketch.modules[base]
    stream: list[Port] = []
    for name in (*stem.writes, *(name for name in stem.optional if _has(module, name))):
        stream += sketch.outputs(join(base, name))
    for name in stem.parameters:
        if (parameter := attribute(module, name)) is not None:
            stream.append(sketch.parameter(join(base, name), parameter.ndim - 1))
    container = next(name for name in stem.layers if _has(module, name))
    for index, block in enumerate(attribute(module, container)):
        path = join(base, f"{container}.{index}")
        names = fitting(sketch, path, layers.get(class_name(block), ()))
        for name in names.reads:
            stream += sketch.inputs(join(path, name))
        for name in names.writes:
            stream += sketch.outputs(join(path, name))
    for name in head.reads:
        stream += sketch.inputs(join(root, name))
    copies = {join(root, name) for name in head.copies}
    if missing := [name for name in sketch.undescribed(root) if name not in copies]:
        raise UnsupportedModuleError(
            missing[0],
            expected=f"only parts known of {class_name(sketch.modules[root])}",
            got=f"{len(missing)} parameters of unknown use",
            remedy="the residual stream stays where it is",
        )
    sketch.add("residual", join(root, "residual"), sketch.size(stream[0]), [(stream, Block())])


def fitting(sketch: Sketch, path: str, alternatives: Sequence[Layer]) -> Layer:
    """The alternative whose names all exist in the block at `path`."""
    for names in alternatives:
        if names.fits(sketch.modules[path]):
            return names
    raise UnsupportedModuleError(
        path,
        expected="a known kind of block, with the submodule names known of it",
        got=f"{class_name(sketch.modules[path])} with "
        + ", ".join(name for name, _ in sketch.modules[path].named_children()),
        remedy="its parameters stay where they are",
    )


def attribute(module: nn.Module, dotted: str) -> Any:
    """The attribute a dotted path leads to."""
    return reduce(getattr, dotted.split("."), module)


def _projections(
    sketch: Sketch, path: str, names: Layer
) -> tuple[Sequence[Port], Sequence[Port], Sequence[Port]]:
    if not names.fused:
        query, key, value = (
            sketch.outputs(join(path, name)) for name in (names.query, names.key, names.value)
        )
        return query, key, value
    fused = sketch.outputs(join(path, names.fused))
    third = sketch.size(fused[0]) // 3
    query, key, value = (
        [Port(parameter=p.parameter, axis=p.axis, start=i * third) for p in fused] for i in range(3)
    )
    return query, key, value


def _has(module: nn.Module, dotted: str) -> bool:
    try:
        return attribute(module, dotted) is not None
    except AttributeError:
        return False
