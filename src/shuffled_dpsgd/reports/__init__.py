"""What a run leaves for people: figures, a self-contained report, the privacy card as HTML."""

from __future__ import annotations

from shuffled_dpsgd.reports.figures import RunView, draw_all
from shuffled_dpsgd.reports.page import card_fragment, card_page
from shuffled_dpsgd.reports.records import (
    MetricsLog,
    StepRecord,
    count_norms,
    samples_per_second,
)
from shuffled_dpsgd.reports.run_report import report_page, write_report

__all__ = [
    "MetricsLog",
    "RunView",
    "StepRecord",
    "card_fragment",
    "card_page",
    "count_norms",
    "draw_all",
    "report_page",
    "samples_per_second",
    "write_report",
]
