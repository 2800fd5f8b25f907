"""Which activations map every entry by itself and in the same way, as Theorem 1 asks."""

from __future__ import annotations

from torch import nn

from shuffled_dpsgd.permutation.describe.ports import class_name

ELEMENTWISE = frozenset(
    {
        f"torch.nn.modules.activation.{name}"
        for name in [
            "CELU",
            "ELU",
            "GELU",
            "Hardshrink",
            "Hardsigmoid",
            "Hardswish",
            "Hardtanh",
            "LeakyReLU",
            "LogSigmoid",
            "Mish",
            "ReLU",
            "ReLU6",
            "RReLU",
            "SELU",
            "SiLU",
            "Sigmoid",
            "Softplus",
            "Softshrink",
            "Softsign",
            "Tanh",
            "Tanhshrink",
            "Threshold",
        ]
    }
    | {
        f"transformers.activations.{name}"
        for name in [
            "GELUTanh",
            "NewGELUActivation",
            "GELUActivation",
            "SiLUActivation",
            "FastGELUActivation",
            "QuickGELUActivation",
            "ClippedGELUActivation",
            "AccurateGELUActivation",
            "MishActivation",
            "LinearActivation",
            "LaplaceActivation",
            "ReLUSquaredActivation",
            "SqrtSoftplusActivation",
        ]
    }
    | {"torch.nn.modules.dropout.Dropout", "torch.nn.modules.linear.Identity"}
)
ELEMENTWISE_FUNCTIONS = frozenset(
    [
        "celu",
        "elu",
        "gelu",
        "hardsigmoid",
        "hardswish",
        "hardtanh",
        "leaky_relu",
        "logsigmoid",
        "mish",
        "relu",
        "relu6",
        "selu",
        "silu",
        "sigmoid",
        "softplus",
        "softsign",
        "tanh",
        "tanhshrink",
    ]
)


def is_elementwise(activation: object) -> bool:
    """Whether an activation (module or function) maps every entry by itself and the same way."""
    if isinstance(activation, nn.Module):
        return class_name(activation) in ELEMENTWISE
    home = getattr(activation, "__module__", None) or ""
    name = getattr(activation, "__name__", "")
    return name in ELEMENTWISE_FUNCTIONS and home.split(".")[0] in ("torch", "")
