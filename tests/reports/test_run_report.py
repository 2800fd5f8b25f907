"""The page is one file, says what each ε is worth, and escapes what it is given."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

from shuffled_dpsgd.permutation import PermutationSpec
from shuffled_dpsgd.permutation.spec import Group, Member
from shuffled_dpsgd.reports import RunView, card_page, report_page, write_report
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


def test_report_is_one_self_contained_page(view: RunView, card: PrivacyCard) -> None:
    text = report_page(view, card, spec=None, facts={"privacy": {"epsilon": 3.0}})
    check_page(text)
    assert text.count("<svg") == 7
    assert "a &lt;made-up&gt; run" in text
    assert "privacy.<wbr>epsilon" in text
    assert "No ε covers publishing them" in text


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


def test_permutation_is_summarised(view: RunView, card: PrivacyCard) -> None:
    spec = PermutationSpec(
        scope="paper",
        groups=(
            Group(
                name="mlp",
                kind="mlp-hidden",
                size=4,
                members=(Member(parameter="w", axis=0),),
            ),
        ),
        shapes={"w": (4, 2), "b": (3,)},
        unmoved={"b": "class axis"},
    )
    text = report_page(view, card, spec=spec, facts={})
    assert "8 of 11 parameters (72.7%)" in text
    assert "class axis" in text
    assert "credits this with nothing" in text


def test_files_of_a_report(view: RunView, card: PrivacyCard, tmp_path: Path) -> None:
    written = write_report(tmp_path, view, card, spec=None, facts={})
    assert all(path.stat().st_size > 0 for path in written)
    names = {path.relative_to(tmp_path).as_posix() for path in written}
    assert {"report.html", "privacy_card.txt", "privacy_card.json", "privacy_card.html"} <= names
    assert {"figures/epsilon.png", "figures/epsilon.svg"} <= names
    assert json.loads((tmp_path / "privacy_card.json").read_text()) == card.to_json()
    assert (tmp_path / "privacy_card.txt").read_text() == f"{card}\n"


def test_pages_suit_dark_screens_and_small_ones(view: RunView, card: PrivacyCard) -> None:
    text = report_page(view, card.about(model="a <b>"), spec=None, facts={})
    assert "prefers-color-scheme: dark" in text
    assert "min(24rem, 100%)" in text
    assert "a &lt;b&gt;" in text
    assert 'class="claim small"' in text
    assert "; small print: " in text
    assert "fill: #ffffff" not in text  # no white plates behind the figures
    assert "10^" not in re.sub("<svg.*?</svg>", "", text, flags=re.DOTALL)


def test_steps_are_whole_numbers(view: RunView) -> None:
    from shuffled_dpsgd.reports.figures import draw_loss

    figure = draw_loss(replace(view, records=view.records[:3]))
    assert figure is not None
    ticks = figure.axes[0].get_xticks()
    assert all(float(tick).is_integer() for tick in ticks)
