"""Every relative link in the documents leads to a file, and every fragment to a heading."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
FILES = {
    path.as_posix()
    for folder in ("src", "shuffled_dpsgd_experiments", "tests", "benchmarks", "examples")
    for path in (ROOT / folder).rglob("*.py")
}
OUTSIDE = ("http://", "https://", "mailto:")


def links_in(text: str) -> list[str]:
    """Targets of links that lead to files, leaving code blocks out.

    >>> links_in("[a](b.md#c), ![d](e.svg), [f](https://g.org)")
    ['b.md#c', 'e.svg']
    """
    found = LINK.findall(FENCE.sub("", text))
    return [target for target in found if not target.startswith(OUTSIDE)]


def anchors_in(text: str) -> set[str]:
    """The fragments that GitHub and the site both make of a page's headings.

    >>> sorted(anchors_in("## What it's `for`\\n### A-b c\\n## Over ε"))
    ['a-b-c', 'what-its-for']
    """
    heads = re.findall(r"^#+ +(.+)$", FENCE.sub("", text), re.MULTILINE)
    github = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
    return github & {slugify(head, "-") for head in heads}


def broken(page: Path, root: Path = ROOT) -> list[str]:
    """The links of a page that lead nowhere."""
    found = []
    for target in links_in(page.read_text()):
        path, _, fragment = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        inside = file.exists() and file.is_relative_to(root)
        if not inside or (fragment and fragment not in anchors_in(file.read_text())):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Head\n[here](#head), [no](#tail), [gone](gone.md), [out](../out.md)")
    assert broken(page, tmp_path) == ["#tail", "gone.md", "../out.md"]


def test_every_record_is_cited() -> None:
    """A record that no page cites goes; git has it."""
    reports = ROOT / "benchmarks" / "reports"
    cited = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in PAGES
        for target in links_in(page.read_text())
    }
    pages = {page.with_suffix("") for page in cited if page.parent == reports}
    left = {path.name for path in reports.iterdir() if path.with_suffix("") not in pages}
    assert left == set()


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.parent.name != "reports"],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_files_named_in_code_exist(page: Path) -> None:
    named = re.findall(r"`([\w./-]+\.py)`", page.read_text())
    assert [name for name in named if not any(f.endswith(f"/{name}") for f in FILES)] == []
