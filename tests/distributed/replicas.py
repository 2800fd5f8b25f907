"""What ranks with the whole model each do in the tests; run by `nursery.py`."""

from __future__ import annotations

import io
import math
import os
import signal
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from distributed.sharded_models import shard, spread, whole
from shuffled_dpsgd.distributed import current_world, heartbeat
from shuffled_dpsgd.distributed.exchange import ReplicatedSums
from shuffled_dpsgd.distributed.world import GroupWorld, _store, leave_world
from shuffled_dpsgd.errors import ShuffledDPError
from shuffled_dpsgd.models import checkpoint_activations
from shuffled_dpsgd.tasks import RunConfig, parse_config
from shuffled_dpsgd.tasks.start import compare_configs
from shuffled_dpsgd.training import (
    GaussianNoise,
    PoissonSampler,
    PrivateTraining,
    make_private,
)
from training.cases import (
    RECORDS,
    Case,
    FixedSampler,
    bert_case,
    gpt2_case,
    mlp_case,
    run,
    vectors,
    vit_case,
    weights,
)

CASES: dict[str, Callable[[torch.dtype], Case]] = {
    "bert": bert_case,
    "gpt2": gpt2_case,
    "vit": vit_case,
    "mlp": mlp_case,
}
# None, one, fewer than ranks, and more than a physical batch.
UNEVEN: tuple[list[int], ...] = ([], [3], [1, 2, 9], list(range(5, 22)))
STEPS = len(UNEVEN)


def start(case: Case, **changes: Any) -> PrivateTraining:
    model = case.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    options: dict[str, Any] = {
        "dataset_size": RECORDS,
        "expected_batch_size": 8,
        "num_steps": STEPS,
        "noise_multiplier": 0.5,
        "delta": 1e-4,
        "seed": 3,
        "physical_batch_size": 4,
        **changes,
    }
    private = make_private(model, optimizer, **options)
    private.sampler = FixedSampler(*UNEVEN)
    return private


PAPER = {
    "accounting": "paper",
    "unshuffled_noise_multiplier": 0.8,
    "batch_clip_norm": 1.2,
    "clip_norm": 1.0,
}


def trained(name: str, *, sharded: bool | str = False, **changes: Any) -> dict[str, Any]:
    """Uneven steps in float64: everything that must not depend on the number of ranks."""
    case = CASES[name](torch.float64)
    if sharded:
        case = replace(case, make=spread(case.make, sharded))
    private = start(case, **PAPER | changes)
    metrics: list[dict[str, Any]] = []
    private.on_update(lambda: metrics.append(private.last_metrics.to_json()))  # type: ignore[union-attr]
    run(private, case)
    private.release()
    state = private.optimizer.state_dict()["state"]
    moments = {f"{i}.{k}": whole(v) for i, s in state.items() for k, v in s.items() if v.dim()}
    found = {name: whole(p) for name, p in private.model.named_parameters()}
    return {
        "weights": found | moments,
        "verified": (private.engine.num_checked > 0, private.shuffling.num_verified),
        "metrics": metrics,
        "spent": private.ledger.spent,
        "claims": [str(private.card().certified), str(private.card().paper)],
        "norms": private.last_sample_norms.sort().values,
    }


def several(names: list[str], sharded: bool | str = False) -> dict[str, Any]:
    """The equalities in one launch; a name may end in "without noise"."""
    noiseless = {"noise_multiplier": 0.0, "unshuffled_noise_multiplier": 0.0}
    found = {}
    for name in names:
        case, _, without = name.partition(" ")
        changes: dict[str, Any] = noiseless if without else {}
        if name == "vit":
            changes = {"shuffle": "at-release"}
        found[name] = trained(case, sharded=sharded, **changes)
    return found


def means(name: str, *, sharded: bool = False) -> dict[str, torch.Tensor]:
    """Uneven steps with the mean of every physical batch as its loss, declared as such."""
    case = CASES[name](torch.float64)
    if sharded:
        case = replace(case, make=lambda make=case.make: shard(make()))
    private = start(case, loss_reduction="mean", clip_norm=0.05)
    for batch in private.batches(case.data):
        if name == "gpt2":  # The mean that the model computes itself.
            words = batch["input_ids"]
            private.backward(private.model(input_ids=words, labels=words).loss)
        else:
            private.backward(case.loss(private.model, batch).mean())
        private.step()
    return {key: whole(p) for key, p in private.model.named_parameters()}


