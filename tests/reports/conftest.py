"""A made-up run for the renderers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from shuffled_dpsgd.accounting import PrivacyClaim
from shuffled_dpsgd.reports import RunView, StepRecord, count_norms
from shuffled_dpsgd.training import PrivacyCard, PrivacyOptions, make_plan, write_card


def made_up_record(step: int) -> StepRecord:
    evaluated = step % 3 == 0
    return StepRecord(
        step=step,
        batch_size=8,
        seconds=0.5,
        learning_rate=0.1,
        loss=3.0 / step,
        clipped_share=0.5,
        median_norm=1.0,
        signal_to_noise=1.0 / step,
        certified_epsilon=math.sqrt(step),
        paper_epsilon=2.0 * math.sqrt(step),
        heldout_loss=2.0 / step if evaluated else None,
        heldout_score=0.1 * step if evaluated else None,
        norm_counts=count_norms([0.3, 1.5, 2.5]),
    )


@pytest.fixture(scope="session")
def view() -> RunView:
    return RunView(
        title="a <made-up> run",
        records=[made_up_record(step) for step in range(1, 10)],
        clip_norm=1.0,
        epsilon_budget=3.0,
    )


@pytest.fixture(scope="session")
def card() -> PrivacyCard:
    plan = make_plan(
        PrivacyOptions(
            dataset_size=100,
            expected_batch_size=10,
            num_steps=9,
            noise_multiplier=1.0,
            delta=1e-5,
            shuffle="off",
        ),
        sizes={"w": 4},
        moved=frozenset(),
    )
    return replace(
        write_card(plan, num_steps=0),
        certified=PrivacyClaim(
            epsilon=3.0, delta=1e-5, method="PLD", kind="proven", assumptions=("one", "two")
        ),
        paper=PrivacyClaim(
            epsilon=0.5,
            delta=1e-5,
            method="theorem 3",
            kind="heuristic",
            inputs={"batch_clip": 1.0, "dimension": 1000, "delta_split": 0.5},
        ),
        steps_released=9,
        mechanism=("clip <each> sample", "noise"),
    )
