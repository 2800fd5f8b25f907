"""Brings into the site what pages link to outside of docs/: pages, notebooks, figures, records.

A linked page (`.md`) or notebook becomes a page of the site; any other file is copied, so that
every link works offline. `mkdocs build --strict` fails on a link that leads nowhere.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from functools import partial
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")
FENCE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
}
NOTEBOOKS = "examples/notebooks"
# Links lead to the pages of all names, of which one has what two packages have.
SECOND = "skip_local_inventory: true"
# The names of `training` that stand on another page than the rest of them.
OF_PLAN = [
    *("AuditedBound", "GaussianNoise", "Ledger", "NoiseBlock", "PoissonSampler", "PrivacyCard"),
    *("PrivacyOptions", "PrivacyPlan", "RandomStreams", "ShuffledGaussianMechanism"),
    *("SpendingCurve", "make_plan", "write_card"),
]


def place_of(path: str) -> str:
    """Where in the site a file of the repository lies.

    >>> place_of("docs/claims.md"), place_of("SECURITY.md"), place_of("results/a.json")
    ('claims.md', 'security.md', 'files/results/a.json')
    """
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.endswith(".ipynb"):
        return "tutorials/" + posixpath.basename(path).replace(".ipynb", ".md")
    return PAGES.get(path, "files/" + path)


def source_of(place: str) -> str:
    """The file of the repository that lies there in the site."""
    for source, other in PAGES.items():
        if other == place and not (ROOT / "docs" / place).exists():
            return source
    if place.startswith("tutorials/"):
        return f"{NOTEBOOKS}/{posixpath.basename(place).replace('.md', '.ipynb')}"
    return f"docs/{place}"


def linked_from(source: str, text: str) -> dict[str, str]:
    """The local targets in a page, each as a path from the root of the repository."""
    plain = FENCE.sub("", text)
    here = posixpath.dirname(source)
    return {
        target: posixpath.normpath(posixpath.join(here, target)) for target in LINK.findall(plain)
    }


def as_markdown(path: Path) -> str:
    """A notebook, kept without outputs, as a page: prose as it is, code in blocks."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    code = [cell["cell_type"] == "code" for cell in cells]
    return "\n\n".join(
        f"```python\n{text}\n```" if is_code else text
        for text, is_code in zip(texts, code, strict=True)
    )


def on_files(files: Files, config: Any) -> Files:
    """Add pages and notebooks, and then every other file that a page links to."""
    for source, place in PAGES.items():
        if not (ROOT / "docs" / place).exists():
            text = (ROOT / source).read_text(encoding="utf-8")
            files.append(File.generated(config, place, content=text))
    for path in sorted((ROOT / NOTEBOOKS).glob("*.ipynb")):
        place = place_of(f"{NOTEBOOKS}/{path.name}")
        files.append(File.generated(config, place, content=as_markdown(path)))
    for page in list(files.documentation_pages()):
        text = page.content_string
        for target in linked_from(source_of(page.src_uri), text).values():
            file, place = ROOT / target, place_of(target)
            if file.is_dir():
                continue
            if files.get_file_from_path(place) is None and file.is_file():
                files.append(File.generated(config, place, abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as the site has them; those to folders become plain text, as a site lists none."""
    if page.parent is None:
        page.meta.setdefault("hide", []).append("navigation")  # It would list this page alone.
    source = source_of(page.file.src_uri)
    here = posixpath.dirname(page.file.src_uri) or "."

    def moved(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[0]))
        return os.path.relpath(place_of(target), here)

    def without_folders(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[2]))
        return found[1] if (ROOT / target).is_dir() else found[0]

    parts = FENCE.split(markdown)
    for number in range(0, len(parts), 2):
        text = re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s#:]+)\)", without_folders, parts[number])
        parts[number] = LINK.sub(moved, text)
    text = "".join(parts)
    name = page.file.src_uri
    if name == "reference.md" or name.startswith("api_"):
        directive = partial(_with_options, name)
        text = re.sub(r"^::: (.+)$", directive, text, flags=re.MULTILINE)
    return text


def _with_options(page: str, found: re.Match[str]) -> str:
    """The directive for a name or a package, of which `training` is on two pages."""
    options = [SECOND] if page == "reference.md" else ["show_if_no_docstring: true"]
    if found[1] == "shuffled_dpsgd.options":
        options += [SECOND]
    if found[1] == "shuffled_dpsgd.training":
        others = f"filters: ['!^_', '!^({'|'.join(OF_PLAN)})$']"
        options += [f"members: {OF_PLAN}" if page == "api_plan.md" else others]
    return f"{found[0]}\n    options: {{{', '.join(options)}}}"