def shares_of_noise(sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    """What each rank adds to its share of zeros, in float32 and float64; zeros elsewhere."""
    world = current_world()
    sums = {
        name: torch.zeros(size, dtype=torch.float64 if name.startswith("wide") else torch.float32)
        for name, size in sizes.items()
    }
    exchange = ReplicatedSums(world, sums)
    shares = exchange.reduce(sums)
    stds = dict.fromkeys(sizes, 2.0)
    GaussianNoise().add_(shares, stds, key=bytes(32), places=exchange.places())
    own = {f"share of {name}": share.clone() for name, share in shares.items()}
    return own | exchange.spread(shares)


def secure_steps() -> dict[str, Any]:
    """Without a seed the ranks still draw the same batches and permutations."""
    case = mlp_case(torch.float64)
    private = start(case, seed=None)
    private.sampler = PoissonSampler(
        dataset_size=RECORDS, sampling_prob=0.3, streams=private.streams
    )
    sizes: list[int] = []
    private.on_update(lambda: sizes.append(private.last_metrics.batch_size))  # type: ignore[union-attr]
    run(private, case)
    return {"weights": weights(private.model), "sizes": sizes, "tokens": private.ledger.entries()}


def one_bad_sample(sharded: bool | str = False) -> dict[str, Any]:
    """A record whose gradient is not a number, in the part of one rank."""
    case = mlp_case()
    inputs, labels = case.data.tensors
    inputs = inputs.clone()
    inputs[9] = math.nan
    bad = replace(case, data=TensorDataset(inputs, labels))
    if sharded:
        bad = replace(bad, make=spread(case.make, sharded))
    private = start(bad)
    private.sampler = FixedSampler([1, 9, 4, 7])
    found: list[int] = []
    private.on_update(lambda: found.append(private.last_metrics.num_nonfinite))  # type: ignore[union-attr]
    run(private, bad, num_steps=1)
    finite = all(bool(torch.isfinite(whole(w)).all()) for w in private.model.parameters())
    return {"found": found, "finite": finite}


def drawn_differently() -> str:
    """A sampler that does not draw alike on all ranks: no record may count twice."""
    case = mlp_case()
    private = start(case)
    private.sampler = FixedSampler([current_world().rank, 5, 6])
    return refusal(lambda: run(private, case, num_steps=1))


def bad_launches() -> dict[str, str]:
    """What is refused when rank 1 differs; every rank gets the same answer and lives on."""
    case, odd = mlp_case(), current_world().rank == 1
    sharded = replace(case, make=lambda: shard(case.make()))

    def config(every: int) -> RunConfig:
        training = {"epochs": 1, "expected_batch_size": 8, "evaluate_every": every}
        return parse_config(
            {
                "task": "digits",
                "model": {"name": "vit-digits"},
                "data": {"format": "digits"},
                "privacy": {"epsilon": 3.0, "delta": 1e-4, "clip_norm": 1.0},
                "training": training,
            }
        )

    found = {
        "seed": refusal(lambda: start(case, seed=4 if odd else 3)),
        "clip": refusal(lambda: start(case, clip_norm=2.0 if odd else 1.0)),
        "model": refusal(lambda: start(vit_case() if odd else bert_case(), shuffle="off")),
        "frame": refusal(lambda: start(case, noise_frame="unshuffled")),
        "kind": refusal(lambda: start(sharded if odd else case)),
        "command": refusal(lambda: compare_configs(current_world(), config(3 if odd else 2))),
        "wrapped": refusal(lambda: wrapped(ddp(case.make()))),
        "wrapped inside": refusal(lambda: wrapped(torch.nn.Sequential(ddp(case.make())))),
    }
    version = torch.__version__
    torch.__version__ = "1.0" if odd else version  # type: ignore[assignment]
    found["version"] = refusal(lambda: start(case))
    torch.__version__ = version
    found["data"] = refusal(lambda: other_data(case, odd))
    found["optimizer"] = refusal(lambda: other_rate(case, odd))
    return found


ddp = torch.nn.parallel.DistributedDataParallel


def wrapped(model: torch.nn.Module) -> None:
    make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        dataset_size=RECORDS,
        expected_batch_size=8,
        num_steps=2,
        noise_multiplier=1.0,
        delta=1e-4,
    )


def other_data(case: Case, odd: bool) -> None:
    inputs, labels = case.data.tensors
    changed = TensorDataset(inputs + 0.5 if odd else inputs, labels)
    private = start(case)
    run(private, Case(make=case.make, data=changed, loss=case.loss), num_steps=1)


