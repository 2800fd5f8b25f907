"""What `train` prints: the plan, a progress bar, the result. Every ε is shown with its kind."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from shuffled_dpsgd.cli.output import KIND_COLOURS, facts
from shuffled_dpsgd.cli.plan_rows import plan_rows

if TYPE_CHECKING:
    from shuffled_dpsgd.accounting import PrivacyClaim
    from shuffled_dpsgd.reports import StepRecord
    from shuffled_dpsgd.tasks import PreparedRun, RunResult
    from shuffled_dpsgd.tasks.diagnosis import Finding
    from shuffled_dpsgd.training import PrivacyCard

RECENT_STEPS = 20  # The speed shown is the mean over so many.
LOOK_EVERY = 10
SECONDS_BETWEEN_LINES = 30.0


def announcement(run: PreparedRun) -> RenderableType:
    """The plan of a run, as it starts."""
    from shuffled_dpsgd.training.planning import large_delta

    plan, card = run.private.plan, run.private.card()
    certified = plan.certified()
    warnings = [large_delta(plan)]
    if plan.accounting == "paper" and plan.epsilon and certified is not None:
        text = (
            f"What is proven of this noise is ε = {certified.epsilon:.4g}, not {plan.epsilon:g}. "
            "For a guarantee at the target use --accounting certified."
        )
        warnings.insert(0, text if certified.epsilon > plan.epsilon else None)
    how = Text("privately") if card.private else Text("without privacy", style="red")
    title = Text("Resuming " if run.resumed else "Training ", style="bold").append(how)
    shown = [Text(each, style="bold red") for each in warnings if each]
    return Group(title, facts(_planned(run, card, certified)), *shown, Text())


def _planned(
    run: PreparedRun, card: PrivacyCard, certified: PrivacyClaim | None
) -> Iterator[tuple[str, Any]]:
    from shuffled_dpsgd.tasks.models import describe_choices
    from shuffled_dpsgd.training.spending import paper_estimate

    private, model = run.private, run.private.model
    plan = private.plan
    yield "task", run.task.name
    # `fully_shard` puts a word before the name of a model's class.
    name = type(model).__name__.removeprefix("FSDP" if private.is_sharded else "")
    total = sum(p.numel() for p in model.parameters() if p.requires_grad)
    yield "model", f"{name}, {total:,} trainable parameters"
    yield from plan_rows(plan, describe_choices(run.config, model))
    yield "shuffle", card.shuffle
    yield "certified ε", _claim(certified, card)
    yield "paper's estimate", _paper(paper_estimate(plan), card)
    if private.world.size > 1:
        part = "every batch and of the weights" if private.is_sharded else "every batch"
        yield "ranks", f"{private.world.size}, each with a part of {part}"
    yield "output", str(run.directory)


def _claim(claim: PrivacyClaim | None, card: PrivacyCard) -> Text:
    if claim is None:
        return Text(f"{card.no_claim}: {'; '.join(card.why_not_certified)}")
    return Text(claim.describe(), style=KIND_COLOURS[claim.kind])


def _paper(claim: PrivacyClaim | None, card: PrivacyCard) -> Text:
    """The paper's estimate, in small print unless the noise was calibrated by it."""
    if claim is None:
        return Text("none: the formula does not apply")
    if not card.paper_is_small_print:
        return _claim(claim, card)
    from shuffled_dpsgd.training.card import SMALL_PRINT

    return Text(f"{claim.describe()}; {SMALL_PRINT}", style="dim")


