"""From scores to lower bounds on ε. Nothing here imports torch.

Each estimator states its confidence and its assumptions in the bound it returns, and which claims
that bound may refute.
"""

from __future__ import annotations

from shuffled_dpsgd.auditing.estimators.clopper_pearson import ClopperPearson
from shuffled_dpsgd.auditing.estimators.curves import Area, area_of, claim_trade_off, roc
from shuffled_dpsgd.auditing.estimators.one_run import OneRunFDP
from shuffled_dpsgd.auditing.estimators.order_statistics import OrderStatistics
from shuffled_dpsgd.auditing.estimators.scores import EstimatedBound, Inclusion, ScorePair

__all__ = [
    "Area",
    "ClopperPearson",
    "EstimatedBound",
    "Inclusion",
    "OneRunFDP",
    "OrderStatistics",
    "ScorePair",
    "area_of",
    "claim_trade_off",
    "roc",
]
