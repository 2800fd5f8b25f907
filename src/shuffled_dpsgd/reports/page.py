"""The frame of every HTML page: one file without scripts, which fetches nothing."""

from __future__ import annotations

import re
from html import escape

from shuffled_dpsgd.reports.style import HEURISTIC, INK, MUTED, PROVEN, TRAIN

SHORT = 16
BASE_CSS = f"""
:root {{ --ink: {INK}; --muted: {MUTED}; --line: #d8dde3; --proven: {PROVEN};
  --heuristic: {HEURISTIC}; --measured: {TRAIN}; --paper: #fff; --notice: #fdf4ee;
  --refuted: #b42318; color-scheme: light dark; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e6e8eb; --muted: #9aa3ad; --line: #3a424c;
  --proven: #4cc2a8; --heuristic: #f0935a; --measured: #82aee8; --paper: #14181d; --notice: #2b211a;
  --refuted: #ff8a7a; }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; padding: 2rem 1.2rem 4rem; max-width: 70rem; color: var(--ink);
  background: var(--paper); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }}
h1 {{ font-size: 1.7rem; margin: 0 0 .3rem; }} h2 {{ font-size: 1.15rem; margin: 0 0 .8rem; }}
section {{ margin-top: 2rem; }} p {{ margin: .4rem 0; }}
.muted {{ color: var(--muted); }}
.warning {{ border-left: 5px solid var(--heuristic);
  background: var(--notice); padding: .6rem .9rem; }}
table {{ border-collapse: collapse; max-width: 100%; }}
th, td {{ overflow-wrap: anywhere; padding: .25rem 1.2rem .25rem 0; text-align: left;
  border-bottom: 1px solid var(--line); vertical-align: top; }} th {{ color: var(--muted);
  font-weight: 500; min-width: 8rem; overflow-wrap: break-word; }}
td.short {{ white-space: nowrap; }}
.figures {{ display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); }}
figure {{ margin: 0; min-width: 0;
  border: 1px solid var(--line); border-radius: 10px; padding: .6rem; }}
figure svg {{ width: 100%; height: auto; }}
/* Figures have no background; on a dark page they are inverted, with their hues kept. */
@media (prefers-color-scheme: dark) {{ figure svg {{
  filter: invert(.9) hue-rotate(180deg) brightness(1.15); }} }}
figcaption {{ color: var(--muted); font-size: .85rem; padding: 0 .4rem .2rem; }}
footer {{ margin-top: 3rem; color: var(--muted); font-size: .85rem; }}
"""


def page(*, title: str, body: str, css: str = "") -> str:
    """A complete HTML document; `body` and `css` must already be safe to embed."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{BASE_CSS}{css}</style></head>"
        f"<body>{body}</body></html>\n"
    )


def table(rows: list[tuple[str, str]]) -> str:
    """Two columns, both escaped: a name and a value."""
    return f"<table>{''.join(_row(name, value) for name, value in rows)}</table>"


def _row(name: str, value: str) -> str:
    """A name may break after a dot or an underscore; a short value stays on one line."""
    breakable = re.sub(r"([._])", r"\1<wbr>", escape(name))
    kind = ' class="short"' if len(value) <= SHORT else ""
    return f"<tr><th>{breakable}</th><td{kind}>{escape(value)}</td></tr>"
