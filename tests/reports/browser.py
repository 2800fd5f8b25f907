"""Pages in a headless Chromium: what sticks out, which colours, and how it looks.

A page is shown in a frame as wide as a screen would be, since a browser window has a least width.
Run as a script with pages to write one picture of all of them, at two widths and in both colour
schemes: `python tests/reports/browser.py docs/figures/pages.png runs/demo/report.html`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from html import escape, unescape
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
WIDTHS = (390, 1280)
SCHEMES = ("light", "dark")
LEAST_WINDOW = 500
MEASURE = """
onload = () => {
  const inside = frame.contentDocument, root = inside.documentElement;
  const seen = [...inside.querySelectorAll("body *")].filter((e) => !e.closest("svg *"));
  const colours = frame.contentWindow.getComputedStyle(inside.body);
  found.textContent = JSON.stringify({
    width: root.scrollWidth, height: root.scrollHeight,
    background: colours.backgroundColor, ink: colours.color,
    sticking_out: seen.filter((e) => e.getBoundingClientRect().right > root.clientWidth + 0.5)
      .map((e) => e.tagName),
  });
};
"""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What a browser made of a page."""

    width: int
    height: int
    background: str
    ink: str
    sticking_out: list[str]


def measure(page: str, folder: Path, *, width: int, scheme: str) -> Shown:
    """Lay `page` out on a screen of `width`; `folder` takes what the browser needs on disk."""
    framed = _frame(page, folder, width=width, height=800)
    done = browse("--dump-dom", framed, folder=folder, scheme=scheme)
    answer = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert answer is not None, done.stderr
    found: dict[str, Any] = json.loads(unescape(answer[1]))
    return Shown(**found)


def photograph(page: str, folder: Path, *, width: int, scheme: str, path: Path) -> None:
    """Write a picture of the whole page to `path`."""
    from PIL import Image

    height = measure(page, folder, width=width, scheme=scheme).height
    framed = _frame(page, folder, width=width, height=height)
    window = f"--window-size={max(width, LEAST_WINDOW)},{height}"
    browse(window, f"--screenshot={path}", framed, folder=folder, scheme=scheme)
    with Image.open(path) as picture:
        cropped = picture.crop((0, 0, width, height))
    cropped.save(path)


def _frame(page: str, folder: Path, *, width: int, height: int) -> str:
    path = folder / "framed.html"
    path.write_text(
        '<!doctype html><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        "<style>body { margin: 0 } iframe { border: 0; display: block }</style>"
        f'<iframe id="frame" width="{width}" height="{height}" srcdoc="{escape(page)}"></iframe>'
        f'<pre id="found"></pre><script>{MEASURE}</script>',
        encoding="utf-8",
    )
    return path.resolve().as_uri()


def browse(
    *arguments: str, folder: Path, scheme: str = "light"
) -> subprocess.CompletedProcess[str]:
    """Run the browser without a window; `folder` takes its profile."""
    assert BROWSER is not None
    settings = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
        "--virtual-time-budget=3000",
        f"--blink-settings=preferredColorScheme={SCHEMES[::-1].index(scheme)}",
    ]
    return subprocess.run(
        [BROWSER, *settings, *arguments], capture_output=True, text=True, timeout=300, check=True
    )


def contact_sheet(pages: list[Path], path: Path, *, scale: float = 0.4) -> None:
    """All pages side by side at every width and in both schemes, small and in few colours."""
    from tempfile import TemporaryDirectory

    from PIL import Image

    tiles = []
    with TemporaryDirectory() as name:
        shot = Path(name) / "shot.png"
        for page in pages:
            for width in WIDTHS:
                for scheme in SCHEMES:
                    text = page.read_text(encoding="utf-8")
                    photograph(text, Path(name), width=width, scheme=scheme, path=shot)
                    with Image.open(shot) as taken:
                        size = (round(taken.width * scale), round(taken.height * scale))
                        tiles.append(taken.convert("RGB").resize(size, Image.Resampling.LANCZOS))
    gap = 8
    whole = (sum(t.width + gap for t in tiles) - gap, max(t.height for t in tiles))
    sheet = Image.new("RGB", whole, "#808080")
    left = 0
    for tile in tiles:
        sheet.paste(tile, (left, 0))
        left += tile.width + gap
    few = sheet.quantize(64, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


if __name__ == "__main__":
    contact_sheet([Path(name) for name in sys.argv[2:]], Path(sys.argv[1]))
