"""The paper's figures 1 to 4: numbers first, drawing second, both tested."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from shuffled_dpsgd_experiments.figures import fig1, fig2, fig3, fig4
from shuffled_dpsgd_experiments.figures.output import FigureRecipe

FIGURES: Mapping[str, FigureRecipe[Any]] = MappingProxyType(
    {module.RECIPE.name: module.RECIPE for module in (fig1, fig2, fig3, fig4)}
)

__all__ = ["FIGURES", "FigureRecipe"]
