"""What a traced forward does to feature axes, node by node.

A value's last axis carries a `Space`, or nothing is known about it. Every rule either keeps the
symmetry provably or pins the spaces involved; a node without a rule pins all its inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from shuffled_dpsgd.errors import UnsupportedModuleError
from shuffled_dpsgd.permutation import layers, torch_layers
from shuffled_dpsgd.permutation.layers import Port, class_name, is_elementwise, join
from shuffled_dpsgd.permutation.sketch import Sketch, is_below
from shuffled_dpsgd.permutation.spaces import Role, Space, Spaces

_Value = Space | tuple["_Value", ...] | None

_SUMS = {operator.add, operator.iadd, operator.sub, operator.isub, torch.add, torch.sub}
_PRODUCTS = {operator.mul, operator.imul, torch.mul}
_QUOTIENTS = {operator.truediv, operator.itruediv, torch.div}
_SAME = {F.dropout, torch.dropout, torch.clone, torch.detach, operator.neg, torch.neg}
_METHOD_SUMS = {"add", "add_", "sub", "sub_"}
_METHOD_PRODUCTS = {"mul", "mul_"}
_CASTS = {"bfloat16", "double", "float", "half"}
_SAME_METHODS = _CASTS | {"clone", "contiguous", "detach", "relu", "sigmoid", "tanh"}
_METADATA_METHODS = {"dim", "numel", "size", "is_floating_point"}
_METADATA = {"device", "dtype", "ndim", "shape"}


class GraphReader:
    """Reads traced graphs of the module at `path` and accumulates what they require."""

    def __init__(self, sketch: Sketch, path: str, spaces: Spaces) -> None:
        self._sketch = sketch
        self._path = path
        self._spaces = spaces
        self._values: dict[fx.Node, _Value] = {}

    def read(self, graph: fx.Graph) -> None:
        """Take in one more way the module may be executed."""
        self._values = {}
        for node in graph.nodes:
            self._values[node] = self._rule(node)(node)

    def _rule(self, node: fx.Node) -> Callable[[fx.Node], _Value]:
        if node.op == "call_module":
            return self._module
        if node.op in ("get_attr", "placeholder"):
            return lambda _: None
        if node.op == "output":
            return lambda n: self._unknown(n, "is part of the module's output")
        if node.op == "call_method":
            return self._method
        return self._function

    def _module(self, node: fx.Node) -> _Value:
        module = self._sketch.modules[join(self._path, str(node.target))]
        kind = class_name(module)
        if is_elementwise(module):
            return self._same(node)
        if kind in layers.NORM:
            return self._norm(node)
        if kind == torch_layers.ATTENTION:
            return self._attention(node, module)
        if kind in torch_layers.ENCODERS | torch_layers.DECODERS:
            return self._layers(node, module)
        return self._affine(node, module)

    def _affine(self, node: fx.Node, module: nn.Module) -> _Value:
        path = join(self._path, str(node.target))
        try:
            writes = self._sketch.outputs(path)
            reads = [] if class_name(module) in layers.TABLES else self._sketch.inputs(path)
        except UnsupportedModuleError:
            return self._unknown_module(node, path)
        if reads:
            source = self._features(argument(node, 0, "input"), self._sketch.size(reads[0]), path)
            self._attach(source, reads, "read")
        space = self._spaces.new(self._sketch.size(writes[0]), is_stream=not reads)
        self._attach(space, writes, "write")
        return space

    def _norm(self, node: fx.Node) -> _Value:
        path = join(self._path, str(node.target))
        space = self._first(node)
        try:
            scales = self._sketch.outputs(path)
        except UnsupportedModuleError:
            return self._unknown_module(node, path)
        if space is None or (scales and self._sketch.size(scales[0]) != space.size):
            return self._unknown_module(node, path)
        self._spaces.mark_stream(space)
        self._attach(space, scales, "scale")
        return space

    def _attention(self, node: fx.Node, module: Any) -> _Value:
        path = join(self._path, str(node.target))
        given = [argument(node, i, name) for i, name in enumerate(("query", "key", "value"))]
        reads = torch_layers.attention_reads(self._sketch, path, module)
        for value, axes in zip(given, reads, strict=True):
            source = self._features(value, self._sketch.size(axes[0]), path)
            self._attach(source, axes, "read")
        self._pin_masks(node, given, path)
        written = self._spaces.new(module.embed_dim)
        self._attach(written, self._sketch.outputs(join(path, "out_proj")), "write")
        return (written, None)

    def _layers(self, node: fx.Node, module: Any) -> _Value:
        """Layers that add to a residual stream: what they read, they return."""
        path = join(self._path, str(node.target))
        try:
            stream, memory = torch_layers.streams(self._sketch, path, module)
        except UnsupportedModuleError:
            return self._unknown_module(node, path)
        first = "src" if class_name(module) in torch_layers.ENCODERS else "tgt"
        given = [argument(node, 0, first)]
        source = self._features(given[0], self._sketch.size(stream[0]), path)
        self._spaces.mark_stream(source)
        self._attach(source, stream, "scale")
        if memory:
            given.append(argument(node, 1, "memory"))
            read = self._features(given[1], self._sketch.size(memory[0]), path)
            self._attach(read, memory, "read")
        self._pin_masks(node, given, path)
        return source

    def _pin_masks(self, node: fx.Node, given: list[Any], path: str) -> None:
        for other in node.all_input_nodes:
            if other not in given:
                self._pin_node(other, f"enters {path} as a mask")

    def _function(self, node: fx.Node) -> _Value:
        target = node.target
        if target in _SUMS or target in _PRODUCTS or target in _QUOTIENTS:
            return self._combine(node, is_sum=target in _SUMS)
        if target is getattr and len(node.args) > 1 and node.args[1] in _METADATA:
            return None
        if target is operator.getitem:
            return self._getitem(node)
        if target in _SAME or is_elementwise(target):
            return self._same(node)
        return self._unknown(node, f"enters {getattr(target, '__name__', target)}")

    def _method(self, node: fx.Node) -> _Value:
        if node.target in _METADATA_METHODS:
            return None
        if node.target in _SAME_METHODS:
            return self._same(node)
        if node.target in _METHOD_SUMS | _METHOD_PRODUCTS:
            return self._combine(node, is_sum=node.target in _METHOD_SUMS)
        return self._unknown(node, f"enters {node.target}")

    def _getitem(self, node: fx.Node) -> _Value:
        """Pick one of several results, or index axes in front of the features."""
        carrier, index = node.args
        source = self._values[carrier] if isinstance(carrier, fx.Node) else None
        if isinstance(source, tuple):
            return source[index] if isinstance(index, int) else None
        keeps_last = isinstance(index, tuple) and index[0] is ... and index[-1] == slice(None)
        if isinstance(source, Space) and keeps_last and len(node.all_input_nodes) == 1:
            return source
        return self._unknown(node, "is indexed in a way that may touch its features")

    def _same(self, node: fx.Node) -> _Value:
        """An elementwise map of the first operand; any other operand must not be a tensor."""
        source = self._first(node)
        if source is None or len(node.all_input_nodes) != 1:
            return self._unknown(node, f"enters {node.target} beside another tensor")
        return source

    def _combine(self, node: fx.Node, *, is_sum: bool) -> _Value:
        """Entry by entry: a number keeps a space; two spaces become one."""
        left, right = argument(node, 0, "input"), argument(node, 1, "other")
        if isinstance(left, int | float) or isinstance(right, int | float):
            return self._same(node)
        if isinstance(left, fx.Node) and isinstance(right, fx.Node):
            one, other = self._operand(left), self._operand(right)
            if isinstance(one, Space) and isinstance(other, Space):
                self._spaces.unite(one, other)
                if is_sum:
                    self._spaces.mark_stream(one)
                return one
        return self._unknown(node, "is combined with something of which nothing is known")

    def _features(self, argument: object, size: int, path: str) -> Space:
        """The space an argument carries; one that may not move if that is not known."""
        value = self._operand(argument) if isinstance(argument, fx.Node) else None
        if isinstance(value, Space) and value.size == size:
            return value
        if isinstance(argument, fx.Node):
            self._pin_node(argument, f"enters {path} in a way that is not known")
        return self._spaces.new(size, pinned=f"{path} reads an input of the module")

    def _operand(self, node: fx.Node) -> _Value:
        """A value, or a bare parameter seen as features along its last axis."""
        if node.op != "get_attr":
            return self._values[node]
        name = join(self._path, str(node.target))
        parameter = self._sketch.parameters.get(name)
        if parameter is None or parameter.ndim == 0:
            return None
        space = self._spaces.new(int(parameter.shape[-1]))
        self._attach(space, [self._sketch.parameter(name, parameter.ndim - 1)], "scale")
        return space

    def _unknown(self, node: fx.Node, reason: str) -> _Value:
        for source in node.all_input_nodes:
            self._pin_node(source, reason)
        return None

    def _unknown_module(self, node: fx.Node, path: str) -> _Value:
        self._pin_parameters(path)
        return self._unknown(node, f"enters {path}, of which nothing is known")

    def _pin_node(self, node: fx.Node, reason: str) -> None:
        if node.op == "get_attr":
            self._pin_parameters(join(self._path, str(node.target)))
        for space in _flatten(self._values[node]):
            self._spaces.pin(space, reason)

    def _pin_parameters(self, prefix: str) -> None:
        """Nothing is known about the use of these parameters: no axis of theirs may move."""
        for name, parameter in self._sketch.parameters.items():
            if name == prefix or is_below(name, prefix):
                for axis, size in enumerate(parameter.shape):
                    space = self._spaces.new(int(size), pinned="is used in a way not known")
                    self._spaces.attach(space, (self._sketch.canonical[name], axis), "scale")

    def _attach(self, space: Space, found: list[Port], role: Role) -> None:
        for port in found:
            axis = (self._sketch.canonical[port.parameter], port.axis)
            self._spaces.attach(space, axis, role)

    def _first(self, node: fx.Node) -> Space | None:
        sources = node.all_input_nodes
        value = self._values[sources[0]] if sources else None
        return value if isinstance(value, Space) else None


def argument(node: fx.Node, position: int, name: str) -> Any:
    """What a call is given, by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _flatten(value: _Value) -> Iterator[Space]:
    if isinstance(value, Space):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _flatten(part)
