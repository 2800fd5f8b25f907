"""Whatever mixes records is stopped before the first release, wherever it stands.

The checks know nothing of mix-up, centring or means: one record is exchanged, and others change.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate, get_worker_info

from shuffled_dpsgd.errors import InvalidArgumentError, UnsupportedModuleError
from shuffled_dpsgd.training import LoopSettings, PrivateTraining, loader_check, make_private, train
from training import healthy_zoo, planted_mixing
from training.cases import FixedSampler, vectors

RECORDS, EXPECTED, WIDTH, CLASSES = 200, 20, 6, 3


pytestmark = [
    pytest.mark.filterwarnings("ignore:the most frequent row"),
    pytest.mark.filterwarnings("ignore:δ = "),
]


def start(model: nn.Module, **changes: Any) -> PrivateTraining:
    settings: dict[str, Any] = {
        "dataset_size": RECORDS,
        "expected_batch_size": EXPECTED,
        "num_steps": 4,
        "noise_multiplier": 1.0,
        "delta": 1e-3,
        "shuffle": "off",
        "physical_batch_size": 16,
        # So that a test passes always or never; how often planted mixing is found in time is
        # counted by the slow one, without it.
        "seed": 5,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return make_private(model, optimizer, **(settings | changes))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 10), nn.Tanh(), nn.Linear(10, CLASSES))


def run(private: PrivateTraining, data: Any, loss: Any = None, **options: Any) -> None:
    for x, y in private.batches(data, **options):
        logits = private.model(x)
        private.backward(
            F.cross_entropy(logits, y, reduction="none") if loss is None else loss(logits, y)
        )
        private.step()


def stops_before_the_first_release(private: PrivateTraining, *args: Any, **options: Any) -> None:
    with pytest.raises((InvalidArgumentError, UnsupportedModuleError)):
        run(private, *args, **options)
    assert private.ledger.spent == 0


# --- collate functions ---------------------------------------------------------------------------


def mixed(x: Tensor, partners: Any) -> Tensor:
    return 0.7 * x + 0.3 * x[partners]


def mix_up(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    return mixed(x, torch.randperm(len(x))), y


def cut_mix(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    x = x.clone()
    x[:, : WIDTH // 2] = x[np.random.permutation(len(x)), : WIDTH // 2]  # noqa: NPY002
    return x, y


def centred(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    return x - x.mean(0), y


def seldom_mixed(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    if random.random() < 0.3:
        x = mixed(x, random.sample(range(len(x)), len(x)))
    return x, y


def one_in_ten(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    return (mixed(x, torch.randperm(len(x))) if torch.rand(()) < 0.1 else x), y


def above_four(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    return (x if len(x) <= 4 else x - x.mean(0)), y


def halves_mixed(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    half = len(x) // 2
    return torch.cat([x[:half].flip(0) + x[:half], x[half:]]), y


def soft_labels(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    return x, y.roll(1)


class OwnGenerator:
    def __init__(self) -> None:
        self.numpy = np.random.default_rng()

    def __call__(self, samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        return mixed(x, self.numpy.permutation(len(x))), y


class Remembers:
    """Mixes with the batch before."""

    def __init__(self) -> None:
        self.last: Any = 0.0

    def __call__(self, samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        shifted, self.last = x + self.last, 0.1 * x.mean()
        return shifted, y


COLLATES: dict[str, Callable[[], Any]] = {
    "mix-up": lambda: mix_up,
    "cut-mix": lambda: cut_mix,
    "centred": lambda: centred,
    "mix-up at 0.3 by Python": lambda: seldom_mixed,
    "mix-up in one batch of ten": lambda: one_in_ten,
    "only above four rows": lambda: above_four,
    "the first half": lambda: halves_mixed,
    "labels": lambda: soft_labels,
    "a generator of its own": OwnGenerator,
    "the batch before": Remembers,
}


@pytest.mark.parametrize("name", COLLATES)
@pytest.mark.parametrize("seed", range(3))
def test_collate_functions_that_mix_are_stopped(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    private = start(mlp())
    stops_before_the_first_release(private, vectors(count=RECORDS), collate=COLLATES[name]())


def jittered(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    return x + random.SystemRandom().random(), y


def test_what_cannot_be_repeated_is_listed_as_not_checked() -> None:
    private = start(mlp(), num_steps=1)
    run(private, vectors(count=RECORDS), collate=jittered)
    assert "not checked: that a row of a batch is made of one record" in str(private.card())


def test_looks_that_time_has_cut_are_told(monkeypatch: Any) -> None:
    monkeypatch.setattr(loader_check, "_SECONDS", 0.0)
    for collate, is_cut in ((RandomCrops(), True), (None, False)):
        private = start(mlp(), num_steps=1)
        run(private, vectors(count=RECORDS), collate=collate)
        assert ("under 8 random numbers instead of 96" in str(private.card())) is is_cut


class RandomCrops:
    """Healthy: numbers of its own for every row, more for some rows than for others."""

    def __call__(self, samples: list[Any]) -> Any:
        rows = []
        for x, _ in samples:
            while torch.rand(()) < 0.3 + 0.2 * float(x[0] > 0):
                random.random()
            rows.append(x.roll(int(torch.randint(3, ()))) + 0.1 * torch.randn(WIDTH))
        return torch.stack(rows), torch.tensor([int(y) for _, y in samples])


def masked_words(samples: list[Any]) -> Any:
    """Healthy: one mask for the whole batch, as masked language models draw it."""
    x, y = default_collate(samples)
    return x.masked_fill(torch.bernoulli(torch.full(x.shape, 0.3)).bool(), 0.0), y


@pytest.mark.parametrize("collate", [RandomCrops(), masked_words])
@pytest.mark.slow
def test_healthy_random_collates_pass(collate: Any) -> None:
    private = start(mlp(), check_rate=1.0, num_steps=20)
    run(private, vectors(count=RECORDS), collate=collate)
    assert private.ledger.spent == 20
    assert "one record" not in "".join(private.card().use_assumptions)


class InWorkers(TensorDataset):
    """Centres what is loaded together, in worker processes alone."""

    def __getitems__(self, indices: list[int]) -> Any:
        x, y = self.tensors[0][indices], self.tensors[1][indices]
        return list(zip(x if get_worker_info() is None else x - x.mean(0), y, strict=True))


def centred_in_workers(samples: list[Any]) -> Any:
    return default_collate(samples) if get_worker_info() is None else centred(samples)


def test_what_worker_processes_load_is_tested_in_one() -> None:
    data = vectors(count=RECORDS)
    stops_before_the_first_release(start(mlp()), data, collate=centred_in_workers, num_workers=1)
    stops_before_the_first_release(start(mlp()), InWorkers(*data.tensors), num_workers=1)


@pytest.mark.slow
def test_a_healthy_loader_of_workers_passes_and_its_findings_come_back() -> None:
    private = start(mlp(), num_steps=2)
    run(private, vectors(count=RECORDS), num_workers=1)
    assert "not checked: that a" not in str(private.card()).replace("that the loss", "")
    private = start(mlp(), num_steps=1)
    run(private, vectors(count=RECORDS), collate=jittered, num_workers=1)
    assert "not checked: that a row of a batch is made of one record" in str(private.card())


class OneAtATime(TensorDataset):
    """Fails where two threads load at once."""

    busy = False

    def __getitem__(self, index: int) -> Any:
        assert not self.busy
        OneAtATime.busy = True
        time.sleep(1e-5)
        OneAtATime.busy = False
        return super().__getitem__(index)


def test_a_thread_that_loads_ahead_waits_for_the_check() -> None:
    private = start(mlp(), check_rate=1.0)
    run(private, OneAtATime(*vectors(count=RECORDS).tensors), background=True)
    assert private.ledger.spent == 4


# --- data sets and transforms --------------------------------------------------------------------


class Records(Dataset[Any]):
    """Healthy unless a subclass is not."""

    def __init__(self) -> None:
        self.x, self.y = vectors(count=RECORDS).tensors
        self.names = [str(number) for number in range(RECORDS)]

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


class Noisy(Records):
    def __getitem__(self, index: int) -> Any:
        return self.x[index] + 0.1 * torch.randn(WIDTH), self.y[index]


class ByOrder(Records):
    """Healthy: its lists lie in another order than its records."""

    def __init__(self) -> None:
        super().__init__()
        self.order = torch.randperm(RECORDS).tolist()

    def __getitem__(self, index: int) -> Any:
        at = self.order[index]
        return self.x[at] + 0.1 * torch.randn(WIDTH), self.y[at]


class Standardised(Records):
    def __getitems__(self, indices: list[int]) -> Any:
        x = self.x[indices]
        return list(zip((x - x.mean(0)) / x.std(0), self.y[indices], strict=True))


class BrokenOnes(Records):
    """Returns another record for one in five."""

    def __getitem__(self, index: int) -> Any:
        at = 0 if index % 5 == 3 else index
        return self.x[at], self.y[at]


class BrokenByChance(Records):
    def __getitem__(self, index: int) -> Any:
        at = random.randrange(RECORDS) if index % 5 == 3 else index
        return self.x[at], self.y[at]


class SecondDrawn(Records):
    def __getitem__(self, index: int) -> Any:
        other = random.randrange(RECORDS)
        return 0.6 * self.x[index] + 0.4 * self.x[other], self.y[index]


@pytest.mark.parametrize("kind", [Standardised, BrokenOnes, BrokenByChance, SecondDrawn])
@pytest.mark.parametrize("seed", range(3))
def test_data_sets_that_mix_are_stopped(kind: type[Records], seed: int) -> None:
    random.seed(seed)
    stops_before_the_first_release(start(mlp()), kind())


@pytest.mark.parametrize("kind", [Records, Noisy, ByOrder])
def test_healthy_data_sets_pass(kind: type[Records]) -> None:
    private = start(mlp(), check_rate=1.0)
    run(private, kind())
    assert private.ledger.spent == 4


def test_a_subset_passes() -> None:
    data = torch.utils.data.Subset(Records(), list(range(RECORDS - 1, -1, -1)))
    private = start(mlp())
    assert private.check_seconds == 0
    run(private, data)
    assert private.ledger.spent == 4
    assert private.check_seconds > 0


# --- models --------------------------------------------------------------------------------------


class Between(nn.Module):
    def __init__(self, mix: Callable[[Any, Tensor], Tensor], dropout: float = 0.2) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 10), nn.Tanh(), nn.Dropout(dropout))
        self.head = nn.Linear(10, CLASSES)
        self.mix = mix
        self.own = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.mix(self, x)))


def statistics_beside_noise(net: Any, x: Tensor) -> Tensor:
    return (x - x.detach().mean(0)) / x.detach().std(0) + 0.1 * torch.randn_like(x)


def norm_of_inputs(net: Any, x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


def random_half(net: Any, x: Tensor) -> Tensor:
    return x - x[torch.randperm(len(x))[: len(x) // 2]].mean(0)


def by_index_select(net: Any, x: Tensor) -> Tensor:
    return x + 0.5 * torch.index_select(x, 0, torch.randperm(len(x)))


def cut_mixed(net: Any, x: Tensor) -> Tensor:
    return torch.cat([x[:, :3], x[torch.randperm(len(x)), 3:]], 1)


def by_multinomial(net: Any, x: Tensor) -> Tensor:
    return x + 0.5 * x[torch.multinomial(torch.ones(len(x)), len(x), replacement=True)]


def by_its_own_generator(net: Any, x: Tensor) -> Tensor:
    return x + 0.5 * x[torch.randperm(len(x), generator=net.own)]


def in_one_batch_of_ten(net: Any, x: Tensor) -> Tensor:
    return x + 0.5 * x.roll(1, 0) if torch.rand(()) < 0.1 else x


def seldom_by_python(net: Any, x: Tensor) -> Tensor:
    return x + 0.5 * x.flip(0) if random.random() < 0.1 else x


MODELS = [
    statistics_beside_noise,
    norm_of_inputs,
    random_half,
    by_index_select,
    cut_mixed,
    by_multinomial,
    by_its_own_generator,
    in_one_batch_of_ten,
    seldom_by_python,
]


@pytest.mark.parametrize("mix", MODELS)
@pytest.mark.parametrize("seed", range(2))
def test_models_that_mix_are_stopped(mix: Any, seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    stops_before_the_first_release(start(Between(mix)), vectors(count=RECORDS))


def test_a_large_batch_mixed_by_multinomial_is_stopped() -> None:
    data = TensorDataset(torch.randn(2000, WIDTH), torch.randint(CLASSES, (2000,)))
    private = start(
        Between(by_multinomial),
        dataset_size=2000,
        expected_batch_size=1000,
        physical_batch_size=1000,
    )
    stops_before_the_first_release(private, data)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_healthy_models_pass_under_dropout_and_bfloat16(dropout: float) -> None:
    private = start(Between(lambda net, x: x, dropout), check_rate=1.0, num_steps=10)
    for x, y in private.batches(vectors(count=RECORDS)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = private.model(x)
        private.backward(F.cross_entropy(logits.float(), y, reduction="none"))
        private.step()
    assert private.ledger.spent == 10


# --- losses --------------------------------------------------------------------------------------


def detached_mean(model: nn.Module, batch: Any) -> Tensor:
    losses = F.cross_entropy(model(batch.x), batch.y, reduction="none")
    return losses / losses.detach().mean()


def softmax_of_batch(model: nn.Module, batch: Any) -> Tensor:
    losses = F.cross_entropy(model(batch.x), batch.y, reduction="none")
    return losses * losses.detach().softmax(0) * len(losses)


def over_detached_std(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch.x)
    return F.cross_entropy(logits / logits.detach().std(0), batch.y, reduction="none")


def gradient_alone(model: nn.Module, batch: Any) -> Tensor:
    losses = F.cross_entropy(model(batch.x), batch.y, reduction="none")
    weight = batch.x.mean().detach()
    return losses + weight * (losses - losses.detach())


def mixed_in_one_of_ten(model: nn.Module, batch: Any) -> Tensor:
    losses = F.cross_entropy(model(batch.x), batch.y, reduction="none")
    return losses / losses.detach().mean() if torch.rand(()) < 0.1 else losses


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    similar = model(batch.x) @ model(batch.x).T
    return F.cross_entropy(similar, torch.arange(len(similar)), reduction="none")


def weighted_by_counts(model: nn.Module, batch: Any) -> Tensor:
    losses = F.cross_entropy(model(batch.x), batch.y, reduction="none")
    return losses / torch.bincount(batch.y, minlength=CLASSES)[batch.y]


def divided_by_the_batch(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch.x), batch.y, reduction="none") / len(batch.x)


def centred_in_training_beside_noise(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch.x)
    logits = logits - logits.mean(0) if model.training else logits
    return F.cross_entropy(logits + 0.1 * torch.randn_like(logits), batch.y, reduction="none")


LOSSES = [
    detached_mean,
    softmax_of_batch,
    over_detached_std,
    gradient_alone,
    mixed_in_one_of_ten,
    contrastive,
    weighted_by_counts,
    divided_by_the_batch,
    centred_in_training_beside_noise,
]


def step_by_step(private: PrivateTraining, loss: Any) -> None:
    for batch in private.batches(vectors(count=RECORDS)):
        private.backward(loss(private.model, batch))
        private.step()


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_that_look_at_the_batch_are_stopped(loss: Any) -> None:
    private = start(mlp(), loss=loss)
    with pytest.raises(InvalidArgumentError, match="per_sample_loss"):
        step_by_step(private, loss)
    assert private.ledger.spent == 0


def test_a_weighted_mean_is_stopped() -> None:
    weight = torch.tensor([0.1, 1.0, 5.0])

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch.x), batch.y, weight=weight)

    private = start(mlp(), loss=loss, loss_reduction="mean")
    with pytest.raises(InvalidArgumentError, match="per_sample_loss"):
        step_by_step(private, loss)
    assert private.ledger.spent == 0


@pytest.mark.parametrize("loss", LOSSES)
def test_the_loop_hands_its_loss_over(loss: Any) -> None:
    private = start(mlp())
    with pytest.raises(InvalidArgumentError, match="per_sample_loss"):
        train(private, vectors(count=RECORDS), loss, settings=LoopSettings(price_steps=False))
    assert private.ledger.spent == 0


def test_augmentations_are_tested_with_the_loss() -> None:
    def augment(batch: Any, generator: torch.Generator) -> Any:
        x, y = batch
        return type(batch)((mixed(x, torch.randperm(len(x), generator=generator)), y))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch.x), batch.y, reduction="none")

    private = start(mlp())
    settings = LoopSettings(price_steps=False, augment=augment)
    with pytest.raises(InvalidArgumentError, match="per_sample_loss"):
        train(private, vectors(count=RECORDS), loss, settings=settings)
    assert private.ledger.spent == 0


def test_honest_losses_pass_and_the_card_says_what_was_not_checked() -> None:
    def plain(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch.x), batch.y, reduction="none")

    def mean(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch.x), batch.y)

    for loss, reduction in ((plain, "sum"), (mean, "mean"), (None, "sum")):
        private = start(mlp(), loss=loss, loss_reduction=reduction, check_rate=1.0)
        step_by_step(private, loss or plain)
        assert private.ledger.spent == 4
        listed = "not checked: that the loss of a record" in str(private.card())
        assert listed is (loss is None)
        private.close()


def test_without_a_loss_there_is_one_notice(
    caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    from shuffled_dpsgd.runtime import notices

    monkeypatch.setattr(notices, "_said", set())
    for _ in range(2):
        private = start(mlp(), num_steps=2)
        run(private, vectors(count=RECORDS))
        private.close()
    assert sum("the loss is not checked" in record.message for record in caplog.records) == 1


class ArcFace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(CLASSES, CLASSES))

    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits @ self.centres, y, reduction="none")


def test_parameters_of_a_loss_are_refused() -> None:
    private = start(mlp())
    with pytest.raises(UnsupportedModuleError, match=r"shape \(3, 3\) in the loss"):
        run(private, vectors(count=RECORDS), ArcFace())
    assert private.ledger.spent == 0


def test_a_temperature_is_refused_also_in_a_mean() -> None:
    temperature = nn.Parameter(torch.ones(()))
    private = start(mlp(), loss_reduction="mean")
    with pytest.raises(UnsupportedModuleError, match="requires gradients"):
        run(private, vectors(count=RECORDS), lambda z, y: F.cross_entropy(z * temperature, y))
    free = torch.ones((), requires_grad=True)
    private = start(mlp())
    with pytest.raises(UnsupportedModuleError, match="requires gradients"):
        run(
            private,
            vectors(count=RECORDS),
            lambda z, y: F.cross_entropy(z * free, y, reduction="none"),
        )


# --- a draw belongs to its step ------------------------------------------------------------------


def records_seen(private: PrivateTraining, data: Any) -> list[float]:
    """The records of one step, which is released."""
    seen: list[float] = []
    for x, y in private.batches(data):
        seen += x[:, 0].tolist()
        private.backward(F.cross_entropy(private.model(x), y, reduction="none"))
        if private.step():
            return seen
    return seen


def interrupt(_: int) -> None:
    raise KeyboardInterrupt


def out_of_memory(_: int) -> None:
    raise torch.OutOfMemoryError("planted")


@pytest.mark.parametrize("failure", [interrupt, out_of_memory])
def test_the_same_records_come_again_until_their_step_is_released(failure: Any) -> None:
    private = start(mlp(), physical_batch_size=4)
    data = vectors(count=RECORDS)
    given_up: list[list[float]] = []
    for _ in range(3):
        seen: list[float] = []

        def attempt(seen: list[float] = seen) -> None:
            for x, y in private.batches(data):
                seen += x[:, 0].tolist()
                if len(seen) > 4:
                    failure(len(seen))
                private.backward(F.cross_entropy(private.model(x), y, reduction="none"))
                private.step()

        with pytest.raises((KeyboardInterrupt, torch.OutOfMemoryError)):
            attempt()
        given_up.append(seen)
    assert given_up[0] == given_up[1] == given_up[2]
    assert len(given_up[0]) > 4
    assert private.ledger.spent == 0
    released = records_seen(private, data)
    assert released[: len(given_up[0])] == given_up[0]
    assert private.ledger.spent == 1
    assert records_seen(private, data) != released


def test_a_reopened_loop_goes_on_with_the_same_draw() -> None:
    private = start(mlp())
    data = vectors(count=RECORDS)
    for x, _ in private.batches(data):
        given_up = x[:, 0].tolist()
        break
    assert records_seen(private, data)[: len(given_up)] == given_up


class Raises(Records):
    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise OSError("planted")
        return super().__getitem__(index)


def test_a_record_that_always_raises_cannot_be_skipped() -> None:
    private = start(mlp())
    private.sampler = FixedSampler([1, 7, 9], [2, 3], dataset_size=RECORDS)
    for _ in range(3):
        with pytest.raises(OSError, match="planted"):
            run(private, Raises())
    assert private.ledger.spent == private.steps_taken == 0


# --- how often -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", planted_mixing.PLANTED)
def test_mixing_that_nobody_thought_of_is_stopped(name: str) -> None:
    assert not planted_mixing.is_missed(name, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", planted_mixing.PLANTED)
def test_ninety_nine_of_a_hundred_runs_are_stopped_before_the_first_release(name: str) -> None:
    assert sum(planted_mixing.is_missed(name) for _ in range(100)) <= 1


@pytest.mark.slow
# Recurrent layers run one sample after the other, and say so.
@pytest.mark.filterwarnings("default:.*vmap cannot run:RuntimeWarning")
@pytest.mark.parametrize("name", healthy_zoo.ZOO)
@pytest.mark.parametrize("precision", healthy_zoo.PRECISIONS)
def test_healthy_models_of_every_kind_pass(name: str, precision: str) -> None:
    assert healthy_zoo.train(name, precision, 2).steps_taken == 2


@pytest.mark.slow
def test_two_thousand_healthy_steps_with_dropout_are_never_stopped() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch.x), batch.y, reduction="none")

    model = Between(lambda net, x: x + 0.1 * torch.randn_like(x), 0.3)
    private = start(model, num_steps=2000, check_rate=1 / 4, loss=loss)
    for batch in private.batches(Noisy(), collate=RandomCrops()):
        private.backward(loss(model, batch))
        private.step()
    assert private.ledger.spent == 2000
    assert private.engine.num_checked > 500
