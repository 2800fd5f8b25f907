"""Stands in until the accountant moves here."""

from __future__ import annotations

from shuffled_dpsgd.accounting.certified import certified_claim, certified_curve

__all__ = ["certified_claim", "certified_curve"]
