"""Sweeps: a grid of methods, budgets and seeds, one JSON per cell, never edited, resumable.

`load_sweep` reads a file, `run_sweeps` runs every cell that has no result yet, `table_of` draws the
table.
"""

from __future__ import annotations

from shuffled_dpsgd_experiments.sweeps.grid import Cell, Sweep
from shuffled_dpsgd_experiments.sweeps.reading import load_sweep
from shuffled_dpsgd_experiments.sweeps.running import SweepProgress, run_sweeps
from shuffled_dpsgd_experiments.sweeps.table import table_of

__all__ = ["Cell", "Sweep", "SweepProgress", "load_sweep", "run_sweeps", "table_of"]
