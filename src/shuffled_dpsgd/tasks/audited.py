"""Audits of tasks, and of the folder of a finished run.

`audit_folder` repeats the run in memory with the same initial weights, records, noise, clip and
number of steps, and with canaries among the records (a one-run audit). The canaries lower the
sampling probability slightly, and with it ε. So a lower bound for the repeated run is also one for
the finished run. The released weights are not changed.

Publishing what the second run shows spends privacy of its own; the card says so.
"""

from __future__ import annotations

import copy
import json
import math
import re
import secrets
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from shuffled_dpsgd.auditing.estimators.scores import check_levels
from shuffled_dpsgd.auditing.run import audit_one_run, card_bounds
from shuffled_dpsgd.auditing.taps import OnProgress
from shuffled_dpsgd.auditing.target import AuditTarget, RunSetting
from shuffled_dpsgd.auditing.verdict import AuditReport, Membership, ThreatModel
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.environment import describe_weights
from shuffled_dpsgd.errors import CheckpointError, InvalidArgumentError
from shuffled_dpsgd.reports.page import card_files, card_fragment, table
from shuffled_dpsgd.tasks.config import RunConfig
from shuffled_dpsgd.tasks.run_folder import SUMMARY_FILE, check_data, finished_summary, load_run
from shuffled_dpsgd.tasks.start import start_private
from shuffled_dpsgd.tasks.task import Task, build_task
from shuffled_dpsgd.training.card import PrivacyCard
from shuffled_dpsgd.training.private import PrivateTraining
from shuffled_dpsgd.training.saved_card import read_card

SECOND_RUN = (
    "the audited bounds: they were read off a second run on the same records with the same noise, "
    "so publishing them spends as much again"
)
OF_A_REPEAT = ", in a repeat of the run with canaries"
MEMBERSHIP_WARNING = (
    "Read off a second run with {count} records planted by fair coins ({canary}), and off the same "
    "training without privacy. These losses carry no noise: no ε covers publishing them."
)
WITHOUT_PRIVACY: dict[str, Any] = {
    "epsilon": None,
    "noise_multiplier": 0.0,
    "unshuffled_noise_multiplier": None,
    "batch_clip_norm": None,
    "clip_norm": math.inf,
    "accounting": "certified",
    "shuffle": "off",
    "noise_frame": "shuffled",
}


def audit_target(config: RunConfig) -> AuditTarget:
    """Fresh runs of the configured task, each from a copy of the same initial weights."""
    return target_of(config, build_task(config))


def target_of(config: RunConfig, task: Task) -> AuditTarget:
    """What audits need of a task.

    An audit counts itself in the run's budget, so the runs that it starts do not.
    """
    uncounted = replace(config, privacy=replace(config.privacy, budget=None))
    plain = replace(config, privacy=replace(uncounted.privacy, **WITHOUT_PRIVACY))

    def start(chosen: RunConfig, dataset_size: int) -> PrivateTraining:
        model = copy.deepcopy(task.model)
        return start_private(chosen, model, dataset_size=dataset_size, units=task.units)

    return AuditTarget(
        start=partial(start, uncounted),
        start_plain=partial(start, plain),
        data=task.train_data,
        losses=task.losses,
        collate=task.collate,
        budget=config.privacy.budget,
        num_units=None if task.units is None else len(task.units),
    )


def audit_folder(
    directory: Path,
    setting: RunSetting,
    *,
    confidence: float = 0.95,
    on_progress: OnProgress | None = None,
    spare_budget: bool = False,
) -> tuple[AuditReport, PrivacyCard]:
    """Audit the run in `directory`; the report, and the run's card with the bounds on it.

    With `spare_budget` no records are canaries where the run draws units, or counts in a budget,
    which cannot cover what their losses show.
    """
    check_levels(delta=0.0, confidence=confidence)
    config = load_run(directory)
    if finished_summary(directory) is None:
        raise CheckpointError(
            f"{directory}: the run is not finished; continue it with "
            f"`shuffled-dpsgd train --resume {directory}`"
        )
    old = read_card(directory)
    if spare_budget and (config.privacy.budget or config.privacy.records_per_unit):
        setting = replace(setting, num_input_canaries=0)
    if describe_weights(directory / "model") != old.subject.get("weights"):
        raise CheckpointError(
            f"{directory / 'model'}: not the weights that the card names; audit a folder as its "
            "run left it"
        )
    task = build_task(config)
    check_data(directory, task.train_data)
    first = target_of(config, task).start(task.dataset_size)
    plan = first.plan
    first.close()
    if plan.uncertifiable:
        raise InvalidArgumentError(
            "DIR", expected="a private run", got=f"{directory}: {'; '.join(plan.uncertifiable)}"
        )
    # What a budget covers must not rest on a seed that the report shows.
    seed = setting.seed if config.privacy.budget is None else secrets.randbits(62)
    target = target_of(_repeated(config, plan, seed=seed), task)
    report = audit_one_run(target, setting, confidence=confidence, on_progress=on_progress)
    # Bounds from releases alone: losses of records carry no noise and have no place on a card.
    noised = [a for a in report.attacks if a.evidence.threat_model is not ThreatModel.BLACK_BOX]
    bounds = card_bounds(noised, confidence=confidence)
    audited = replace(
        old,
        audits=tuple(replace(b, adversary=f"{b.adversary}{OF_A_REPEAT}") for b in bounds),
        not_covered=(*(line for line in old.not_covered if line != SECOND_RUN), SECOND_RUN),
    )
    return replace(report, card=audited), audited


def write_audited_card(
    directory: Path, card: PrivacyCard, membership: Membership | None
) -> list[Path]:
    """Replace the folder's card by `card` in every file that shows it.

    The membership attack's result goes into the report, which is not for publishing.
    """
    summary = json.loads((directory / SUMMARY_FILE).read_text(encoding="utf-8"))
    summary["privacy_card"] = card.to_json()
    texts = {
        **card_files(card),
        SUMMARY_FILE: json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n",
    }
    report = directory / "report.html"
    if report.is_file():
        sections = {"membership": "", "card": card_fragment(card) + _membership_section(membership)}
        page = report.read_text(encoding="utf-8")
        for name, new in sections.items():
            plain = new.replace("\\", r"\\")
            page = re.sub(f'<section class="{name}">.*?</section>', plain, page, flags=re.S)
        texts[report.name] = page
    for name, text in texts.items():
        beside = directory / f".{name}.new"
        beside.write_text(text, encoding="utf-8")
        beside.replace(directory / name)
    return [directory / name for name in texts]


def _membership_section(found: Membership | None) -> str:
    if found is None:
        return ""
    warning = MEMBERSHIP_WARNING.format(count=found.num_records, canary=found.canary)
    return (
        '<section class="membership"><h2>Membership attack: area under the ROC curve</h2>'
        f'<p class="warning">{escape(warning)}</p>{table(found.rows())}</section>'
    )


def _repeated(config: RunConfig, plan: PrivacyPlan, *, seed: int) -> RunConfig:
    """The configuration with its noise and steps written out, and a seed of the audit's own.

    Canaries add to the number of records; neither the noise nor the steps may follow it.
    """
    noise: dict[str, Any] = {"epsilon": None, "noise_multiplier": plan.smallest_noise_multiplier}
    if plan.accounting == "paper":
        noise["unshuffled_noise_multiplier"] = max(b.noise_multiplier for b in plan.blocks)
    return replace(
        config,
        seed=seed,
        privacy=replace(config.privacy, **noise),
        training=replace(config.training, epochs=None, num_steps=plan.num_steps),
    )
