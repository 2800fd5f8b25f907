"""Which axes of which parameters carry a module's input and output features.

Modules are recognised by the exact qualified name of their class: a subclass may compute something
else, so it is refused. Layers wrapped by LoRA answer for their factors too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from shuffled_dpsgd.errors import UnsupportedModuleError


@dataclass(frozen=True, kw_only=True)
class Port:
    """One axis of one parameter, from `start` on, that carries features."""

    parameter: str
    axis: int
    start: int = 0


_Ports = list[Port]

LINEAR = frozenset(
    {
        "torch.nn.modules.linear.Linear",
        "torch.nn.modules.linear.NonDynamicallyQuantizableLinear",
    }
)
CONV1D = frozenset({"transformers.pytorch_utils.Conv1D"})
CONV2D = frozenset({"torch.nn.modules.conv.Conv2d"})
EMBEDDING = frozenset(
    {
        "torch.nn.modules.sparse.Embedding",
        "transformers.models.opt.modeling_opt.OPTLearnedPositionalEmbedding",
    }
)
NORM = frozenset(
    {
        "torch.nn.modules.normalization.LayerNorm",
        "torch.nn.modules.normalization.RMSNorm",
        "transformers.models.llama.modeling_llama.LlamaRMSNorm",
        "transformers.models.mistral.modeling_mistral.MistralRMSNorm",
        "transformers.models.qwen2.modeling_qwen2.Qwen2RMSNorm",
    }
)
LORA_LINEAR = frozenset({"peft.tuners.lora.layer.Linear"})
LORA_EMBEDDING = frozenset({"peft.tuners.lora.layer.Embedding"})
# Variants of LoRA that are more than base(x) + B A x, and known to keep the symmetry even so.
LORA_VARIANTS = frozenset(
    {
        "peft.tuners.lora.variants.DoraEmbeddingVariant",
        "peft.tuners.lora.variants.DoraLinearVariant",
    }
)
SAVED = frozenset({"peft.utils.other.ModulesToSaveWrapper"})


def class_name(module: object) -> str:
    """The exact qualified name of the object's class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def inputs(path: str, module: nn.Module) -> _Ports:
    """The axes that read the module's input features."""
    return _ports(path, module, _INPUTS, "a linear layer")


def outputs(path: str, module: nn.Module) -> _Ports:
    """The axes that write the module's output features; for a norm, those it scales."""
    return _ports(path, module, _OUTPUTS, "a linear layer, embedding, convolution or norm")


def ranks(path: str, module: nn.Module) -> dict[str, _Ports]:
    """Per LoRA adapter, the axes of its inner rank; empty for any other module."""
    kind = class_name(module)
    if kind not in LORA_LINEAR | LORA_EMBEDDING:
        return {}
    _lora_base(path, module)
    found: dict[str, _Ports] = {}
    down, up = ("lora_A", "lora_B") if kind in LORA_LINEAR else _EMBEDDING_FACTORS
    suffix = ".weight" if kind in LORA_LINEAR else ""
    for adapter in getattr(module, down):
        found[adapter] = [
            Port(parameter=_join(path, f"{down}.{adapter}{suffix}"), axis=0),
            Port(parameter=_join(path, f"{up}.{adapter}{suffix}"), axis=1),
        ]
    return found


_EMBEDDING_FACTORS = ("lora_embedding_A", "lora_embedding_B")
_Rule = Callable[[str, nn.Module], Iterator[Port]]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _ports(path: str, module: nn.Module, rules: dict[str, _Rule], expected: str) -> _Ports:
    rule = rules.get(class_name(module))
    if rule is None:
        raise UnsupportedModuleError(
            path,
            expected=expected,
            got=class_name(module),
            remedy="its parameters stay where they are",
        )
    return list(rule(path, module))


def _present(path: str, module: nn.Module, axes: dict[str, int]) -> Iterator[Port]:
    """Those of the named parameters the module has, if it has no others.

    Re-parametrisations by hooks keep the class, but compute `weight` from other parameters.
    """
    own = {name for name, parameter in module.named_parameters(recurse=False)}
    computed = {name for name in axes if getattr(module, name, None) is not None} - own
    if strange := sorted((own - {"weight", "bias"}) | computed):
        raise UnsupportedModuleError(
            path,
            expected="plain parameters weight and bias",
            got=f"{', '.join(strange)} besides or in their place",
            remedy="its parameters stay where they are",
        )
    for name, axis in axes.items():
        if name in own:
            yield Port(parameter=_join(path, name), axis=axis)


