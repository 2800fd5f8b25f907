"""From a name to a model: the folder of a saved model, else the catalogue, else the hub.

`build_model` reads the configuration only: catalogue names work offline, and models on the meta
device need no memory. `load_model` reads weights if there are any.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shuffled_dpsgd.errors import InvalidArgumentError, MissingExtraError, require
from shuffled_dpsgd.models.catalogue import CATALOGUE, Head, find_named

if TYPE_CHECKING:
    from torch import nn

_AUTO_CLASSES: Mapping[Head, str] = {
    "sequence": "AutoModelForSequenceClassification",
    "image": "AutoModelForImageClassification",
    "causal-lm": "AutoModelForCausalLM",
}


def build_model(
    name: str,
    *,
    device: str = "meta",
    num_labels: int | None = None,
    settings: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Any:
    """The named architecture without its published or saved weights.

    On the meta device it has shapes only; elsewhere its weights are drawn from `seed`, and torch's
    global generator stays as it was. `settings` override entries of the configuration.
    """
    changes = dict(settings or {})
    if num_labels is not None:
        changes["num_labels"] = num_labels
    config, architecture = _describe(name, changes)
    kind = _class_named(architecture)
    if kind is None:
        raise InvalidArgumentError(
            "model",
            expected="a configuration that names an architecture of transformers",
            got=architecture or "none",
            remedy="save the model with save_pretrained",
        )
    if num_labels is not None and not architecture.endswith("Classification"):
        raise InvalidArgumentError(
            "num_labels",
            expected="a model that classifies",
            got=architecture,
            remedy="leave the number of classes out",
        )
    import torch

    with torch.device(device), seeded(seed, device):
        return kind(config)


def load_model(
    name: str,
    *,
    head: Head,
    num_labels: int | None = None,
    seed: int = 0,
    from_scratch: bool = False,
) -> nn.Module:
    """The named model with its weights, and with the `head` that a task needs.

    Weights that are not saved anywhere, or all with `from_scratch`, are drawn from `seed`. They are
    float32, whatever is stored: small updates of half-precision weights would be rounded away.
    """
    if _adapter_in(name) is not None:
        return _load_adapter(name, head)
    source = weights_of(name)
    if source is None:
        require(CATALOGUE[name].head == head, "model", f"a model whose head is {head}", name)
        return build_model(name, device="cpu", num_labels=num_labels, seed=seed)
    import torch

    transformers = _transformers()
    auto = getattr(transformers, _AUTO_CLASSES[head])
    extra: dict[str, Any] = {} if num_labels is None else {"num_labels": num_labels}
    try:
        if from_scratch:
            config = transformers.AutoConfig.from_pretrained(source, **extra)
            with seeded(seed):
                return auto.from_config(config, dtype=torch.float32)
        mismatch = {} if num_labels is None else {"ignore_mismatched_sizes": True}
        with seeded(seed):
            return auto.from_pretrained(source, dtype=torch.float32, **extra, **mismatch)
    except OSError as error:
        raise _unknown(name, remedy=str(error).splitlines()[0]) from error


def _load_adapter(folder: str, head: Head) -> nn.Module:
    """The model that a folder's adapter (LoRA) was made for, with the adapter."""
    try:
        import peft
        import torch
    except ImportError as error:
        raise MissingExtraError("peft", extra="hf", purpose="adapters") from error
    transformers = _transformers()
    base = str(_adapter_in(folder))
    # The configuration beside the adapter has the labels of the training run.
    config = transformers.AutoConfig.from_pretrained(folder)
    try:
        model = getattr(transformers, _AUTO_CLASSES[head]).from_pretrained(
            base, config=config, dtype=torch.float32, ignore_mismatched_sizes=head != "causal-lm"
        )
    except OSError as error:
        raise _unknown(base, remedy=str(error).splitlines()[0]) from error
    return peft.PeftModel.from_pretrained(model, folder, is_trainable=True)


def _adapter_in(folder: str) -> str | None:
    """The name of the model that a folder's adapter belongs to, if it holds an adapter."""
    file = Path(folder) / "adapter_config.json"
    if not folder or not file.is_file():
        return None
    return str(json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"])


def weights_of(name: str) -> str | None:
    """The folder or hub name that weights and tokenizer come from; None: there are none."""
    if _is_saved(name):
        return name
    named = find_named(name)
    return name if named is None else named.checkpoint


def _describe(name: str, changes: Mapping[str, Any]) -> tuple[Any, str]:
    """The model's configuration, and the class it is the configuration of."""
    transformers = _transformers()
    named = None if _is_saved(name) else find_named(name)
    if named is not None:
        config = _class_named(named.config_class)(**{**named.settings, **changes})
        return config, named.architecture
    if not name:
        raise _unknown(name)
    try:
        with _quiet_hub():
            config = transformers.AutoConfig.from_pretrained(
                name, local_files_only=_is_saved(name), **changes
            )
    except (OSError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0]
        if not _is_saved(name):
            raise _unknown(name, remedy=reason) from error
        raise InvalidArgumentError(
            "model",
            expected=f"a configuration of transformers in {Path(name) / 'config.json'}",
            got=reason,
            remedy="save the model with save_pretrained",
        ) from error
    return config, next(iter(config.architectures or ()), "")


def _is_saved(name: str) -> bool:
    return bool(name) and (Path(name) / "config.json").is_file()


def _unknown(name: str, *, remedy: str = "") -> InvalidArgumentError:
    return InvalidArgumentError(
        "model",
        expected=f"one of {', '.join(CATALOGUE)}, the folder of a saved model, or a hub name",
        got=name,
        remedy=remedy,
    )


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """Silence the hub's retries; the final error is reported."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def seeded(seed: int, device: str = "cpu") -> Iterator[None]:
    """Inside, torch's generators start from `seed`; afterwards they are restored."""
    import torch

    drawn_on = [] if device in ("cpu", "meta") else [torch.device(device)]
    with torch.random.fork_rng(devices=drawn_on):
        torch.manual_seed(seed)
        yield


def checkpoint_activations(model: nn.Module) -> None:
    """Recompute activations in the backward, without reentrant checkpointing."""
    # The name from transformers 5.23 on, and the older one, which warns there.
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable: Any = next(getattr(model, name) for name in names if hasattr(model, name))
    enable({"use_reentrant": False})


def _class_named(name: str) -> Any:
    """A class of transformers, or the project's own beside them; None if there is none."""
    transformers = _transformers()
    from shuffled_dpsgd.models import pixels

    return getattr(transformers, name, None) or getattr(pixels, name, None)


def _transformers() -> Any:
    try:
        import transformers

        from shuffled_dpsgd.models import pixels  # noqa: F401  # it registers its classes
    except ImportError as error:
        raise MissingExtraError("transformers", extra="hf", purpose="Transformer models") from error
    return transformers