class Doubtful:
    """Data of one rank that differ from the others': a seventh of them, or all later."""

    def __init__(self, odd: bool, count: int, augments: bool = False) -> None:
        self._inputs, self._labels = vectors(count=count).tensors
        self._augments = augments
        self.changed = range(3, count, 7) if odd else range(0)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.rand(6) if self._augments else 0.0
        return self._inputs[index] + noise + 0.5 * (index in self.changed), self._labels[index]


def data_that_differ() -> dict[str, Any]:
    """Records that differ on rank 1 off any fixed positions, and from the second epoch on."""
    case, odd = mlp_case(), current_world().rank == 1

    def train(data: Doubtful) -> None:
        private = start(case, dataset_size=1800, expected_batch_size=600)
        private.on_update(lambda: after(data, private.steps_taken))
        run(private, Case(make=case.make, data=data, loss=case.loss))

    steps: list[int] = []
    later = Doubtful(False, 1800)

    def after(data: Doubtful, step: int) -> None:
        if data is later:
            steps.append(step)
            later.changed = range(1800 if odd and step > 1 else 0)

    found: dict[str, Any] = {"some": refusal(lambda: train(Doubtful(odd, 1800)))}
    found["augmented"] = refusal(lambda: train(Doubtful(odd, 1800, augments=True)))
    found["alike"] = refusal(lambda: train(Doubtful(False, 1800, augments=True)))
    found["later"] = refusal(lambda: train(later))
    return found | {"steps before": [*steps]}


class Measured(TensorDataset):
    """Records that say how long they are, and count how often they are asked."""

    asked = 0

    def length(self, index: int) -> int:
        self.asked += 1
        return 1 + index % 7


def lengths_asked_for() -> dict[str, Any]:
    """Two epochs of records whose lengths are dear: who looks at them."""
    case = mlp_case()
    data = Measured(*case.data.tensors)
    private = start(case)
    run(private, replace(case, data=data))
    layout = private._drawn.layout(data, pad_batches=False)
    return {"asked": data.asked, "parts": [part.records for part in layout.parts(range(20))]}


def other_rate(case: Case, odd: bool) -> None:
    model = case.make()
    make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.2 if odd else 0.1),
        dataset_size=RECORDS,
        expected_batch_size=8,
        num_steps=2,
        noise_multiplier=1.0,
        delta=1e-4,
    )


def other_weights() -> dict[str, torch.Tensor]:
    """Ranks that start from different weights train rank 0's."""
    torch.manual_seed(current_world().rank)
    model = torch.nn.Linear(3, 2)
    started = Case(make=lambda: model, data=None, loss=mlp_case().loss)
    start(started, shuffle="off")
    return weights(model) | {"dropout": torch.rand(4)}


def broken_data(rank: int) -> None:
    """A record that cannot be loaded, in the part of one rank."""
    case = mlp_case()

    class Broken:
        armed = False

        def __len__(self) -> int:
            return RECORDS

        def __getitem__(self, index: int) -> Any:
            if self.armed and index == 9:
                raise OSError("the disk is gone")
            return case.data[index]

    data = Broken()
    private = start(case)
    private.sampler = FixedSampler([1, 2], [1, 9] if rank == 1 else [9, 1])
    private.on_update(lambda: setattr(data, "armed", True))
    run(private, Case(make=case.make, data=data, loss=case.loss))


def killed_in_a_step(rank: int) -> None:
    """One rank is killed while the others wait for its sums; a launcher then ends those too."""
    case = mlp_case()

    def leave() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        leave_world()

    mock.patch("shuffled_dpsgd.distributed.launch.leave_world", leave).start()
    private = start(case)
    private.sampler = FixedSampler([1, 2, 3, 4])
    if current_world().rank == rank:
        private._door.exchange.reduce = lambda sums: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign, return-value]
    run(private, case)


def each_layer_sharded() -> nn.Module:
    """Several layers, each gathered when it runs."""
    torch.manual_seed(1)
    layers = [nn.Linear(6, 6) for _ in range(3)]
    return fully_shard(nn.Sequential(*map(fully_shard, layers)))


