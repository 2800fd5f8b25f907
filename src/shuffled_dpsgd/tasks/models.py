"""The model of a run: loaded by name, with some weights frozen and low-rank factors added."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from safetensors import SafetensorError
from torch import nn

from shuffled_dpsgd.errors import InvalidArgumentError, MissingExtraError
from shuffled_dpsgd.models import (
    Head,
    build_model,
    checkpoint_activations,
    load_model,
    seeded,
    weights_of,
)
from shuffled_dpsgd.tasks.config import ModelConfig, RunConfig

# A module made of these alone only embeds tokens.
_OF_EMBEDDINGS = (nn.Embedding, nn.LayerNorm, nn.Dropout, nn.Identity)
_TASK_TYPES = {"sequence": "SEQ_CLS", "causal-lm": "CAUSAL_LM", "image": None}


def prepare_model(
    config: ModelConfig, *, head: Head, num_labels: int | None = None, seed: int = 0
) -> Any:
    """The model `config` names: a local folder, else the catalogue, else the hub.

    `from_scratch` keeps the architecture and draws new weights; `lora_rank` freezes the weights
    and adds trainable low-rank factors. Whatever is drawn is drawn from `seed`.
    """
    try:
        with no_progress_bars():
            model = load_model(
                config.name,
                head=head,
                num_labels=num_labels,
                seed=seed,
                from_scratch=config.from_scratch,
            )
    except InvalidArgumentError as error:
        raise error.about("model.name") from error
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise InvalidArgumentError(
            "model.name",
            expected="a saved model that transformers can load",
            got=config.name,
            remedy=(str(error) or type(error).__name__).splitlines()[0],
        ) from error
    if config.gradient_checkpointing:
        checkpoint_activations(model)
    choose_trained(model, config)
    if config.lora_rank is None:
        return model
    with seeded(seed):
        return _with_lora(model, head, config.lora_rank)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Inside, transformers shows no progress bars, which would break the one on screen."""
    try:
        from transformers.utils import logging
    except ImportError as error:
        raise MissingExtraError("transformers", extra="hf", purpose="Transformer models") from error
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def choose_trained(model: nn.Module, config: ModelConfig) -> None:
    """Freeze what `freeze` matches, all that `train_only` does not match, or input embeddings.

    Patterns are those of the shell: `*` stands for anything.
    """
    names = [name for name, _ in model.named_parameters()]
    matched = set()
    for key, patterns in (("freeze", config.freeze), ("train_only", config.train_only)):
        for pattern in patterns:
            found = {name for name in names if fnmatch.fnmatchcase(name, pattern)}
            if not found:
                raise InvalidArgumentError(
                    f"model.{key}",
                    expected="patterns of parameter names, each matching one at least",
                    got=pattern,
                    remedy=f"names are like {names[0]} and {names[-1]}; * stands for anything",
                )
            matched |= found
    frozen = {*names} - matched if config.train_only else matched
    if config.embeddings != "train":
        embeddings, why_not = find_input_embeddings(model)
        if why_not is not None and config.embeddings == "freeze":
            raise InvalidArgumentError(
                "model.embeddings",
                expected="a model whose input embeddings can be told from its structure",
                got=why_not,
                remedy="name them by patterns in model.freeze",
            )
        frozen |= {*embeddings}
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise InvalidArgumentError(
            "model.freeze", expected="something left to train", got=list(config.freeze)
        )


def find_input_embeddings(model: nn.Module) -> tuple[tuple[str, ...], str | None]:
    """The names of the parameters that embed tokens, or the reason why they cannot be found.

    They are the embedding that `get_input_embeddings` returns and what belongs to it in the module
    around it: everything, if that holds only embeddings and their norms (BERT), or else the other
    embeddings (positions in GPT-2). Weights that are shared with a head are not input embeddings.
    """
    getter: Any = getattr(model, "get_input_embeddings", None)
    words = None if getter is None else getter()
    if not isinstance(words, nn.Embedding):
        return (), "the model names no input embedding"
    everywhere = model.named_modules(remove_duplicate=False)
    paths = [path for path, module in everywhere if module is words]
    if len(paths) != 1:
        return (), "the input embedding stands in several places"
    parent = paths[0].rpartition(".")[0]
    around = model.get_submodule(parent)
    alone = all(isinstance(child, _OF_EMBEDDINGS) for child in around.children())
    prefix = f"{parent}." if parent else ""
    parameters = dict(model.named_parameters(remove_duplicate=False))

    def is_inside(name: str) -> bool:
        child = name.removeprefix(prefix).partition(".")[0]
        return name.startswith(prefix) and (
            alone or isinstance(getattr(around, child), nn.Embedding)
        )

    inside = tuple(filter(is_inside, parameters))
    taken = {id(parameters[name]) for name in inside}
    shared = [n for n, p in parameters.items() if n not in inside and id(p) in taken]
    if shared:
        return (), f"{shared[0]} shares the input embeddings' weights"
    return inside, None


def simpler_model(config: RunConfig, model: Any) -> tuple[str, int] | None:
    """The keys under [model] that ask for a simpler model, and its weights; None if there is none.

    For images it is a linear classifier of pixels; for texts, the head on a pre-trained encoder
    that is frozen.
    """
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    keys, count = "", trained
    if config.task in ("digits", "image-classification", "image-folder"):
        name = "linear-digits" if config.task == "digits" else "linear-images"
        shapes = build_model(name, num_labels=model.config.num_labels)
        keys, count = f'name = "{name}"', sum(p.numel() for p in shapes.parameters())
    elif config.task == "text-classification" and weights_of(config.model.name) is not None:
        # transformers calls the head `classifier`; peft keeps an untrained copy of it.
        sizes = {n: p.numel() for n, p in model.named_parameters() if "original_module" not in n}
        count = sum(size for name, size in sizes.items() if "classifier" in name)
        keys = 'train_only = ["*classifier*"]' if count else ""
    return (keys, count) if keys and count < trained else None


def describe_choices(config: RunConfig, model: nn.Module) -> str | None:
    """What the method chose for a run of `model`, in words; None if it chose nothing."""
    parts = []
    if "optimizer.schedule" in config.by_method:
        parts.append(f"{config.optimizer.schedule} schedule")
    if "training.weight_averaging" in config.by_method:
        parts.append(f"weights averaged with decay {config.training.weight_averaging:g}")
    if "model.embeddings" in config.by_method:
        why_not = find_input_embeddings(model)[1]
        sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
        total, trained = sum(n for n, _ in sizes), sum(n for n, trains in sizes if trains)
        share = f"{trained:,} of {total:,}"
        if total >= 1_000_000:
            share = f"{trained / 1e6:.1f} of {total / 1e6:.1f} million"
        parts.append(
            f"embeddings frozen ({share} weights trained)"
            if why_not is None
            else f"all weights trained, no embeddings frozen ({why_not})"
        )
    return f"{config.privacy.method}: {', '.join(parts)}" if parts else None


def _with_lora(model: nn.Module, head: Head, rank: int) -> nn.Module:
    try:
        import peft
    except ImportError as error:
        raise MissingExtraError("peft", extra="hf", purpose="model.lora_rank") from error
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        task_type=_TASK_TYPES[head],
        target_modules="all-linear" if head == "image" else None,
        modules_to_save=["classifier"] if head == "image" else None,
        # GPT-2 stores its matrices transposed.
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
    )
    return peft.get_peft_model(model, settings)
