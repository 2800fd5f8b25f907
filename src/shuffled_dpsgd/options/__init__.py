"""Every option of a private run, stated once, with what is refused; imports nothing heavy."""

from __future__ import annotations

from shuffled_dpsgd.core.claim import Adjacency
from shuffled_dpsgd.core.plan import (
    Accounting,
    Clip,
    LossReduction,
    NoiseFrame,
    Sampling,
    Scope,
)
from shuffled_dpsgd.options.methods import METHODS, Method
from shuffled_dpsgd.options.statement import (
    Budget,
    Noise,
    PrivacyOptions,
    Schedule,
    Shuffle,
    Strategy,
    choices_of,
    help_of,
    options_in,
)

__all__ = [
    "METHODS",
    "Accounting",
    "Adjacency",
    "Budget",
    "Clip",
    "LossReduction",
    "Method",
    "Noise",
    "NoiseFrame",
    "PrivacyOptions",
    "Sampling",
    "Schedule",
    "Scope",
    "Shuffle",
    "Strategy",
    "choices_of",
    "help_of",
    "options_in",
]
