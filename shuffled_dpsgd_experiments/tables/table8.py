"""Table 8: the time of an epoch with and without shuffling, full-size models, batch 1000.

Random weights, and random records of one length, because neither changes how long a step takes. A
private step is timed with the shuffle and without, in turns, so that both meet the same machine; an
epoch is the median step times ⌈N/1000⌉ steps, extrapolated and said so.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from shuffled_dpsgd.environment import environment
from shuffled_dpsgd.errors import require
from shuffled_dpsgd.integrations.per_sample_loss import classification_losses, next_token_losses
from shuffled_dpsgd.models import build_model
from shuffled_dpsgd.options import Shuffle
from shuffled_dpsgd.tasks.start import chosen_device
from shuffled_dpsgd.training import make_private
from shuffled_dpsgd_experiments.exhibits import Exhibit, ExhibitRow, in_one_file, origin_of
from shuffled_dpsgd_experiments.tables.printed import EPOCH_SECONDS

TITLE = "Table 8: the time of an epoch"
BATCH_SIZE = 1000
NUM_STEPS = 10_000  # More than are timed; a run refuses steps beyond its plan.
ROUNDS, FEWEST_ROUNDS = 6, 3


@dataclass(frozen=True)
class TimedModel:
    """One row: a model, and records of the length it is timed with."""

    label: str
    model: str
    dataset_size: int
    length: int
    physical_batch_size: int

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.dataset_size / BATCH_SIZE)


# The paper states no lengths; 128 tokens are the usual cut for both tasks.
MODELS = (
    TimedModel("ViT, CIFAR", "vit-base", 50_000, 224, 250),
    TimedModel("BERT, QNLI", "bert-base", 108_000, 128, 250),
    TimedModel("GPT-2, E2E", "gpt2", 42_043, 128, 125),
    TimedModel("GPT-2-large, E2E", "gpt2-large", 42_043, 128, 50),
    TimedModel("RoBERTa, QNLI", "roberta-base", 108_000, 128, 250),
)
SMALL = (
    TimedModel("ViT, small", "vit-tiny", 50_000, 32, 100),
    TimedModel("BERT, small", "bert-tiny", 108_000, 32, 100),
    TimedModel("GPT-2, small", "gpt2-tiny", 42_043, 32, 100),
)


def batch_of(row: TimedModel, model: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """One physical batch of random records."""
    generator = torch.Generator().manual_seed(0)
    if row.model.startswith("vit"):
        shape = (row.physical_batch_size, 3, row.length, row.length)
        return {"pixel_values": torch.randn(shape, generator=generator).to(device)}
    vocabulary = int(model.config.vocab_size)  # type: ignore[union-attr,arg-type]
    ids = torch.randint(4, vocabulary, (row.physical_batch_size, row.length), generator=generator)
    return {"input_ids": ids.to(device)}


def losses_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """(B,) losses: of the next tokens, or of class 0."""
    logits = model(**batch).logits
    if logits.dim() == 2:
        return classification_losses(logits, logits.new_zeros(len(logits), dtype=torch.long))
    return next_token_losses(logits, batch["input_ids"])


def step_of(row: TimedModel, device: torch.device, shuffle: Shuffle) -> Callable[[], None]:
    """A whole private step of Algorithm 1 on a batch of 1000, as `make_private` runs it."""
    model = build_model(row.model, device=str(device)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    private = make_private(
        model,
        optimizer,
        dataset_size=row.dataset_size,
        expected_batch_size=BATCH_SIZE,
        num_steps=NUM_STEPS,
        noise_multiplier=1.0,
        delta=1e-6,
        shuffle=shuffle,
        sampling="unaccounted",
        physical_batch_size=row.physical_batch_size,
        seed=0,
    )
    batch = batch_of(row, model, device)

    def step() -> None:
        with private:
            for _ in range(BATCH_SIZE // row.physical_batch_size):
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    losses = losses_of(model, batch)
                private.backward(losses)
            private.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return step


def time_model(row: TimedModel, device: torch.device, *, rounds: int) -> dict[str, Any]:
    """Steps with and without the shuffle, one of each a round, the first of a round by turns.

    The first round warms up and does not count.
    """
    shuffles: tuple[Shuffle, Shuffle] = ("off", "every-step")
    steps = {shuffle: step_of(row, device, shuffle) for shuffle in shuffles}
    times: dict[str, list[float]] = {shuffle: [] for shuffle in steps}
    for number in range(1 + rounds):
        for shuffle in list(steps)[:: 1 if number % 2 else -1]:
            started = time.perf_counter()
            steps[shuffle]()
            if number:
                times[shuffle].append(time.perf_counter() - started)
    steps.clear()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    without, shuffled = (statistics.median(times[s]) for s in shuffles)
    ratios = [b / a for a, b in zip(times["off"], times["every-step"], strict=True)]
    return {
        **asdict(row),
        "steps_per_epoch": row.steps_per_epoch,
        "step_seconds": times,
        "unshuffled_epoch_seconds": without * row.steps_per_epoch,
        "shuffled_epoch_seconds": shuffled * row.steps_per_epoch,
        "ratios": ratios,
        "ratio": statistics.median(ratios),
    }


def run(scale: str) -> dict[str, Any]:
    """The table at a scale: full-size models need a GPU; `demo` has small ones."""
    device = chosen_device("auto")
    expected = "demo without a GPU: an epoch of full-size models takes hours here"
    remedy = "or --from-results"
    require(not (scale == "paper" and device.type != "cuda"), "--scale", expected, scale, remedy)
    rounds = FEWEST_ROUNDS if scale == "demo" else ROUNDS
    models = SMALL if scale == "demo" else MODELS
    return {
        "scale": scale,
        "batch_size": BATCH_SIZE,
        "precision": "bfloat16 autocast" if device.type == "cuda" else "float32",
        "epoch": "extrapolated: the median step times the steps of an epoch",
        "rows": [time_model(row, device, rounds=rounds) for row in models],
        "environment": environment(str(device)),
    }


def show(raw: dict[str, Any]) -> Exhibit:
    """Epoch times, and what the shuffle adds."""
    found = {row["label"].removesuffix(", small"): row for row in raw["rows"]}
    rows = []
    for label, (without, shuffled) in EPOCH_SECONDS.items():
        printed = f"{_minutes(without)} → {_minutes(shuffled)} ({shuffled / without - 1:+.1%})"
        row = found.get(label) or found.get(label.split(",")[0])
        if row is None:
            rows.append(ExhibitRow(what=label, paper=printed))
            continue
        times = row["unshuffled_epoch_seconds"], row["shuffled_epoch_seconds"]
        more = row["ratio"] - 1
        rows.append(
            ExhibitRow(
                what=label if row["label"] == label else f"{label} (ours: {row['model']})",
                paper=printed,
                ours=f"{_minutes(times[0])} → {_minutes(times[1])} ({more:+.2%}; "
                f"{len(row['ratios'])} of {row['steps_per_epoch']} steps timed)",
                verdict=_verdict(row["ratios"], shuffled / without - 1),
            )
        )
    return Exhibit(
        name="table8",
        title=TITLE,
        origin=f"Batch {raw['batch_size']}, {raw['precision']}. {origin_of(raw)}",
        rows=tuple(rows),
        notes=(
            f"Epochs are {raw['epoch']}; random weights, records of one length.",
            "The paper's GPUs were an RTX 3090 and an A100: shares compare, times do not.",
            "Our share is the median over rounds of one step with the shuffle over one without, "
            "timed one after the other. Each printed time is a median of its own, so the share "
            "does not follow from the two.",
        ),
    )


def _minutes(seconds: float) -> str:
    """As the paper writes it, with tenths below a minute."""
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds // 60)}:{seconds % 60:02.0f}"


def _verdict(ratios: Sequence[float], printed: float) -> str:
    """What the rounds say of the shuffle's cost, as a share; nothing that their spread hides."""
    low, high = min(ratios) - 1, max(ratios) - 1
    spread = f"rounds from {low:+.1%} to {high:+.1%}"
    if len(ratios) < FEWEST_ROUNDS:
        return f"too few rounds to tell ({spread})"
    if low <= 0 <= high:
        return f"no cost that can be told from the spread of timing ({spread})"
    if low <= printed <= high:
        return f"the printed share is within our spread ({spread})"
    return f"costs {'less' if high < printed else 'more'} than printed ({spread})"


TABLE = in_one_file("table8", TITLE, run, show)
