"""The parts of Transformers as data, and the groups that follow from them.

`Layer` names the parts of one kind of block, `Stem` those around the blocks, `Head` what reads the
residual stream at the top. All names are relative to the module they describe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import nn

from shuffled_dpsgd.permutation.layers import Port, class_name, is_elementwise, join, stays
from shuffled_dpsgd.permutation.sketch import Sketch
from shuffled_dpsgd.permutation.spec import Block, Kind

Ports = Sequence[Port]


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One attention. `reads` are its query, key and value, or one module that writes all three.

    `fixed_heads` says why whole heads must not trade places, where other code counts on their
    order.
    """

    reads: tuple[str, ...]
    output: str
    num_heads: str
    num_kv_heads: str = ""
    head_dim: str
    rotary: bool = False
    fixed_heads: str = ""


@dataclass(frozen=True, kw_only=True)
class HiddenUnits:
    """A feed-forward part: gated with more than one `up`."""

    up: tuple[str, ...]
    down: str
    activation: str


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A block, or a part of one; with attention, hidden units and norms it is on the stream."""

    attention: Attention | None = None
    hidden: HiddenUnits | None = None
    norms: tuple[str, ...] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        """Modules that read the residual stream."""
        attention = self.attention.reads if self.attention else ()
        return (*attention, *(self.hidden.up if self.hidden else ()))

    @property
    def writes(self) -> tuple[str, ...]:
        """Modules that add to the residual stream, or scale it."""
        attention = (self.attention.output,) if self.attention else ()
        return (*attention, *((self.hidden.down,) if self.hidden else ()), *self.norms)


@dataclass(frozen=True, kw_only=True)
class Stem:
    """What surrounds the blocks: modules and bare parameters whose last axis is the stream."""

    layers: str
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
    """A complete model: where its stem is, and what reads the stream: modules, or a chain.

    `copies` are second names of parameters that only serve saving and loading.
    """

    stem: str
    reads: tuple[str, ...] = ()
    chain: Chain | None = None
    copies: tuple[str, ...] = ()


def describe_layer(sketch: Sketch, path: str, names: Layer) -> None:
    """Add the groups inside one block: Theorem 1 and Theorem 2."""
    _check_parts(sketch, path, names)
    if names.hidden is not None:
        _describe_hidden_units(sketch, path, names.hidden)
    if names.attention is not None:
        _describe_attention(sketch, path, names.attention, whole=names.hidden is None)


def _describe_hidden_units(sketch: Sketch, path: str, names: HiddenUnits) -> None:
    """Theorem 1 for an elementwise activation; gated units share the permutation."""
    activation = attrgetter(names.activation)(sketch.modules[path])
    if not is_elementwise(activation):
        for name in (*names.up, names.down):
            sketch.refuse(join(path, name), _not_elementwise(activation))
        return
    up = [sketch.outputs(join(path, name)) for name in names.up]
    down = sketch.inputs(join(path, names.down))
    places = [(ports, Block()) for ports in (*up, down)]
    sketch.add("mlp-hidden", join(path, "mlp"), sketch.size(up[0][0]), places)


def _describe_attention(sketch: Sketch, path: str, names: Attention, *, whole: bool) -> None:
    """Theorem 2 for one attention, to its own stream or another; `whole` if alone at `path`."""
    module = sketch.modules[path]
    written = [sketch.outputs(join(path, name)) for name in names.reads]
    if len(written) == 1:
        third = sketch.size(written[0][0]) // 3
        written = [
            [Port(parameter=p.parameter, axis=p.axis, start=i * third) for p in written[0]]
            for i in range(3)
        ]
    if names.fixed_heads:
        sketch.keep(path, names.fixed_heads, "heads")
    heads = int(attrgetter(names.num_heads)(module))
    add_attention(
        sketch,
        path if whole else join(path, "attention"),
        (written[0], written[1], written[2], sketch.inputs(join(path, names.output))),
        heads=heads,
        kv_heads=int(attrgetter(names.num_kv_heads)(module)) if names.num_kv_heads else heads,
        size=int(attrgetter(names.head_dim)(module)),
        rotary=names.rotary,
    )


def add_attention(
    sketch: Sketch,
    name: str,
    ports: tuple[Ports, Ports, Ports, Ports],
    *,
    heads: int,
    kv_heads: int,
    size: int,
    rotary: bool = False,
) -> None:
    """Theorem 2, and in scope 'full' per-head value permutations and whole heads.

    `ports` write query, key and value, and read the attended values. Head h owns positions
    [h * size, (h + 1) * size) of each. With fewer key/value heads, query head h reads key/value
    head h // (heads // kv_heads); heads that share one share its permutations.

    Scores are inner products over the head dimension, so Q and K may permute it together. Rotary
    embeddings rotate fixed pairs of dimensions and rule this out.
    """
    query, key, value, output = ports
    shared = heads // kv_heads
    owned = [Block(start=head * size) for head in range(kv_heads)]
    readers = [
        Block(start=head * shared * size, repeats=shared, repeat_every=size)
        for head in range(kv_heads)
    ]
    for head in range(0 if rotary else kv_heads):
        places = [(query, readers[head]), (key, owned[head])]
        sketch.add("query-key", f"{name}.query_key.{head}", size, places)
    if sketch.scope == "paper":  # One permutation for all heads, as Theorem 2 states it.
        all_owned = Block(repeats=kv_heads, repeat_every=size)
        all_readers = Block(repeats=heads, repeat_every=size)
        places = [(value, all_owned), (output, all_readers)]
        sketch.add("value-output", f"{name}.value_output", size, places)
        return
    for head in range(kv_heads):
        places = [(value, owned[head]), (output, readers[head])]
        sketch.add("value-output", f"{name}.value_output.{head}", size, places)
    # Whole heads may trade places: query heads inside their group, then whole groups.
    for head in range(kv_heads):
        block = Block(start=head * shared * size, width=size)
        places = [(query, block), (output, block)]
        sketch.add("heads", f"{name}.query_heads.{head}", shared, places)
    wide, narrow = Block(width=shared * size), Block(width=size)
    places = [(query, wide), (key, narrow), (value, narrow), (output, wide)]
    sketch.add("heads", f"{name}.heads", kv_heads, places)


def describe_torch_attention(sketch: Sketch, path: str, module: Any) -> None:
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


def describe_chain(sketch: Sketch, root: str, chain: Chain) -> None:
    """Theorem 1 above the blocks; a norm in between needs scope 'full'."""
    if chain.activation:
        found = attrgetter(chain.activation)(sketch.modules[root])
        if not is_elementwise(found):
            sketch.refuse(join(root, chain.up), _not_elementwise(found))
            return
    up = sketch.outputs(join(root, chain.up))
    down = sketch.inputs(join(root, chain.down))
    if chain.norms and sketch.scope == "paper":
        return
    norms = [port for norm in chain.norms for port in sketch.outputs(join(root, norm))]
    places = [(ports, Block()) for ports in (up, norms, down)]
    kind: Kind = "residual" if chain.norms else "mlp-hidden"
    sketch.add(kind, join(root, chain.up), sketch.size(up[0]), places)


def describe_stream(
    sketch: Sketch, root: str, head: Head, stem: Stem, layers: Mapping[str, Layer]
) -> None:
    """Add the residual stream of a complete model, if every parameter below is accounted for."""
    base = join(root, head.stem)
    module = sketch.modules[base]
    stream: list[Port] = []
    for name in (*stem.writes, *(name for name in stem.optional if _has(module, name))):
        stream += sketch.outputs(join(base, name))
    for name in stem.parameters:
        if (parameter := attrgetter(name)(module)) is not None:
            stream.append(sketch.parameter(join(base, name), parameter.ndim - 1))
    for index, block in enumerate(attrgetter(stem.layers)(module)):
        path = join(base, f"{stem.layers}.{index}")
        names = _check_parts(sketch, path, layers.get(class_name(block)), whole=True)
        for name in names.reads:
            stream += sketch.inputs(join(path, name))
        for name in names.writes:
            stream += sketch.outputs(join(path, name))
    for name in (*head.reads, *([head.chain.up] if head.chain else [])):
        stream += sketch.inputs(join(root, name))
    copies = {join(root, name) for name in head.copies}
    if missing := [name for name in sketch.undescribed(root) if name not in copies]:
        expected = f"only parts known of {class_name(sketch.modules[root])}"
        raise stays(missing[0], expected=expected, got=f"{len(missing)} parameters of unknown use")
    sketch.add("residual", join(root, "residual"), sketch.size(stream[0]), [(stream, Block())])


def _check_parts(sketch: Sketch, path: str, names: Layer | None, *, whole: bool = False) -> Layer:
    """Refuse a block that has other parts than those named; library versions may differ."""
    module = sketch.modules[path]
    known = names is not None and (bool(names.norms) or not whole)
    if names is None or not known or not all(_has(module, n) for n in names.reads + names.writes):
        children = ", ".join(name for name, _ in module.named_children())
        expected = "a known kind of block, with the submodule names known of it"
        raise stays(path, expected=expected, got=f"{class_name(module)} with {children}")
    return names


def _not_elementwise(activation: object) -> str:
    name = getattr(activation, "__name__", class_name(activation))
    return f"activation {name} is not known to be elementwise"


def _has(module: nn.Module, dotted: str) -> bool:
    try:
        return attrgetter(dotted)(module) is not None
    except AttributeError:
        return False
