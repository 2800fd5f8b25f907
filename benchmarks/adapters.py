"""One training step per competitor, behind one signature.

An adapter takes a fresh model and gives back a function that performs one whole step: forward,
losses, backward, whatever makes it private, and AdamW. Only that function is timed.

- `plain` is non-private training: the mean loss, backward, AdamW.
- `ours` is the clipping engine with noise, division and AdamW; a variant is a strategy.
- `training` is what users meet: `make_private`, its step and all its checks, shuffle included.
- `opacus:hooks` has per-sample gradients by hooks, `opacus:ghost` clips with two backward passes.
- `opake` has per-sample gradients by torch.func, with its patches of Hugging Face's models.

`compiled` compiles forward and losses as one graph. `sharded` puts the model under `fully_shard` in
a launch of one rank: what FSDP's hooks and copies cost, and what of ours is done otherwise.
"""

from __future__ import annotations

import secrets
import socket
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.workloads import Batch, Workload
from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.training import make_private
from shuffled_dpsgd.training.device_noise import DeviceNoise

Step = Callable[[Batch], None]
CLIP_NORM = 1.0
NOISE_MULTIPLIER = 1.0
# More than any benchmark takes; a run refuses steps beyond its plan.
NUM_STEPS = 1_000_000
ADAPTERS = (
    "plain", "plain:compiled", "plain:sharded", "ours", "ours:compiled", "ours:ghost", "ours:mixed",
    "ours:instantiate", "training", "training:compiled", "training:sharded", "opacus:hooks",
    "opacus:ghost", "opake",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What every adapter of one comparison shares."""

    workload: Workload
    device: torch.device
    bfloat16: bool

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trainable, lr=1e-5, fused=True)


def build(name: str, model: nn.Module, setting: Setting) -> Step:
    """The step of the adapter called `name`."""
    family, _, variant = name.partition(":")
    makers = {"plain": plain, "ours": ours, "training": training, "opacus": opacus, "opake": opake}
    if name not in ADAPTERS:
        raise SystemExit(f"adapter {name!r}: expected one of {', '.join(ADAPTERS)}")
    return makers[family](model, setting, variant)


def plain(model: nn.Module, setting: Setting, variant: str) -> Step:
    if variant == "sharded":
        shard(model, setting.device)
    optimizer = setting.optimizer(model)
    losses = setting.workload.losses
    if variant == "compiled":
        losses = torch.compile(losses, fullgraph=True)

    def step(batch: Batch) -> None:
        with setting.autocast():
            loss = losses(model, batch).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def ours(model: nn.Module, setting: Setting, variant: str) -> Step:
    strategy = "bookkeeping" if variant in ("", "compiled") else variant
    engine = ClippingEngine(model, clip_norm=CLIP_NORM, strategy=strategy)
    optimizer = setting.optimizer(model)
    noise = DeviceNoise()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    stds = dict.fromkeys(parameters, NOISE_MULTIPLIER * CLIP_NORM)
    losses = losses_of(setting, compiled=variant == "compiled")

    def step(batch: Batch) -> None:
        with engine:
            with setting.autocast():
                per_sample = losses(model, batch)
            engine.backward(per_sample)
        sums = engine.clipped_sum()
        noise.add_(
            sums, stds, key=secrets.token_bytes(32), divide_by=float(setting.workload.batch_size)
        )
        for name, total in sums.items():
            parameters[name].grad = total
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        engine.reset()

    return step


def training(model: nn.Module, setting: Setting, variant: str) -> Step:
    """A step of a planned run, every parameter that can move shuffled after it."""
    if variant == "sharded":
        shard(model, setting.device)
    batch_size = setting.workload.batch_size
    private = make_private(
        model,
        setting.optimizer(model),
        dataset_size=1000 * batch_size,
        expected_batch_size=batch_size,
        num_steps=NUM_STEPS,
        noise_multiplier=NOISE_MULTIPLIER,
        clip_norm=CLIP_NORM,
        delta=1e-6,
        sampling="unaccounted",
        scope="full",
        physical_batch_size=batch_size,
    )
    losses = losses_of(setting, compiled=variant == "compiled")
    # Entered once and for all, as a loop over its batches would do.
    private.__enter__()

    def step(batch: Batch) -> None:
        with setting.autocast():
            per_sample = losses(model, batch)
        private.backward(per_sample)
        private.step()

    return step


def losses_of(setting: Setting, *, compiled: bool) -> Callable[[nn.Module, Batch], Tensor]:
    """The workload's losses. The first batch of a compiled side runs without the compiler.

    Bare parameters are checked in it.
    """
    bare = setting.workload.losses
    if not compiled:
        return bare
    fast, calls = torch.compile(bare, fullgraph=True), 0

    def losses(model: nn.Module, batch: Batch) -> Tensor:
        nonlocal calls
        calls += 1
        return bare(model, batch) if calls == 1 else fast(model, batch)

    return losses


def opacus(model: nn.Module, setting: Setting, variant: str) -> Step:
    """Opacus 1.6, helped where it would refuse stock Hugging Face models or crash.

    Position ids are repeated over the batch, a tied head gets a table of its own, and parameters
    that belong to no supported module (ViT's class token and position embeddings) are frozen. All
    three make its task easier than that of the others, except that the untied head adds a table.
    """
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    # Opacus and the torch it runs on warn on every backward hook; that is not what is measured.
    warnings.filterwarnings("ignore", module="opacus")
    warnings.filterwarnings("ignore", message=".*backward hook.*")
    head = getattr(model, "lm_head", None)
    if head is not None:
        head.weight = nn.Parameter(head.weight.detach().clone())
    embeddings = getattr(getattr(model, "vit", None), "embeddings", None)
    if embeddings is not None:
        embeddings.cls_token.requires_grad_(False)
        embeddings.position_embeddings.requires_grad_(False)
    ghost = variant == "ghost"
    if ghost:
        wrapped = GradSampleModuleFastGradientClipping(
            model, max_grad_norm=CLIP_NORM, use_ghost_clipping=True, strict=False
        )
    else:
        wrapped = GradSampleModule(model, strict=False)
    optimizer = (DPOptimizerFastGradientClipping if ghost else DPOptimizer)(
        setting.optimizer(model),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=CLIP_NORM,
        expected_batch_size=setting.workload.batch_size,
    )

    def step(batch: Batch) -> None:
        if "input_ids" in batch:
            ids = batch["input_ids"]
            positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
            batch = {**batch, "position_ids": positions.contiguous()}
        with setting.autocast():
            losses = setting.workload.losses(wrapped, batch)
        if ghost:
            DPTensorFastGradientClipping(wrapped, optimizer, losses, "mean").backward()
        else:
            losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def opake(model: nn.Module, setting: Setting, variant: str) -> Step:
    """Opake, with its own clip and noise. Models of Hugging Face that it does not patch fail."""
    from opake.dpsgd.clipping import clipped_grad
    from opake.dpsgd.noise import gaussian_noise
    from opake.patches import apply_model_patches, apply_runtime_patches
    from opake.random import key

    apply_runtime_patches()
    apply_model_patches(model)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = setting.optimizer(model)

    def loss_of_one(weights: dict[str, Tensor], one: Batch) -> Tensor:
        def run(**inputs: Tensor) -> Any:
            return torch.func.functional_call(model, weights, (), inputs)

        with setting.autocast():
            return setting.workload.losses(run, {n: t.unsqueeze(0) for n, t in one.items()}).sum()

    clipped, clip_state = clipped_grad(
        loss_of_one,
        clipping_norm=CLIP_NORM,
        batch_argnums=1,
        normalize_by=float(setting.workload.batch_size),
    )
    noised, noise_state = gaussian_noise(noise_multiplier=NOISE_MULTIPLIER, key=key(0))

    def step(batch: Batch) -> None:
        nonlocal clip_state, noise_state
        weights = {name: parameter.detach() for name, parameter in parameters.items()}
        grads, clip_state = clipped(weights, batch, state=clip_state)
        private, noise_state = noised(grads, noise_state)
        for name, grad in private.pytree.items():
            parameters[name].grad = grad
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def shard(model: nn.Module, device: torch.device) -> None:
    """Shard every block of a Transformer over this process alone, then the rest with the model."""
    from torch.distributed.fsdp import fully_shard

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=0,
        world_size=1,
    )
    for module in [*model.modules()]:
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block)
    fully_shard(model)
