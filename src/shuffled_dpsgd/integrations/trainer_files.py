"""What a private Trainer keeps in its folder: a ledger, parts of checkpoints, the privacy card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from shuffled_dpsgd.errors import CheckpointError
from shuffled_dpsgd.integrations.model_card import update_readme
from shuffled_dpsgd.reports import card_page
from shuffled_dpsgd.training import (
    PrivacyCard,
    PrivateTraining,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)

LEDGER_FILE = "privacy_ledger.jsonl"
PRIVACY_FOLDER = "privacy"


def claim_ledger(ledger: Path, *, resuming: bool) -> None:
    """Refuse to begin where another run has spent privacy."""
    if ledger.exists() and not resuming:
        raise CheckpointError(
            f"{ledger}: an earlier run spent privacy here; resume it "
            "(resume_from_checkpoint=True) or choose another output_dir"
        )
    ledger.parent.mkdir(parents=True, exist_ok=True)


def save_private_part(
    private: PrivateTraining, checkpoint: str, *, extras: Mapping[str, Any], weights: bool
) -> None:
    """Put what a private run needs to go on into one of the Trainer's checkpoints."""
    folder = Path(checkpoint) / PRIVACY_FOLDER
    save_checkpoint(private, folder, extras=extras, keep=1, weights=weights)


def load_private_part(
    private: PrivateTraining, checkpoint: str, *, extras: Mapping[str, Any]
) -> None:
    """Put a private run where one of the Trainer's checkpoints left it."""
    newest = latest_checkpoint(Path(checkpoint) / PRIVACY_FOLDER)
    if newest is None:
        raise CheckpointError(
            f"{checkpoint}: no {PRIVACY_FOLDER} folder, so not a checkpoint of a private run; "
            "resume from one this trainer saved"
        )
    load_checkpoint(private, newest, extras=extras)


def saves_all_weights(model: nn.Module, *, save_only_model: bool) -> bool:
    """Whether the Trainer's own file has every tensor: not with adapters, nor without it."""
    whole = isinstance(model, PreTrainedModel) and not hasattr(model, "peft_config")
    return whole and not save_only_model


def write_card_files(directory: Path, card: PrivacyCard) -> None:
    """The card in the model's README, and as text, JSON and a page of its own."""
    update_readme(directory, card, title=directory.name)
    (directory / "privacy_card.txt").write_text(f"{card}\n", encoding="utf-8")
    (directory / "privacy_card.json").write_text(card.dumps() + "\n", encoding="utf-8")
    (directory / "privacy_card.html").write_text(card_page(card), encoding="utf-8")
