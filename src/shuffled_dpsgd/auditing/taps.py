"""What an audit puts into a run: canaries into its sums, and somebody who reads its releases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shuffled_dpsgd.core.mechanism import ShuffledGaussianMechanism
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.core.referee import Checks, Referee
from shuffled_dpsgd.errors import require
from shuffled_dpsgd.training.data import MapStyle
from shuffled_dpsgd.training.physical import PerSampleLoss
from shuffled_dpsgd.training.private import PrivateTraining

Tensors = Mapping[str, torch.Tensor]
OnProgress = Callable[[int, int], object]
"""Called with (done, total)."""


def refuse_shared_steps(plan: PrivacyPlan) -> None:
    """Canaries have noise and draws of their own in every step; so must the plan."""
    alone = plan.bands == 1 and plan.largest_batch is None
    got = f"bands={plan.bands}, largest_batch={plan.largest_batch}"
    require(alone, "plan", "steps with noise and draws of their own, as canaries have", got)


def trainable(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the trainable weights, by name."""
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


class Unwatched(Referee):
    """Takes the referee's place and looks at nothing; its counts stay zero, and the card shows it.

    A canary that is added to the sums is what the referee exists to stop.
    """

    def __init__(self) -> None:
        self.checks = Checks()

    def _pass(self, *_: Any, **__: Any) -> None:
        """Anything passes."""

    begin_step = inspect = inspect_rows = check_bound = before_noise = after_noise = _pass


class RecordingMechanism(ShuffledGaussianMechanism):
    """Passes everything on; keeps the last sums it was given, their release, and its norms."""

    def __init__(self, inner: ShuffledGaussianMechanism) -> None:
        self.inner = inner
        self.given: dict[str, torch.Tensor] = {}
        self.last: dict[str, torch.Tensor] = {}
        self.norms: dict[str, torch.Tensor] = {}

    def privatize(
        self, sums: Mapping[str, torch.Tensor], *, key: bytes, earlier: Sequence[bytes] = ()
    ) -> dict[str, torch.Tensor]:
        self.given = {name: tensor.detach().clone() for name, tensor in sums.items()}
        self.norms = self.inner.privatize(sums, key=key, earlier=earlier)
        self.last = {name: tensor.detach().clone() for name, tensor in sums.items()}
        return self.norms


class InjectingEngine:
    """A clipping engine whose clipped sum also holds what `extra` returns.

    Everything else is the engine's own; `extra` is handed the records' sums. The injected vectors
    must obey the clip by themselves.
    """

    def __init__(self, inner: Any, extra: Callable[[Tensors], Tensors]) -> None:
        self._inner = inner
        self._extra = extra

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __enter__(self) -> InjectingEngine:
        self._inner.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._inner.__exit__(*raised)

    def clipped_sum(self) -> dict[str, torch.Tensor]:
        sums: dict[str, torch.Tensor] = self._inner.clipped_sum()
        for name, tensor in self._extra(sums).items():
            sums[name] = sums[name] + tensor.to(sums[name])
        return sums


def tap(private: PrivateTraining, extra: Callable[[Tensors], Tensors]) -> RecordingMechanism:
    """Inject `extra` into every step of the run, with nobody at the door, and record releases."""
    refuse_shared_steps(private.plan)
    recorder = RecordingMechanism(private.mechanism)
    engine = InjectingEngine(private.engine, extra)
    private.claims.audit_with(engine=engine, mechanism=recorder, referee=Unwatched())
    return recorder


def train(
    private: PrivateTraining,
    data: MapStyle,
    losses: PerSampleLoss,
    collate: Callable[[list[Any]], Any] | None,
    *,
    num_steps: int | None = None,
    watch: Callable[[], object] = lambda: None,
    on_progress: OnProgress | None = None,
) -> None:
    """Train so many steps, or to the end of the plan, and call `watch` after each update."""

    def observe() -> None:
        watch()
        if on_progress is not None:
            on_progress(private.steps_taken, private.plan.num_steps)

    private.use_loss(losses, is_trained_on=True)
    stop = private.on_update(observe)
    for batch in private.batches(data, num_steps=num_steps, collate=collate):
        private.backward(losses(private.model, batch))
        private.step()
    stop()
