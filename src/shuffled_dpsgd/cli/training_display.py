"""What `train` shows people: the plan, a progress bar, the result. Every ε carries its kind."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from shuffled_dpsgd.accounting import PrivacyClaim
    from shuffled_dpsgd.reports import StepRecord
    from shuffled_dpsgd.tasks import PreparedRun, RunResult
    from shuffled_dpsgd.tasks.diagnosis import Finding
    from shuffled_dpsgd.training import Outcome, PrivacyCard, PrivacyPlan

# The speed shown is that of so many steps.
RECENT_STEPS = 20
LOOK_EVERY = 10
SECONDS_BETWEEN_LINES = 30.0
NO_ESTIMATE = "none: the formula does not apply"
COLOURS = {"proven": "green", "heuristic": "yellow", "measured": "cyan"}


def announcement(run: PreparedRun) -> RenderableType:
    """What will be trained, on what noise, and what that is worth."""
    from shuffled_dpsgd.tasks.models import describe_choices
    from shuffled_dpsgd.training.planning import large_delta

    plan, model = run.private.plan, run.private.model
    certified = plan.certified()
    total = sum(p.numel() for p in model.parameters() if p.requires_grad)
    table = _facts()
    table.add_row("task", f"{run.task.name}, {plan.dataset_size:,} training records")
    # `fully_shard` puts a word before the name of a model's class.
    name = type(model).__name__.removeprefix("FSDP" if run.private.is_sharded else "")
    table.add_row("model", f"{name}, {total:,} trainable parameters")
    table.add_row(
        "steps",
        f"{plan.num_steps}, Poisson batches of {plan.expected_batch_size} expected "
        f"(sampling probability {plan.sampling_prob:.4g})",
    )
    chosen = describe_choices(run.config, model)
    if chosen is not None:
        table.add_row("chosen by method", chosen)
    table.add_row("noise", _noise(run))
    from shuffled_dpsgd.training.spending import paper_estimate

    card = run.private.card()
    table.add_row("shuffle", card.shuffle)
    table.add_row("certified ε", _claim(certified, _no_claim(card)))
    table.add_row("paper's estimate", _paper(paper_estimate(plan), card))
    if run.private.world.size > 1:
        part = "every batch and of the weights" if run.private.is_sharded else "every batch"
        table.add_row("ranks", f"{run.private.world.size}, each with a part of {part}")
    table.add_row("output", str(run.directory))
    verb = "Resuming" if run.resumed else "Training"
    how = Text("privately") if card.private else Text("without privacy", style="red")
    title = Text(f"{verb} ", style="bold").append(how)
    warnings = [_warning(plan, certified), Text(large_delta(plan) or "", style="bold red")]
    return Group(title, table, *(each for each in warnings if each), Text())


def _warning(plan: PrivacyPlan, certified: PrivacyClaim | None) -> Text:
    """What is proven of noise that the paper's formula calibrated, if it misses the target."""
    if plan.accounting != "paper" or plan.epsilon is None or certified is None:
        return Text()
    if certified.epsilon <= plan.epsilon:
        return Text()
    return Text(
        f"What is proven of this noise is ε = {certified.epsilon:.4g}, not {plan.epsilon:g}. "
        "For a guarantee at the target use --accounting certified.",
        style="bold red",
    )


def _noise(run: PreparedRun) -> str:
    plan = run.private.plan
    parts = []
    for block in plan.blocks:
        clip = block.batch_clip_norm
        batch = "" if clip is None else f", batch clip c' = {clip / plan.clip_norm:g} c"
        parts.append(f"{block.noise_multiplier:.4g} on {block.dimension:,} ({block.name}{batch})")
    if plan.epsilon is None:
        source = "given"
    elif plan.accounting == "certified":
        source = "calibrated to the certified ε, which is proven"
    elif plan.accounting == "rdp":
        source = "calibrated by Rényi DP, which is proven and looser than the certified ε"
    else:
        source = "calibrated by the paper's formula, which is heuristic: not a guarantee"
    return f"multiplier {'; '.join(parts)}; {source}"


def _no_claim(card: PrivacyCard) -> str:
    return f"{card.no_claim}: {'; '.join(card.why_not_certified)}"


def _claim(claim: PrivacyClaim | None, otherwise: str) -> Text:
    if claim is None:
        return Text(otherwise)
    return Text(claim.describe(), style=COLOURS[claim.kind])


def _paper(claim: PrivacyClaim | None, card: PrivacyCard) -> Text:
    """In small print where the noise was not calibrated by it."""
    text = _claim(claim, NO_ESTIMATE)
    if claim is None or not card.paper_is_small_print:
        return text
    from shuffled_dpsgd.training.card import SMALL_PRINT

    return Text(f"{claim.describe()}; {SMALL_PRINT}", style="dim")


def _facts() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    return table


