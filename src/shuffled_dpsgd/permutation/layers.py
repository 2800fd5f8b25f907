"""What is known of single layers: the axes that carry features, and the elementwise activations.

Modules are recognised by the exact qualified name of their class: a subclass may compute something
else, so it is refused. Layers wrapped by LoRA answer for their factors too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from shuffled_dpsgd.errors import UnsupportedModuleError

LINEAR = frozenset(
    f"torch.nn.modules.linear.{name}" for name in ("Linear", "NonDynamicallyQuantizableLinear")
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
LORA_LINEAR = "peft.tuners.lora.layer.Linear"
LORA_EMBEDDING = "peft.tuners.lora.layer.Embedding"
# Parts of a LoRA layer, and variants that are more than base(x) + B A x and keep the symmetry.
_LORA_PARTS = {"base_layer", "lora_dropout", "lora_A", "lora_B", "lora_magnitude_vector"}
_LORA_PARTS |= {"lora_embedding_A", "lora_embedding_B"}
_LORA_VARIANTS = frozenset(
    f"peft.tuners.lora.variants.Dora{kind}Variant" for kind in ("Embedding", "Linear")
)
SAVED = "peft.utils.other.ModulesToSaveWrapper"

# For each class, the axis of its parameters that reads input features, and that writes output
# features; for a norm, the axis that it scales.
_READS = {name: {"weight": 1} for name in LINEAR} | {name: {"weight": 0} for name in CONV1D}
_WRITES = {
    **{name: {"weight": 0, "bias": 0} for name in LINEAR | CONV2D | NORM},
    **{name: {"weight": 1, "bias": 0} for name in CONV1D},
    **{name: {"weight": 1} for name in EMBEDDING},
}

_TORCH_ACTIVATIONS = (
    "CELU ELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid Mish ReLU ReLU6"
    " RReLU SELU SiLU Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink Threshold"
)
_TRANSFORMERS_ACTIVATIONS = (
    "GELUTanh NewGELUActivation GELUActivation SiLUActivation FastGELUActivation"
    " QuickGELUActivation ClippedGELUActivation AccurateGELUActivation MishActivation"
    " LinearActivation LaplaceActivation ReLUSquaredActivation SqrtSoftplusActivation"
)
_FUNCTIONS = (
    "celu elu gelu hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 selu silu"
    " sigmoid softplus softsign tanh tanhshrink"
)
_ELEMENTWISE = frozenset(
    {
        *(f"torch.nn.modules.activation.{name}" for name in _TORCH_ACTIVATIONS.split()),
        *(f"transformers.activations.{name}" for name in _TRANSFORMERS_ACTIVATIONS.split()),
        "torch.nn.modules.dropout.Dropout",
        "torch.nn.modules.linear.Identity",
    }
)
_ELEMENTWISE_FUNCTIONS = frozenset(_FUNCTIONS.split())


@dataclass(frozen=True, kw_only=True)
class Port:
    """One axis of one parameter, from `start` on, that carries features."""

    parameter: str
    axis: int
    start: int = 0


def class_name(module: object) -> str:
    """The exact qualified name of the object's class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def join(path: str, name: str) -> str:
    """Dotted path of `name` below `path`."""
    return f"{path}.{name}" if path and name else path or name


def is_elementwise(activation: object) -> bool:
    """Whether an activation maps every entry by itself and the same way, as Theorem 1 asks."""
    if isinstance(activation, nn.Module):
        return class_name(activation) in _ELEMENTWISE
    home = getattr(activation, "__module__", None) or ""
    name = getattr(activation, "__name__", "")
    return name in _ELEMENTWISE_FUNCTIONS and home.split(".")[0] in ("torch", "")


