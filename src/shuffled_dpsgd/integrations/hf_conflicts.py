"""Settings of `TrainingArguments` that contradict private training, refused by name.

The Trainer has many knobs that quietly change what one record contributes or how often it is
seen. Each is refused here rather than ignored, with what to use instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shuffled_dpsgd.errors import InvalidArgumentError


def check_training_arguments(args: Any) -> None:
    """Raise `InvalidArgumentError` for the first setting that private training cannot honour."""
    for name, got, expected, remedy in _conflicts(args):
        raise InvalidArgumentError(name, expected=expected, got=got, remedy=remedy)


def check_trainer_options(options: Mapping[str, Any]) -> None:
    """Refuse options of `Trainer(...)` that replace the per-sample loss or the model."""
    if options.get("compute_loss_func") is not None:
        raise InvalidArgumentError(
            "compute_loss_func",
            expected="per_sample_loss=function(outputs, labels), one loss per sample",
            got="a function of the whole batch",
            remedy="a loss averaged over the batch cannot be clipped per sample",
        )
    if options.get("model_init") is not None:
        raise InvalidArgumentError(
            "model_init",
            expected="model=",
            got="a function",
            remedy="a model drawn anew for each trial spends privacy anew; pass one model",
        )


def check_model(model: Any, shuffle: str) -> None:
    """Refuse to shuffle under an adapter, which the Trainer saves without its base."""
    if hasattr(model, "peft_config") and shuffle != "off":
        raise InvalidArgumentError(
            "shuffle",
            expected="off for a model with adapters",
            got=shuffle,
            remedy="a shuffle moves the frozen weights too, so an adapter saved alone would no "
            "longer fit the public model",
        )


def _conflicts(args: Any) -> list[tuple[str, Any, str, str]]:
    checkpointing = args.gradient_checkpointing_kwargs or {}
    rules = [
        (
            "max_grad_norm",
            bool(args.max_grad_norm),
            args.max_grad_norm,
            "0",
            "clip_norm of PrivacyArguments clips each sample; set max_grad_norm to 0",
        ),
        (
            "per_device_train_batch_size",
            args.n_gpu > 1 or args.world_size > 1,
            f"{args.n_gpu} GPUs, {args.world_size} processes",
            "one process on one device",
            "restrict CUDA_VISIBLE_DEVICES to one device",
        ),
        ("deepspeed", bool(args.deepspeed), args.deepspeed, "none", "run without it"),
        ("fsdp", bool(args.fsdp), args.fsdp, "none", "run without it"),
        (
            "fp16",
            args.fp16,
            True,
            "bf16 or float32",
            "the gradient scaler of fp16 rescales what is clipped",
        ),
        (
            "label_smoothing_factor",
            bool(args.label_smoothing_factor),
            args.label_smoothing_factor,
            "0",
            "smooth inside per_sample_loss",
        ),
        (
            "auto_find_batch_size",
            args.auto_find_batch_size,
            True,
            "False",
            "set per_device_train_batch_size to what fits in memory",
        ),
        (
            "train_sampling_strategy",
            args.train_sampling_strategy != "random",
            args.train_sampling_strategy,
            "random",
            "records must be drawn by Poisson sampling, the sampler accounted for",
        ),
        (
            "dataloader_num_workers",
            args.dataloader_num_workers > 0,
            args.dataloader_num_workers,
            "0",
            "batches are drawn step by step; prepare the data beforehand",
        ),
        (
            "use_liger_kernel",
            args.use_liger_kernel,
            True,
            "False",
            "fused kernels hide per-sample gradients",
        ),
        (
            "gradient_checkpointing_kwargs",
            args.gradient_checkpointing and bool(checkpointing.get("use_reentrant")),
            checkpointing,
            "use_reentrant=False",
            "reentrant checkpointing runs backward inside backward",
        ),
    ]
    return [
        (name, got, expected, remedy) for name, clashes, got, expected, remedy in rules if clashes
    ]