class TrainingBar:
    """Progress with loss, held-out score and certified ε: a bar, or lines without a terminal.

    What is wrong with a run is said once, when it is first seen.
    """

    def __init__(self, run: PreparedRun, console: Console) -> None:
        self._plan = run.private.plan
        whole = self._plan.certified()
        self._of = "" if whole is None else f", of a plan of ε = {whole.epsilon:.3f}"
        self._score_name = run.task.score_name
        self._console = console
        self._records: list[StepRecord] = []
        self._said: set[str] = set()
        self._last_line = self._started = time.monotonic()
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(),
                TextColumn("{task.fields[status]}"),
                TimeRemainingColumn(compact=True),
                console=console,
            )
            self._bar = self._progress.add_task("", total=self._plan.num_steps, status="")
        self._score = ""

    def __enter__(self) -> TrainingBar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, record: StepRecord, _: object) -> None:
        """Show one finished step."""
        self._records.append(record)
        if record.heldout_score is not None:
            self._score = f"{self._score_name} {record.heldout_score:.3f}"
        loss = "no loss" if record.loss is None else f"loss {record.loss:.3f}"
        spent = record.certified_epsilon
        epsilon = "no certified ε" if spent is None else f"ε {spent:.3f} spent so far{self._of}"
        if self._progress is not None:
            colour = "red" if spent is None else "green"
            status = _joined(loss, self._score, f"[{colour}]{epsilon}[/]", self._speed())
            self._progress.update(self._bar, completed=record.step, status=status)
        elif self._is_due(record.step):
            self._print_line(record.step, loss, epsilon)
        if record.step % LOOK_EVERY == 0:
            self._warn()

    def _is_due(self, step: int) -> bool:
        """At the first and last step, and in between every half minute or tenth of the run."""
        tenth = max(1, self._plan.num_steps // 10)
        waited = time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES
        return waited or step % tenth == 0 or step in (1, self._plan.num_steps)

    def _print_line(self, step: int, loss: str, epsilon: str) -> None:
        now = time.monotonic()
        self._last_line = now
        seconds = now - self._started
        left = seconds / len(self._records) * (self._plan.num_steps - step)
        self._console.print(
            _joined(
                f"step {step}/{self._plan.num_steps}",
                loss,
                self._score,
                epsilon,
                self._speed(),
                f"{left:,.0f} s left",
            ),
            soft_wrap=True,
            highlight=False,
        )

    def _speed(self) -> str:
        from shuffled_dpsgd.reports import samples_per_second

        speed = samples_per_second(self._records[-RECENT_STEPS:])
        return "" if speed is None else f"{speed:,.0f} samples/s"

    def _warn(self) -> None:
        from shuffled_dpsgd.tasks.diagnosis import diagnose

        for finding in diagnose(self._records, self._plan):
            if finding.kind not in self._said:
                self._said.add(finding.kind)
                self._console.print(_warning_line(finding), soft_wrap=True)


def _joined(*parts: str) -> str:
    return " · ".join(part for part in parts if part)


def _warning_line(finding: Finding) -> Text:
    return Text("warning: ", style="bold yellow").append(finding.describe(), style="not bold")


def _lost(outcome: Outcome) -> Text:
    first, last = outcome.steps_taken + 1, outcome.steps_taken + outcome.steps_lost
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    return Text(
        f"{steps} of the plan: as many releases were made after the last checkpoint of a run that "
        "was killed; they stay spent, and what they taught is gone",
        style="yellow",
    )


def scored(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a finished run scored, for people: on every split, and by the texts it wrote."""
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
    """The result, the claims in the order every surface keeps, and where everything is."""
    card = run.private.card()
    if not result.outcome.finished:
        outcome = result.outcome
        return Group(
            Text(
                f"Stopped by {outcome.interrupted_by} after step {outcome.steps_taken}",
                style="bold yellow",
            ),
            Text(f"continue with: shuffled-dpsgd train --resume {result.directory}"),
            _claim(card.certified, _no_claim(card)),
            Text(card.spent_so_far or ""),
        )
    table = _facts()
    for label, text in scored(result.summary):
        table.add_row(label, text)
    if result.outcome.steps_lost:
        table.add_row("lost", _lost(result.outcome))
    table.add_row("time", f"{seconds:.1f} s")
    table.add_row("certified ε", _claim(card.certified, _no_claim(card)))
    table.add_row("paper's estimate", _paper(card.paper, card))
    if run.private.history.in_budget:
        table.add_row("budget", run.private.history.in_budget)
    table.add_row("report", str(result.directory / "report.html"))
    table.add_row("weights", str(result.directory / "model"))
    if not result.findings:
        return Group(Text("Done", style="bold"), table)
    title = Text("Done, but this model may not be of use:", style="bold yellow")
    return Group(title, *map(_warning_line, result.findings), table)
