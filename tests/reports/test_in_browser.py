"""In a browser, pages fit phones and desks, in the light and in the dark."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from reports.browser import BROWSER, SCHEMES, WIDTHS, measure
from shuffled_dpsgd.reports import RunView, card_page, report_page
from shuffled_dpsgd.training import AuditedBound, PrivacyCard

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine"),
]
LONG = "model.safetensors sha256 " + 8 * "0123abcd"
FACTS = {
    "model": {"gradient_checkpointing_of_every_other_layer": False},
    "privacy": {"check_rate": 1 / 256},
    "data": {"path": "/a/very/long/path" * 8},
}


def pages(view: RunView, card: PrivacyCard) -> dict[str, str]:
    bound = AuditedBound(
        adversary="weights re-aligned (constant along the axis)",
        estimator="order statistics",
        epsilon=1.0,
        delta=1e-5,
        confidence=0.95,
    )
    full = card.about(model="a-rather-long-model-name" * 3, weights=LONG).with_audits(bound)
    report = report_page(view, full, facts=FACTS)
    return {"report": report, "card": card_page(full)}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["report", "card"])
def test_nothing_sticks_out_and_colours_follow_the_scheme(
    view: RunView, card: PrivacyCard, tmp_path: Path, name: str, width: int, scheme: str
) -> None:
    shown = measure(pages(view, card)[name], tmp_path, width=width, scheme=scheme)
    assert shown.width == width
    assert shown.sticking_out == []
    assert (brightness(shown.background) < brightness(shown.ink)) == (scheme == "dark")
    assert abs(brightness(shown.background) - brightness(shown.ink)) > 400


def brightness(colour: str) -> int:
    """The sum of red, green and blue, 0 to 765."""
    return sum(int(part) for part in re.findall(r"\d+", colour)[:3])
