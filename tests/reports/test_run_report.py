"""The page is one file, says what each ε is worth, and escapes what it is given."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib import pyplot as plt

from shuffled_dpsgd.reports import RunView, card_page, report_page, run_report, write_report
from shuffled_dpsgd.training import AuditedBound, PrivacyCard

VOID = {"meta", "br", "link", "wbr"}


class Balanced(HTMLParser):
    """Fails on a tag that is closed but not open."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag


def check_page(text: str) -> None:
    parser = Balanced()
    parser.feed(text)
    assert parser.stack == []
    assert "<script" not in text
    references = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert [target for target in references if not target.startswith("#")] == []


@pytest.fixture(scope="module")
def written(
    tmp_path_factory: pytest.TempPathFactory, view: RunView, card: PrivacyCard
) -> tuple[Path, list[Path]]:
    """A folder with everything, and what was said to be in it; its figures take a while."""
    folder = tmp_path_factory.mktemp("report")
    facts = {"privacy": {"epsilon": 3.0}}
    return folder, write_report(folder, view, card.about(model="a <b>"), facts=facts)


@pytest.fixture(scope="module")
def page(written: tuple[Path, list[Path]]) -> str:
    return (written[0] / "report.html").read_text(encoding="utf-8")


def test_report_is_one_self_contained_page(page: str) -> None:
    check_page(page)
    assert page.count("<svg") == 6
    assert "a &lt;made-up&gt; run" in page
    assert "privacy.<wbr>epsilon" in page
    assert "No ε covers publishing them" in page


def test_card_keeps_the_order_of_claims(card: PrivacyCard) -> None:
    text = card_page(card)
    check_page(text)
    places = [text.index(part) for part in ("ε · proven", "estimate · heuristic", "audited")]
    assert places == sorted(places)
    assert "clip &lt;each&gt; sample" in text
    assert "d = 1,000" in text
    assert "not a guarantee" in text


def test_the_card_says_what_the_text_says(card: PrivacyCard) -> None:
    full = replace(card, exactness="exact <indeed>").about(data="films & more")
    text = unescape(re.sub("<[^>]*>", "", card_page(full)))
    said = [
        *full.assumptions,
        *full.not_covered,
        *full.mechanism,
        full.exactness,
        full.threat_model,
    ]
    for line in [*said, full.target, full.sampler, full.randomness, "films & more"]:
        assert str(line) in text


def test_refuted_claims_are_marked(card: PrivacyCard) -> None:
    bound = AuditedBound(
        adversary="axis sums", estimator="CP", epsilon=1.0, delta=1e-5, confidence=0.95
    )
    text = card_page(card.with_audits(bound))
    assert '<span class="refuted">paper: claim refuted</span>' in text
    assert "certified: consistent with the audit" in text
    assert "ε ≥ 1" in text


def test_uncertified_runs_say_why(card: PrivacyCard) -> None:
    text = card_page(replace(card, certified=None, paper=None, why_not_certified=("no noise",)))
    check_page(text)
    assert "no noise" in text
    assert "proven" not in text.split("<body>")[1].split("target")[0]


def test_files_of_a_report(card: PrivacyCard, written: tuple[Path, list[Path]]) -> None:
    folder, paths = written
    assert all(path.stat().st_size > 0 for path in paths)
    names = {path.relative_to(folder).as_posix() for path in paths}
    assert {"report.html", "privacy_card.txt", "privacy_card.json", "privacy_card.html"} <= names
    assert {"figures/epsilon.png", "figures/epsilon.svg"} <= names
    shown = card.about(model="a <b>")
    assert json.loads((folder / "privacy_card.json").read_text()) == shown.to_json()
    assert (folder / "privacy_card.txt").read_text() == f"{shown}\n"


def test_a_page_has_the_figures_that_there_are(
    view: RunView, card: PrivacyCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = plt.figure(figsize=(1, 1))
    monkeypatch.setattr(run_report, "draw_all", lambda view: {"loss": figure})
    text = report_page(view, card, facts={})
    check_page(text)
    assert text.count("<svg") == 1


def test_pages_suit_dark_screens_and_small_ones(page: str) -> None:
    assert "prefers-color-scheme: dark" in page
    assert "min(24rem, 100%)" in page
    assert "a &lt;b&gt;" in page
    assert 'class="claim small"' in page
    assert ">small print: " in page
    assert "fill: #ffffff" not in page  # no white plates behind the figures
    assert "10^" not in re.sub("<svg.*?</svg>", "", page, flags=re.DOTALL)


def test_steps_are_whole_numbers(view: RunView) -> None:
    from shuffled_dpsgd.reports.figures import draw

    figure = draw("loss", replace(view, records=view.records[:3]))
    assert figure is not None
    ticks = figure.axes[0].get_xticks()
    assert all(float(tick).is_integer() for tick in ticks)


def test_rows_that_were_trained_on_are_not_called_held_out(
    view: RunView, card: PrivacyCard
) -> None:
    told = report_page(replace(view, shared_rows=3), card, facts={}, figures={"score": ""})
    assert "On data the model was trained on as well" in told
    assert "3 of the held-out rows are training records" in told
    apart = report_page(view, card, facts={}, figures={"score": ""})
    assert "On data the model was not trained on" in apart
