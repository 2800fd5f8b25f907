"""What is refused by name before any training: the models that no rule could make exact."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from shuffled_dpsgd.clipping.capture.slot import Slot
from shuffled_dpsgd.errors import UnsupportedModuleError

_LINEAR_4BIT = "bitsandbytes.nn.modules.Linear4bit"
_LINEAR_8BIT = "bitsandbytes.nn.modules.Linear8bitLt"


def refuse_known(module: nn.Module, path: str) -> None:
    """Refuse, by name, modules whose use of their parameters cannot be told apart by samples."""
    if isinstance(module, nn.AdaptiveLogSoftmaxWithLoss):
        raise UnsupportedModuleError(
            path,
            expected="layers that see all samples",
            got="AdaptiveLogSoftmaxWithLoss, which sends samples to layers by their labels",
            remedy="use nn.Linear with cross_entropy, or freeze it with requires_grad_(False)",
        )
    if getattr(module, "has_relative_attention_bias", False):
        table = getattr(module, "relative_attention_bias", None)
        if table is not None and any(p.requires_grad for p in table.parameters()):
            raise UnsupportedModuleError(
                f"{path}.relative_attention_bias" if path else "relative_attention_bias",
                expected="a table looked up per sample",
                got=f"the relative position bias of {type(module).__name__}, which all samples "
                "share without a batch axis",
                remedy="freeze it: .relative_attention_bias.requires_grad_(False)",
            )


def refuse_scripted(model: nn.Module) -> None:
    """Refuse scripted modules, which hold their children in a way of their own.

    Raises:
        UnsupportedModuleError: naming the first of them.
    """
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedModuleError(
                path,
                expected="modules that run in Python",
                got="a scripted module, inside which nothing can be recorded",
                remedy="use the module as it was before torch.jit.script",
            )


def check_quantized(model: nn.Module) -> None:
    """Refuse weights of bitsandbytes that a gradient cannot pass, or that mix the samples.

    On a CPU, in evaluation mode, it packs 4-bit weights for inference. A backward through packed
    weights stops there and says nothing, so it is kept from doing that. With 8 bits and a threshold
    it computes those columns precisely in which any sample of the batch has a large value.

    Raises:
        UnsupportedModuleError: naming the first such module.
    """
    for path, module in model.named_modules():
        name = f"{type(module).__module__}.{type(module).__name__}"
        if name == _LINEAR_4BIT:
            if getattr(module.weight.quant_state, "packing_format_for_cpu", False):
                raise UnsupportedModuleError(
                    path,
                    expected="4-bit weights that a gradient can pass",
                    got="weights that bitsandbytes has packed for inference on this CPU",
                    remedy="load the model again, and do not evaluate it before it is made private",
                )
            module.support_avx512bf16_for_cpu = False
        elif name == _LINEAR_8BIT and module.state.threshold > 0:
            raise UnsupportedModuleError(
                path,
                expected="8-bit weights that treat every sample on its own",
                got=f"llm_int8_threshold={module.state.threshold}: a large value of one sample "
                "changes what others are multiplied with",
                remedy="load with BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0), "
                "or in 4 bits",
            )


def refuse_hooks(model: nn.Module) -> None:
    """Refuse hooks on parameters' gradients: the engine never forms those, so no hook would run."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (
            parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        ):
            raise UnsupportedModuleError(
                name,
                expected="a parameter without gradient hooks",
                got="a hook that would see no gradient",
                remedy="remove it; change gradients in the loss, or updates in the optimizer",
            )


def refuse_unreachable(names: dict[int, str], slots: list[Slot]) -> None:
    covered = {name for slot in slots for name in slot.names.values()}
    for name in names.values():
        if name not in covered:
            raise UnsupportedModuleError(
                name,
                expected="a parameter held by a module with a forward",
                got="a parameter no module's forward can be blamed for",
                remedy="hold it in the module that uses it, or freeze it",
            )


def batch_norms(model: nn.Module) -> list[tuple[str, _BatchNorm]]:
    """The model's batch norms, by path."""
    return [(path, m) for path, m in model.named_modules() if isinstance(m, _BatchNorm)]


