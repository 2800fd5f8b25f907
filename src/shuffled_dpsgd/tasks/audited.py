"""Tasks as audits take them, and a finished run's folder put on trial.

`audit_folder` trains the run once more in memory, from the same initial weights and on the same
records, with its own noise, clip and number of steps and with canaries among the records (a one-run
audit). The records of the finished run keep their chance to join a step or have a slightly smaller
one, since the canaries are counted too, and ε grows with that chance: what the canaries show of the
repeated run is a lower bound for the finished one. The released weights themselves are not touched.

A second run spends privacy of its own if what it shows is published, and the card says so.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

from shuffled_dpsgd.auditing.estimators.scores import check_levels
from shuffled_dpsgd.auditing.fitted_start import fit_to_records
from shuffled_dpsgd.auditing.probes import OnProgress
from shuffled_dpsgd.auditing.run import AuditTarget, RunSetting, audit_one_run
from shuffled_dpsgd.auditing.verdict import AuditReport
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.environment import describe_weights
from shuffled_dpsgd.errors import CheckpointError, InvalidArgumentError
from shuffled_dpsgd.reports import card_fragment, card_page
from shuffled_dpsgd.tasks.config import RunConfig
from shuffled_dpsgd.tasks.run_folder import SUMMARY_FILE, check_data, finished_summary, load_run
from shuffled_dpsgd.tasks.start import chosen_device, start_private
from shuffled_dpsgd.tasks.task import Task, build_task
from shuffled_dpsgd.training.card import AuditedBound, PrivacyCard, write_card
from shuffled_dpsgd.training.private import PrivateTraining

SECOND_RUN = (
    "the audited bounds: they were read off a second run on the same records with the same noise, "
    "so publishing them spends as much again"
)
COPIED_RECORDS = "; some of its canaries are copies of records, whose losses carry no noise at all"


def prepared_task(config: RunConfig, *, fit_steps: int = 0) -> Task:
    """The configured task, its initial weights fitted to its records for so many steps first."""
    task = build_task(config)
    if fit_steps:
        task.model.to(chosen_device(config.training.device))
        fit_to_records(
            task.model,
            task.train_data,
            task.losses,
            num_steps=fit_steps,
            collate=task.collate,
            seed=config.init_seed,
        )
    return task


def audit_target(config: RunConfig, *, fit_steps: int = 0) -> AuditTarget:
    """Fresh runs of the configured task, each from a copy of the same initial weights.

    With `fit_steps`, these are first fitted to the records for so many steps: the worst case.
    """
    return target_of(config, prepared_task(config, fit_steps=fit_steps))


def target_of(config: RunConfig, task: Task) -> AuditTarget:
    """A task that is built already, as audits take it.

    An audit counts itself in the run's budget; the runs that it starts have none of their own.
    """
    uncounted = replace(config, privacy=replace(config.privacy, budget=None))

    def start(dataset_size: int) -> PrivateTraining:
        return start_private(uncounted, copy.deepcopy(task.model), dataset_size=dataset_size)

    return AuditTarget(
        start=start,
        data=task.train_data,
        losses=task.losses,
        collate=task.collate,
        budget=config.privacy.budget,
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
    first = target_of(config, task).start(len(task.train_data))
    plan, spec = first.plan, first.spec
    first.close()
    if plan.uncertifiable:
        raise InvalidArgumentError(
            "DIR", expected="a private run", got=f"{directory}: {'; '.join(plan.uncertifiable)}"
        )
    # What a budget covers must not rest on a seed that the report shows.
    seed = setting.seed if config.privacy.budget is None else secrets.randbits(62)
    target = target_of(_repeated(config, plan, seed=seed), task)
    report = audit_one_run(target, setting, confidence=confidence, on_progress=on_progress)
    card = write_card(
        plan,
        num_steps=old["steps_released"],
        spec=spec,
        shuffles_verified=old["shuffles_verified"],
        samples_checked=int(old["samples_checked"]),
    ).about(**old["subject"])
    assert report.card is not None
    price = SECOND_RUN + COPIED_RECORDS * bool(setting.num_input_canaries)
    audited = replace(
        card.with_audits(*map(_of_a_repeat, report.card.audits)),
        not_covered=(*card.not_covered, price),
        weights=old.get("weights", {}),
    )
    return replace(report, card=audited), audited


def write_audited_card(directory: Path, card: PrivacyCard) -> list[Path]:
    """Put `card` in the place of the folder's, on every page and in every file that has it."""
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
        page, fragment = report.read_text(encoding="utf-8"), card_fragment(card)
        texts[report.name] = re.sub(
            r'<section class="card">.*?</section>', lambda _: fragment, page, flags=re.DOTALL
        )
    for name, text in texts.items():
        beside = directory / f".{name}.new"
        beside.write_text(text, encoding="utf-8")
        beside.replace(directory / name)
    return [directory / name for name in texts]


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
