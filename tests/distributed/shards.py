"""What ranks with a shard of the model each do in the tests; run by `nursery.py`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from traceback import StackSummary
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from distributed import replicas
from distributed.collectives import Collectives
from distributed.replicas import CASES, refusal
from distributed.sharded_models import shard, spread, two_by_two, whole
from distributed.split_layers import block_case
from shuffled_dpsgd.clipping.finalize.layer_by_layer import LayerByLayer
from shuffled_dpsgd.distributed import World, current_world, launched
from shuffled_dpsgd.distributed.exchange import ShardedSums
from shuffled_dpsgd.distributed.unshard import ShardedWeight
from shuffled_dpsgd.distributed.unshard_graph import UnshardedGraph
from shuffled_dpsgd.distributed.world import _scatter_sum
from shuffled_dpsgd.errors import RefereeError, UnsupportedModuleError
from shuffled_dpsgd.integrations.hf_conflicts import check_model
from shuffled_dpsgd.permutation import apply, discover, draw
from shuffled_dpsgd.runtime.replay import Call
from shuffled_dpsgd.runtime.shards import held
from shuffled_dpsgd.tasks.averaging import WeightAverage
from shuffled_dpsgd.tasks.sharding import fill_whole
from shuffled_dpsgd.training import (
    GaussianNoise,
    PrivateTraining,
    load_checkpoint,
    make_private,
    save_checkpoint,
)
from shuffled_dpsgd.training.device_noise import DeviceNoise
from shuffled_dpsgd.training.physical import find_physical_batch_size
from training.cases import Case, FixedSampler, run


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights, and moments under the names of their parameters; collective."""
    found = {name: whole(p) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.dim():
                found[f"{name}.{key}"] = whole(value)
    return found


def with_moments(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose moments differ from coordinate to coordinate, as on any rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for index, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(index)
        grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            grad = distribute_tensor(grad, mesh, placements)
        parameter.grad = grad
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@contextmanager
def nothing_gathered() -> Iterator[None]:
    """Only an all-to-all may carry weights."""
    forbidden = ("all_gather_into_tensor", "all_gather", "all_reduce", "broadcast")
    with mock.patch.multiple(dist, **dict.fromkeys(forbidden, _refuse)):
        yield


def _refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("a collective that the shuffle has no need of")


def shuffled(name: str, scope: str) -> dict[str, bool]:
    """A shuffle of shards beside one of whole tensors: the same bits, and back again."""
    torch.manual_seed(0)
    plain, model = CASES[name](torch.float32).make(), CASES[name](torch.float32).make()
    spec = discover(plain, scope=scope)  # type: ignore[arg-type]
    permutation = draw(spec, torch.Generator().manual_seed(5))
    plain_optimizer = with_moments(plain)
    optimizer = with_moments(shard(model))
    before = everything(model, optimizer)
    same_start = _equal(before, everything(plain, plain_optimizer))
    apply(permutation, plain, plain_optimizer)
    with nothing_gathered():
        apply(permutation, model, optimizer)
    after = everything(model, optimizer)
    with nothing_gathered():
        apply(permutation.inverse(), model, optimizer)
    return {
        "same start": same_start,
        "same end": _equal(after, everything(plain, plain_optimizer)),
        "moved": not _equal(before, after),
        "moments": any(name.endswith("exp_avg_sq") for name in after),
        "back": _equal(before, everything(model, optimizer)),
    }


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def start(case: Case, **changes: Any) -> PrivateTraining:
    """As `replicas.start`, with the model sharded before anything else."""
    return replicas.start(replace(case, make=lambda: shard(case.make())), **changes)


def rows_of_noise(shapes: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """What each rank adds to its rows of zeros, in float32 and float64."""
    world = current_world()
    whole = {
        name: torch.zeros(shape, dtype=torch.float64 if name == "wide" else torch.float32)
        for name, shape in shapes.items()
    }
    exchange = ShardedSums(world, world, World(), whole)
    narrow = {name: tensor for name, tensor in whole.items() if name != "wide"}
    rows = exchange.scatter({"wide": whole["wide"]})() | exchange.scatter(narrow)()
    rows = {name: rows[name].contiguous() for name in whole}
    stds = dict.fromkeys(shapes, 2.0)
    GaussianNoise().add_(rows, stds, key=bytes(32), places=exchange.places())
    return rows


def held_in_a_run() -> dict[str, Any]:
    """Steps with an evaluation after each, an empty one too: what a rank holds meanwhile."""
    case = CASES["bert"](torch.float64)
    batches: list[list[int]] = [[*range(8)], [], [*range(8, 16)], [*range(16, 24)]]
    options = {"shuffle": "off", "physical_batch_size": 2, "num_steps": 4}
    plain = replicas.start(case, **options)
    plain.sampler = FixedSampler(*batches)
    run(plain, case)
    private = start(case, **options)
    private.sampler = FixedSampler(*batches)
    found: dict[str, Any] = {"unsharded": 0, "batches": 0, "largest sums": 0}
    sharding: Any = private._sharding
    scatter, unsharded = sharding.sums.scatter, sharding.unsharded

    def scattered(sums: Any) -> Any:
        size = sum(tensor.numel() for tensor in sums.values())
        found["largest sums"] = max(found["largest sums"], size)
        return scatter(sums)

    def counted() -> Any:
        found["unsharded"] += 1
        return unsharded()

    sharding.sums.scatter, sharding.unsharded = scattered, counted

    def evaluate() -> None:
        with torch.no_grad():
            private.model(input_ids=torch.ones(1, 4, dtype=torch.int64))

    private.on_update(evaluate)
    for batch in private.batches(case.data):
        found["batches"] += 1
        private.backward(case.loss(private.model, batch))
        own = sum(tensor.numel() for tensor in private.engine.clipped_sum().values())
        private.step()
    private.close()
    trained = everything(private.model, private.optimizer)
    expected = everything(plain.model, plain.optimizer)
    shapes = [tensor.shape for tensor in plain.model.parameters()]
    return found | {
        "own sums": own,
        "all sums": sum(shape.numel() for shape in shapes),
        "largest layer": max(shape.numel() for shape in shapes) + 64,
        "rows to spare": sum(shape[1:].numel() for shape in shapes),
        "same": all(
            torch.allclose(trained[n], expected[n], rtol=1e-9, atol=1e-9) for n in expected
        ),
    }


class BegunScatters:
    """Sends sums as ever, and counts those on their way when the next are sent."""

    def __init__(self) -> None:
        self.overlapping = 0
        self._pending = 0

    def __call__(self, *args: Any, **options: Any) -> mock.Mock:
        self.overlapping += self._pending > 0
        self._pending += 1
        work = _scatter_sum(*args, **options)

        def wait() -> None:
            self._pending -= 1
            work.wait()

        return mock.Mock(wait=wait)


def sums_held() -> dict[str, Any]:
    """Backwards of eight blocks: the sums that are alive at once, and what is gathered for them."""
    case = replace(CASES["mlp"](torch.float32), make=lambda: shard(Deep()))
    private = replicas.start(case, shuffle="off", check_rate=0.0, num_steps=2)
    private.sampler = FixedSampler([1, 2, 3], [5, 6, 7, 8])
    found: dict[str, Any] = {"most": 0, "settled": 0, "scattered": 0}
    alive: list[tuple[StorageWeakRef, int]] = []
    sharding: Any = private._sharding
    scatter, settle = sharding.sums.scatter, LayerByLayer._finalize

    def scattered(sums: Any) -> Any:
        for tensor in sums.values():
            storage = tensor.untyped_storage()
            alive.append((StorageWeakRef(storage), storage.nbytes()))
        alive[:] = [(ref, size) for ref, size in alive if not ref.expired()]
        found["most"] = max(found["most"], sum(size for _, size in alive))
        found["scattered"] += 1
        return scatter(sums)

    def settled(self: LayerByLayer, batch: Any) -> Any:
        found["settled"] += 1
        gather = "shuffled_dpsgd.distributed.world._gather_parts"
        with nothing_gathered(), mock.patch(gather, _refuse):
            return settle(self, batch)

    sharding.sums.scatter = scattered
    begun = BegunScatters()
    send = mock.patch("shuffled_dpsgd.distributed.world._scatter_sum", begun)
    with mock.patch.object(LayerByLayer, "_finalize", settled), send:
        run(private, case)
    found["overlapping"] = begun.overlapping
    own = sum(total.nbytes for total in private.engine.clipped_sum().values())
    whole = [p.nbytes for p in Deep().parameters()]
    return found | {"own": own, "whole": sum(whole), "layer": max(whole) + 4 * Deep.HIDDEN}


class Block(nn.Sequential):
    """Its forward may hold a checkpoint, which computes again without the block's own hooks."""

    checkpoints = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.checkpoints:
            return super().forward(x)
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class Deep(nn.Module):
    """Many blocks of one size, around them little. No activation is as large as a weight."""

    WIDTH, HIDDEN = 6, 24

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            Block(nn.Linear(self.WIDTH, self.HIDDEN), nn.Tanh(), nn.Linear(self.HIDDEN, self.WIDTH))
            for _ in range(8)
        )
        self.head = nn.Linear(6, 3)
        self.checkpoints = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.checkpoints:
                x = x + checkpoint(block, x, use_reentrant=False)
            else:
                x = x + block(x)
        found: torch.Tensor = self.head(x)
        return found


@contextmanager
def whole_weights_counted(found: dict[str, int]) -> Iterator[None]:
    """Write down the most bytes of gathered weights, and of gradients of them, alive at once."""
    alive: list[tuple[StorageWeakRef, int]] = []

    def note(tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        alive[:] = [(ref, size) for ref, size in alive if not ref.expired()]
        if all(ref.cdata != storage._cdata for ref, _ in alive):
            alive.append((StorageWeakRef(storage), storage.nbytes()))
        found["most"] = max(found.get("most", 0), sum(size for _, size in alive))

    gathered, receive, pack = ShardedWeight.gathered, UnshardedGraph.receive, UnshardedGraph.pack

    def noted(self: ShardedWeight, world: Any) -> torch.Tensor:
        whole = gathered(self, world)
        note(whole)
        found["sent"] = found.get("sent", 0) + whole.nbytes
        return whole

    def received(self: UnshardedGraph, name: str, grad: torch.Tensor) -> None:
        note(grad)
        found["gradients"] = found.get("gradients", 0) + 1
        receive(self, name, grad)

    def packed(self: UnshardedGraph, tensor: torch.Tensor) -> Any:
        kept = pack(self, tensor)
        is_weight = tensor.numel() == Deep.WIDTH * Deep.HIDDEN
        found["kept by graphs"] += isinstance(kept, torch.Tensor) and is_weight
        found["gathered again"] += is_weight
        return kept

    found |= {"kept by graphs": 0, "gathered again": 0}
    with (
        mock.patch.object(UnshardedGraph, "pack", packed),
        mock.patch.object(ShardedWeight, "gathered", noted),
        mock.patch.object(UnshardedGraph, "receive", received),
    ):
        yield


def unsharded_in_checks(kinds: list[str]) -> dict[str, Any]:
    """Steps of which every batch is checked, and a shuffle: what is whole at once on a rank."""
    case = replace(CASES["mlp"](torch.float32), make=Deep)
    found: dict[str, Any] = {}
    for kind in kinds:
        model = Deep()
        model.checkpoints = kind == "checkpointing"
        for block in model.blocks:
            block.checkpoints = kind == "checkpointing inside"  # type: ignore[assignment]
        sizes = [sum(p.nbytes for p in block.parameters()) for block in model.blocks]
        root = sum(p.nbytes for p in model.head.parameters())
        whole = sum(p.nbytes for p in model.parameters())
        shuffle = "off" if kind.startswith("checkpointing") else "every-step"
        sharded = replace(case, make=lambda model=model: shard(model))
        private = replicas.start(sharded, shuffle=shuffle, check_rate=1.0, num_steps=2)
        private.sampler = FixedSampler([1, 2, 3], [5, 6, 7, 8])
        one: dict[str, int] = {"block": max(sizes), "root": root, "whole": whole}
        with whole_weights_counted(one):
            for batch in private.batches(case.data):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "bfloat16"):
                    losses = case.loss(private.model, batch)
                private.backward(losses)
                private.step()
        one["checked"] = private.engine.num_checked
        one["verified"] = private.shuffling.num_verified
        shards = all(isinstance(p, DTensor) for p in private.model.parameters())
        found[kind] = one | {"shards": shards}
        private.close()
    return found


def uneven_runs() -> dict[str, Any]:
    """Ranks run the model by themselves three times, once, and half way."""
    torch.manual_seed(0)
    x, plain = torch.randn(3, Deep.WIDTH), Deep()
    private = replicas.start(
        Case(make=lambda: shard(Deep()), data=None, loss=None),  # type: ignore[arg-type]
        shuffle="off",
    )
    model: Any = private.model
    rank = current_world().rank
    found: dict[str, Any] = {"same": []}

    def run(times: int, breaks: bool = False) -> None:
        with private.unsharded_layers(), torch.no_grad():
            for _ in range(times):
                found["same"].append(torch.equal(model(x), plain(x)))
            if breaks:
                model.blocks[4].register_forward_pre_hook(_break)
                model(x)

    run(3 if rank == 0 else 0)
    found["refused"] = refusal(lambda: run(1, breaks=rank == 1))
    return found | {"shards": all(isinstance(p, DTensor) for p in model.parameters())}


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in_a_shuffle(rank: int) -> None:
    """One rank is killed while the others wait for the rows that move."""
    case = CASES["mlp"](torch.float32)
    private = start(case)
    private.sampler = FixedSampler([1, 2, 3, 4])
    if current_world().rank == rank:
        sending = "shuffled_dpsgd.permutation.sharded.send_rows"
        mock.patch(sending, _die).start()
    run(private, case)


def beside_other_records(name: str) -> dict[str, Any]:
    """A batch that one rank runs twice among other records, and the other rank not at all."""
    case = CASES[name](torch.float64)
    private = start(case, shuffle="off")
    checks, rank = private.engine._checks, current_world().rank
    batch = next(iter(DataLoader(case.data, batch_size=3)))
    kwargs = {"input_ids": batch["input_ids"]}
    found: dict[str, Any] = {"same": None}
    with private, whole_weights_counted(found), private.unsharded_layers():
        if rank == 1:
            call, take = Call.now(private.model, (), kwargs), private._sharding.gradients_to
            with checks.witness.replay(call, 3, checks.taken_off(), take=take) as rerun:
                rerun.invent_gradients(numbers=False)
                one, two = (rerun.observe(order, [1]) for order in ([0, 1, 2], [2, 1, 0]))
                found["same"] = all(
                    torch.allclose(one.grads[name], two.grads[name], atol=1e-12)
                    for name in one.grads
                )
    return found | {
        "shards": all(isinstance(p, DTensor) for p in private.model.parameters()),
    }


def _break(module: nn.Module, args: Any) -> None:
    raise UnsupportedModuleError("blocks.4", expected="better", got="worse", remedy="none")


def in_half_precision(name: str) -> dict[str, Any]:
    """FSDP's own mixed precision beside float32 on whole weights: weights and what was checked."""
    case = CASES[name](torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    options = {"noise_multiplier": 0.0, "num_steps": 2, "clip_norm": 0.1}
    found: dict[str, Any] = {}
    for kind in ("float32", "bfloat16"):
        half = kind == "bfloat16"
        make = (lambda: shard(case.make(), mp_policy=policy)) if half else case.make
        private = replicas.start(replace(case, make=make), **options)
        private.optimizer.param_groups[0]["lr"] = 1e-3
        private.sampler = FixedSampler([1, 2, 3], list(range(4, 15)))
        seen: set[torch.dtype] = set()
        block = next(m for m in private.model.modules() if isinstance(m, nn.ModuleList))[0]
        block.register_forward_pre_hook(
            lambda module, *_, seen=seen: seen.update(p.dtype for p in module.parameters())
        )
        run(private, case)
        found[kind] = {
            "weights": everything(private.model, private.optimizer),
            "norms": private.last_sample_norms.sort().values,
            "computed in": sorted(map(str, seen)),
            "checked": private.engine.num_checked > 0,
            "verified": private.shuffling.num_verified,
            "sums": {str(total.dtype) for total in private.engine.clipped_sum().values()},
        }
        private.close()
    return found


class OtherLayers(nn.Module):
    """PyTorch's own attention, and recurrent layers, one of which only the generic rule takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.recurrent = nn.GRU(6, 5, batch_first=True)
        self.other = type("Own", (nn.RNN,), {"forward": lambda self, x: nn.RNN.forward(self, x)})(
            5, 5, batch_first=True
        )
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x.unsqueeze(1).expand(-1, 3, -1))
        found: torch.Tensor = self.head(self.other(self.recurrent(x)[0])[0][:, -1])
        return found


def other_layers() -> dict[str, Any]:
    """Models that are no Hugging Face Transformer, whole and sharded, in one launch."""
    case = replace(CASES["mlp"](torch.float64), make=lambda: OtherLayers().double())
    options = {"shuffle": "off", "noise_multiplier": 0.1}
    plain = replicas.start(case, **options)
    run(plain, case)

    def sharded() -> nn.Module:
        model = OtherLayers().double()
        for layer in [*model.encoder.layers, model.recurrent, model.other]:
            fully_shard(layer)
        return fully_shard(model)

    private = replicas.start(replace(case, make=sharded), **options)
    run(private, case)
    mine = everything(private.model, private.optimizer)
    theirs = everything(plain.model, plain.optimizer)
    return {
        "kinds": sorted({slot.kind for slot in private.engine._slots}),
        "same": all(torch.allclose(mine[n], theirs[n], rtol=1e-9, atol=1e-9) for n in theirs),
    }


def compiled_blocks(name: str, backend: str) -> dict[str, Any]:
    """Blocks that are compiled and then sharded, beside the model as it is, in uneven steps."""
    case, counter = CASES[name](torch.float64), CompileCounterWithBackend(backend)

    def compiled() -> nn.Module:
        model = case.make()
        for blocks in model.modules():
            if isinstance(blocks, nn.ModuleList):
                for block in blocks:
                    block.compile(backend=counter)
        return shard(model)

    plain, private = replicas.start(case), replicas.start(replace(case, make=compiled))
    run(plain, case)
    run(private, case)
    mine = everything(private.model, private.optimizer)
    theirs = everything(plain.model, plain.optimizer)
    traced = replicas.start(replace(case, make=lambda: shard(case.make())))
    traced.sampler = FixedSampler([1, 2, 3])
    as_a_whole = torch.compile(traced.model, backend="eager")
    return {
        "same": all(torch.allclose(mine[n], theirs[n], rtol=1e-9, atol=1e-9) for n in theirs),
        "graphs": counter.frame_count,
        "checked": private.engine.num_checked > 0,
        "as a whole": refusal(
            lambda: [case.loss(as_a_whole, batch) for batch in traced.batches(case.data)]
        ),
    }


class FunctionalCollectives(TorchDispatchMode):
    """Counts the collectives that a DTensor asks for by itself."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented  # What it becomes is seen here afterwards.
        self.count += func.namespace == "_c10d_functional"
        return func(*args, **(kwargs or {}))


def collectives_of_a_step(how: bool | str, shuffle: str) -> dict[str, Any]:
    """What travels in a step that nobody checks, once the run has settled in."""
    case = CASES["bert"](torch.float32)
    if how:
        case = replace(case, make=spread(case.make, how))
    with Collectives() as first:
        private = replicas.start(case, shuffle=shuffle, check_rate=0.0, num_steps=16)
    private.sampler = FixedSampler(*[[1, 2, 3, 4]] * 16)
    coin = mock.patch.object(type(private.streams), "coin", return_value=False)
    with coin:
        run(private, case, num_steps=12)
        pickled = mock.patch("pickle.dumps", side_effect=AssertionError("something is pickled"))
        with pickled, Collectives() as mode:
            run(private, case, num_steps=1)
    modules = private.model.modules()
    layers = [[p.nbytes for p in module.parameters(recurse=False)] for module in modules]
    return {
        "seen": mode.seen,
        "sent first": [size for name, size in first.seen if "broadcast" in name],
        "state": sum(held(v).nbytes for v in tree_leaves([*private.optimizer.state.values()])),
        "rows": sum(held(p).nbytes for p in private.model.parameters()),
        "weights": sum(p.nbytes for p in private.model.parameters()),
        "layers": [sum(sizes) for sizes in layers if sizes],
    }


def written_on_a_full_disk(directory: str) -> dict[str, Any]:
    """What saving shards says where no rank can write, and the files it leaves."""
    private, kept = start(CASES["mlp"](torch.float64)), Path(directory)
    writer = "shuffled_dpsgd.training.sharded_checkpoint.save"
    # As torch says it: a rank's file is shorter than it should be.
    cause = RuntimeError("unexpected pos 704 vs 598")
    failure = CheckpointException("write", {0: (cause, StackSummary())})
    usage = mock.patch("shutil.disk_usage", return_value=mock.Mock(free=4096))
    with mock.patch(writer, side_effect=failure):
        other = refusal(lambda: save_checkpoint(private, kept))
        with usage:
            full = refusal(lambda: save_checkpoint(private, kept))
    return {"full": full, "other": other, "left": [path.name for path in kept.iterdir()]}


def collectives_of_dtensors(directory: str) -> dict[str, Any]:
    """All that a run asks of a sharded model: checks, steps, shuffles, checkpoints, weights."""
    case, kept, asked = CASES["mlp"](torch.float64), Path(directory), FunctionalCollectives()
    with asked:
        private = start(case, check_rate=1.0)
        average = WeightAverage(private.model, decay=0.5)
        run(private, case)
        average.update(private.model)
        saved = save_checkpoint(private, kept, extras={"average": average})
        private.release()
        copied = case.make()
        fill_whole(current_world(), copied, private.model)
        load_checkpoint(start(case), saved, extras={"average": average})
    found = {
        "asked for": asked.count,
        "checked": private.engine.num_checked,
        "verified": private.shuffling.num_verified,
    }
    with asked:
        expected = everything(private.model, private.optimizer)
    return found | {
        "seen if there are any": asked.count,
        "same": all(torch.equal(p, expected[name]) for name, p in copied.named_parameters()),
    }


class Around(nn.Module):
    """A parameter of its own around a module that is sharded by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x) * self.scale
        return found


def square(count: int = 2) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(count)])


def _on_two_meshes(mesh: DeviceMesh) -> nn.Module:
    model = square()
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model)


def refusals() -> dict[str, str]:
    """What cannot be trained is refused by name, on every rank alike."""
    import bitsandbytes

    def attempt(model: nn.Module, **changes: Any) -> str:
        case = Case(make=lambda: model, data=None, loss=CASES["mlp"](torch.float32).loss)
        return refusal(lambda: replicas.start(case, **{"shuffle": "off"} | changes))

    meshes = {
        name: init_device_mesh("cpu", (2,) if name else (1, 2), mesh_dim_names=names)
        for name, names in {"": ("dp", "fsdp"), "tp": ("tp",), "pp": ("pp",)}.items()
    }
    ignoring, several, apart = square(), square(3), CASES["gpt2"](torch.float32).make()
    fully_shard([several[0], several[1]])
    fully_shard(apart.get_input_embeddings())
    half, around, compiled = square(), Around(), square()
    fully_shard(half[0])
    fully_shard(around.inner)
    compiled.compile()
    quantised = square()
    quantised[0] = bitsandbytes.nn.Linear8bitLt(4, 4, has_fp16_weights=False)
    quantised[0].requires_grad_(False)
    optimized = nn.Sequential(torch.compile(nn.Linear(4, 4)), nn.Linear(4, 4))
    other = square()
    rows = distribute_tensor(other[0].weight.detach(), init_device_mesh("cpu", (2,)), [Shard(0)])
    other[0].weight = nn.Parameter(rows)
    offloading = CPUOffloadPolicy(pin_memory=False)
    narrow = MixedPrecisionPolicy(param_dtype=torch.float16)
    rank = current_world().rank
    return {
        "axis": attempt(fully_shard(square(), mesh=meshes["pp"])),
        "another mesh": attempt(fully_shard(square(), mesh=meshes[""]), mesh=meshes["tp"]),
        "no mesh": attempt(fully_shard(square()), mesh="fsdp"),
        "two meshes": attempt(_on_two_meshes(meshes[""])),
        "not on it": attempt(square(), mesh=meshes[""]),
        "columns": attempt(fully_shard(square(), shard_placement_fn=lambda p: Shard(p.ndim - 1))),
        "half": attempt(fully_shard(square(), mesh=DeviceMesh("cpu", [1, 0]))),
        "root": attempt(half),
        "tensor parallel": attempt(other),
        "ignored": attempt(fully_shard(ignoring, ignored_params={ignoring[0].weight})),
        "precision": attempt(fully_shard(square(), mp_policy=narrow)),
        "offload": attempt(fully_shard(square(), offload_policy=offloading)),
        "list": attempt(fully_shard(several)),
        "untied": attempt(fully_shard(apart)),
        "compiled": attempt(fully_shard(compiled)),
        "wrapped by a compiler": attempt(fully_shard(optimized)),
        "quantised": attempt(fully_shard(quantised)),
        "unaccounted": attempt(fully_shard(square()), sampling="unaccounted"),
        "opacus": attempt(fully_shard(square()), method="opacus"),
        "inside": attempt(fully_shard(around)),
        "find": refusal(
            lambda: find_physical_batch_size(
                replicas.start(
                    Case(make=lambda: fully_shard(square()), data=None, loss=None),  # type: ignore[arg-type]
                    shuffle="off",
                ),
                [0],
                lambda *_: torch.zeros(1),
            )
        ),
        "frame": attempt(fully_shard(square()), noise_frame="unshuffled", shuffle="every-step"),
        "trainer": refusal(lambda: check_model(fully_shard(square()))),
        "size": attempt(fully_shard(square()), physical_batch_size=2 + rank),
    }


def refereed(name: str, fault: str, how: bool | str = True) -> dict[str, Any]:
    """A few steps with or without a fault in the sums of rank 1; says what was compared."""
    case = CASES[name](torch.float32)
    case = replace(case, make=spread(case.make, how))
    private = replicas.start(case, check_rate=1.0)
    inner = private.engine.clipped_sum
    world: Any = current_world()

    def bent() -> dict[str, torch.Tensor]:
        sums = {name: total.clone() for name, total in inner().items()}
        if fault == "scaled" and world.rank == 1:
            for total in sums.values():
                total.mul_(1.05)
        return sums

    def forgotten(flat: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: flat[: flat.numel() // 2]  # Its own rows, with nothing of the copy's.

    private.engine.clipped_sum = bent  # type: ignore[method-assign]
    if fault == "copies":
        copies: Any = private._sharding.copies  # type: ignore[union-attr]
        copies.start_scatter_sum_ = forgotten
    said = ""
    try:
        run(private, case)
    except RefereeError as error:
        said = str(error)
    checks = private.referee.checks
    return {
        "said": said,
        "sums": checks.sums,
        "spent": private.ledger.spent,
        "not": checks.not_made,
    }


def copies() -> dict[str, Any]:
    """A secure run on two copies of two shards, which start from different weights."""
    case = CASES["mlp"](torch.float64)

    def make() -> nn.Module:
        model = case.make()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(current_world().rank)
        return shard(model, mesh=two_by_two())

    model = make()
    private = replicas.start(
        replace(case, make=lambda: model),
        mesh=two_by_two(),
        seed=None,
        shuffle="every-step",
    )
    found = {"before": _held(model)}
    private.sampler = FixedSampler([1, 2, 3], [4], [])
    with _counted_noise() as drawn:
        run(private, case, num_steps=3)
    return found | {"after": _held(model), "drawn": drawn}


def _held(model: nn.Module) -> torch.Tensor:
    return torch.cat([held(p).detach().flatten() for p in model.parameters()])


@contextmanager
def _counted_noise() -> Iterator[list[int]]:
    """How many coordinates this rank noises in every step."""
    drawn: list[int] = []
    add = DeviceNoise.add_

    def counted(self: DeviceNoise, sums: Any, *args: Any, **kwargs: Any) -> None:
        drawn.append(sum(total.numel() for total in sums.values()))
        add(self, sums, *args, **kwargs)

    with mock.patch.object(DeviceNoise, "add_", counted):
        yield drawn


def run_page(code: str, name: str = "gpt2") -> tuple[int, bool]:
    """The page's code with what its reader has; steps taken, and whether rank 0 alone evaluated."""
    case = block_case() if name == "block" else CASES[name](torch.float32)
    model, evaluated = case.make(), []
    names: dict[str, Any] = {
        "torch": torch,
        "model": model,
        "block": model,
        "data": case.data,
        "per_sample_loss": case.loss,
        "evaluate": lambda model: evaluated.append(model(case.data[0]["input_ids"][None]).logits),
        "fully_shard": fully_shard,
        "init_device_mesh": init_device_mesh,
        "launched": launched,
        "make_private": make_private,
        "parallelize_module": parallelize_module,
        "ColwiseParallel": ColwiseParallel,
        "RowwiseParallel": RowwiseParallel,
    }
    exec(compile(code, "distributed.md", "exec"), names)
    private = names["private"]
    private.close()
    expected = private.world.rank == 0 and "evaluate(" in code
    return private.steps_taken, bool(evaluated) == expected
