"""What a private Trainer keeps in its folder: a ledger, parts of checkpoints, the privacy card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from shuffled_dpsgd.errors import CheckpointError
from shuffled_dpsgd.reports.page import card_files
from shuffled_dpsgd.training import (
    PrivacyCard,
    PrivateTraining,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)

LEDGER_FILE = "privacy_ledger.jsonl"
PRIVACY_FOLDER = "privacy"
UPLOADED = "_uploaded"
BEGIN = "<!-- privacy-card:begin -->"
END = "<!-- privacy-card:end -->"
HEADER = """---
library_name: transformers
tags:
- differential-privacy
---

# {title}
"""
PRIVATE = (
    "Trained with differential privacy by `shuffled-dpsgd`. The certified ε is what may be "
    "relied on; the paper's estimate is heuristic and not a guarantee."
)
NOT_PRIVATE = (
    "Trained by `shuffled-dpsgd` without noise or without a clip: this model is not private."
)


def claim_ledger(ledger: Path, *, resuming: bool) -> None:
    """Refuse to begin where another run has spent privacy."""
    if ledger.exists() and not resuming:
        raise CheckpointError(
            f"{ledger}: an earlier run spent privacy here; resume it "
            "(resume_from_checkpoint=True) or choose another output_dir"
        )
    ledger.parent.mkdir(parents=True, exist_ok=True)


def save_private_part(
    private: PrivateTraining, checkpoint: str, *, extras: Mapping[str, Any], only_model: bool
) -> None:
    """Put what a private run needs to go on into one of the Trainer's checkpoints.

    Weights go in as well where the Trainer's own file lacks some, as with adapters, or is alone.
    """
    model: nn.Module = private.model
    whole = isinstance(model, PreTrainedModel) and not hasattr(model, "peft_config")
    folder = Path(checkpoint) / PRIVACY_FOLDER
    save_checkpoint(private, folder, extras=extras, keep=1, weights=only_model or not whole)


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


def write_card_files(directory: Path, card: PrivacyCard) -> None:
    """The card in the model's README, and as text, JSON and a page of its own."""
    readme = directory / "README.md"
    title = HEADER.format(title=directory.name)
    old = readme.read_text(encoding="utf-8") if readme.exists() else title
    readme.write_text(with_privacy_section(old, card), encoding="utf-8")
    for name, text in card_files(card).items():
        (directory / name).write_text(text, encoding="utf-8")


def with_privacy_section(readme: str, card: PrivacyCard) -> str:
    """`readme` with its privacy section replaced, or added at the end, the card's text unchanged.

    Works on a README without one, and again on its own result.
    """
    about = PRIVATE if card.private else NOT_PRIVATE
    section = f"{BEGIN}\n## Privacy\n\n{about}\n\n```text\n{card}\n```\n{END}"
    if BEGIN in readme and END in readme:
        before, _, rest = readme.partition(BEGIN)
        return f"{before}{section}{rest.partition(END)[2]}"
    separator = "\n" if readme.endswith("\n") or not readme else "\n\n"
    return f"{readme}{separator}{section}\n"
