"""A fault planted behind any seam is stopped at the door; a healthy run never is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.clipping.finalize import clip_functions
from shuffled_dpsgd.core.noise import GaussianNoise, Place
from shuffled_dpsgd.core.plan import NoiseBlock, PrivacyPlan
from shuffled_dpsgd.core.referee import FIRST_STEPS, MOST_TRIES
from shuffled_dpsgd.core.release import Door
from shuffled_dpsgd.core.streams import RandomStreams
from shuffled_dpsgd.errors import InvalidArgumentError, RefereeError
from shuffled_dpsgd.runtime.replay import Witness
from shuffled_dpsgd.training import PrivateTraining, ShuffledGaussianMechanism, make_private
from training.cases import make_bert

RECORDS, EXPECTED, CLIP = 200, 24, 0.3
Plant = Callable[[PrivateTraining], None]


class Sentences(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(1, 30, (RECORDS, 6), generator=generator)
        self.labels = torch.randint(0, 3, (RECORDS,), generator=generator)

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def start(model: nn.Module | None = None, **changes: Any) -> PrivateTraining:
    model = make_bert() if model is None else model
    settings: dict[str, Any] = {
        "dataset_size": RECORDS,
        "expected_batch_size": EXPECTED,
        "num_steps": 12,
        "noise_multiplier": 0.5,
        "delta": 1e-3,
        "clip_norm": CLIP,
        "shuffle": "off",
        "physical_batch_size": 16,
    }
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    return make_private(model, optimizer, **(settings | changes))


def half() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def train(
    private: PrivateTraining, cast: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> None:
    for batch in private.batches(Sentences()):
        with cast():
            logits = private.model(input_ids=batch["input_ids"]).logits
        private.backward(F.cross_entropy(logits.float(), batch["labels"], reduction="none"))
        private.step()


# --- faults of an engine -------------------------------------------------------------------------


def bent_sums(bend: Callable[[dict[str, Tensor]], None]) -> Plant:
    """The engine hands out its sums with something done to them."""

    def plant(private: PrivateTraining) -> None:
        inner = private.engine.clipped_sum

        def clipped_sum() -> dict[str, Tensor]:
            sums = {name: total.clone() for name, total in inner().items()}
            bend(sums)
            return sums

        private.engine.clipped_sum = clipped_sum  # type: ignore[method-assign]

    return plant


def scaled(factor: float) -> Plant:
    def bend(sums: dict[str, Tensor]) -> None:
        for total in sums.values():
            total.mul_(factor)

    return bent_sums(bend)


# Of the sum they hold a thousandth, which rounding can hide under bfloat16, and a third.
SMALL, LARGE = "bert.encoder.layer.1.output.dense.weight", "bert.pooler.dense.weight"


def permuted_rows(name: str) -> Plant:
    def bend(sums: dict[str, Tensor]) -> None:
        sums[name].copy_(sums[name].flip(0))

    return bent_sums(bend)


def stale_tensor() -> Plant:
    """One tensor is the one of the step before."""
    kept: list[Tensor] = []

    def plant(private: PrivateTraining) -> None:
        inner = private.engine.clipped_sum
        private.on_update(lambda: kept.append(held.pop()))
        held: list[Tensor] = []

        def clipped_sum() -> dict[str, Tensor]:
            sums = dict(inner())
            held[:] = [sums[LARGE].clone()]
            return sums | ({LARGE: kept[-1]} if kept else {})

        private.engine.clipped_sum = clipped_sum  # type: ignore[method-assign]

    return plant


def factor_of_one_sample(value: float | None) -> Plant:
    """The first sample of a batch is not clipped, is counted twice, or is dropped."""

    def plant(private: PrivateTraining) -> None:
        def bent(norms_B: Tensor, clip_norm: float) -> Tensor:
            factors_B = clip_functions.flat(norms_B, clip_norm)
            factors_B[0] = 1.0 if value is None else value * factors_B[0]
            return factors_B

        rule = private.engine._schedule.rule
        assert rule.clip is clip_functions.flat
        object.__setattr__(rule, "clip", bent)

    return plant


# --- faults of a noise source --------------------------------------------------------------------


class BentNoise:
    def __init__(self, scale: float = 1.0, *, repeats: bool = False) -> None:
        self._inner, self._scale, self._repeats = GaussianNoise(), scale, repeats
        self._key: bytes | None = None

    def add_(
        self,
        tensors: Mapping[str, Tensor],
        stds: Mapping[str, float],
        *,
        key: bytes,
        places: Mapping[str, Place] | None = None,
        divide_by: float = 1.0,
    ) -> None:
        self._key = key if self._key is None or not self._repeats else self._key
        bent = {name: self._scale * std for name, std in stds.items()}
        self._inner.add_(tensors, bent, key=self._key, places=places, divide_by=divide_by)


def bent_noise(noise: Callable[[], BentNoise]) -> Plant:
    def plant(private: PrivateTraining) -> None:
        private.mechanism = ShuffledGaussianMechanism(private.plan, noise())

    return plant


# --- faults of the mechanism ---------------------------------------------------------------------


class Bent(ShuffledGaussianMechanism):
    """The run's mechanism, with its draws or its plan bent."""

    def __init__(self, inner: ShuffledGaussianMechanism, draws: Any = None, **plan: Any) -> None:
        super().__init__(replace(inner.plan, **plan), inner.noise)
        self._bend, self._kept = draws, list[bytes]()

    def _combined(self, keys: list[bytes]) -> list[tuple[float, bytes]]:
        self._kept.append(keys[-1])
        found = super()._combined(keys)
        return found if self._bend is None else self._bend(self, found)


