"""The privacy section of a model card: Markdown, put into a README between two markers."""

from __future__ import annotations

from pathlib import Path

from shuffled_dpsgd.training.card import PrivacyCard

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


def privacy_section(card: PrivacyCard) -> str:
    """The card as a Markdown section; its text is the card's own, unchanged."""
    return "\n".join(
        [
            BEGIN,
            "## Privacy",
            "",
            PRIVATE if card.private else NOT_PRIVATE,
            "",
            "```text",
            str(card),
            "```",
            END,
        ]
    )


def with_privacy_section(readme: str, card: PrivacyCard) -> str:
    """`readme` with its privacy section replaced, or added at the end.

    Works on a README without one, and again on its own result.
    """
    section = privacy_section(card)
    if BEGIN in readme and END in readme:
        before, _, rest = readme.partition(BEGIN)
        _, _, after = rest.partition(END)
        return f"{before}{section}{after}"
    separator = "\n" if readme.endswith("\n") or not readme else "\n\n"
    return f"{readme}{separator}{section}\n"


def update_readme(directory: Path, card: PrivacyCard, *, title: str) -> Path:
    """Write the section into `directory/README.md`, creating the file if need be."""
    path = directory / "README.md"
    old = path.read_text(encoding="utf-8") if path.exists() else HEADER.format(title=title)
    path.write_text(with_privacy_section(old, card), encoding="utf-8")
    return path
