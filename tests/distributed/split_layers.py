"""What ranks that split every layer do in the tests; run by `nursery.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import TensorDataset

from distributed import replicas
from distributed.collectives import Collectives
from distributed.sharded_models import split, whole
from shuffled_dpsgd.distributed import current_world
from shuffled_dpsgd.runtime.shards import held, spread_like
from shuffled_dpsgd.training import LoopSettings, train
from shuffled_dpsgd.training.data import Batch
from training.cases import CLASSES, Case, FixedSampler, bert_case, make_mlp, mlp_case, run


class Block(nn.Module):
    """A small Transformer: attention by heads, an MLP, norms between them, dropout."""

    WIDTH, HEAD, VOCABULARY = 16, 4, 30

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = self.WIDTH
        self.table = nn.Embedding(self.VOCABULARY, width)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, CLASSES)
        self.dropout = nn.Dropout(dropout)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.table(words)
        y = self.before(x)
        q, k, v = (
            part(y).unflatten(-1, (-1, self.HEAD)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        x = x + self.dropout(self.out(mixed))
        x = x + self.down(self.dropout(F.gelu(self.up(self.between(x)))))
        found: torch.Tensor = self.head(x.mean(1))
        return found


PLANS: dict[str, dict[str, type[ParallelStyle]]] = {
    "mlp": {"0": ColwiseParallel, "2": RowwiseParallel},
    "block": {
        **dict.fromkeys("qkv", ColwiseParallel),
        "out": RowwiseParallel,
        "up": ColwiseParallel,
        "down": RowwiseParallel,
    },
    "bert": {
        f"bert.encoder.layer.{layer}.{path}": style
        for layer in range(2)
        for path, style in {
            "attention.self.query": ColwiseParallel,
            "attention.self.key": ColwiseParallel,
            "attention.self.value": ColwiseParallel,
            "attention.output.dense": RowwiseParallel,
            "intermediate.dense": ColwiseParallel,
            "output.dense": RowwiseParallel,
        }.items()
    },
}


def block_case(dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> Case:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch["input_ids"]), batch["labels"], reduction="none")

    return replace(bert_case(dtype), make=lambda: Block(dropout).to(dtype), loss=loss)


CASES: dict[str, Callable[[torch.dtype], Case]] = {
    "mlp": mlp_case,
    "block": block_case,
    "bert": bert_case,
    "block with dropout": partial(block_case, dropout=0.2),
}


def case_of(name: str, dtype: torch.dtype = torch.float64, *, splits: bool = True) -> Case:
    case, plan = CASES[name](dtype), PLANS[name.split()[0]]
    styles = {path: style() for path, style in plan.items()}
    return replace(case, make=lambda: split(case.make(), styles)) if splits else case


def trained(name: str, *, splits: bool, **changes: Any) -> dict[str, Any]:
    """Uneven steps in float64: everything that must be as in one process."""
    case = case_of(name, splits=splits)
    private = replicas.start(case, loss=case.loss, **changes)
    metrics: list[dict[str, Any]] = []
    private.on_update(lambda: metrics.append(private.last_metrics.to_json()))  # type: ignore[union-attr]
    run(private, case)
    private.release()
    state = private.optimizer.state_dict()["state"]
    moments = {f"{i}.{k}": whole(v) for i, s in state.items() for k, v in s.items() if v.dim()}
    return {
        "weights": {n: whole(p) for n, p in private.model.named_parameters()} | moments,
        "metrics": metrics,
        "spent": private.ledger.spent,
        "claim": str(private.card().certified),
        "norms": private.last_sample_norms,
        "sums": private.referee.checks.sums,
        "assumed": private.card().assumptions,
        "checked": private.engine.num_checked,
        "shuffle": private.plan.shuffle,
        "held": sum(held(p).numel() for p in private.model.parameters()),
    }


def other_loops(splits: bool) -> dict[str, dict[str, torch.Tensor]]:
    """Padded batches, means as losses and half precision: the weights after uneven steps."""
    found = {}
    for kind in ("padded", "mean", "half"):
        case = case_of("block", torch.float32 if kind == "half" else torch.float64, splits=splits)
        reduction = "mean" if kind == "mean" else "sum"
        private = replicas.start(case, shuffle="off", check_rate=1.0, loss_reduction=reduction)
        for batch in private.batches(case.data, pad_batches=kind == "padded"):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "half"):
                losses = case.loss(private.model, batch)
            private.backward(losses.mean() if kind == "mean" else losses)
            private.step()
        found[kind] = {name: whole(p) for name, p in private.model.named_parameters()}
        private.close()
    return found


def augmented(splits: bool) -> dict[str, torch.Tensor]:
    """A few steps of `train` with noise on the inputs."""
    case = case_of("mlp", splits=splits)
    private = replicas.start(case, shuffle="off")

    def blurred(batch: Any, generator: torch.Generator) -> Any:
        return Batch((batch.x + torch.randn(batch.x.shape, generator=generator), batch.y))

    train(private, case.data, case.loss, settings=LoopSettings(augment=blurred))
    return {name: whole(p) for name, p in private.model.named_parameters()}


def faulty(name: str, fault: str) -> dict[str, Any]:
    """A few steps with a fault on rank 1, or in what the ranks add up; says who noticed."""
    case = case_of(name, torch.float32)
    odd = current_world().rank == 1
    if fault == "records":
        data = case.data
        case = replace(case, data=[data[(i + odd) % len(data)] for i in range(len(data))])
    private = replicas.start(case, check_rate=1.0)
    private.sampler = FixedSampler([1, 2, 9, 4], [5, 6, 7])
    inner, sharding = private.engine.clipped_sum, cast(Any, private._sharding)
    add = sharding.total

    def forgets(values: torch.Tensor) -> torch.Tensor:
        own, same = values.clone(), add(values.clone())
        return torch.stack([own[0], same[1]])

    if fault == "sums" and odd:
        scaled = lambda: {name: 1.05 * total for name, total in inner().items()}  # noqa: E731
        private.engine.clipped_sum = scaled  # type: ignore[method-assign]
    if fault == "norms":
        sharding.total = forgets
    if fault == "exchange":
        lay = sharding.sums._part  # Into a copy that nobody sends.
        sharding.sums._part = lambda name, whole: lay(name, torch.zeros_like(whole))
    if fault == "weights" and odd:
        with torch.no_grad():
            private.model.get_parameter("table.weight").mul_(1.5)
    if fault == "losses" and odd:
        backward = private.backward
        private.backward = lambda losses: backward(losses + 1.0)  # type: ignore[method-assign]
    said = replicas.refusal(lambda: run(private, case, num_steps=2))
    return {"said": said, "spent": private.ledger.spent}


def one_bad_sample() -> dict[str, Any]:
    """A record whose gradient is not a number."""
    case = case_of("mlp", torch.float32)
    inputs, labels = case.data.tensors
    inputs = inputs.clone()
    inputs[9] = float("nan")
    private = replicas.start(replace(case, data=TensorDataset(inputs, labels)))
    private.sampler = FixedSampler([1, 9, 4, 7])
    found: list[int] = []
    private.on_update(lambda: found.append(private.last_metrics.num_nonfinite))  # type: ignore[union-attr]
    run(private, replace(case, data=TensorDataset(inputs, labels)), num_steps=1)
    finite = all(bool(torch.isfinite(whole(w)).all()) for w in private.model.parameters())
    return {"found": found, "finite": finite}


def collectives_of_a_step() -> dict[str, Any]:
    """What travels in a step that nobody checks: by us, and by torch between the layers."""
    case = case_of("block", torch.float32)
    private = replicas.start(case, check_rate=0.0, num_steps=16)
    private.sampler = FixedSampler(*[[1, 2, 3, 4]] * 16)
    with mock.patch.object(type(private.streams), "coin", return_value=False):
        run(private, case, num_steps=12)
        pickled = mock.patch("pickle.dumps", side_effect=AssertionError("something is pickled"))
        with pickled, Collectives() as mode:
            run(private, case, num_steps=1)
    return {"seen": mode.seen, "model": sum(p.nbytes for p in private.model.parameters())}


def noise_alone(splits: bool) -> dict[str, torch.Tensor]:
    """What a step without records adds to the weights."""
    case = case_of("block", splits=splits)
    model = case.make()
    before = {name: whole(p) for name, p in model.named_parameters()}
    private = replicas.start(replace(case, make=lambda: model), shuffle="off", num_steps=1)
    private._optimizer._optimizer.param_groups[0]["lr"] = 1.0
    private.sampler = FixedSampler([])
    seen: dict[str, torch.Tensor] = {}
    update = private._optimizer.update

    def kept(gradients: Any) -> None:
        seen.update({name: gradient.clone() for name, gradient in gradients.items()})
        update(gradients)

    private._optimizer.update = kept  # type: ignore[method-assign]
    run(private, case)
    assert before.keys() == seen.keys()
    mine = {name: spread_like(g, model.get_parameter(name)) for name, g in seen.items()}
    return {name: whole(g) for name, g in mine.items()}


class Between(nn.Module):
    """A norm of single heads, between a layer split by outputs and one split by inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.LayerNorm(4), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(self.norm(self.up(x).unflatten(-1, (-1, 4))).flatten(-2))
        return found


