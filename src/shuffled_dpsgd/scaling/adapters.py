"""Memory of LoRA on a frozen model, whole or quantised (QLoRA), on one GPU, term by term.

In bytes, for linear maps of P_l numbers in all (heads left out), P_o others, adapters of rank r
with A numbers, and B samples of T tokens, n = B T:

- frozen weights: b/8 P_l, and with 4 bits another 4 bytes for every block of 64; 2 P_o;
- adapters: 4 A, AdamW's moments 8 A, clipped sums 4 A, bfloat16 copies 2 A; the noise of the
  largest adapter another 4 bytes a number;
- the largest linear map once more in bfloat16, where it is quantised: it is unpacked to be used;
- with checkpointing, 2 n d for the input of every block of width d, and the activations of one
  block, 2.7 n W_1; without, 2.7 n W for W numbers in and out of all linear maps;
- 10.6 n V for V logits per token;
- per-sample gradients 4 B A, or what they are made of, 2 n (W + 2 r) a map, whichever is less.

The constants 2.7 and 10.6 are those of `estimate.py`, fitted to whole models on an H200. This sum
was not measured.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Literal

from shuffled_dpsgd.scaling.estimate import LOGIT_BYTES, STORED_BYTES, USABLE_MEMORY
from shuffled_dpsgd.scaling.gpus import Gpu
from shuffled_dpsgd.scaling.shapes import ModelShapes

Bits = Literal[4, 8, 16]
# bitsandbytes keeps one float32 scale for so many weights of 4 bits.
BLOCK = 64


@dataclass(frozen=True, kw_only=True)
class AdapterJob:
    """LoRA of a rank on every linear map but the head, in batches of `batch` samples."""

    rank: int
    bits: Bits
    length: int
    batch: int
    checkpointing: bool = True


@dataclass(frozen=True, kw_only=True)
class AdapterMemory:
    """Bytes on the GPU."""

    frozen_linear_maps: float
    frozen_others: float
    unpacked_map: float
    adapters: float
    activations: float
    logits: float
    sample_gradients: float

    @property
    def peak(self) -> float:
        """The sum of all parts: an upper bound, as logits are gone when blocks run backwards."""
        return sum(asdict(self).values())


def adapter_memory(shapes: ModelShapes, job: AdapterJob) -> AdapterMemory:
    """What training adapters takes."""
    maps = [one for one in shapes.linears if not one.is_head]
    sizes = [one.rows * one.columns for one in maps]
    numbers = [job.rank * (one.rows + one.columns) for one in maps]
    tokens, inside, trained = job.batch * job.length, sum(sizes), sum(numbers)
    scales = 4 / BLOCK if job.bits == 4 else 0.0
    stored = STORED_BYTES * shapes.stored_width
    if job.checkpointing:
        stored = stored / shapes.layers + 2 * shapes.layers * shapes.width
    captured = [2 * tokens * (one.rows + one.columns + 2 * job.rank) for one in maps]
    return AdapterMemory(
        frozen_linear_maps=inside * (job.bits / 8 + scales),
        frozen_others=2 * (shapes.parameters - inside),
        unpacked_map=2 * max(sizes) if job.bits < 16 else 0,
        adapters=18 * trained + 4 * max(numbers),
        activations=tokens * stored,
        logits=LOGIT_BYTES * tokens * shapes.logits,
        sample_gradients=sum(
            min(4 * job.batch * few, many) for few, many in zip(numbers, captured, strict=True)
        ),
    )


def largest_adapter_batch(shapes: ModelShapes, gpu: Gpu, job: AdapterJob) -> int:
    """The largest power of two of samples that leaves a fifth of the GPU free; 0 if none does."""
    found = 0
    for power in range(16):
        asked = replace(job, batch=2**power)
        if adapter_memory(shapes, asked).peak <= USABLE_MEMORY * gpu.memory:
            found = asked.batch
    return found