def inputs(path: str, module: Any) -> list[Port]:
    """The axes that read the module's input features."""
    if class_name(module) == LORA_LINEAR:
        found = inputs(*_lora_base(path, module))
        for adapter, factor in module.lora_A.items():
            found += inputs(join(path, f"lora_A.{adapter}"), factor)
        return found
    axes = _READS.get(class_name(module))
    if axes is None:
        raise stays(path, expected="a linear layer", got=class_name(module))
    return _present(path, module, axes)


def outputs(path: str, module: Any) -> list[Port]:
    """The axes that write the module's output features; for a norm, those it scales."""
    kind = class_name(module)
    if kind in (LORA_LINEAR, LORA_EMBEDDING):
        return _lora_outputs(path, module)
    axes = _WRITES.get(kind)
    if axes is None:
        expected = "a linear layer, embedding, convolution or norm"
        raise stays(path, expected=expected, got=kind)
    if kind in CONV2D and module.groups != 1:
        raise stays(path, expected="a convolution with groups=1", got=f"groups={module.groups}")
    shape = getattr(module, "normalized_shape", (0,))
    if len(shape) != 1:
        raise stays(path, expected="a norm over one axis", got=f"normalized_shape={tuple(shape)}")
    return _present(path, module, axes)


def ranks(path: str, module: Any) -> dict[str, list[Port]]:
    """Per LoRA adapter, the axes of its inner rank; empty for any other module."""
    kind = class_name(module)
    if kind not in (LORA_LINEAR, LORA_EMBEDDING):
        return {}
    _lora_base(path, module)
    stem, suffix = ("lora_", ".weight") if kind == LORA_LINEAR else ("lora_embedding_", "")
    return {
        adapter: [
            Port(parameter=join(path, f"{stem}A.{adapter}{suffix}"), axis=0),
            Port(parameter=join(path, f"{stem}B.{adapter}{suffix}"), axis=1),
        ]
        for adapter in getattr(module, f"{stem}A")
    }


def stays(path: str, *, expected: str, got: object) -> UnsupportedModuleError:
    """The error for a layer of which too little is known."""
    remedy = "its parameters stay where they are"
    return UnsupportedModuleError(path, expected=expected, got=got, remedy=remedy)


def _present(path: str, module: nn.Module, axes: Mapping[str, int]) -> list[Port]:
    """Those of the named parameters the module has, if it has no others.

    Re-parametrisations by hooks keep the class, but compute `weight` from other parameters.
    """
    own = {name for name, _ in module.named_parameters(recurse=False)}
    computed = {name for name in axes if getattr(module, name, None) is not None} - own
    if strange := sorted((own - {"weight", "bias"}) | computed):
        got = f"{', '.join(strange)} besides or in their place"
        raise stays(path, expected="plain parameters weight and bias", got=got)
    return [Port(parameter=join(path, n), axis=axis) for n, axis in axes.items() if n in own]


def _lora_base(path: str, module: Any) -> tuple[str, nn.Module]:
    """The wrapped layer, once every part of the wrapper is known to keep the symmetry."""
    extra = {name.split(".")[0] for name, _ in module.named_parameters()} - _LORA_PARTS
    extra |= {class_name(v) for v in getattr(module, "lora_variant", {}).values()} - _LORA_VARIANTS
    if extra:
        raise stays(path, expected="LoRA factors A and B only", got=sorted(extra))
    return join(path, "base_layer"), module.base_layer


def _lora_outputs(path: str, module: Any) -> list[Port]:
    found = outputs(*_lora_base(path, module))
    if class_name(module) == LORA_EMBEDDING:
        names = [join(path, f"lora_embedding_B.{adapter}") for adapter in module.lora_embedding_B]
        return found + [Port(parameter=name, axis=0) for name in names]
    for adapter, factor in module.lora_B.items():
        found += outputs(join(path, f"lora_B.{adapter}"), factor)
    for adapter, magnitude in module.lora_magnitude_vector.items():
        where = join(path, f"lora_magnitude_vector.{adapter}")
        found += _present(where, magnitude, {"weight": 0})
    return found
