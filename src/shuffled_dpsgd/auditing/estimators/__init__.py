"""From scores to lower bounds on ε. Nothing here imports torch.

Each estimator states its confidence and its assumptions in the bound it returns, and which claims
that bound may refute.
"""

from __future__ import annotations

from shuffled_dpsgd.auditing.estimators.clopper_pearson import ClopperPearson
from shuffled_dpsgd.auditing.estimators.curves import (
    Roc,
    claim_trade_off,
    gaussian_trade_off,
    roc,
    tpr_at_fpr,
)
from shuffled_dpsgd.auditing.estimators.gaussian_dp import GaussianDP, gaussian_epsilon
from shuffled_dpsgd.auditing.estimators.joint_beta import JointBeta
from shuffled_dpsgd.auditing.estimators.one_run import Inclusion, OneRun
from shuffled_dpsgd.auditing.estimators.one_run_fdp import OneRunFDP
from shuffled_dpsgd.auditing.estimators.order_statistics import OrderStatistics
from shuffled_dpsgd.auditing.estimators.paper_point import PaperPoint
from shuffled_dpsgd.auditing.estimators.scores import ErrorCounts, EstimatedBound, ScorePair
from shuffled_dpsgd.auditing.estimators.threshold import Decision, Fixed, HeldOut

__all__ = [
    "ClopperPearson",
    "Decision",
    "ErrorCounts",
    "EstimatedBound",
    "Fixed",
    "GaussianDP",
    "HeldOut",
    "Inclusion",
    "JointBeta",
    "OneRun",
    "OneRunFDP",
    "OrderStatistics",
    "PaperPoint",
    "Roc",
    "ScorePair",
    "claim_trade_off",
    "gaussian_epsilon",
    "gaussian_trade_off",
    "roc",
    "tpr_at_fpr",
]
