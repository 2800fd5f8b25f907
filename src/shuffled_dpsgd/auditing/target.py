"""What an audit of training is about, how much it may do, and where it counts what it spends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shuffled_dpsgd.auditing.input_canaries import InputCanary, check_kind
from shuffled_dpsgd.auditing.verdict import check_fields
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.errors import InvalidArgumentError, require
from shuffled_dpsgd.training.budget import BudgetFile, counted
from shuffled_dpsgd.training.data import MapStyle
from shuffled_dpsgd.training.physical import PerSampleLoss
from shuffled_dpsgd.training.private import PrivateTraining
from shuffled_dpsgd.training.record_digest import data_mark


@dataclass(frozen=True, kw_only=True)
class AuditTarget:
    """What is audited: how to start a fresh run on a data set of a given size, and its records.

    `start_plain` starts the same run with neither clip nor noise, which membership is compared
    with. `budget` is the file in which an audit of these records counts itself. Where units of
    several records are drawn, `num_units` is how many there are.
    """

    start: Callable[[int], PrivateTraining]
    start_plain: Callable[[int], PrivateTraining] | None = None
    data: MapStyle
    losses: PerSampleLoss
    collate: Callable[[list[Any]], Any] | None = None
    budget: str | None = None
    num_units: int | None = None

    @property
    def size(self) -> int:
        """How many may be drawn: records, or units."""
        return len(self.data) if self.num_units is None else self.num_units


@dataclass(frozen=True, kw_only=True)
class RunSetting:
    """How much is spent on an audit.

    `warmup_steps` of real training precede a step audit; `num_gradient_canaries` and
    `num_input_canaries` are planted in a one-run audit; a step audit takes one record as a canary
    unless they are zero. Without `other_records` canaries alone take part in a one-run audit, the
    worst case of the definition.
    """

    num_observations: int = 500
    warmup_steps: int = 5
    num_gradient_canaries: int = 500
    num_input_canaries: int = 100
    input_canary: InputCanary = "mislabelled"
    other_records: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_kind(self.input_canary)
        check_fields(
            self, num_observations=20, warmup_steps=0, num_gradient_canaries=2, num_input_canaries=0
        )


def refuse_budget(budget: str | None, shown: str) -> None:
    """An audit that shows what has no noise is refused where the records have a budget."""
    remedy = f"{shown} carry no noise, so no budget covers them; audit other records"
    require(budget is None, "budget", "none for what is shown without noise", budget, remedy)


def refuse_copies(target: AuditTarget, setting: RunSetting) -> None:
    """Records as canaries are refused where they are no units, or no budget covers their losses."""
    name = "units" if target.num_units is not None else "budget" if target.budget else ""
    if name and setting.num_input_canaries:
        raise InvalidArgumentError(
            name,
            expected="gradient canaries alone",
            got=f"{setting.num_input_canaries} input canaries",
            remedy="a copy of a record is no unit, and what it shows has no noise: leave them out "
            "with --input-canaries 0",
        )


def count_in_budget(
    target: AuditTarget, setting: RunSetting, plan: PrivacyPlan, *, steps: int
) -> Callable[[], object]:
    """Write an audit whose run takes so many steps with the records into their budget.

    What it returns is called when the run has ended.
    """
    if target.budget is None or not steps:
        return lambda: None
    file = BudgetFile(target.budget)
    salt = file.read().salt
    entry = counted(plan, name=f"audit, {setting.num_gradient_canaries} canaries", salt=salt)
    file.enter(replace(entry, num_steps=steps), data_mark(target.data, salt))
    return partial(file.note, entry.identity, steps)
