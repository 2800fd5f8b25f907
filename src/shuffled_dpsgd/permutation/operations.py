"""What a traced forward does to feature axes, node by node.

A value's last axis carries a `Space`, or nothing is known about it. Every rule either keeps the
symmetry provably or pins the spaces involved; a node without a rule pins all its inputs.
Constraints only accumulate: axes once found equal stay equal, and an axis once pinned stays pinned,
with everything that equals it. What is left unpinned at the end may move.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import fx

from shuffled_dpsgd.errors import UnsupportedModuleError
from shuffled_dpsgd.permutation.layers import Port, is_elementwise, join
from shuffled_dpsgd.permutation.sketch import Sketch, is_below

Role = Literal["write", "read", "scale"]
Axis = tuple[str, int]


@dataclass(eq=False)
class Space:
    """A set of parameter axes that carry the same features, of `size` entries."""

    size: int
    axes: dict[Axis, Role] = field(default_factory=dict)
    pinned: str = ""
    parent: Space | None = None


class Spaces:
    """A union-find over spaces, keyed by the parameter axes they hold."""

    def __init__(self) -> None:
        self._of_axis: dict[Axis, Space] = {}
        self._all: list[Space] = []

    def new(self, size: int, *, pinned: str = "") -> Space:
        """A space of its own."""
        space = Space(size=size, pinned=pinned)
        self._all.append(space)
        return space

    def find(self, space: Space) -> Space:
        """The space it has become part of."""
        while space.parent is not None:
            space = space.parent
        return space

    def attach(self, space: Space, axis: Axis, role: Role) -> None:
        """Put a parameter's axis into a space; an axis seen before makes two spaces one."""
        space = self.find(space)
        if (seen := self._of_axis.get(axis)) is not None:
            space = self.unite(space, seen)
        else:
            self._of_axis[axis] = space
        space.axes.setdefault(axis, role)

    def unite(self, one: Space, other: Space) -> Space:
        """Make two spaces one; if their sizes differ, nothing is known and both are pinned."""
        one, other = self.find(one), self.find(other)
        if one is other:
            return one
        if one.size != other.size:
            self.pin(one, "combined with features of another size")
            self.pin(other, "combined with features of another size")
            return one
        other.parent = one
        one.axes.update(other.axes)
        one.pinned = one.pinned or other.pinned
        return one

    def pin(self, space: Space, reason: str) -> None:
        """Forbid the space to move; the first reason is kept."""
        space = self.find(space)
        space.pinned = space.pinned or reason

    def roots(self) -> list[Space]:
        """The distinct spaces, in the order of their first appearance."""
        return [space for space in self._all if space.parent is None]


_Value = Space | None

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
        return self._same(node) if is_elementwise(module) else self._linear(node)

    def _linear(self, node: fx.Node) -> _Value:
        path = join(self._path, str(node.target))
        try:
            writes, reads = self._sketch.outputs(path), self._sketch.inputs(path)
        except UnsupportedModuleError:
            self._pin_parameters(path)
            return self._unknown(node, f"enters {path}, which Theorem 1 does not cover")
        source = self._features(argument(node, 0, "input"), self._sketch.size(reads[0]), path)
        self._attach(source, reads, "read")
        space = self._spaces.new(self._sketch.size(writes[0]))
        self._attach(space, writes, "write")
        return space

    def _function(self, node: fx.Node) -> _Value:
        target = node.target
        if target in _SUMS or target in _PRODUCTS or target in _QUOTIENTS:
            return self._combine(node, is_product=target in _PRODUCTS)
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
            return self._combine(node, is_product=node.target in _METHOD_PRODUCTS)
        return self._unknown(node, f"enters {node.target}")

    def _getitem(self, node: fx.Node) -> _Value:
        """Index axes in front of the features."""
        carrier, index = node.args
        source = self._values[carrier] if isinstance(carrier, fx.Node) else None
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

    def _combine(self, node: fx.Node, *, is_product: bool) -> _Value:
        """Entry by entry: a number keeps a space; two that are multiplied become one."""
        left, right = argument(node, 0, "input"), argument(node, 1, "other")
        if isinstance(left, int | float) or isinstance(right, int | float):
            return self._same(node)
        if is_product and isinstance(left, fx.Node) and isinstance(right, fx.Node):
            one, other = self._operand(left), self._operand(right)
            if isinstance(one, Space) and isinstance(other, Space):
                self._spaces.unite(one, other)
                return one
        return self._unknown(node, "is combined with something in a way Theorem 1 does not cover")

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

    def _pin_node(self, node: fx.Node, reason: str) -> None:
        if node.op == "get_attr":
            self._pin_parameters(join(self._path, str(node.target)))
        if (space := self._values[node]) is not None:
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
        return self._values[sources[0]] if sources else None


def argument(node: fx.Node, position: int, name: str) -> Any:
    """What a call is given, by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)
