"""The privacy section enters a README once, and is replaced, not repeated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shuffled_dpsgd.accounting import PrivacyClaim
from shuffled_dpsgd.integrations.trainer_files import (
    BEGIN,
    PRIVATE,
    with_privacy_section,
    write_card_files,
)
from shuffled_dpsgd.training import PrivacyCard, PrivacyOptions, make_plan, write_card


def card(epsilon: float) -> PrivacyCard:
    plan = make_plan(
        PrivacyOptions(
            dataset_size=10,
            expected_batch_size=2,
            num_steps=1,
            noise_multiplier=1.0,
            delta=1e-5,
            shuffle="off",
        ),
        sizes={"w": 4},
        moved=frozenset(),
    )
    claim = PrivacyClaim(epsilon=epsilon, delta=1e-5, method="PLD", kind="proven")
    return replace(write_card(plan, num_steps=0), certified=claim)


def test_section_is_added_at_the_end() -> None:
    text = with_privacy_section("# Model\n\nText.\n", card(1.0))
    assert text.startswith("# Model\n\nText.\n")
    assert f"## Privacy\n\n{PRIVATE}\n\n```text\n{card(1.0)}\n```" in text
    assert "ε = 1 (proven)" in text


def test_section_is_replaced_in_place() -> None:
    first = with_privacy_section("# Model\n", card(1.0)) + "\n## After\n"
    second = with_privacy_section(first, card(2.0))
    assert second.count(BEGIN) == 1
    assert "ε = 2 (proven)" in second
    assert "ε = 1 (proven)" not in second
    assert second.endswith("\n## After\n")
    assert with_privacy_section(second, card(2.0)) == second


def test_readme_is_created_with_metadata(tmp_path: Path) -> None:
    write_card_files(tmp_path, card(1.0))
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: transformers\n")
    assert f"# {tmp_path.name}" in text
    assert (tmp_path / "privacy_card.txt").read_text() == f"{card(1.0)}\n"
