"""Which check catches which planted mistake, and in how long.

Run as a script with a file name to write the matrix there: `python planted_report.py OUT.json`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from auditing.planted import BUGS, CHECKS, Plant
from shuffled_dpsgd.environment import environment

COMMAND = "python tests/auditing/planted_report.py results/audit_planted_bugs.json"


def row(plant: Plant) -> dict[str, Any]:
    """Every check on one planted mistake, with its seconds."""
    caught, seconds = [], {}
    for name, fails in CHECKS.items():
        started = time.perf_counter()
        if fails(plant):
            caught.append(name)
        seconds[name] = round(time.perf_counter() - started, 3)
    return {"caught_by": caught, "seconds": seconds}


def report() -> dict[str, Any]:
    """The whole matrix, the sound run last."""
    return {
        "checks": {name: fails.__doc__ for name, fails in CHECKS.items()},
        "bugs": {name: row(bug.plant) for name, bug in BUGS.items()},
        "sound_run": row(lambda private: None),
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(
        json.dumps({**report(), "command": COMMAND, "environment": environment()}, indent=2) + "\n",
        encoding="utf-8",
    )