def refusals() -> dict[str, str]:
    """What cannot be trained is refused by name, on every rank alike."""
    mlp = case_of("mlp", torch.float32)

    def attempt(make: Callable[[], nn.Module] = mlp.make, **changes: Any) -> str:
        return replicas.refusal(lambda: replicas.start(replace(mlp, make=make), **changes))

    def on(axis: str) -> nn.Module:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
        return parallelize_module(nn.Linear(6, 4), mesh, ColwiseParallel())

    def apart() -> nn.Module:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        return fully_shard(split(make_mlp(), {"0": ColwiseParallel()}), mesh=mesh["dp"])

    def by_hand() -> nn.Module:
        model = make_mlp()
        mesh = init_device_mesh("cpu", (2,))
        for name, rows in model[0].named_parameters():
            parts = distribute_tensor(rows.detach(), mesh, [Shard(0)])
            model[0].register_parameter(name, nn.Parameter(parts))
        return model

    def compiled() -> nn.Module:
        model = mlp.make()
        model.get_submodule("0").compile()
        return model

    between = replace(
        mlp,
        make=lambda: split(Between(), {"up": ColwiseParallel(), "down": RowwiseParallel()}),
    )
    hand = replace(mlp, make=by_hand)
    whole_run = replicas.start(mlp)
    return {
        **{axis: attempt(lambda axis=axis: on(axis)) for axis in ("pp", "cp", "ep")},
        "declared": attempt(mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))),
        "another mesh": attempt(mesh=init_device_mesh("cpu", (1, 2))),
        "with fully_shard": attempt(apart),
        "table": attempt(
            lambda: split(nn.Sequential(nn.Embedding(6, 4)), {"0": ColwiseParallel()})
        ),
        "sequence": attempt(
            lambda: split(nn.Sequential(nn.LayerNorm(6)), {"0": SequenceParallel()})
        ),
        "uneven": attempt(lambda: split(nn.Sequential(nn.Linear(6, 5)), {"0": ColwiseParallel()})),
        "compiled": attempt(compiled),
        "shuffle": attempt(shuffle="every-step"),
        "paper": attempt(**replicas.PAPER),
        "batch clip": attempt(shuffle="off", batch_clip_norm=1.0),
        "per layer": attempt(clip="per-layer"),
        "opacus": attempt(method="opacus"),
        "alone": replicas.refusal(lambda: whole_run.whole_weights().__enter__()),
        "between": replicas.refusal(lambda: run(replicas.start(between), between, num_steps=2)),
        "by hand": replicas.refusal(lambda: run(replicas.start(hand), hand, num_steps=2)),
    }
