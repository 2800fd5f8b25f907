"""The model of a run: loaded by name, then prepared as its configuration asks."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError
from torch import nn

from shuffled_dpsgd.errors import InvalidArgumentError, MissingExtraError
from shuffled_dpsgd.models import Head, checkpoint_activations, load_model, seeded
from shuffled_dpsgd.tasks.config import ModelConfig
from shuffled_dpsgd.tasks.embeddings import find_input_embeddings


def prepare_model(
    config: ModelConfig, *, head: Head, num_labels: int | None = None, seed: int = 0
) -> nn.Module:
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
    """transformers draws bars of its own while it loads and saves, through the one on screen."""
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
    """Freeze what `freeze` matches, all that `train_only` does not, or the input embeddings.

    Patterns are those of the shell: `*` stands for anything.

    Raises:
        InvalidArgumentError: a pattern matches nothing, or nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    for key, patterns in (("freeze", config.freeze), ("train_only", config.train_only)):
        for pattern in patterns:
            if not fnmatch.filter(names, pattern):
                raise InvalidArgumentError(
                    f"model.{key}",
                    expected="patterns of parameter names, each matching one at least",
                    got=pattern,
                    remedy=f"names are like {names[0]} and {names[-1]}; * stands for anything",
                )
    for name, parameter in model.named_parameters():
        frozen = any(fnmatch.fnmatchcase(name, pattern) for pattern in config.freeze)
        if config.train_only:
            frozen = not any(fnmatch.fnmatchcase(name, p) for p in config.train_only)
        if frozen:
            parameter.requires_grad_(False)
    if config.embeddings != "train":
        _freeze_embeddings(model, required=config.embeddings == "freeze")
    if not any(p.requires_grad for p in model.parameters()):
        raise InvalidArgumentError(
            "model.freeze", expected="something left to train", got=list(config.freeze)
        )


def _freeze_embeddings(model: nn.Module, *, required: bool) -> None:
    """Freeze what the model turns tokens into vectors with; if it is not `required`, where found.

    Raises:
        InvalidArgumentError: the embeddings are required and cannot be told.
    """
    found = find_input_embeddings(model)
    if required and found.why_not is not None:
        raise InvalidArgumentError(
            "model.embeddings",
            expected="a model whose input embeddings can be told from its structure",
            got=found.why_not,
            remedy="name them by patterns in model.freeze",
        )
    for name in found.names:
        model.get_parameter(name).requires_grad_(False)


def _with_lora(model: nn.Module, head: Head, rank: int) -> nn.Module:
    try:
        import peft
    except ImportError as error:
        raise MissingExtraError("peft", extra="hf", purpose="model.lora_rank") from error
    kinds = {"sequence": "SEQ_CLS", "causal-lm": "CAUSAL_LM", "image": None}
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        task_type=kinds[head],
        target_modules="all-linear" if head == "image" else None,
        modules_to_save=["classifier"] if head == "image" else None,
    )
    return peft.get_peft_model(model, settings)