def _linear_in(path: str, module: nn.Module) -> Iterator[Port]:
    yield from _present(path, module, {"weight": 1})


def _linear_out(path: str, module: nn.Module) -> Iterator[Port]:
    yield from _present(path, module, {"weight": 0, "bias": 0})


def _conv1d_in(path: str, module: nn.Module) -> Iterator[Port]:
    yield from _present(path, module, {"weight": 0})


def _conv1d_out(path: str, module: nn.Module) -> Iterator[Port]:
    yield from _present(path, module, {"weight": 1, "bias": 0})


def _conv2d_out(path: str, module: nn.Module) -> Iterator[Port]:
    if getattr(module, "groups", 1) != 1:
        raise UnsupportedModuleError(
            path,
            expected="a convolution with groups=1",
            got=f"groups={module.groups}",
            remedy="its channels stay where they are",
        )
    yield from _linear_out(path, module)


def _embedding_out(path: str, module: nn.Module) -> Iterator[Port]:
    yield from _present(path, module, {"weight": 1})


def _norm_out(path: str, module: nn.Module) -> Iterator[Port]:
    shape = getattr(module, "normalized_shape", (0,))
    if len(shape) != 1:
        raise UnsupportedModuleError(
            path,
            expected="a norm over one axis",
            got=f"normalized_shape={tuple(shape)}",
            remedy="its parameters stay where they are",
        )
    yield from _present(path, module, {"weight": 0, "bias": 0})


def _lora_base(path: str, module: Any) -> tuple[str, nn.Module]:
    """The wrapped layer, once every part of the wrapper is known to keep the symmetry."""
    known = {
        "base_layer",
        "lora_dropout",
        "lora_A",
        "lora_B",
        *_EMBEDDING_FACTORS,
        "lora_magnitude_vector",
    }
    extra = {name.split(".")[0] for name, _ in module.named_parameters()} - known
    extra |= {class_name(v) for v in getattr(module, "lora_variant", {}).values()} - LORA_VARIANTS
    if extra:
        raise UnsupportedModuleError(
            path,
            expected="LoRA factors A and B only",
            got=sorted(extra),
            remedy="the layer's parameters stay where they are",
        )
    return _join(path, "base_layer"), module.base_layer


def _lora_linear_in(path: str, module: Any) -> Iterator[Port]:
    yield from inputs(*_lora_base(path, module))
    for adapter in module.lora_A:
        yield from inputs(_join(path, f"lora_A.{adapter}"), module.lora_A[adapter])


def _lora_linear_out(path: str, module: Any) -> Iterator[Port]:
    yield from outputs(*_lora_base(path, module))
    for adapter in module.lora_B:
        yield from outputs(_join(path, f"lora_B.{adapter}"), module.lora_B[adapter])
    for adapter, magnitude in module.lora_magnitude_vector.items():
        yield from _present(
            _join(path, f"lora_magnitude_vector.{adapter}"), magnitude, {"weight": 0}
        )


def _lora_embedding_out(path: str, module: Any) -> Iterator[Port]:
    yield from outputs(*_lora_base(path, module))
    for adapter in module.lora_embedding_B:
        yield Port(parameter=_join(path, f"lora_embedding_B.{adapter}"), axis=0)


_INPUTS: dict[str, _Rule] = {
    **dict.fromkeys(LINEAR, _linear_in),
    **dict.fromkeys(CONV1D, _conv1d_in),
    **dict.fromkeys(LORA_LINEAR, _lora_linear_in),
}
_OUTPUTS: dict[str, _Rule] = {
    **dict.fromkeys(LINEAR, _linear_out),
    **dict.fromkeys(CONV1D, _conv1d_out),
    **dict.fromkeys(CONV2D, _conv2d_out),
    **dict.fromkeys(EMBEDDING, _embedding_out),
    **dict.fromkeys(NORM, _norm_out),
    **dict.fromkeys(LORA_LINEAR, _lora_linear_out),
    **dict.fromkeys(LORA_EMBEDDING, _lora_embedding_out),
}
