"""Accounting: what a run costs, by proven methods and by the paper's formula, never confused.

Numpy and scipy only; `dp_accounting` is imported when Rényi DP is first asked for; torch never.
"""

from __future__ import annotations

from shuffled_dpsgd.accounting.accountants import (
    Accountant,
    Target,
    accountants,
    calibrate_rdp,
    compare,
)
from shuffled_dpsgd.accounting.bracket import Bracket, certified_bracket
from shuffled_dpsgd.accounting.calibration import Calibration, calibrate_certified
from shuffled_dpsgd.accounting.certified import certified_claim
from shuffled_dpsgd.accounting.meaning import Meaning, what_it_means
from shuffled_dpsgd.accounting.paper import PaperCalibration, calibrate_paper, paper_claim
from shuffled_dpsgd.accounting.together import BestOf, Filter, claim_together
from shuffled_dpsgd.accounting.units import UnitComparison, compare_units
from shuffled_dpsgd.core.claim import Adjacency, Kind, PrivacyClaim
from shuffled_dpsgd.core.events import SampledGaussian

__all__ = [
    "Accountant",
    "Adjacency",
    "BestOf",
    "Bracket",
    "Calibration",
    "Filter",
    "Kind",
    "Meaning",
    "PaperCalibration",
    "PrivacyClaim",
    "SampledGaussian",
    "Target",
    "UnitComparison",
    "accountants",
    "calibrate_certified",
    "calibrate_paper",
    "calibrate_rdp",
    "certified_bracket",
    "certified_claim",
    "claim_together",
    "compare",
    "compare_units",
    "paper_claim",
    "what_it_means",
]
