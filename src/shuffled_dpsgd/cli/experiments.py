"""Imports the paper's experiments, which are in a clone beside `src` and not in the wheel."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shuffled_dpsgd.cli.output import EXAMPLES, AsJson, reports_errors
from shuffled_dpsgd.errors import InvalidArgumentError, ShuffledDPError

if TYPE_CHECKING:
    from shuffled_dpsgd.tasks.recipes import Recipe
    from shuffled_dpsgd_experiments.presets import Preset

NAME = "shuffled_dpsgd_experiments"
ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True}
VERBS = ("reproduce", "sweep", "examine")
AUDITS = ("step", "composition", "blackbox")
ROOT = Path(__file__).resolve().parents[3]
"""Of a clone, its root; of an installed wheel, a folder without the experiments."""


def register(
    app: typer.Typer, names: tuple[str, ...], module: str = "verbs", prefix: str = "", **look: Any
) -> None:
    """Add verbs of the experiments; where these are missing, a verb says what it needs."""
    verbs = importlib.import_module(f"{NAME}.{module}") if _are_there() else None
    for name in names:
        if verbs is None:
            app.command(name, context_settings=ANYTHING, **look)(_refused(f"{prefix}{name}"))
        else:
            app.command(name, epilog=EXAMPLES.get(name), **look)(getattr(verbs, name))


def _refused(name: str) -> Callable[..., None]:
    @reports_errors
    def verb(as_json: AsJson = False) -> None:
        """Needs a clone of the repository."""
        need_experiments(name)

    return verb


def need_experiments(purpose: str) -> None:
    """Make the experiments importable, here and in processes that this one starts, or refuse."""
    if not _are_there():
        raise ShuffledDPError(
            f"{purpose} needs the experiments, which are in no wheel: clone the repository, "
            "`pip install -e .` in it, and run this again"
        )


def find_preset(name: str) -> Preset | Recipe:
    """The recipe of that name, or the row of the paper's Table 1, which needs a clone."""
    from shuffled_dpsgd.tasks.recipes import RECIPES

    if name in RECIPES:
        return RECIPES[name]
    if name.startswith("paper/"):
        need_experiments(f"--preset {name}")
    elif not _are_there():
        raise InvalidArgumentError("--preset", expected=f"one of {', '.join(RECIPES)}", got=name)
    from shuffled_dpsgd_experiments import presets

    return presets.find_preset(name)


def _are_there() -> bool:
    if (ROOT / NAME / "__init__.py").is_file() and str(ROOT) not in sys.path:
        sys.path.insert(1, str(ROOT))  # Before another clone that is installed.
        paths = [path for path in (os.environ.get("PYTHONPATH"), str(ROOT)) if path]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    try:
        importlib.import_module(NAME)
    except ModuleNotFoundError:
        return False
    return True
