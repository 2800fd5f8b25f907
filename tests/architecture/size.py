"""How large the project is, room by room; fails above a budget. `make size` runs it.

A budget may only be lowered. It stands at the present count, rounded up, until it meets its target.
Words are those of pages in Markdown; notebooks and what is made from docstrings are not counted.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, EXPERIMENTS = ROOT / "src" / "shuffled_dpsgd", ROOT / "shuffled_dpsgd_experiments"
BUDGETS = {  # what: (budget, target)
    "lines of package and experiments": (53_500, 44_000),
    "lines of the package": (45_200, 36_000),
    "files of the package": (300, 340),
    "lines of core": (3_000, 3_000),
    "lines of checks and guards": (3_500, 3_613),
    "words of documents": (35_000, 35_000),
}


# Where batches, records, losses, labels, ranks and models are checked or refused.
CHECKS = re.compile(r"clipping/checks/|_checks?\.py$|guards|watch|neighbours")


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.suffix in (".py", ".c")]


def lines_of(paths: list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def measure() -> dict[str, int]:
    package = files_of(PACKAGE)
    checks = [p for p in package if CHECKS.search(p.relative_to(PACKAGE).as_posix())]
    pages = [ROOT.glob("*.md"), *((ROOT / name).rglob("*.md") for name in ("docs", "benchmarks"))]
    texts = [page.read_text(encoding="utf-8") for found in pages for page in found]
    return {
        "lines of package and experiments": lines_of([*package, *files_of(EXPERIMENTS)]),
        "lines of the package": lines_of(package),
        "files of the package": len(package),
        "lines of core": lines_of(files_of(PACKAGE / "core")),
        "lines of checks and guards": lines_of(checks),
        "words of documents": sum(len(text.split()) for text in texts),
    }


def main() -> int:
    rooms = sorted(path for path in PACKAGE.iterdir() if path.is_dir() and files_of(path))
    print(f"{'room':34}{'lines':>8}{'files':>8}")
    for room in [*rooms, PACKAGE, EXPERIMENTS, *(ROOT / n for n in ("tests", "benchmarks"))]:
        found = files_of(room)
        print(f"{room.relative_to(ROOT)!s:34}{lines_of(found):8,}{len(found):8,}")
    print(f"\n{'':34}{'now':>8}{'budget':>8}{'target':>8}")
    counts, failed = measure(), 0
    for what, (budget, target) in BUDGETS.items():
        failed |= counts[what] > budget
        above = "  above the budget" * (counts[what] > budget)
        print(f"{what:34}{counts[what]:8,}{budget:8,}{target:8,}{above}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
