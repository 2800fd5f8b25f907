"""A reproduced figure on disk: PNG and SVG for eyes, JSON with every number that was drawn."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shuffled_dpsgd.environment import environment
from shuffled_dpsgd.reports.style import house_style, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Data = TypeVar("Data")


@dataclass(frozen=True, kw_only=True)
class FigureRecipe(Generic[Data]):
    """How to reproduce one figure: compute its numbers, then draw them; never both at once."""

    name: str
    title: str
    compute: Callable[[], Data]
    draw: Callable[[Data], Figure]
    to_json: Callable[[Data], dict[str, Any]]

    def reproduce(self, directory: Path) -> list[Path]:
        """Write `<name>.json`, `<name>.png` and `<name>.svg` under `directory`."""
        directory.mkdir(parents=True, exist_ok=True)
        data = self.compute()
        record = {"figure": self.name, "title": self.title, **self.to_json(data)}
        numbers = directory / f"{self.name}.json"
        numbers.write_text(
            json.dumps({**record, "environment": environment()}, indent=1, ensure_ascii=False)
            + "\n"
        )
        with house_style():
            figure = self.draw(data)
        return [numbers, *save_figure(figure, directory, self.name)]
