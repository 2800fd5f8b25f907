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
from core import test_banded, test_truncation
from shuffled_dpsgd.environment import environment
from training import test_units

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


def special() -> dict[str, dict[str, Any]]:
    """Mistakes in what is special about a run, against audits of their own: bound and claim."""
    cut, uncounted, certified = test_truncation.audited()
    found = {
        "unit counted as records": test_units.audited(as_records=True),
        "unit, sound": test_units.audited(as_records=False),
        "largest batch not counted": (cut, uncounted),
        "largest batch, sound": (cut, certified),
        **{f"banded noise, {wrong}": test_banded.audited(wrong) for wrong in test_banded.WRONG},
        "banded noise, sound": test_banded.audited(),
    }
    return {
        name: {"bound": bound, "claimed": claimed, "refuted": bound > claimed}
        for name, (bound, claimed) in found.items()
    }


def report() -> dict[str, Any]:
    """The whole matrix, the sound run last."""
    return {
        "checks": {name: fails.__doc__ for name, fails in CHECKS.items()},
        "bugs": {name: row(bug.plant) for name, bug in BUGS.items()},
        "sound_run": row(lambda private: None),
        "special": special(),
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(
        json.dumps({**report(), "command": COMMAND, "environment": environment()}, indent=2) + "\n",
        encoding="utf-8",
    )
