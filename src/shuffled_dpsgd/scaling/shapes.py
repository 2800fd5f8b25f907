"""What the cost model needs to know of a model, read off its modules; the meta device will do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from shuffled_dpsgd.errors import UnsupportedModuleError

_CONV1D = "transformers.pytorch_utils.Conv1D"
# Activations that transformers computes by several elementwise operations, each of which is stored.
_COMPOSITE = ("gelu_new", "gelu_fast", "gelu_python")


@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """The weight of a linear map: outputs, inputs, and whether it makes the logits of words."""

    rows: int
    columns: int
    is_head: bool


@dataclass(frozen=True, kw_only=True)
class ModelShapes:
    """Sizes of a Transformer.

    `largest_layer` counts the parameters of a block, `outside_layers` those in no block, and
    `largest_module` those that a single module holds itself, such as a table of words.

    `stored_width` is the number of inputs and outputs of all linear maps together, for one token:
    what a backward needs is about proportional to it.
    """

    parameters: int
    largest_layer: int
    outside_layers: int
    largest_module: int
    layers: int
    width: int
    length: int | None
    linears: tuple[LinearShape, ...]
    composite_activation: bool

    @property
    def stored_width(self) -> int:
        """Numbers per token that go into linear maps and come out of them, logits left out."""
        return sum(one.rows + one.columns for one in self.linears if not one.is_head)

    @property
    def logits(self) -> int:
        """Logits per token of a language model; 0 for others."""
        return max((one.rows for one in self.linears if one.is_head), default=0)

    @property
    def products(self) -> int:
        """Multiplications per token in all linear maps."""
        return sum(one.rows * one.columns for one in self.linears)


def shapes_of(model: nn.Module) -> ModelShapes:
    """The sizes of a Hugging Face Transformer.

    Raises:
        UnsupportedModuleError: its configuration does not say how many layers it has.
    """
    config: Any = getattr(model, "config", None)
    layers = getattr(config, "num_hidden_layers", None)
    width = getattr(config, "hidden_size", None)
    if not isinstance(layers, int) or not isinstance(width, int):
        raise UnsupportedModuleError(
            "",
            expected="a Transformer whose configuration has num_hidden_layers and hidden_size",
            got=type(model).__name__,
            remedy="name a model of `inspect --model`, a saved model's folder or a hub name",
        )
    linears = tuple(
        _linear(module, is_head=name.endswith("lm_head"))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or _is_conv1d(module)
    )
    counted = sum(p.numel() for p in model.parameters())
    blocks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == layers]
    inside = [sum(p.numel() for p in block.parameters()) for m in blocks for block in m]
    activation = str(
        getattr(config, "activation_function", None) or getattr(config, "hidden_act", "")
    )
    return ModelShapes(
        parameters=counted,
        largest_layer=max(inside, default=counted),
        outside_layers=counted - sum(inside),
        largest_module=max(
            sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()
        ),
        layers=layers,
        width=width,
        length=getattr(config, "max_position_embeddings", None),
        linears=linears,
        composite_activation=activation in _COMPOSITE,
    )


def _is_conv1d(module: nn.Module) -> bool:
    kind = type(module)
    return f"{kind.__module__}.{kind.__name__}" == _CONV1D


def _linear(module: nn.Module, *, is_head: bool) -> LinearShape:
    weight: Any = module.weight
    first, second = weight.shape
    # Conv1D stores its weight as inputs by outputs.
    rows, columns = (second, first) if _is_conv1d(module) else (first, second)
    return LinearShape(rows=rows, columns=columns, is_head=is_head)