class TrainingBar:
    """Progress with loss, held-out score and certified ε: a bar, or lines if there is no terminal.

    Each finding about the run is printed once.
    """

    def __init__(self, run: PreparedRun, console: Console) -> None:
        self._plan = run.private.plan
        whole = self._plan.certified()
        self._of = "" if whole is None else f", of a plan of ε = {whole.epsilon:.3f}"
        self._score_name = run.task.score_name
        self._score = ""
        self._console = console
        self._records: list[StepRecord] = []
        self._said: set[str] = set()
        self._last_line = self._started = time.monotonic()
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )
        self._bar = self._progress.add_task("", total=self._plan.num_steps, status="")

    def __enter__(self) -> TrainingBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, record: StepRecord, _: object) -> None:
        """Show one finished step."""
        from shuffled_dpsgd.reports import samples_per_second
        from shuffled_dpsgd.tasks.diagnosis import diagnose

        self._records.append(record)
        if record.heldout_score is not None:
            self._score = f"{self._score_name} {record.heldout_score:.3f}"
        loss = "no loss" if record.loss is None else f"loss {record.loss:.3f}"
        spent = record.certified_epsilon
        epsilon = "no certified ε" if spent is None else f"ε {spent:.3f} spent so far{self._of}"
        speed = samples_per_second(self._records[-RECENT_STEPS:])
        said = "" if speed is None else f"{speed:,.0f} samples/s"
        coloured = f"[{'red' if spent is None else 'green'}]{epsilon}[/]"
        status = _joined(loss, self._score, coloured, said)
        self._progress.update(self._bar, completed=record.step, status=status)
        if not self._console.is_terminal:
            self._print_line(record.step, loss, self._score, epsilon, said)
        for finding in diagnose(self._records, self._plan) if record.step % LOOK_EVERY == 0 else ():
            if finding.kind not in self._said:
                self._said.add(finding.kind)
                self._console.print(_warning_line(finding), soft_wrap=True)

    def _print_line(self, step: int, *parts: str) -> None:
        """At the first and last step, every tenth of the run, and every half minute."""
        total, now = self._plan.num_steps, time.monotonic()
        waited = now - self._last_line >= SECONDS_BETWEEN_LINES
        if not waited and step % max(1, total // 10) and step not in (1, total):
            return
        self._last_line = now
        left = (now - self._started) / len(self._records) * (total - step)
        line = _joined(f"step {step}/{total}", *parts, f"{left:,.0f} s left")
        self._console.print(line, soft_wrap=True, highlight=False)


def _joined(*parts: str) -> str:
    return " · ".join(part for part in parts if part)


def _warning_line(finding: Finding) -> Text:
    return Text("warning: ", style="bold yellow").append(finding.describe(), style="not bold")


def scored(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Rows with the scores of a finished run: on every split, and of its texts."""
    name, splits = summary["score_name"], summary["heldout_scores"]
    several = {split: found["score"] for split, found in splits.items() if len(splits) > 1}
    for split, score in (several or {"": summary["heldout_score"]}).items():
        if score is not None or splits:
            shown = "not finite" if score is None else f"{score:.4f}"
            yield f"held-out {name}", f"{shown}{split and f' on {split}'}"
    texts = summary.get("generation")
    if texts is not None:
        metrics = ", ".join(f"{metric} {texts[metric]:.4g}" for metric in texts["variants"])
        yield "generated texts", f"{texts['num_prompts']:,} on {texts['split']}: {metrics}"


def conclusion(result: RunResult, run: PreparedRun, seconds: float) -> RenderableType:
    """The result, the claims, and where the files are."""
    card, outcome = run.private.card(), result.outcome
    if not outcome.finished:
        stopped = f"Stopped by {outcome.interrupted_by} after step {outcome.steps_taken}"
        resume = f"continue with: shuffled-dpsgd train --resume {result.directory}"
        spent = (_claim(card.certified, card), Text(card.spent_so_far or ""))
        return Group(Text(stopped, style="bold yellow"), Text(resume), *spent)
    rows: list[tuple[str, Any]] = [*scored(result.summary)]
    if outcome.steps_lost:
        first, last = outcome.steps_taken + 1, outcome.steps_taken + outcome.steps_lost
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        lost = (
            f"{steps} of the plan: as many releases were made after the last checkpoint of a run "
            "that was killed; they stay spent, and what they taught is gone"
        )
        rows.append(("lost", Text(lost, style="yellow")))
    rows += [
        ("time", f"{seconds:.1f} s, of which {run.private.check_seconds:.1f} s for checks"),
        ("certified ε", _claim(card.certified, card)),
        ("paper's estimate", _paper(card.paper, card)),
        *([("budget", run.private.history.in_budget)] if run.private.history.in_budget else []),
        ("report", str(result.directory / "report.html")),
        ("weights", str(result.directory / "model")),
    ]
    if not result.findings:
        return Group(Text("Done", style="bold"), facts(rows))
    title = Text("Done, but this model may not be of use:", style="bold yellow")
    return Group(title, *map(_warning_line, result.findings), facts(rows))
