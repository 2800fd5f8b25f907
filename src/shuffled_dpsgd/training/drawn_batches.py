"""The batches of a run: drawn by Poisson sampling, divided, loaded, and yielded in order.

A logical batch is what was drawn for one step; it is divided into physical batches that fit in
memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shuffled_dpsgd.errors import BudgetExhaustedError, InvalidArgumentError, require
from shuffled_dpsgd.runtime.clock import OTHER
from shuffled_dpsgd.training.background import loaded_ahead
from shuffled_dpsgd.training.data import (
    LogicalBatch,
    MapStyle,
    PhysicalBatch,
    physical_batches,
    shaped,
    to_device,
)
from shuffled_dpsgd.training.global_randomness import loader_generator
from shuffled_dpsgd.training.guards import check_count, check_records
from shuffled_dpsgd.training.label_check import warn_of_labels
from shuffled_dpsgd.training.launch_check import compare_records, lengths_on_all
from shuffled_dpsgd.training.layout import Layout, Part
from shuffled_dpsgd.training.meeting import Meeting
from shuffled_dpsgd.training.rows import survey, warn_of_repeats

if TYPE_CHECKING:
    from shuffled_dpsgd.training.private import PrivateTraining


# The generator of a stream yields this after every step.
_STEP_ENDS = object()


class BatchStream(Iterator[Any]):
    """Physical batches; `len` counts logical ones, which are the steps, as schedulers need it.

    A logical batch may come in several physical ones, or, empty, in none.
    """

    def __init__(self, batches: Generator[Any, None, None], *, num_steps: int) -> None:
        self._batches = batches
        self._num_steps = num_steps

    def __len__(self) -> int:
        return self._num_steps

    def __next__(self) -> Any:
        while (batch := next(self._batches)) is _STEP_ENDS:
            pass
        return batch

    def of_next_step(self) -> Iterator[Any]:
        """The physical batches of the next logical batch, whose step has been taken at the end."""
        for batch in self._batches:
            if batch is _STEP_ENDS:
                return
            yield batch

    def close(self) -> None:
        """End the loop early; what was accumulated since the last step is dropped."""
        self._batches.close()


class DrawnBatches:
    """Draws the batches of `run` and knows which of them the user's loop is at.

    `before_step(step)` is called before the first batch of a step and says whether the step may be
    taken. `take_empty_step()` takes the step of an empty logical batch.

    `current` is the physical batch in the user's hands, None between two. `num_drawn` counts the
    records of the logical batch up to and including it. With `pads`, a physical batch may end in
    copies that do not count.
    """

    def __init__(
        self,
        run: PrivateTraining,
        *,
        meeting: Meeting,
        before_step: Callable[[int], bool],
        take_empty_step: Callable[[], None],
    ) -> None:
        self._run = run
        self._meeting = meeting
        self._before_step = before_step
        self._take_empty_step = take_empty_step
        self.current: PhysicalBatch | None = None
        self.num_drawn = 0
        self.pads = False
        self._compared: MapStyle | None = None
        self._compared_in: int | None = None
        self._layout: tuple[MapStyle, tuple[int, bool], Layout] | None = None
        self._pausing = False
        self._epoch_end: int | None = None
        self._stream: object = None
        self._begun: int | None = None

    def open(
        self,
        data: MapStyle,
        *,
        num_steps: int | None,
        pad_batches: bool,
        background: bool | None,
        **loading: Any,
    ) -> BatchStream:
        """What `private.batches` returns; `loading` goes to `physical_batches`."""
        run = self._run
        self._check_request(data, pad_batches=pad_batches)
        last = run.plan.num_steps if self._epoch_end is None else self._epoch_end
        last = last if num_steps is None else min(last, run.steps_taken + num_steps)
        steps = range(run.steps_taken, last)
        on_gpu = run.device.type == "cuda"
        if loading["pin_memory"] is None:
            loading["pin_memory"] = on_gpu
        # Worker processes load ahead already.
        ahead = (on_gpu if background is None else background) and not loading["num_workers"]
        layout = self.layout(data, pad_batches=pad_batches)
        return BatchStream(self._batches(data, steps, layout, ahead, loading), num_steps=len(steps))

    def epochs(self) -> Iterator[int]:
        """What `private.epochs` returns."""
        run = self._run
        try:
            while not run.finished:
                epoch = run.steps_taken // run.steps_per_epoch
                self._epoch_end = min((epoch + 1) * run.steps_per_epoch, run.plan.num_steps)
                before = run.steps_taken
                yield epoch
                if run.steps_taken == before:
                    return
        finally:
            self._epoch_end = None

    def layout(self, data: MapStyle, *, pad_batches: bool) -> Layout:
        """How logical batches of `data` are divided into physical ones."""
        run = self._run
        key = run.physical_batch_size, pad_batches
        if self._layout is None or self._layout[0] is not data or self._layout[1] != key:
            layout = Layout(
                batch_size=max(1, run.physical_batch_size // (run.plan.records_per_unit or 1)),
                expected=math.ceil(
                    run.plan.expected_batch_size / (1 if run.is_split else run.world.size)
                ),
                lengths=self._lengths(data),
                pads=pad_batches,
                most=run.plan.largest_batch,
                device=run.device.type,
                max_length=getattr(
                    getattr(run.model, "config", None), "max_position_embeddings", None
                ),
            )
            self._layout = data, key, layout
        return self._layout[2]

    def _lengths(self, data: MapStyle) -> Sequence[int] | None:
        """The lengths of what is drawn: records, or units."""
        units, lengths = self._run.find_units(data), lengths_on_all(self._run.world, data)
        return lengths if units is None else units.lengths(lengths)

    def pause(self) -> None:
        """End the present loop after this step."""
        self._pausing = True

    def forget(self) -> None:
        """Forget the current batch."""
        self.current = None
        self.num_drawn = 0
        self._begun = None

    def check_count(self, count: int) -> None:
        """Refuse unless every record drawn has one gradient among the `count` in the sums."""
        padded = self.pads or self._run.keeps_in_step
        check_count(count, drawn=self.num_drawn, padded=padded)

    def _check_request(self, data: MapStyle, *, pad_batches: bool) -> None:
        run = self._run
        if run.plan.sampling != "poisson":
            raise InvalidArgumentError(
                "sampling",
                expected="'poisson' for private.batches",
                got=run.plan.sampling,
                remedy="feed your own batches inside `with private:`, or plan Poisson sampling",
            )
        units = run.find_units(data)
        size = run.plan.dataset_size if units is None else units.num_records
        check_records(data, dataset_size=size)
        if self._compared is not data:
            self._compared_in = None
            self._compare(data, run.steps_taken)
            with run.clock.part("checks"):
                run.rows = survey(data)
                run.history.begin(data, run.rows.sketch)
                if units is None:
                    warn_of_repeats(run.plan, run.rows)
                warn_of_labels(run.model, run.rows)
            self._compared = data
        if run.finished:
            raise BudgetExhaustedError(
                f"after {run.steps_taken} steps, {run.ledger.spent} of the "
                f"{run.plan.num_steps} releases of the plan are spent. One pass over "
                "private.batches(data) runs the whole plan: for a pass per epoch write `for epoch "
                "in private.epochs():` around it. The model is trained; for more steps start a "
                "run with a larger plan"
            )
        if pad_batches and run.plan.loss_reduction == "mean":
            raise InvalidArgumentError(
                "pad_batches",
                expected="losses of single samples, loss_reduction='sum'",
                got="loss_reduction='mean', a mean over the rows that do not count as well",
            )

    def _compare(self, data: MapStyle, step: int) -> None:
        """Compare the records of all ranks, once in every epoch."""
        epoch = step // self._run.steps_per_epoch
        if self._run.world.size > 1 and self._compared_in != epoch:
            with self._run.clock.part("checks"):
                compare_records(self._run.world, data)
            self._compared_in = epoch

    def _batches(
        self, data: MapStyle, steps: range, layout: Layout, ahead: bool, loading: dict[str, Any]
    ) -> Generator[Any, None, None]:
        run = self._run
        logical = (self._logical(step, layout) for step in steps)
        stream = self._stream = object()
        self.pads = layout.pads
        self._pausing = False
        with run:
            run.discard()
            generator = loader_generator(run.streams, "loader", run.steps_taken)
            loaded = physical_batches(
                data, logical, layout=layout, generator=generator, rows_of=self._rows_of, **loading
            )
            loaded = loaded_ahead(loaded) if ahead else loaded
            try:
                while not self._pausing and (part := self._next(loaded)) is not None:
                    if self._begun != part.step:
                        self._compare(data, part.step)
                        if not self._before_step(part.step):
                            break
                        self._begun = part.step
                    self.current = part
                    self.num_drawn += part.size
                    if run.keeps_in_step:
                        run.engine.expect_samples(any_count=part.size > 0)
                    if part.data is None:
                        self._take_empty_step()
                        yield _STEP_ENDS
                        continue
                    with run.clock.part("data"):
                        batch = to_device(shaped(part.data), run.device)
                    run.neighbours.check(part, batch)
                    run.clock.turn_to("forward and backward")
                    yield batch
                    run.clock.turn_to(OTHER)
                    self._check_stepped(part, stream)
                    if part.completes:
                        yield _STEP_ENDS
                run.check()
            finally:
                # An abandoned loop may be closed while another one is running.
                if self._stream is stream:
                    run.discard()

    def _logical(self, step: int, layout: Layout) -> LogicalBatch:
        """This rank's part of what is drawn for a step; padded where ranks keep in step."""
        drawn = self._run.sampler.indices(step).tolist()
        part = self._meeting.part(step, drawn)
        if not self._run.keeps_in_step or not drawn:
            return LogicalBatch(step=step, indices=part)
        most = self._meeting.most_parts(drawn, lambda indices: len(layout.parts(indices)))
        return LogicalBatch(step=step, indices=part, num_parts=most, filler=drawn[0])

    def _rows_of(self, part: Part, step: int) -> Part:
        """The records of the units that a part names."""
        run, units = self._run, self._run.units
        most = run.plan.records_per_unit
        if units is None or most is None:
            return part
        return units.rows(part, step, at_most=most, streams=run.streams)

    def _next(self, loaded: Iterator[PhysicalBatch]) -> PhysicalBatch | None:
        with self._run.clock.part("data"):
            return next(loaded, None)

    def _check_stepped(self, part: PhysicalBatch, stream: object) -> None:
        run = self._run
        require(
            self._stream is stream, "batches", "one loop over private.batches at a time", "a second"
        )
        if not part.completes:
            self.check_count(run.engine.sample_norms.numel())
        elif run.steps_taken <= part.step:
            raise InvalidArgumentError(
                "step",
                expected="private.step() once per physical batch",
                got=f"no call for the batch that completes step {part.step}",
            )
