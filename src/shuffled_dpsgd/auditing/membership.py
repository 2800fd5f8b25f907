"""What a membership attack on the losses of planted records reaches, with privacy and without.

Both runs start from the same weights and train on the same records, in the same batches, for as
many steps; one clips and adds noise, the other does neither. Whether a record was in is decided by
a fair coin, the same in both, so guessing has an area of one half under its ROC curve.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shuffled_dpsgd.auditing.estimators import Area


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Areas under the ROC curve of the loss attack on `num_records` planted records.

    `without_privacy` is None where the target does not say how to train without.
    """

    canary: str
    num_records: int
    with_privacy: Area
    without_privacy: Area | None

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each area, for tables."""
        areas = {"with": self.with_privacy, "without": self.without_privacy}
        return [(f"trained {n} privacy", str(a)) for n, a in areas.items() if a is not None]

    def to_json(self) -> dict[str, Any]:
        areas = {"with_privacy": self.with_privacy, "without_privacy": self.without_privacy}
        return {
            "attack": "area under the ROC curve of the loss",
            "canary": self.canary,
            "num_records": self.num_records,
            **{n: a and {**asdict(a), "kind": "measured"} for n, a in areas.items()},
        }
