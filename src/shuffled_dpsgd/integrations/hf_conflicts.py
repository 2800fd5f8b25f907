"""Refuses what contradicts private training, apart from fields of the Trainer's arguments.

Those are in `trainer_fields.toml`. Here are processes, options of `Trainer(...)`, overridden
methods that would never be called, decisions by scores on trained rows, and models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from transformers import EarlyStoppingCallback

from shuffled_dpsgd.errors import require
from shuffled_dpsgd.runtime.notices import warn_caller
from shuffled_dpsgd.runtime.shards import is_wrapped
from shuffled_dpsgd.training.rows import shared_rows

# accelerate's names for processes that each hold the whole model.
_SERVED = ("NO", "MULTI_CPU", "MULTI_GPU")


def check_processes(args: Any) -> None:
    """Refuse several devices in one process."""
    remedy = "restrict CUDA_VISIBLE_DEVICES to one"
    require(args.n_gpu <= 1, "n_gpu", "one device", args.n_gpu, remedy)


def check_accelerator(accelerator: Any) -> None:
    """Refuse what `accelerate launch` or its configuration asks for besides plain processes.

    It is configured by environment variables, which `TrainingArguments` do not show.
    """
    kind, precision = str(accelerator.distributed_type.value), accelerator.mixed_precision
    require(
        kind in _SERVED,
        "distributed_type",
        "processes that each hold the whole model (MULTI_GPU or MULTI_CPU)",
        f"{kind}, from accelerate's configuration",
        "start it with torchrun, or with accelerate launch --multi_gpu and no other plugin",
    )
    require(
        precision in ("no", "bf16"),
        "mixed_precision",
        "no or bf16",
        f"{precision}, from accelerate's configuration",
        "a scaler would rescale gradients before the clip: launch with --mixed_precision bf16",
    )
    plan = getattr(accelerator, "parallelism_config", None)
    remedy = "processes may divide the batch, but not the model: launch without it"
    require(plan is None, "parallelism_config", "nothing", plan, remedy)


def check_trainer_options(options: Mapping[str, Any]) -> None:
    """Refuse streamed data, and options of `Trainer(...)` that replace the loss or the model."""
    if options.get("train_dataset") is not None:
        size_of_data(options["train_dataset"])
    require(
        options.get("compute_loss_func") is None,
        "compute_loss_func",
        "per_sample_loss=function(outputs, labels), one loss per sample",
        "a function of the whole batch",
        "a loss averaged over the batch cannot be clipped per sample",
    )
    remedy = "every trial would spend privacy of its own: pass one model as model="
    require(options.get("model_init") is None, "model_init", "model=", "a function", remedy)


def size_of_data(data: Any) -> int:
    """The number of records.

    Raises:
        InvalidArgumentError: the data are a stream, whose length is unknown.
    """
    require(
        hasattr(data, "__len__"),
        "train_dataset",
        "a map-style data set (with len() and indexing)",
        type(data).__name__,
        "Poisson sampling needs random access to every record: load the data without "
        "streaming=True",
    )
    return len(data)


# Methods of the Trainer that a private run never calls, and what to do instead.
_NOT_CALLED = {
    "compute_loss": "pass per_sample_loss=function(outputs, labels), or override "
    "per_sample_losses(model, inputs): one loss per sample, which can be clipped",
    "get_train_dataloader": "records are drawn from train_dataset by Poisson sampling: prepare "
    "that, and data_collator",
    "_get_train_sampler": "records are drawn by Poisson sampling, the sampler accounted for",
}
# Methods that are called only if their class comes before ours.
_IN_FRONT = (
    *("training_step", "get_total_train_batch_size"),
    *("_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler"),
)


def check_overrides(trainer: Any, own: type, replaced: Sequence[str]) -> None:
    """Refuse overridden methods that would never be called; `own` is our Trainer.

    Modules in `replaced` may override them: `trainer` computes their losses record by record.
    """
    classes = type(trainer).__mro__
    behind = dict.fromkeys(_IN_FRONT, f"put the class in front of {own.__name__}")
    for place, owner in enumerate(classes):
        if owner.__module__.startswith(("transformers.", __package__, *replaced)):
            continue
        never = _NOT_CALLED | (behind if place > classes.index(own) else {})
        for name, remedy in never.items():
            wanted, got = "no override of a method that is never called", "an override"
            require(name not in vars(owner), f"{owner.__name__}.{name}", wanted, got, remedy)


def check_deciders(
    args: Any, callbacks: Sequence[Any], train_data: Any, heldout: Mapping[str, Any]
) -> None:
    """Refuse to let a score decide that is computed from rows the model is trained on.

    The weights would then reveal the outcome of a decision that was made without noise.
    """
    by = ["load_best_model_at_end"] * bool(args.load_best_model_at_end)
    by += ["save_strategy='best'"] * (getattr(args.save_strategy, "value", "") == "best")
    plateau = getattr(args.lr_scheduler_type, "value", "") == "reduce_lr_on_plateau"
    by += ["lr_scheduler_type='reduce_lr_on_plateau'"] * plateau
    by += ["EarlyStoppingCallback" for each in callbacks if isinstance(each, EarlyStoppingCallback)]
    for name, part in heldout.items() if by else ():
        count = shared_rows(train_data, part)
        require(
            not count,
            "eval_dataset",
            f"no row of the training data, because {by[0]} decides by a score",
            f"{count} shared row{'s' if count > 1 else ''}{name and f' in {name}'}",
            f"evaluate on other records, or leave {by[0]} out",
        )


def check_model(model: Any) -> None:
    """Refuse a sharded model, which the Trainer would not save whole."""
    require(
        not (isinstance(model, nn.Module) and is_wrapped(model)),
        "model",
        "a model that every rank holds whole",
        "one under fully_shard, which the Trainer does not gather before it saves",
        "leave fully_shard out, or use make_private and a loop of your own",
    )
    config = getattr(model, "config", None)
    if getattr(config, "output_router_logits", False):
        warn_caller(
            "the router's auxiliary loss is left out: it is a mean over the tokens of a batch, and "
            "cannot be split by sample; experts may be used unevenly"
        )
