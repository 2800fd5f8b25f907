"""Which parameters are a model's input embeddings, found by its structure; never guessed at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

# A module made of these alone turns tokens into vectors and does nothing else.
_PARTS = (nn.Embedding, nn.LayerNorm, nn.Dropout, nn.Identity)


@dataclass(frozen=True, kw_only=True)
class InputEmbeddings:
    """The names of the parameters, or why they cannot be told; exactly one of the two."""

    names: tuple[str, ...] = ()
    why_not: str | None = None


def find_input_embeddings(model: nn.Module) -> InputEmbeddings:
    """What a Hugging Face model turns tokens into vectors with.

    Beside the words' embedding, which `get_input_embeddings` names, these are all parameters of
    the module around it, if that has embeddings and their norms alone (BERT). Otherwise they are
    the embeddings that stand beside it in that module: of positions, in GPT-2.

    Weights that are used elsewhere, such as by a head that is tied to them, are not told.
    """
    getter: Any = getattr(model, "get_input_embeddings", None)
    words = None if getter is None else getter()
    if not isinstance(words, nn.Embedding):
        return InputEmbeddings(why_not="the model names no input embedding")
    everywhere = model.named_modules(remove_duplicate=False)
    paths = [path for path, module in everywhere if module is words]
    if len(paths) != 1:
        return InputEmbeddings(why_not="the input embedding stands in several places")
    parent = paths[0].rpartition(".")[0]
    around = model.get_submodule(parent)
    alone = all(isinstance(child, _PARTS) for child in around.children())
    prefix = f"{parent}." if parent else ""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    inside = {
        name: parameter
        for name, parameter in parameters.items()
        if name.startswith(prefix)
        and (alone or isinstance(_child_of(around, name.removeprefix(prefix)), nn.Embedding))
    }
    taken = {id(parameter) for parameter in inside.values()}
    shared = [n for n, p in parameters.items() if n not in inside and id(p) in taken]
    if shared:
        return InputEmbeddings(why_not=f"{shared[0]} shares the input embeddings' weights")
    return InputEmbeddings(names=tuple(inside))


def _child_of(module: nn.Module, name: str) -> Any:
    """The child, or the parameter of `module` itself, that a dotted name leads through."""
    return getattr(module, name.partition(".")[0])
