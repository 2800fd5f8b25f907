"""A stated cost model of private training on several GPUs.

bfloat16 autocast, float32 weights, AdamW, eager. Its constants were fitted to the steps measured on
one H200 (benchmarks/reports/2026-11-15-h200.json); `tests/scaling` holds them against all of them.
On other GPUs the measured shares of peak rates are assumed to hold. Nothing was measured there, and
we measured no communication anywhere.

Memory of a rank, in bytes, for P parameters and n tokens:

- weights 4 P, AdamW's moments 8 P, bfloat16 copies of weights 2 P, clipped sums 4 P; with several
  replicated ranks, or copies of shards, as much again for the vector that they exchange;
- activations n (s W + 10.6 V) for W numbers in and out of all linear maps and V logits per token,
  s = 2.7 bytes, or 5.2 where the activation is computed by several stored operations (gelu_new);
- captures 2 n (W + V), held until the sums are formed, when activations and logits are gone;
- sharded ranks divide weights, moments and sums by their number, or, where every node has a copy
  (hybrid), by that of a node. Beside them they hold the gathered weights outside the blocks and of
  two blocks, with bfloat16 copies of those two unless they are gathered in bfloat16 already, and
  the sums of the largest module three times. Checks need no more: they gather layer by layer as
  well, and one sample's gradient of a module takes the place of the sums.

Time of a physical batch: the larger of what the host needs to issue it, 3.1 ms a layer, and what
the GPU needs: operations at 74 % of its peak, and 13 passes over the activations at its bandwidth.
Operations are 6 per token and weight, 12 T per token, layer and width for attention over T tokens,
and what the norms take (`clipping/contributions/cost.py`). A logical step adds 6 ms and 28 ps per
parameter for noise, update and shuffle (at 4.8 TB/s).
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, replace
from typing import Literal

from shuffled_dpsgd.clipping.contributions.cost import operations
from shuffled_dpsgd.scaling.gpus import GPUS_PER_NODE, Gpu
from shuffled_dpsgd.scaling.shapes import ModelShapes

Strategy = Literal["replicated", "sharded", "hybrid"]

STORED_BYTES, STORED_BYTES_COMPOSITE = 2.7, 5.2
LOGIT_BYTES = 10.6
MATMUL_SHARE = 0.74
PASSES = 13.0
HOST_SECONDS_PER_LAYER = 3.1e-3
STEP_SECONDS = 6e-3
# 28 ps per parameter on an H200, as bytes at its bandwidth.
STEP_BYTES_PER_PARAMETER = 28e-12 * 4.8e12
# Of the links' peak rates; assumed. It gives 280 GB/s between nodes of eight H100. Others report
# 360 to 260 GB/s for reduce-scatter on 4 to 128 of them (github.com/NVIDIA/nccl/issues/1229), 350
# for all-gather (issue 1281), and 200 on 32 in one case (issue 1218).
LINK_SHARE = 0.7
# How far steps measured on an H200 were from this model, which `tests/scaling` holds against them.
TIME_ERROR, MEMORY_ERROR = 0.45, 0.08
# What is left for the first batch's checks, fragmentation and the driver.
USABLE_MEMORY = 0.8
_MOST_SAMPLES = 1 << 32


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be run: batch sizes count samples of `length` tokens, over all ranks.

    `half` is a mixed-precision policy, by which sharded weights are gathered in bfloat16.
    """

    gpus: int
    length: int
    logical_batch: int
    records: int
    physical_batch: int
    strategy: Strategy = "replicated"
    half: bool = False

    @property
    def sharers(self) -> int:
        """How many ranks have one copy of the weights among them."""
        if self.strategy == "hybrid":
            return min(self.gpus, GPUS_PER_NODE)
        return self.gpus if self.strategy == "sharded" else 1

    @property
    def copies(self) -> float:
        """How many copies of the weights there are."""
        return self.gpus / self.sharers

    @property
    def batches(self) -> tuple[int, int]:
        """How many physical batches a rank runs in a logical step, and samples in each."""
        per_rank = math.ceil(self.logical_batch / self.gpus)
        batches = max(1, math.ceil(per_rank / self.physical_batch))
        return batches, min(self.physical_batch, math.ceil(per_rank / batches))


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on one rank.

    `gathered` are whole weights of sharded ranks: those outside the blocks, and of two blocks.
    """

    weights: float
    gathered: float
    half_copies: float
    state: float
    sums: float
    activations: float
    captures: float

    @property
    def peak(self) -> float:
        """Activations are gone when sums are formed; the larger of the two moments."""
        held = self.weights + self.gathered + self.half_copies + self.state
        return held + max(self.activations, self.captures + self.sums)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A job's costs; seconds are those of one logical step.

    `prefetched_seconds` is the part of the exchange that FSDP can hide behind computing: weights
    that are gathered ahead, and sums that travel while those of other layers are formed.
    """

    job: Job
    memory: RankMemory
    fits: bool
    batches_per_rank: int
    compute_seconds: float
    update_seconds: float
    exchange_seconds: float
    exchange_bytes: float
    prefetched_seconds: float

    @property
    def step_seconds(self) -> float:
        """Nothing overlaps: an upper bound where communication could hide behind computing."""
        return self.compute_seconds + self.update_seconds + self.exchange_seconds

    @property
    def hidden_step_seconds(self) -> float:
        """All that can be hidden is: a lower bound."""
        return self.step_seconds - min(self.prefetched_seconds, self.compute_seconds)

    @property
    def samples_per_second(self) -> float:
        """Expected samples of all ranks together."""
        return self.job.logical_batch / self.step_seconds

    @property
    def epochs_per_day(self) -> float:
        """Passes over the records in 24 hours."""
        return 86400.0 * self.samples_per_second / self.job.records


