"""The model of a run: loaded by name, then prepared as its configuration asks."""

from __future__ import annotations

from safetensors import SafetensorError
from torch import nn

from shuffled_dpsgd.errors import InvalidArgumentError, MissingExtraError
from shuffled_dpsgd.models import Head, load_model
from shuffled_dpsgd.tasks.config import ModelConfig


def prepare_model(
    config: ModelConfig, *, head: Head, num_labels: int | None = None, seed: int = 0
) -> nn.Module:
    """The model `config` names: a local folder, else the catalogue, else the hub.

    `from_scratch` keeps the architecture and draws new weights; `lora_rank` freezes the weights
    and adds trainable low-rank factors.
    """
    try:
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
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model if config.lora_rank is None else _with_lora(model, head, config.lora_rank)


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
