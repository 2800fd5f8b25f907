"""TRL's trainers with private steps: fine-tuning on chats and completions, and on preferences.

TRL prepares model, adapters, chat templates and data as always. What changes is that every record,
or every preference pair, has a loss of its own, which is clipped by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from shuffled_dpsgd.errors import require
from shuffled_dpsgd.integrations.hf_trainer import DPTrainer
from shuffled_dpsgd.integrations.pair_losses import (
    Answers,
    answer_logps,
    pair_losses,
    taking_pairs,
    token_weights,
)
from shuffled_dpsgd.integrations.per_sample_loss import IGNORED_LABEL, next_token_losses
from shuffled_dpsgd.runtime.notices import say_once

PACKED = "sequence after packing"
_SIDES = ("chosen", "rejected")
_STACKED = ("input_ids", "attention_mask", "completion_mask")


class DPSFTTrainer(DPTrainer, SFTTrainer):
    """TRL's `SFTTrainer` with private steps. A record is a row of `train_dataset`.

    A record's loss is the mean over its own labelled tokens. With packing, several people's texts
    may share a row, so `unit` of `privacy` must say that a packed sequence is what is protected.
    """

    replaces = ("trl.trainer.sft_trainer",)

    def __init__(
        self, model: Any = None, args: Any = None, *, privacy: Any, **options: Any
    ) -> None:
        packs = getattr(args, "packing", False)
        require(
            not packs or privacy.unit == PACKED,
            "packing",
            "False, so that a row is one record",
            True,
            "ε is about rows: a packed row joins several records, and a record cut in two is in "
            "two rows; if a packed sequence is what you want to protect, say "
            f"unit={PACKED!r} in PrivacyArguments",
        )
        super().__init__(model=model, args=args, privacy=privacy, **options)
        if packs:
            # TRL would join the rows of a batch. Here rows stay apart; positions separate texts.
            self.data_collator.padding_free = self.padding_free = False
            self.data_collator.return_position_ids = True
        keep_adapters_precise(self.model)

    def _usual_args(self, model: Any) -> SFTConfig:
        return SFTConfig(f"{_name_of(model)}-SFT")

    def per_sample_losses(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """The mean over the labelled tokens of each record."""
        if self._per_sample_loss is not None:
            return super().per_sample_losses(model, inputs)
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        if self.args.packing:
            # Without a mask, the model starts a new text wherever positions start again at 0.
            del inputs["attention_mask"]
            labels = labels.masked_fill(inputs["position_ids"] == 0, IGNORED_LABEL)
        logits = model(**inputs, use_cache=False).logits
        dynamic = self.args.loss_type == "dft"
        smoothing = 0.0 if dynamic else self.args.label_smoothing_factor
        # Prompt learning puts virtual tokens in front.
        return next_token_losses(logits[:, -labels.shape[1] :], labels, smoothing, dynamic)


class DPDPOTrainer(DPTrainer, DPOTrainer):
    """TRL's `DPOTrainer` with private steps. A record is a preference pair, clipped as one.

    The reference's log-probabilities are computed as in TRL: by a reference model, with adapters
    switched off, or beforehand. The reference is public, and no gradient comes from it.
    """

    replaces = ("trl.trainer.dpo_trainer",)

    def __init__(
        self, model: Any = None, args: Any = None, *, privacy: Any, **options: Any
    ) -> None:
        super().__init__(model=model, args=args, privacy=privacy, **options)
        refused = {
            "torch_compile": (self.args.torch_compile, "it has not been tested with them"),
            "images": (self._is_vision_dataset, "they have not been tested: use texts"),
            "per_sample_loss": (self._per_sample_loss, "loss_type of DPOConfig chooses the loss"),
            "label_smoothing_factor": (
                self.args.label_smoothing_factor,
                "DPO does not use it: its smoothing is label_smoothing of DPOConfig",
            ),
        }
        for name, (got, remedy) in refused.items():
            require(not got, name, "no such option for preference pairs", got, remedy)
        keep_adapters_precise(self.model)

    def _usual_args(self, model: Any) -> DPOConfig:
        return DPOConfig(f"{_name_of(model)}-DPO")

    def per_sample_losses(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """The loss of each pair."""
        references = self._references(inputs)
        labels = {side: _labels(inputs, side) for side in _SIDES}
        weights = token_weights(labels["chosen"], labels["rejected"], self.ld_alpha)
        found = model(**{side: _of_model(inputs, side) for side in _SIDES})
        chosen, rejected = (
            Answers(
                logps=answer_logps(found[side], labels[side], weight),
                ref_logps=references[side],
                tokens=(labels[side] != IGNORED_LABEL).sum(1),
            )
            for side, weight in zip(_SIDES, weights, strict=True)
        )
        kinds = zip(self.loss_types, self.loss_weights, strict=True)
        losses = [w * pair_losses(kind, chosen, rejected, self.args) for kind, w in kinds]
        return torch.stack(losses).sum(0)

    def _references(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        names = {side: f"ref_{side}_logps" for side in _SIDES}
        if names["chosen"] in inputs:
            return {side: inputs[name] for side, name in names.items()}
        stacked = {
            name: torch.cat([inputs[f"{side}_{name}"] for side in _SIDES]) for name in _STACKED
        }
        found = self.compute_ref_log_probs(self.ref_model or self.model, stacked)
        return dict(zip(_SIDES, found, strict=True))

    def _calling_model(self) -> AbstractContextManager[None]:
        return taking_pairs(self.model)

    def _collator(self) -> Callable[[list[Any]], Any]:
        return PairCollator(super()._collator())


@dataclass(frozen=True)
class PairCollator:
    """TRL's collator puts chosen answers above rejected ones; here every pair is one row."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        """The batch with `chosen_` and `rejected_` before the names of what TRL stacks."""
        found = {}
        for name, value in self.collate(samples).items():
            if len(value) == len(samples):
                found[name] = value
            else:
                found |= {
                    f"{s}_{name}": part for s, part in zip(_SIDES, value.chunk(2), strict=True)
                }
        return found


def _name_of(model: Any) -> str:
    """The last part of a model's name, as TRL makes folders of it."""
    return str(model if isinstance(model, str) else model.config.name_or_path).rpartition("/")[2]


def _of_model(inputs: dict[str, Any], side: str) -> dict[str, Any]:
    names = ("input_ids", "attention_mask")
    return {name: inputs[f"{side}_{name}"] for name in names} | {"use_cache": False}


def _labels(inputs: dict[str, Any], side: str) -> Tensor:
    """The answer's tokens, without the prompt and the padding."""
    ids, mask = inputs[f"{side}_input_ids"], inputs[f"{side}_completion_mask"]
    return cast(Tensor, ids.masked_fill(mask == 0, IGNORED_LABEL))


def keep_adapters_precise(model: nn.Module) -> None:
    """Adapters in float32, where TRL has rounded those of a quantised model to bfloat16.

    Noise makes private updates small; most would be rounded away.
    """
    rounded = [p for p in model.parameters() if p.requires_grad and p.dtype == torch.bfloat16]
    quantised = any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8))
    if rounded and quantised:
        say_once("adapters are trained in float32: in bfloat16 most updates are rounded away")
        for parameter in rounded:
            parameter.data = parameter.data.float()