def refuse_batch_statistics(norms: Iterable[tuple[str, _BatchNorm]]) -> None:
    """Refuse layers whose output for one sample depends on the others.

    Raises:
        UnsupportedModuleError: a batch norm in training mode.
    """
    for path, module in norms:
        if module.training or not module.track_running_stats:
            raise UnsupportedModuleError(
                path,
                expected="layers that treat every sample on its own",
                got=f"{type(module).__name__} with batch statistics",
                remedy="replace it by GroupNorm, as shuffled_dpsgd.fix_model(model) does, or put "
                "it in eval mode",
            )


def refuse_unfit(trainable: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters without a shape or of complex numbers, and models with none at all.

    Raises:
        UnsupportedModuleError: naming the parameter.
    """
    if not trainable:
        raise UnsupportedModuleError(
            "",
            expected="a model with something to train",
            got="no parameter that requires a gradient",
            remedy="call requires_grad_(True) on what is to be trained, before building the engine",
        )
    for name, parameter in trainable.items():
        if is_lazy(parameter):
            raise UnsupportedModuleError(
                name,
                expected="an initialised parameter",
                got="a lazy one without a shape",
                remedy="pass one batch through the model before building the engine",
            )
        if parameter.is_complex():
            raise UnsupportedModuleError(
                name,
                expected="a real parameter",
                got=str(parameter.dtype),
                remedy="store real and imaginary parts (torch.view_as_real), or freeze it",
            )


def refuse_replaced(slots: Iterable[Slot]) -> None:
    """Refuse modules whose forward is already replaced, for two engines would undo each other.

    Raises:
        UnsupportedModuleError: naming the first of them.
    """
    for slot in slots:
        if "forward" in slot.module.__dict__:
            raise already_replaced(slot.path)


def already_replaced(path: str) -> UnsupportedModuleError:
    return UnsupportedModuleError(
        path,
        expected="a module whose forward is its class's",
        got="a forward replaced on the instance",
        remedy="leave the other engine's `with` block, or undo the replacement, first",
    )


def refuse_sharded(slots: Iterable[Slot], modules: Sequence[nn.Module]) -> None:
    """Refuse what would run parts of a sharded model by itself: ranks would wait for each other.

    Raises:
        UnsupportedModuleError: a rule that runs a module for its own checks, around a module whose
            weights are gathered when it runs.
    """
    gathered = set(map(id, modules))
    for slot in slots:
        below = [child for child in slot.module.modules() if child is not slot.module]
        if slot.runs_module and any(id(child) in gathered for child in below):
            raise UnsupportedModuleError(
                slot.path,
                expected="fully_shard on this module as a whole, or above it",
                got="fully_shard on modules inside it, while its own parameters need a rule that "
                "runs it for checks of its own",
                remedy="shard this module in one call, or freeze the parameters it holds itself",
            )


def refuse_thawed(frozen: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters that were frozen when the slots were built and no longer are.

    Raises:
        UnsupportedModuleError: naming the first of them.
    """
    for name, parameter in frozen.items():
        if parameter.requires_grad:
            raise UnsupportedModuleError(
                name,
                expected="the parameters that were frozen at first to stay frozen",
                got="a parameter made trainable later, which nobody would clip",
                remedy="build a new engine after changing what is trainable",
            )


_grad = attrgetter("grad")


def gradients_of(parameters: Mapping[str, nn.Parameter]) -> list[tuple[Tensor | None, int]]:
    """What every parameter has as its `.grad`, and how often that was written to."""
    found = map(_grad, parameters.values())
    return [(None, 0) if grad is None else (grad, grad._version) for grad in found]


def refuse_stray_gradients(
    parameters: Mapping[str, nn.Parameter], before: Sequence[tuple[Tensor | None, int]]
) -> None:
    """Drop gradients that have arrived at a parameter since `before`, and refuse to go on.

    A parameter used outside its own module, such as `F.linear(x, model.embedding.weight)`, receives
    an ordinary gradient that no clipping has seen.

    Raises:
        UnsupportedModuleError: naming the parameter.
    """
    # Most often there is none; found by C, because it is asked in every step.
    if all(map(is_, map(_grad, parameters.values()), repeat(None))):
        return
    for name, (grad, version) in zip(parameters, before, strict=True):
        now = parameters[name].grad
        if now is not None and (now is not grad or now._version != version):
            for parameter in parameters.values():
                parameter.grad = None
            raise UnsupportedModuleError(
                name,
                expected="a parameter used only by its own module",
                got="an ordinary gradient from somewhere else",
                remedy="make the forward inside `with engine:`, and call the module instead of "
                "using its weight directly; or freeze it",
            )
