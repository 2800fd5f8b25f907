"""Memory and messages of LoRA on a frozen model, whole or quantised (QLoRA), term by term.

In bytes on a rank, for linear maps of P_l numbers in all (heads left out), P_o others, adapters of
rank r with A numbers, and B samples of T tokens, n = B T:

- frozen weights: b/8 P_l, and with 4 bits another 4 bytes for every block of 64; 2 P_o;
- adapters: 4 A, AdamW's moments 8 A, clipped sums 4 A, bfloat16 copies 2 A; the noise of the
  largest adapter another 4 bytes a number; with several replicated ranks, or copies of shards, 4 A
  more for the vector that they exchange;
- the largest linear map once more in bfloat16, where it is quantised: it is unpacked to be used;
- with checkpointing, 2 n d for the input of every block of width d, and the activations of one
  block, 2.7 n W_1; without, 2.7 n W for W numbers in and out of all linear maps;
- 10.6 n V for V logits per token;
- per-sample gradients 4 B A, or what they are made of, 2 n (W + 2 r) a map, whichever is less;
- sharded ranks divide all numbers of the first two but the bfloat16 copies and the noise. They hold
  the weights outside the blocks and of two blocks as they are gathered, adapters in float32, and
  three times the sums of the largest adapter. Quantised weights are not sharded: that is refused.

Replicated ranks exchange the sums of adapters, and nothing else. Sharded ones gather frozen weights
in bfloat16 and adapters in float32, twice in every physical batch, and reduce-scatter the sums of
adapters. The constants 2.7 and 10.6 and the rates of links are those of `estimate.py`, fitted to
whole models on an H200. These sums were not measured, and no time of computing is given.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Literal

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.scaling.estimate import LOGIT_BYTES, STORED_BYTES, USABLE_MEMORY, Job, exchange
from shuffled_dpsgd.scaling.gpus import Gpu
from shuffled_dpsgd.scaling.shapes import ModelShapes

Bits = Literal[4, 8, 16]
# bitsandbytes keeps one float32 scale for so many weights of 4 bits.
BLOCK = 64


ONE_GPU = Job(gpus=1, length=1, logical_batch=1, records=1, physical_batch=1)


@dataclass(frozen=True, kw_only=True)
class AdapterJob:
    """LoRA of a rank on every linear map but the head, in batches of `batch` samples.

    `launch` says which ranks there are, and the samples of a logical batch.
    """

    rank: int
    bits: Bits
    length: int
    batch: int
    checkpointing: bool = True
    launch: Job = ONE_GPU


@dataclass(frozen=True, kw_only=True)
class AdapterMemory:
    """Bytes on one rank."""

    frozen_linear_maps: float
    frozen_others: float
    unpacked_map: float
    gathered: float
    adapters: float
    activations: float
    logits: float
    sample_gradients: float

    @property
    def peak(self) -> float:
        """The sum of all parts: an upper bound, as logits are gone when blocks run backwards."""
        return sum(asdict(self).values())


def adapter_memory(shapes: ModelShapes, job: AdapterJob) -> AdapterMemory:
    """What training adapters takes on one rank."""
    sharers, is_sharded = job.launch.sharers, job.launch.strategy != "replicated"
    if is_sharded and job.bits < 16:
        raise InvalidArgumentError("launch", expected="whole weights if quantised", got=job.launch)
    maps = [one for one in shapes.linears if not one.is_head]
    sizes, numbers = [one.rows * one.columns for one in maps], _numbers(shapes, job)
    tokens, inside, trained = job.batch * job.length, sum(sizes), sum(numbers)
    scales = 4 / BLOCK if job.bits == 4 else 0.0
    stored = STORED_BYTES * shapes.stored_width
    if job.checkpointing:
        stored = stored / shapes.layers + 2 * shapes.layers * shapes.width
    captured = [2 * tokens * (one.rows + one.columns + 2 * job.rank) for one in maps]
    frozen = 2 * (shapes.outside_layers + 2 * shapes.largest_layer)
    gathered = frozen + 4 * (2 * trained / shapes.layers + 3 * max(numbers))
    divided = 20 if job.launch.copies > 1 else 16
    return AdapterMemory(
        frozen_linear_maps=inside * (job.bits / 8 + scales) / sharers,
        frozen_others=2 * (shapes.parameters - inside) / sharers,
        unpacked_map=2 * max(sizes) if job.bits < 16 else 0,
        gathered=gathered if is_sharded else 0,
        adapters=(divided / sharers + 2) * trained + 4 * max(numbers),
        activations=tokens * stored,
        logits=LOGIT_BYTES * tokens * shapes.logits,
        sample_gradients=sum(
            min(4 * job.batch * few, many) for few, many in zip(numbers, captured, strict=True)
        ),
    )


def largest_adapter_batch(shapes: ModelShapes, gpu: Gpu, job: AdapterJob) -> int:
    """The largest power of two of samples that leaves a fifth of the GPU free; 0 if none does."""
    asked = (replace(job, batch=2**power) for power in range(16))
    usable = USABLE_MEMORY * gpu.memory
    return max(
        (one.batch for one in asked if adapter_memory(shapes, one).peak <= usable), default=0
    )


def adapter_exchange(shapes: ModelShapes, gpu: Gpu, job: AdapterJob) -> tuple[float, float]:
    """Bytes that a rank sends in a logical step, and seconds that they take."""
    trained = sum(_numbers(shapes, job))
    launch, gathered = replace(job.launch, physical_batch=job.batch), 2 * shapes.parameters
    sent, *seconds = exchange(gpu, launch, gathered=gathered + 4 * trained, trained=trained)
    return sent, sum(seconds)


def _numbers(shapes: ModelShapes, job: AdapterJob) -> list[int]:
    """The numbers of every adapter."""
    return [job.rank * (one.rows + one.columns) for one in shapes.linears if not one.is_head]
