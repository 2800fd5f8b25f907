"""Which sharded models are refused, each by name: those whose result would not be exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from shuffled_dpsgd.distributed.world import World
from shuffled_dpsgd.errors import InvalidArgumentError, UnsupportedModuleError
from shuffled_dpsgd.runtime.shards import RowAxis, is_sharded
from shuffled_dpsgd.runtime.uncompiled import refuse_compiled_whole

_TENSOR = "layers split by parallelize_module are supported without fully_shard"
_OTHER_AXES = {"tp": "tensor", "sp": "sequence", "pp": "pipeline", "cp": "context", "ep": "expert"}


def refuse_unsupported(world: World, model: nn.Module, declared: Any = None) -> None:
    """Refuse all but `fully_shard` by rows over all ranks, on the root and any modules below.

    The mesh must be the `declared` one, if there is one.

    Raises:
        UnsupportedModuleError: naming the module or parameter.
    """
    first = next(name for name, p in model.named_parameters() if is_sharded(p))
    if not isinstance(model, FSDPModule):
        raise UnsupportedModuleError(
            first,
            expected="parameters that fully_shard has spread, the model itself last",
            got="a model whose root it was not called on",
            remedy=f"call fully_shard on the blocks, then on the model; {_TENSOR}",
        )
    mesh = RowAxis.of(model.get_parameter(first)).mesh if declared is None else declared
    for name, parameter in model.named_parameters():
        _refuse_placement(world, name, parameter)
        own = RowAxis.of(parameter).mesh
        if own.mesh.tolist() != mesh.mesh.tolist():
            raise UnsupportedModuleError(
                name,
                expected=f"the mesh {mesh} of make_private or of other parameters",
                got=f"{own}",
                remedy="give every call of fully_shard, and make_private, the same mesh",
            )
    for path, module in model.named_modules():
        if isinstance(module, FSDPModule):
            _refuse_options(path, module)
        if type(module).__module__.startswith("bitsandbytes."):
            raise UnsupportedModuleError(
                path,
                expected="weights that are not quantised, where ranks share their rows",
                got=f"{type(module).__name__} of bitsandbytes, whose scales are of whole weights",
                remedy="leave fully_shard out: ranks that have the whole model send adapters alone",
            )
        if hasattr(module, "_orig_mod"):
            raise UnsupportedModuleError(
                path,
                expected="blocks that are compiled in place",
                got="one that torch.compile has wrapped",
                remedy="call block.compile() on each block, then fully_shard",
            )
    if getattr(model, "_compiled_call_impl", None) is not None:
        refuse_compiled_whole()
    _refuse_untied(model)


def refuse_axes(model: nn.Module, declared: Any, known: Sequence[str] = ()) -> None:
    """Refuse by its name an axis of the model's mesh, or of the `declared` one, but `known` ones.

    Raises:
        UnsupportedModuleError: naming a parameter that lies on it.
    """
    if declared is not None and not isinstance(declared, DeviceMesh):
        raise InvalidArgumentError("mesh", expected="a DeviceMesh of PyTorch", got=declared)
    for name, parameter in model.named_parameters():
        meshes = [declared, *([RowAxis.of(parameter).mesh] if is_sharded(parameter) else [])]
        for axis in (each for mesh in meshes if mesh for each in mesh.mesh_dim_names or ()):
            if axis in _OTHER_AXES and axis not in known:
                raise UnsupportedModuleError(
                    name,
                    expected="a mesh whose ranks share rows, split layers, or have copies",
                    got=f"an axis {axis!r}, as of {_OTHER_AXES[axis]} parallelism",
                    remedy="use fully_shard on one axis, or on two of which the first has copies; "
                    "or parallelize_module on one",
                )


def _refuse_placement(world: World, name: str, parameter: nn.Parameter) -> None:
    if not is_sharded(parameter):
        raise UnsupportedModuleError(
            name,
            expected="every parameter sharded",
            got="one that fully_shard was told to ignore",
            remedy="leave ignored_params out",
        )
    mesh, placements, ranks = RowAxis.of(parameter)
    if ranks is None:
        raise UnsupportedModuleError(
            name,
            expected="rows spread over the last axis of a mesh, Shard(0), with copies along "
            "another axis before it, or none",
            got=f"placements {placements} on a mesh of shape {tuple(mesh.shape)}",
            remedy="give fully_shard a mesh of one or two axes, and no shard_placement_fn; "
            f"{_TENSOR}",
        )
    if mesh.mesh.flatten().tolist() != list(range(world.size)):
        raise UnsupportedModuleError(
            name,
            expected=f"a mesh of all {world.size} ranks in their order",
            got=f"a mesh of ranks {mesh.mesh.tolist()}",
            remedy="leave `mesh` out of fully_shard, or make it by init_device_mesh",
        )


def _refuse_options(path: str, module: Any) -> None:
    state = module._get_fsdp_state()
    policy = state._mp_policy
    if torch.float16 in (policy.param_dtype, policy.output_dtype):
        raise UnsupportedModuleError(
            path,
            expected="a mixed-precision policy of bfloat16, or none",
            got=f"{policy}",
            remedy="use bfloat16: float16 would need its losses scaled against underflow",
        )
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if groups is None else groups
    for group in groups:
        if group is not None and isinstance(group.offload_policy, CPUOffloadPolicy):
            raise UnsupportedModuleError(
                path,
                expected="shards that stay on the device",
                got="CPUOffloadPolicy",
                remedy="leave offload_policy out",
            )
    if len(state._modules) > 1:
        raise UnsupportedModuleError(
            path,
            expected="fully_shard on one module at a time",
            got=f"one call for {len(state._modules)} modules",
            remedy="shard their parent: what it holds is then gathered together",
        )


def _refuse_untied(model: Any) -> None:
    """Weights that belong together and were sharded apart have become two parameters."""
    config = getattr(model, "config", None)
    ends = [getattr(model, f"get_{end}_embeddings", None) for end in ("input", "output")]
    if not getattr(config, "tie_word_embeddings", False) or not all(map(callable, ends)):
        return
    table, head = (cast(Any, end)() for end in ends)
    if table is not None and head is not None and table.weight is not head.weight:
        raise UnsupportedModuleError(
            "",
            expected="tied embedding and head in one group of fully_shard",
            got="two parameters, because they were sharded by different calls",
            remedy="call fully_shard on the blocks and the root only, so that both are the root's",
        )
