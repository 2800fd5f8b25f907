"""What one row is, and what is left of a claim for somebody who owns several.

Let a unit own k rows, each drawn with probability q and clipped to norm C. Of one step, k binomial
draws join; the worst case is a Gaussian whose mean is 0 without the unit and j C with probability
Bin(k, q)(j) with it. Its privacy-loss distribution is composed over the steps. That ε is larger
than k times the ε of one row: 13 times were measured for ten rows, 46 for 21.
"""

from __future__ import annotations

import warnings

from shuffled_dpsgd.core.claim import PrivacyClaim
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.training.rows import Survey

DEFAULT_UNIT = "row"
# Of more rows nothing useful is left, and pricing takes long.
_MOST_ROWS = 32
_RELATIVE_ERROR = 0.01


def describe_unit(plan: PrivacyPlan, unit: str, survey: Survey | None) -> str:
    """What the card says of the unit: its name, and the ε of the row that is there most often."""
    named = "one row" if unit == DEFAULT_UNIT else f"one {unit}, as stated: one row each"
    if survey is None:
        return named
    if survey.largest == 1:
        return f"{named}; no row was found twice ({survey.looked_at})"
    return f"{named}; {_repeated(plan, survey)}"


def warn_of_repeats(plan: PrivacyPlan, survey: Survey) -> None:
    """Say before the first release that some rows are worth less protection."""
    if survey.largest > 1 and not plan.uncertifiable:
        warnings.warn(
            f"{_repeated(plan, survey)}. Remove repeated rows; draw views, chunks and balanced "
            "classes inside __getitem__",
            UserWarning,
            stacklevel=5,
        )


def _repeated(plan: PrivacyPlan, survey: Survey) -> str:
    found = f"the most frequent row is there {survey.largest} times ({survey.looked_at})"
    if plan.uncertifiable:
        return found
    claim = claim_for_rows(plan, survey.largest)
    worth = f"no useful ε is left beyond {_MOST_ROWS}" if claim is None else claim.describe()
    return f"{found}; for whoever owns it: {worth}"


def claim_for_rows(plan: PrivacyPlan, rows: int) -> PrivacyClaim | None:
    """The proven claim for a unit of so many rows; None for more than can be priced."""
    if rows > _MOST_ROWS:
        return None
    # Here, because importing a run must not load the accountant.
    from shuffled_dpsgd.core.pld import price

    return PrivacyClaim(
        epsilon=price(plan.mechanism(), plan.delta, _RELATIVE_ERROR, records=rows),
        delta=plan.delta,
        method=f"PLD of a binomial mixture, {rows} rows",
        kind="proven",
        inputs={"rows": rows},
    )