def estimate(shapes: ModelShapes, gpu: Gpu, job: Job) -> Estimate:
    """What `job` takes on that many GPUs of a kind."""
    batches, in_each = job.batches
    memory = memory_of(shapes, job, batch=in_each)
    gathered = (2 if job.half else 4) * shapes.parameters
    sent, in_layers, in_rows = exchange(gpu, job, gathered=gathered, trained=shapes.parameters)
    update = STEP_BYTES_PER_PARAMETER * shapes.parameters / job.sharers / gpu.bandwidth
    return Estimate(
        job=job,
        memory=memory,
        fits=memory.peak <= USABLE_MEMORY * gpu.memory,
        batches_per_rank=batches,
        compute_seconds=batches * batch_seconds(shapes, gpu, batch=in_each, length=job.length),
        update_seconds=STEP_SECONDS + update,
        exchange_seconds=in_layers + in_rows,
        exchange_bytes=sent,
        prefetched_seconds=in_layers,
    )


def largest_batch(shapes: ModelShapes, gpu: Gpu, job: Job) -> int:
    """The most samples that fit in a physical batch of one rank; 0 if not even one does."""

    def fits(batch: int) -> bool:
        return memory_of(shapes, job, batch=batch).peak <= USABLE_MEMORY * gpu.memory

    # Memory grows with the batch, so the sizes that fit come first.
    return bisect.bisect_left(range(1, _MOST_SAMPLES), True, key=lambda size: not fits(size))


