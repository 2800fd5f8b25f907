"""A finished run's folder put on trial, and the outcome written onto its privacy card.

The run is trained once more in memory, from the same initial weights and on the same records, with
its own noise, clip and number of steps and with canaries among the records (a one-run audit). The
records of the finished run keep their chance to join a step or have a slightly smaller one, since
the canaries are counted too, and ε grows with that chance: what the canaries show of the repeated
run is a lower bound for the finished one. The released weights themselves are not touched.

A second run spends privacy of its own if what it shows is published, and the card says so.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from shuffled_dpsgd.auditing.estimators.scores import check_levels
from shuffled_dpsgd.auditing.membership import Membership
from shuffled_dpsgd.auditing.run import RunSetting, audit_one_run, card_bounds
from shuffled_dpsgd.auditing.taps import OnProgress
from shuffled_dpsgd.auditing.verdict import AuditReport, ThreatModel
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.environment import describe_weights
from shuffled_dpsgd.errors import CheckpointError, InvalidArgumentError
from shuffled_dpsgd.reports import card_fragment, card_page
from shuffled_dpsgd.reports.page import table
from shuffled_dpsgd.tasks.audited import target_of
from shuffled_dpsgd.tasks.config import RunConfig
from shuffled_dpsgd.tasks.data_identity import check_data
from shuffled_dpsgd.tasks.privacy import start_private
from shuffled_dpsgd.tasks.registry import build_task
from shuffled_dpsgd.tasks.run import SUMMARY_FILE, finished_summary, load_run
from shuffled_dpsgd.training.card import AuditedBound, PrivacyCard
from shuffled_dpsgd.training.card_of_plan import write_card

SECOND_RUN = (
    "the audited bounds: they were read off a second run on the same records with the same noise, "
    "so publishing them spends as much again"
)
MEMBERSHIP_WARNING = (
    "Read off a second run with {count} records planted by fair coins ({canary}), and off the same "
    "training without privacy. These losses carry no noise: no ε covers publishing them."
)


def audit_folder(
    directory: Path,
    setting: RunSetting,
    *,
    confidence: float = 0.95,
    on_progress: OnProgress | None = None,
) -> tuple[AuditReport, PrivacyCard]:
    """Audit the run in `directory`; the report, and the run's card with the bounds on it.

    Raises:
        CheckpointError: the run is not finished, its data or its weights are no longer the same.
    """
    check_levels(delta=0.0, confidence=confidence)
    config, old = load_run(directory), _card_in(directory)
    if describe_weights(directory / "model") != old["subject"].get("weights"):
        raise CheckpointError(
            f"{directory / 'model'}: not the weights that the card names; audit a folder as its "
            "run left it"
        )
    task = build_task(config)
    check_data(directory, task.train_data)
    first = start_private(config, copy.deepcopy(task.model), dataset_size=len(task.train_data))
    plan, spec = first.plan, first.spec
    first.close()
    if plan.uncertifiable:
        raise InvalidArgumentError(
            "DIR", expected="a private run", got=f"{directory}: {'; '.join(plan.uncertifiable)}"
        )
    repeated = _with_noise_of(config, plan, seed=setting.seed)
    target = target_of(repeated, task)
    report = audit_one_run(target, setting, confidence=confidence, on_progress=on_progress)
    card = write_card(
        plan,
        num_steps=old["steps_released"],
        spec=spec,
        shuffles_verified=old["shuffles_verified"],
        samples_checked=int(old["samples_checked"]),
    ).about(**old["subject"])
    # Bounds from releases alone: losses of records carry no noise and have no place on a card.
    noised = [a for a in report.attacks if a.evidence.threat_model is not ThreatModel.BLACK_BOX]
    bounds = card_bounds(noised, confidence=confidence)
    audited = replace(
        card.with_audits(*map(_of_a_repeat, bounds)), not_covered=(*card.not_covered, SECOND_RUN)
    )
    return replace(report, card=audited), audited


def write_audited_card(
    directory: Path, card: PrivacyCard, membership: Membership | None
) -> list[Path]:
    """Put `card` in the place of the folder's, on every page and in every file that has it.

    What the membership attack reached goes into the report, which is not for publishing.
    """
    summary = json.loads((directory / SUMMARY_FILE).read_text(encoding="utf-8"))
    summary["privacy_card"] = card.to_json()
    texts = {
        "privacy_card.txt": f"{card}\n",
        "privacy_card.json": card.dumps() + "\n",
        "privacy_card.html": card_page(card),
        SUMMARY_FILE: json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n",
    }
    report = directory / "report.html"
    if report.is_file():
        page = report.read_text(encoding="utf-8")
        page = _with_section(page, "membership", "")
        page = _with_section(page, "card", card_fragment(card) + _membership_section(membership))
        texts[report.name] = page
    for name, text in texts.items():
        beside = directory / f".{name}.new"
        beside.write_text(text, encoding="utf-8")
        beside.replace(directory / name)
    return [directory / name for name in texts]


def _with_section(page: str, name: str, fragment: str) -> str:
    section = rf'<section class="{name}">.*?</section>'
    return re.sub(section, lambda _: fragment, page, flags=re.DOTALL)


def _membership_section(found: Membership | None) -> str:
    if found is None:
        return ""
    warning = MEMBERSHIP_WARNING.format(count=found.num_records, canary=found.canary)
    return (
        '<section class="membership"><h2>Membership attack: area under the ROC curve</h2>'
        f'<p class="warning">{escape(warning)}</p>{table(found.rows())}</section>'
    )


def _card_in(directory: Path) -> dict[str, Any]:
    """The card of the finished run in `directory`, as its summary has it."""
    summary = finished_summary(directory)
    if summary is None:
        raise CheckpointError(
            f"{directory}: the run is not finished; continue it with "
            f"`shuffled-dpsgd train --resume {directory}`"
        )
    card = summary.get("privacy_card")
    needed = {"subject", "steps_released", "shuffles_verified", "samples_checked"}
    if not isinstance(card, dict) or not needed <= card.keys():
        raise CheckpointError(
            f"{directory / SUMMARY_FILE}: no privacy card of this version in it; put the file back"
        )
    return card


def _of_a_repeat(bound: AuditedBound) -> AuditedBound:
    return replace(bound, adversary=f"{bound.adversary}, in a repeat of the run with canaries")


def _with_noise_of(config: RunConfig, plan: PrivacyPlan, *, seed: int) -> RunConfig:
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
