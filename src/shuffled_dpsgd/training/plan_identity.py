"""How two plans differ, told without storing the seed."""

from __future__ import annotations

import hashlib
import json

from shuffled_dpsgd.core.plan import PrivacyPlan


def field_fingerprints(plan: PrivacyPlan) -> dict[str, str]:
    """One hash per field, so that a refusal can name what differs."""
    return {
        key: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
        for key, value in plan.comparable().items()
    }


def differences(plan: PrivacyPlan, fingerprints: dict[str, str]) -> list[str]:
    """Names of the fields whose fingerprints differ from those of another plan."""
    mine = field_fingerprints(plan)
    return sorted(
        key for key in mine.keys() | fingerprints if mine.get(key) != fingerprints.get(key)
    )