def memory_of(shapes: ModelShapes, job: Job, *, batch: int) -> RankMemory:
    """Bytes on one rank, with so many samples in a physical batch."""
    tokens, sharded = batch * job.length, job.strategy != "replicated"
    held = shapes.parameters / job.sharers
    # Sharded: the layer at work and the next; the largest module's sums as they are formed, and
    # those that are on their way of this and the last.
    layers, modules = 2 * shapes.largest_layer, 3 * shapes.largest_module
    vector = held if job.copies > 1 else 0.0
    width = 2 if job.half else 4
    stored = STORED_BYTES_COMPOSITE if shapes.composite_activation else STORED_BYTES
    return RankMemory(
        weights=4 * held,
        gathered=width * (shapes.outside_layers + layers) if sharded else 0,
        half_copies=2 * ((0 if job.half else layers) if sharded else shapes.parameters),
        state=8 * held,
        sums=4 * (held + vector + (modules if sharded else 0)),
        activations=tokens * (stored * shapes.stored_width + LOGIT_BYTES * shapes.logits),
        captures=2 * tokens * (shapes.stored_width + shapes.logits),
    )


def batch_seconds(shapes: ModelShapes, gpu: Gpu, *, batch: int, length: int) -> float:
    """One physical batch, forward, backward and clipped sums, on one GPU."""
    tokens = batch * length
    stored = STORED_BYTES_COMPOSITE if shapes.composite_activation else STORED_BYTES
    bytes_stored = tokens * (stored * shapes.stored_width + LOGIT_BYTES * shapes.logits)
    per_token = 6 * shapes.products + 12 * length * shapes.width * shapes.layers
    norms = sum(min(operations(length, one.rows, one.columns, "cuda")) for one in shapes.linears)
    done = tokens * per_token + batch * norms
    on_gpu = done / (MATMUL_SHARE * gpu.flops) + PASSES * bytes_stored / gpu.bandwidth
    return max(HOST_SECONDS_PER_LAYER * shapes.layers, on_gpu)


def weak_scaling(
    shapes: ModelShapes, gpu: Gpu, job: Job, counts: list[int], *, physical_batch: int | None
) -> list[Estimate]:
    """The same work for every rank on more and more GPUs: the logical batch grows along.

    Without a `physical_batch` it is the largest that fits, which grows where shards get smaller.
    """
    per_gpu = job.logical_batch / job.gpus
    found = []
    for count in counts:
        grown = replace(job, gpus=count, logical_batch=max(1, round(per_gpu * count)))
        size = physical_batch or max(1, largest_batch(shapes, gpu, grown))
        found.append(estimate(shapes, gpu, replace(grown, physical_batch=size)))
    return found


def fewest_gpus(shapes: ModelShapes, gpu: Gpu, job: Job) -> int | None:
    """How many sharded ranks hold the model with one sample each; None if no number does."""
    counts = (replace(job, gpus=2**power, strategy="sharded") for power in range(1, 17))
    return next((one.gpus for one in counts if largest_batch(shapes, gpu, one)), None)


def exchange(gpu: Gpu, job: Job, *, gathered: float, trained: float) -> tuple[float, float, float]:
    """Bytes that a rank sends in a logical step, by ring algorithms, and seconds that they take:
    those of layers, while it computes, and those of rows, at its end.

    Sharded: `gathered` bytes of weights before forward and backward, float32 sums of the `trained`
    numbers after, in every batch. Where there are copies of a model, or of a shard, they add up
    their sums once.
    """
    shards, copies = ((n - 1) / n for n in (job.sharers, job.copies))
    layers = job.batches[0] * shards * (2 * gathered + 4 * trained)
    rows = 2 * copies * 4 * trained / job.sharers
    for_layers, for_rows = (LINK_SHARE * link for link in _links(gpu, job))
    return layers + rows, layers / for_layers, rows / for_rows


def _links(gpu: Gpu, job: Job) -> tuple[float, float]:
    """The slowest links that layers and copies' sums pass, as a rank sees them.

    Rings pass through every GPU of a node, and leave it through all its adapters. Ranks of a node
    with different rows share the adapters.
    """
    between = min(gpu.link, gpu.network)
    one_node = job.gpus <= GPUS_PER_NODE
    if job.strategy == "hybrid":
        return gpu.link, gpu.network / job.sharers
    return gpu.link if one_node else between, gpu.link if one_node else between
