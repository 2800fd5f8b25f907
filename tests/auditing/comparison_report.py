"""Our bounds beside those of jax_privacy, on identical scores of two worlds and of one run.

Run as a script with a file name and their `auditing.py`, which is not part of this repository:
`python tests/auditing/comparison_report.py results/audit_comparison.json PATH/auditing.py VERSION`,
or `results/audit_comparison_one_run.json` for the canaries of one run.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from shuffled_dpsgd.auditing.estimators import (
    ClopperPearson,
    Inclusion,
    OneRunFDP,
    OrderStatistics,
    ScorePair,
)
from shuffled_dpsgd.auditing.estimators.order_statistics import composed_epsilon
from shuffled_dpsgd.environment import environment

MUS = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0)
SIZES = (500, 1000, 5000)
DELTA, LEVEL, DATA_SETS = 1e-5, 0.05, 20
ANY = {"order-statistics": OrderStatistics(), "clopper-pearson": ClopperPearson()}
GAUSSIAN = {"order-statistics-gaussian": OrderStatistics(family="gaussian")}
CANARIES, ONE_RUN_MUS = 1000, (1.0,)


def scores(mu: float, size: int, data_set: int) -> ScorePair:
    """Gaussian scores, `size` in each world, the present ones shifted by `mu`."""
    rng = np.random.default_rng([data_set, size, round(10 * mu)])
    return ScorePair(out=rng.standard_normal(size), present=mu + rng.standard_normal(size))


def canaries_of_one_run(mu: float, data_set: int) -> Inclusion:
    """Fair coins for `CANARIES` canaries; independent Gaussian scores, as orthogonal ones have."""
    rng = np.random.default_rng([data_set, CANARIES, round(10 * mu), 1])
    included = rng.random(CANARIES) < 0.5
    return Inclusion(scores=included * mu + rng.standard_normal(CANARIES), included=included)


def ours(pair: ScorePair) -> dict[str, float]:
    return {
        name: one.lower_bound(pair, delta=DELTA, confidence=1.0 - LEVEL).epsilon
        for name, one in (ANY | GAUSSIAN).items()
    }


def strategies(module: Any) -> dict[str, Any]:
    """Every way of theirs to choose a threshold."""
    return {
        "all thresholds": module.Bonferroni(),
        "split": module.Split(seed=0),
        "many splits": module.MultiSplit(num_samples=50, seed=0),
    }


def one_run_point(module: Any, mu: float) -> dict[str, Any]:
    """Mean bounds from the canaries of one run, and the best of theirs on each data set."""
    rows: dict[str, list[float]] = {}
    for data_set in range(DATA_SETS):
        seen = canaries_of_one_run(mu, data_set)
        pair = seen.as_pair()
        auditor = module.CanaryScoreAuditor(pair.present, pair.out)
        best = {
            name: max(
                float(method(LEVEL, DELTA, threshold_strategy=strategy))
                for strategy in strategies(module).values()
            )
            for name, method in (
                ("theirs, coins alone", auditor.epsilon_one_run),
                ("theirs, guesses against a Gaussian curve", auditor.epsilon_one_run_fdp),
            )
        }
        bounds = {
            "ours, coins alone": OneRunFDP().lower_bound(seen, delta=DELTA).epsilon,
            "ours, independent Gaussian scores": ours(pair)["order-statistics-gaussian"],
            **best,
            "theirs, independent Gaussian scores": float(auditor.epsilon_from_gdp(LEVEL, DELTA)),
        }
        for name, bound in bounds.items():
            rows.setdefault(name, []).append(bound)
    return {
        "mu": mu,
        "canaries": CANARIES,
        "true_epsilon": composed_epsilon(mu, sampling_prob=1.0, num_steps=1, delta=DELTA),
        "mean": {name: float(np.mean(bounds)) for name, bounds in rows.items()},
        "bounds": rows,
    }


def theirs(module: Any, pair: ScorePair) -> dict[str, float]:
    """Every two-world estimator of theirs that states a level, in every way it can be called."""
    auditor = module.CanaryScoreAuditor(pair.present, pair.out)
    found = {
        f"clopper-pearson, {name}, {'one-sided' if one_sided else 'two-sided'}": float(
            auditor.epsilon_clopper_pearson(
                LEVEL, DELTA, one_sided=one_sided, threshold_strategy=strategy
            )
        )
        for name, strategy in strategies(module).items()
        for one_sided in (True, False)
    }
    return {**found, "gdp": float(auditor.epsilon_from_gdp(LEVEL, DELTA))}


def point(module: Any, mu: float, size: int) -> dict[str, Any]:
    """Both sides on the same data sets: every bound, and the best of theirs for any mechanism."""
    pairs = [scores(mu, size, data_set) for data_set in range(DATA_SETS)]
    mine, other = [ours(pair) for pair in pairs], [theirs(module, pair) for pair in pairs]
    best = [max(v for name, v in one.items() if name != "gdp") for one in other]
    wins = [one["order-statistics"] >= value for one, value in zip(mine, best, strict=True)]
    gaussian_wins = [
        one["order-statistics-gaussian"] >= two["gdp"] for one, two in zip(mine, other, strict=True)
    ]
    return {
        "mu": mu,
        "observations": size,
        "ours": {name: [one[name] for one in mine] for name in mine[0]},
        "theirs": {name: [one[name] for one in other] for name in other[0]},
        "mean_of_ours": float(np.mean([one["order-statistics"] for one in mine])),
        "mean_of_their_best_on_each_data_set": float(np.mean(best)),
        "data_sets_where_ours_is_at_least_their_best": int(np.sum(wins)),
        "data_sets_where_our_gaussian_is_at_least_theirs": int(np.sum(gaussian_wins)),
    }


def report(path: Path, version: str, *, one_run: bool) -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location("their_auditing", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        points = (
            [one_run_point(module, mu) for mu in ONE_RUN_MUS]
            if one_run
            else [point(module, mu, size) for mu in MUS for size in SIZES]
        )
    return {
        "their_version": f"jax_privacy {version}, auditing.py",
        "delta": DELTA,
        "confidence": 1.0 - LEVEL,
        "data_sets": DATA_SETS,
        "points": points,
    }


if __name__ == "__main__":
    written = Path(sys.argv[1])
    found = report(Path(sys.argv[2]), sys.argv[3], one_run="one_run" in written.name)
    own = f"python tests/auditing/comparison_report.py results/{written.name}"
    found["command"] = f"{own} PATH/auditing.py VERSION"
    text = json.dumps({**found, "environment": environment()}, indent=1)
    written.write_text(text + "\n", encoding="utf-8")
    for row in found["points"]:
        hidden = ("ours", "theirs", "bounds")
        print({key: value for key, value in row.items() if key not in hidden})