def hanging(rank: int, seconds: float, inside: bool) -> dict[str, str]:
    """One rank takes too long over a step, or `inside` the forward of a sharded model; what the
    others say of it."""
    case, world = mlp_case(), current_world()
    if inside:
        case = replace(case, make=each_layer_sharded)
    private = start(case, check_rate=0.0, shuffle="off", num_steps=9)
    private.sampler = FixedSampler([1, 2, 3, 4])
    if inside:
        run(private, case, num_steps=8)  # Checks run the model in rounds of their own.
    assert isinstance(world, GroupWorld)
    world.end()
    heartbeat.BEAT_S, heartbeat.PATIENCE_S = 0.2, 0.6
    world._heartbeat = heartbeat.Heartbeat(_store(), world.rank, range(world.size), name="all")

    def hang(*_: Any) -> None:
        if world.rank == rank:
            time.sleep(seconds)

    def step() -> None:
        for batch in private.batches(case.data, num_steps=1):
            if inside:
                next(private.model.children()).register_forward_hook(hang)
            else:
                hang()
            private.backward(case.loss(private.model, batch))
            private.step()

    with redirect_stderr(io.StringIO()) as said:
        found = refusal(step)
        time.sleep(0.5)  # Rank 0 holds the store in which the others look.
    return {"refusal": found, "said": said.getvalue()}


def refusal(work: Callable[[], object]) -> str:
    """What an attempt was refused with; empty if it was not."""
    try:
        work()
    except ShuffledDPError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def kinds_of_models(sharded: bool = False) -> dict[str, Any]:
    """LoRA, gradient checkpointing and bfloat16 autocast: two steps each, weights and losses."""
    found: dict[str, Any] = {}
    for name in ("lora", "checkpointing", "bfloat16"):
        case, options = bert_case(torch.float32 if name == "bfloat16" else torch.float64), {}
        model = case.make()
        if name == "lora":
            model = with_adapters(model)
            options["shuffle"] = "off"
        if name == "checkpointing":
            checkpoint_activations(model)
            model.train()
        if sharded:
            model = shard(model)
        private = start(Case(make=lambda m=model: m, data=case.data, loss=case.loss), **options)
        private.sampler = FixedSampler([1, 2, 3], list(range(4, 15)))
        losses = []
        for batch in private.batches(case.data, num_steps=2):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=name == "bfloat16"):
                each = case.loss(private.model, batch)
            private.backward(each)
            private.step()
            assert private.last_metrics is not None
            losses.append(private.last_metrics.loss)
        trained = {key: whole(p) for key, p in private.model.named_parameters()}
        found[name] = {"weights": trained, "loss": losses[-1]}
        private.close()
    return found


def compiled_steps() -> dict[str, Any]:
    """A compiled BERT: weights after two steps."""
    case = bert_case(torch.float64)
    private = start(case)
    private.sampler = FixedSampler([1, 2, 3, 4], [5, 6, 7, 8])
    losses = torch.compile(case.loss)
    for batch in private.batches(case.data, num_steps=2):
        private.backward(losses(private.model, batch))
        private.step()
    trained = {key: whole(p) for key, p in private.model.named_parameters()}
    private.close()
    return trained


def with_adapters(model: Any) -> Any:
    import peft

    torch.manual_seed(7)
    config = peft.LoraConfig(r=2, lora_alpha=4, task_type="SEQ_CLS", lora_dropout=0.0)
    return peft.get_peft_model(model, config).double()


def faulty_exchange(fault: str) -> None:
    """An exchange that loses a rank's sums, counts them twice, or mixes coordinates up."""
    case = mlp_case()
    private = start(case)
    private.sampler = FixedSampler([1, 2, 3, 4])
    exchange: Any = private._door.exchange
    reduce, rank = exchange.reduce, current_world().rank

    def bent(sums: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if fault == "lost" and rank == 1:
            sums = {name: torch.zeros_like(total) for name, total in sums.items()}
        if fault == "twice" and rank == 1:
            sums = {name: 2.0 * total for name, total in sums.items()}
        shares: dict[str, torch.Tensor] = reduce(sums)
        if fault == "mixed" and rank == 0:
            largest = max(shares.values(), key=torch.numel)
            largest.copy_(largest.flip(0))
        return shares

    exchange.reduce = bent
    run(private, case)


def mechanisms() -> dict[str, Any]:
    """Units, a largest batch, and banded noise, by the run's own sampler."""
    case = mlp_case(torch.float64)
    settings: dict[str, dict[str, Any]] = {
        "units": {
            "unit": [record // 3 for record in range(RECORDS)],
            "records_per_unit": 2,
            "dataset_size": math.ceil(RECORDS / 3),
        },
        "largest batch": {"largest_batch": 8},
        "banded": {"noise": "banded", "bands": 2, "shuffle": "off"},
    }
    found = {}
    for name, changes in settings.items():
        private = start(case, **changes)
        private.sampler = PoissonSampler(
            dataset_size=private.plan.dataset_size,
            sampling_prob=private.plan.sampling_prob,
            streams=private.streams,
            largest_batch=private.plan.largest_batch,
            bands=private.plan.bands,
        )
        run(private, case)
        found[name] = weights(private.model)
    return found
