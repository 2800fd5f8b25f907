"""Which weights a card is about: digests of every tensor that was released.

A card says nothing about weights that were trained further, and `model.save_pretrained` and
`torch.save` do not check. So the card carries a digest of each tensor as `release()` left it.
`compare_weights` says whether a saved model in any format has those tensors, and a `SaveWatch` on
the model warns when other weights are saved.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.runtime.shards import all_held, parts_of

_DIGITS = 24


class ChangedWeightsWarning(UserWarning):
    """A `state_dict` was taken of weights that differ from those `release()` left."""


def describe_weights(model: nn.Module) -> dict[str, list[str]]:
    """Digests of the trained tensors, and of all others that a saved model has."""
    trained = (p for p in model.parameters() if p.requires_grad)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ChangedWeightsWarning)  # This saves nothing.
        state = model.state_dict()
    every = (v for v in state.values() if isinstance(v, Tensor))
    known = digests(trained)
    return {"trained": sorted(known), "others": sorted(digests(every) - known)}


@dataclass(frozen=True)
class SaveWatch:
    """Warns when the `state_dict` is taken of a model without the `trained` tensors.

    It stays on the model and on copies of it. In a pickle, which may be loaded without this
    library, it is replaced by a module that does nothing.
    """

    trained: frozenset[str]

    def __call__(self, model: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not self.trained <= digests(model.parameters()):
            warnings.warn(
                "the weights about to be saved are others than release() left, which the privacy "
                "card is about: publish no card with them, unless they were made of released "
                "weights without the private records. ChangedWeightsWarning can be filtered",
                ChangedWeightsWarning,
                stacklevel=4,
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return type, (nn.Identity(),)

    def __deepcopy__(self, memo: Any) -> SaveWatch:
        return self


def watch_saves(model: nn.Module, trained: Iterable[str] | None) -> None:
    """Replace any watch on the model by one for these digests, or remove it for None."""
    for module in model.modules():
        hooks = module._state_dict_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, SaveWatch)]:
            del hooks[key]
    if trained is not None:
        model.register_state_dict_pre_hook(SaveWatch(frozenset(trained)))


def compare_weights(card: Mapping[str, Any], saved: Any) -> None:
    """Refuse saved weights that differ from those a card is about.

    `card` is the card's JSON; `saved` a folder or file of weights, a state dict or a model. What is
    saved may lack tensors that were not trained, as an adapter alone does, and names do not matter.
    A copy in another type is not the same to a digest.

    Raises:
        InvalidArgumentError: a trained tensor is missing, or one is there that nobody released.
    """
    weights = card.get("weights")
    if not weights:
        raise InvalidArgumentError(
            "card",
            expected="a card with digests of released weights",
            got="one without",
            remedy="write it after private.release(); a model under fully_shard has none",
        )
    found = digests(_tensors_of(saved))
    missing = len(set(weights["trained"]) - found)
    if missing:
        raise _refusal(f"{missing} of {len(weights['trained'])} trained tensors that are others")
    strange = len(found - {*weights["trained"], *weights["others"]})
    if strange:
        raise _refusal(f"{strange} tensors beside them that nobody released")


def digests(tensors: Iterable[Tensor]) -> set[str]:
    """Digests by content and not by name; tied tensors count once."""
    found = set()
    for tensor in chain.from_iterable(map(parts_of, all_held(tensors))):
        whole = hashlib.sha256(f"{tensor.dtype}:{tuple(tensor.shape)}:".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        whole.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
        found.add(whole.hexdigest()[:_DIGITS])
    return found


def _tensors_of(saved: Any) -> list[Tensor]:
    if isinstance(saved, nn.Module):
        saved = saved.state_dict()
    if isinstance(saved, Mapping):
        return [value for value in saved.values() if isinstance(value, Tensor)]
    path = Path(saved)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    files = files or sorted([*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")])
    if not files:
        raise InvalidArgumentError(
            "saved",
            expected="a folder or a file of weights",
            got=str(saved),
            remedy="pass what save_pretrained or torch.save(model.state_dict()) wrote",
        )
    found: list[Tensor] = []
    for file in files:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            found += load_file(file).values()
        else:
            found += _tensors_of(torch.load(file, map_location="cpu", weights_only=True))
    return found


def _refusal(got: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        "saved",
        expected="the weights that release() left, which the privacy card is about",
        got=got,
        remedy="save right after release(), in the type they were trained in; weights that were "
        "trained on without privacy have no claim",
    )
