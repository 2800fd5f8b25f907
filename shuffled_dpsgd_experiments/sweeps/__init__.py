"""Sweeps: a grid of methods, budgets and seeds, one JSON per cell, never edited, resumable.

`load_sweep` reads a file, `run_sweep` runs every cell that has no result yet, `run_sweeps` those of
several, `run_in_jobs` does so by several processes, `table_of` draws the table.
"""

from __future__ import annotations

from shuffled_dpsgd_experiments.sweeps.grid import Cell, Sweep
from shuffled_dpsgd_experiments.sweeps.jobs import run_in_jobs
from shuffled_dpsgd_experiments.sweeps.reading import load_sweep
from shuffled_dpsgd_experiments.sweeps.running import SweepProgress, run_sweep, run_sweeps
from shuffled_dpsgd_experiments.sweeps.table import table_of

__all__ = [
    "Cell",
    "Sweep",
    "SweepProgress",
    "load_sweep",
    "run_in_jobs",
    "run_sweep",
    "run_sweeps",
    "table_of",
]