def last_row(bent: Bent, draws: list[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    weights = bent.plan.noise_rows[-1]
    return [(bent._scale * weights[i], key) for i, (_, key) in enumerate(draws)]


def half_the_noise(plan: PrivacyPlan) -> tuple[NoiseBlock, ...]:
    return tuple(replace(b, noise_multiplier=b.noise_multiplier / 2) for b in plan.blocks)


def unclipped(plan: PrivacyPlan) -> tuple[NoiseBlock, ...]:
    return tuple(replace(b, batch_clip_norm=None) for b in plan.blocks)


class Rescaling(ShuffledGaussianMechanism):
    """Multiplies its release, once everything else is done."""

    def privatize(self, sums: Mapping[str, Tensor], **keys: Any) -> dict[str, Tensor]:
        norms = super().privatize(sums, **keys)
        for tensor in sums.values():
            tensor.mul_(1.01)
        return norms


class Elsewhere(ShuffledGaussianMechanism):
    """Gives every tensor the noise of the first."""

    def privatize(self, sums: Mapping[str, Tensor], **keys: Any) -> dict[str, Tensor]:
        self.places = {name: Place(0, 0) for name in sums}
        return super().privatize(sums, **keys)


MECHANISMS: dict[str, tuple[Callable[[ShuffledGaussianMechanism], Any], int]] = {
    "weights of zero": (lambda m: Bent(m, lambda _, draws: [(0.0, key) for _, key in draws]), 0),
    "half the std": (lambda m: Bent(m, blocks=half_the_noise(m.plan)), 0),
    "another row of the band": (lambda m: Bent(m, last_row), 0),
    "a draw used again": (
        lambda m: Bent(m, lambda bent, draws: [(w, bent._kept[0]) for w, _ in draws]),
        1,
    ),
    "only the newest draw": (lambda m: Bent(m, lambda _, draws: draws[-1:]), 1),
    "another divisor": (lambda m: Bent(m, expected_batch_size=EXPECTED + 1), 0),
    "a larger release": (lambda m: Rescaling(m.plan, m.noise), 0),
    "places of another tensor": (lambda m: Elsewhere(m.plan, m.noise), 0),
    "no batch clip": (lambda m: Bent(m, blocks=unclipped(m.plan)), 0),
}


@pytest.mark.parametrize("fault", MECHANISMS)
def test_a_mechanism_that_leaves_its_plan_is_stopped(fault: str) -> None:
    """What it says of itself counts for nothing."""
    make, earliest = MECHANISMS[fault]
    changes = {"batch_clip_norm": 0.01, "shuffle": "every-step"} if "batch" in fault else BANDED
    private, data = small(check_rate=1.0, **changes)
    private.mechanism = make(private.mechanism)
    with pytest.raises(RefereeError, match=r"coordinate \d+ received noise of"):
        train_small(private, data)
    assert private.steps_taken == earliest


@pytest.mark.parametrize("changes", [{}, {"noise": "banded", "bands": 3}, {"clip_quantile": 0.5}])
@pytest.mark.parametrize("shuffle", ["off", "every-step"])
def test_the_plan_itself_is_never_stopped(changes: dict[str, Any], shuffle: Any) -> None:
    """Also where noise is drawn as if nothing had been permuted, and a block is clipped."""
    if shuffle != "off":
        frame = "shuffled" if "clip_quantile" in changes else "unshuffled"
        changes = {**changes, "batch_clip_norm": 0.01, "noise_frame": frame}
    private, data = small(check_rate=1.0, shuffle=shuffle, **changes)
    train_small(private, data)
    assert private.ledger.spent == 6
    assert private.referee.checks.noise >= 6 * len(list(private.model.parameters()))


BANDED: dict[str, Any] = {"noise": "banded", "bands": 3}


def small(**changes: Any) -> tuple[PrivateTraining, torch.utils.data.TensorDataset]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    sentences = Sentences()
    data = torch.utils.data.TensorDataset(sentences.ids.float() / 30, sentences.labels)
    return start(model, **({"num_steps": 6, "seed": 1} | changes)), data


def train_small(private: PrivateTraining, data: torch.utils.data.TensorDataset) -> None:
    for x, y in private.batches(data):
        private.backward(F.cross_entropy(private.model(x), y, reduction="none"))
        private.step()


# Where the fault can show: from the first release on, or only once there was one before.
FAULTS: dict[str, tuple[Callable[[], Plant], int]] = {
    "sums scaled by 1.05": (lambda: scaled(1.05), 0),
    "sums scaled by 10": (lambda: scaled(10.0), 0),
    "one sample unclipped": (lambda: factor_of_one_sample(None), 0),
    "one sample counted twice": (lambda: factor_of_one_sample(2.0), 0),
    "one sample dropped": (lambda: factor_of_one_sample(0.0), 0),
    "rows of a tensor permuted": (lambda: permuted_rows(LARGE), 0),
    "rows of a small tensor permuted": (lambda: permuted_rows(SMALL), 0),
    "a tensor stale from the last step": (stale_tensor, 1),
    "noise of half the std": (lambda: bent_noise(lambda: BentNoise(0.5)), 0),
    "noise repeated from the last step": (lambda: bent_noise(lambda: BentNoise(repeats=True)), 1),
}


# What is small may hide in rounding under bfloat16 (`docs/trust.md`).
CASTS = {"float32": nullcontext, "bfloat16": half}
CASES = [
    (each, kind) for each in FAULTS for kind in CASTS if "small" not in each or kind != "bfloat16"
]


@pytest.mark.parametrize("rate", [1 / 256, 1.0])
@pytest.mark.parametrize(("fault", "kind"), CASES)
def test_planted_faults_are_stopped_before_they_are_released(
    fault: str, kind: str, rate: float
) -> None:
    make, earliest = FAULTS[fault]
    private = start(check_rate=rate)
    make()(private)
    before = {name: p.detach().clone() for name, p in private.model.named_parameters()}
    with pytest.raises(RefereeError, match="nothing was released"):
        train(private, CASTS[kind])
    # The first step with records, and the one after it where something is carried over.
    assert private.steps_taken == earliest
    if earliest == 0:
        assert all(torch.equal(p, before[n]) for n, p in private.model.named_parameters())
    if "noise" not in fault:
        assert private.ledger.spent == earliest


@pytest.mark.parametrize("cast", [nullcontext, half], ids=["float32", "bfloat16"])
def test_a_culprit_is_named(cast: Callable[[], AbstractContextManager[Any]]) -> None:
    private = start()
    name = LARGE if cast is half else SMALL
    permuted_rows(name)(private)
    with pytest.raises(RefereeError, match=name):
        train(private, cast)


def test_a_fault_that_comes_later_is_found_at_full_rate() -> None:
    private = start(check_rate=1.0)
    plant = scaled(1.05)
    private.on_update(lambda: plant(private) if private.steps_taken == 7 else None)
    with pytest.raises(RefereeError):
        train(private)
    assert private.ledger.spent == private.steps_taken == 7


@pytest.mark.parametrize("factor", [20.0, float("nan"), float("inf")])
def test_the_bound_holds_at_every_release(factor: float) -> None:
    """Even where nothing is compared with anything."""
    private = start(check_rate=0.0)
    private.on_update(
        lambda: scaled(factor)(private) if private.steps_taken == FIRST_STEPS + 2 else None
    )
    with pytest.raises(RefereeError, match="nothing was released"):
        train(private)
    assert private.ledger.spent == FIRST_STEPS + 2
    with pytest.raises(RefereeError, match="no clipped sum can have"):
        private.referee.check_bound(factor * CLIP, count=3)


def test_a_sum_of_no_record_is_zero() -> None:
    referee = start()._referee
    referee.check_bound(0.0, count=0)
    with pytest.raises(RefereeError, match="over 0 records"):
        referee.check_bound(1e-9, count=0)


def test_records_that_are_missing_from_the_sums_are_noticed() -> None:
    private = start()
    sums = private.engine.clipped_sum()
    with pytest.raises(RefereeError, match="3 records were drawn and 2"):
        private._referee.inspect(sums, norm=0.0, count=2, drawn=3)


def test_what_nobody_looked_at_is_not_released() -> None:
    private, _ = small()
    names = tuple(name for name, _ in private.model.named_parameters())
    known: dict[str, Any] = {"streams": RandomStreams(), "update": lambda gradients: None}
    with pytest.raises(InvalidArgumentError, match="every sum in one block"):
        Door(names=names[1:], plan=private.plan, **known)
    door = Door(names=names, plan=private.plan, **known)
    with pytest.raises(RefereeError, match="not inspected"):
        door.release(
            step=0,
            count=0,
            referee=private.referee,
            ledger=private.ledger,  # type: ignore[arg-type]
            mechanism=private.mechanism,
        )
    assert private.ledger.spent == 0


# --- healthy runs --------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", [nullcontext, half], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("clip", ["flat", "automatic", "per-layer"])
def test_healthy_runs_pass_and_say_what_was_compared(
    cast: Callable[[], AbstractContextManager[Any]], clip: str
) -> None:
    private = start(check_rate=1.0, clip=clip, num_steps=6)
    train(private, cast)
    checks = private.referee.checks
    assert private.ledger.spent == checks.releases == checks.sums == 6
    assert checks.norms >= 6
    assert checks.noise >= 6 * 30
    assert checks.not_made == 0
    card = str(private.card())
    assert f"the whole sums of 6 steps, the norms of {checks.norms} samples" in card


def test_first_steps_are_compared_whatever_the_rate() -> None:
    private = start(check_rate=0.0)
    train(private)
    assert private.referee.checks.sums == FIRST_STEPS


class Scalar(nn.Module):
    """Returns the mean of the samples' losses, as models of Hugging Face do when given labels."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.body(x), y)


def train_on_means(private: PrivateTraining) -> None:
    sentences = Sentences()
    data = torch.utils.data.TensorDataset(sentences.ids.float() / 30, sentences.labels)
    for x, y in private.batches(data):
        private.backward(private.model(x, y))
        private.step()


def test_a_model_that_returns_one_number_is_compared_sample_by_sample() -> None:
    private = start(Scalar(), loss_reduction="mean", check_rate=1.0, num_steps=4)
    train_on_means(private)
    assert private.referee.checks.sums == 4
    assert private.referee.checks.not_made == 0


def test_what_cannot_be_compared_is_not_counted_and_the_card_says_why() -> None:
    private = start(Scalar(dropout=0.5), loss_reduction="mean", num_steps=4)
    train_on_means(private)
    checks = private.referee.checks
    assert checks.sums == 0
    assert checks.not_made > 0
    assert "could not be made: the model returns one number" in str(private.card())


def test_means_over_rows_are_compared_too() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    private = start(model, loss_reduction="mean", check_rate=1.0, num_steps=3)
    sentences = Sentences()
    data = torch.utils.data.TensorDataset(sentences.ids.float() / 30, sentences.labels)
    for x, y in private.batches(data):
        private.backward(F.cross_entropy(private.model(x), y))
        private.step()
    assert private.referee.checks.sums == 3


def test_inputs_changed_after_the_forward_are_not_replayed() -> None:
    model = nn.Linear(6, 3)
    witness = Witness(model, lambda: False)
    witness.wants.append(lambda args, kwargs: True)
    witness.listen()
    x = torch.randn(4, 6)
    model(x).sum().backward()
    call = witness.call
    assert call is not None
    with witness.replay(call, 4, nullcontext()) as replay:
        assert torch.allclose(replay.gradient(torch.ones(4))["weight"], x.sum(0).expand(3, 6))
    assert call.problem() is None
    x.zero_()
    assert "changed in place" in str(call.problem())
    witness.stop()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("fault", ["", "scaled", "dropout"])
def test_batches_that_a_compiler_ran_are_compared_too(fault: str) -> None:
    torch._dynamo.reset()
    dropout = nn.Dropout(0.5 if fault == "dropout" else 0.0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), dropout, nn.Linear(8, 3))
    compiled = torch.compile(model, backend="aot_eager")
    private = start(model, num_steps=4)
    if fault == "scaled":
        scaled(1.05)(private)
    sentences = Sentences()
    data = torch.utils.data.TensorDataset(sentences.ids.float() / 30, sentences.labels)
    with pytest.raises(RefereeError) if fault == "scaled" else nullcontext():
        for x, y in private.batches(data):
            private.backward(F.cross_entropy(compiled(x), y, reduction="none"))
            private.step()
    checks = private.referee.checks
    assert private.ledger.spent == (0 if fault == "scaled" else 4)
    assert checks.sums == (FIRST_STEPS if fault == "" else 0)
    assert (checks.not_made > 0) == (fault == "dropout")


@contextmanager
def torch_state_kept() -> Iterator[None]:
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state())


def test_comparing_changes_neither_generators_nor_buffers() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(6, 3)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.body(x), 0.5)

    outcomes = []
    for rate in (0.0, 1.0):
        torch.manual_seed(3)
        private = start(Counting(), check_rate=rate, num_steps=6, seed=3)
        sentences = Sentences()
        data = torch.utils.data.TensorDataset(sentences.ids.float() / 30, sentences.labels)
        for x, y in private.batches(data):
            losses = F.cross_entropy(private.model(x), y, reduction="none")
            with torch_state_kept():
                private.backward(losses)
            private.step()
        assert all(p.grad is None for p in private.model.parameters())
        outcomes.append([p.detach().clone() for p in private.model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))


@pytest.mark.slow
def test_two_thousand_healthy_steps_are_never_stopped() -> None:
    model = make_bert()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    for cast in (nullcontext, half):
        private = start(model, num_steps=2000, check_rate=1 / 8)
        train(private, cast)
        assert private.ledger.spent == 2000
        assert private.referee.checks.sums > 150
        private.close()


class Shifted(nn.Module):
    """Needs its input no more once the forward is over."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return self.linear(x + 1.0)


def test_comparisons_that_cannot_be_made_are_not_tried_forever() -> None:
    model = Shifted()
    engine = ClippingEngine(model, clip_norm=0.1, check_rate=0.0)
    asked = []
    assert engine._referee is not None
    for _ in range(MOST_TRIES + 3):
        engine.reset()
        with engine:
            x = torch.randn(3, 4)
            losses = model(x).square().sum(1)
            x.zero_()
            engine.backward(losses)
            asked.append(engine.witness.call is not None)
    assert engine._referee.checks.not_made == MOST_TRIES
    assert asked == [True] * MOST_TRIES + [False] * 3
