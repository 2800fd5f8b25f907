"""Groups of modules no family describes, read off their traced forwards.

A module is traced once for every way its optional arguments may be given or left out, in training
and in evaluation mode; what moves must be right in all of them. A module that cannot be traced is
left alone, and its children are traced one by one.

A trace also shows whether a caller reaches past a block that a family describes, to a layer inside.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

from torch import fx, nn

from shuffled_dpsgd.permutation.families import ATTENTION, LAYERS
from shuffled_dpsgd.permutation.layers import Port, class_name, join
from shuffled_dpsgd.permutation.operations import GraphReader, Space, Spaces
from shuffled_dpsgd.permutation.sketch import Sketch, is_below
from shuffled_dpsgd.permutation.spec import Block

_MOST_OPTIONAL = 3
# A forward run on symbols may fail wherever it needs a number, so in as many ways as there are
# operations; fx's own errors are among these.
_UNTRACEABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    RuntimeError,
    TypeError,
    ValueError,
)
# A symbol answers these otherwise than a tensor would, or they ask for something that may change
# between calls; a forward that uses them may take a branch the trace does not see.
_QUESTIONS = {"hasattr", "isinstance", "type", "is_tensor"}
_QUESTIONS |= {"is_autocast_enabled", "is_grad_enabled", "is_inference_mode_enabled"}
_QUESTIONS |= {"is_compiling", "is_scripting", "is_tracing"}
_BLOCKS = frozenset({ATTENTION, *LAYERS})


class _Tracer(fx.Tracer):
    """Does not look inside PyTorch's and other libraries' modules: rules know them, or nothing."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return _is_known(m)


def describe_traced(sketch: Sketch, path: str, skip: frozenset[str]) -> None:
    """Add the groups at `path`, or of its children if untraceable; not of classes in `skip`."""
    module = sketch.modules[path]
    if class_name(module) in skip:
        return
    if _may_be_traced(module):
        spaces = Spaces()
        try:
            reader = GraphReader(sketch, path, spaces)
            for graph in _graphs(module):
                for node in graph.nodes:
                    _note_call(sketch, path, node)
                reader.read(graph)
        except _UNTRACEABLE as error:
            reason = (str(error) or type(error).__name__).split("\n")[0].split(". ")[0]
            sketch.note(f"{type(module).__name__}: forward cannot be traced ({reason})")
        else:
            for space in spaces.roots():
                _add(sketch, path, space)
            return
    for name, _ in module.named_children():
        describe_traced(sketch, join(path, name), skip)


def _may_be_traced(module: nn.Module) -> bool:
    """Not PyTorch's own modules, nor containers; of other libraries' only the innermost."""
    if type(module).forward is nn.Module.forward or fx.Tracer().is_leaf_module(module, ""):
        return False
    if _is_foreign(module):
        return all(not list(child.children()) for child in module.children())
    return True


def _is_known(module: nn.Module) -> bool:
    """Whether rules know the module, or nothing does: a trace does not look inside."""
    return _is_foreign(module) or fx.Tracer().is_leaf_module(module, "")


def _is_foreign(module: nn.Module) -> bool:
    return class_name(module).split(".")[0] in ("transformers", "peft")


def _graphs(module: nn.Module) -> Iterator[fx.Graph]:
    for inner in module.modules():
        if inner is module or not _is_known(inner):
            code = getattr(inspect.unwrap(type(inner).forward), "__code__", None)
            asked = _QUESTIONS.intersection(code.co_names if code is not None else ())
            if asked:
                raise ValueError(f"it asks {', '.join(sorted(asked))}")
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(module.forward).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    if len(defaults) > _MOST_OPTIONAL:
        raise ValueError(f"{len(defaults)} optional arguments, at most {_MOST_OPTIONAL} are tried")
    for training, *given in product((False, True), repeat=1 + len(defaults)):
        left_out = {name: defaults[name] for name, g in zip(defaults, given, strict=True) if not g}
        with _mode(module, training):
            yield _Tracer().trace(module, concrete_args=left_out or None)


@contextmanager
def _mode(module: nn.Module, training: bool) -> Iterator[None]:
    """In this mode; attributes, and lists that a forward appends symbols to, stay as they were."""
    before = [(vars(m), dict(vars(m))) for m in module.modules()]
    lists = [(v, v.copy()) for _, kept in before for v in kept.values() if type(v) is list]
    try:
        for now, _ in before:
            now["training"] = training
        yield
    finally:
        for now, kept in before:
            now.clear()
            now.update(kept)
        for remembered, entries in lists:
            remembered[:] = entries


def _add(sketch: Sketch, path: str, space: Space) -> None:
    if space.pinned:
        for name, _ in space.axes:
            sketch.refuse(name, space.pinned)
    if space.pinned or not {"read", "write"} <= set(space.axes.values()):
        return
    within = [
        Port(parameter=alias, axis=axis)
        for name, axis in space.axes
        for alias, known in sketch.canonical.items()
        if known == name and is_below(alias, path)
    ]
    writer = next(name for (name, _), role in space.axes.items() if role == "write")
    sketch.add("mlp-hidden", writer.rpartition(".")[0], space.size, [(within, Block())])


def _note_call(sketch: Sketch, root: str, node: fx.Node) -> None:
    """Tell the sketch what stays because of this node of the traced module at `root`."""
    if node.op not in ("call_module", "get_attr"):
        return
    path = join(root, str(node.target))
    if (block := _block_around(sketch, root, path)) is not None:
        sketch.keep(block, f"{path} is used from outside of {block}")


def _block_around(sketch: Sketch, root: str, path: str) -> str | None:
    """The outermost described block below `root` that `path` lies inside of."""
    parts = path.split(".")
    first = len(root.split(".")) + 1 if root else 1
    outer = (".".join(parts[:end]) for end in range(first, len(parts)))
    return next((one for one in outer if class_name(sketch.modules.get(one)) in _BLOCKS), None)
