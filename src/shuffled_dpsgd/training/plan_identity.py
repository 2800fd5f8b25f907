"""A plan as plain data, and how two plans differ, without storing the seed."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

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


def plan_json(plan: PrivacyPlan) -> dict[str, Any]:
    """Plain data without the seed, which would let a reader remove the noise."""
    data = plan.comparable()
    del data["seed"]
    data["blocks"] = [{**b, "parameters": list(b["parameters"])} for b in data["blocks"]]
    return data | {
        "clip_norm": plan.clip_norm if math.isfinite(plan.clip_norm) else None,
        "sampling_prob": plan.sampling_prob,
        "secure": plan.secure,
    }
