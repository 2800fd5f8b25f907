"""Table 8: the time of an epoch with and without shuffling, full-size models, batch 1000.

    python -m shuffled_dpsgd_experiments.tables.table8 --json results/table8.json --stop-after 170

Random weights, and random records of one length, because neither changes how long a step takes. A
private step is timed with the shuffle and without, in turns, so that both meet the same machine; an
epoch is the median step times ⌈N/1000⌉ steps, extrapolated and said so. Each model is written as
soon as it is done. One that the file has from the same hardware and versions is not timed again.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shuffled_dpsgd.environment import environment
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.models import build_model
from shuffled_dpsgd.options import Shuffle
from shuffled_dpsgd.tasks.start import chosen_device
from shuffled_dpsgd.training import make_private
from shuffled_dpsgd_experiments.programs import errors_on_one_line
from shuffled_dpsgd_experiments.tables.exhibit import Exhibit, ExhibitRow, origin_of
from shuffled_dpsgd_experiments.tables.printed import EPOCH_SECONDS

TITLE = "Table 8: the time of an epoch"
BATCH_SIZE = 1000
NUM_STEPS = 10_000  # More than are timed; a run refuses steps beyond its plan.
FEWEST_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class TimedModel:
    """One row: a model, and records of the length it is timed with."""

    label: str
    model: str
    dataset_size: int
    length: int
    physical: int

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.dataset_size / BATCH_SIZE)


# The paper states no lengths; 128 tokens are the usual cut for both tasks. RoBERTa is last, for it
# takes as long as BERT: where time ends early, it is missed least.
MODELS = (
    TimedModel(label="ViT, CIFAR", model="vit-base", dataset_size=50_000, length=224, physical=250),
    TimedModel(
        label="BERT, QNLI", model="bert-base", dataset_size=108_000, length=128, physical=250
    ),
    TimedModel(label="GPT-2, E2E", model="gpt2", dataset_size=42_043, length=128, physical=125),
    TimedModel(
        label="GPT-2-large, E2E", model="gpt2-large", dataset_size=42_043, length=128, physical=50
    ),
    TimedModel(
        label="RoBERTa, QNLI", model="roberta-base", dataset_size=108_000, length=128, physical=250
    ),
)
SMALL = tuple(
    TimedModel(label=f"{label}, small", model=model, dataset_size=size, length=32, physical=100)
    for label, model, size in (
        ("ViT", "vit-tiny", 50_000),
        ("BERT", "bert-tiny", 108_000),
        ("GPT-2", "gpt2-tiny", 42_043),
    )
)


def batch_of(row: TimedModel, model: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """One physical batch of random records."""
    generator = torch.Generator().manual_seed(0)
    if row.model.startswith("vit"):
        shape = (row.physical, 3, row.length, row.length)
        return {"pixel_values": torch.randn(shape, generator=generator).to(device)}
    vocabulary = int(model.config.vocab_size)  # type: ignore[union-attr,arg-type]
    ids = torch.randint(4, vocabulary, (row.physical, row.length), generator=generator)
    return {"input_ids": ids.to(device)}


def losses_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """(B,) losses: of the next tokens, or of class 0."""
    logits = model(**batch).logits
    if logits.dim() == 2:
        labels = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
        return F.cross_entropy(logits, labels, reduction="none")
    labels = batch["input_ids"][:, 1:]
    found = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="none")
    return found.view(len(labels), -1).mean(1)


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
        physical_batch_size=row.physical,
        seed=0,
    )
    batch = batch_of(row, model, device)

    def step() -> None:
        with private:
            for _ in range(BATCH_SIZE // row.physical):
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    losses = losses_of(model, batch)
                private.backward(losses)
            private.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return step


def time_model(
    row: TimedModel,
    device: torch.device,
    *,
    rounds: int,
    warm_up: int,
    seconds: float | None = None,
) -> dict[str, Any]:
    """Steps with and without the shuffle, one of each a round, the first of a round by turns.

    After `seconds` of timing no further round is begun, but for the first three.
    """
    began = time.perf_counter()
    shuffles: tuple[Shuffle, Shuffle] = ("off", "every-step")
    steps = {shuffle: step_of(row, device, shuffle) for shuffle in shuffles}
    times: dict[str, list[float]] = {shuffle: [] for shuffle in steps}
    prepared = 0.0
    for number in range(warm_up + rounds):
        if number == warm_up:
            prepared = time.perf_counter() - began
        over = seconds is not None and time.perf_counter() - began - prepared >= seconds
        if number >= warm_up + FEWEST_ROUNDS and over:
            break
        for shuffle in list(steps)[:: 1 if number % 2 else -1]:
            started = time.perf_counter()
            steps[shuffle]()
            if number >= warm_up:
                times[shuffle].append(time.perf_counter() - started)
    steps.clear()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    without, shuffled = (statistics.median(times[s]) for s in ("off", "every-step"))
    ratios = [b / a for a, b in zip(times["off"], times["every-step"], strict=True)]
    return {
        "label": row.label,
        "model": row.model,
        "dataset_size": row.dataset_size,
        "length": row.length,
        "physical_batch_size": row.physical,
        "steps_per_epoch": row.steps_per_epoch,
        "steps_timed": len(times["off"]),
        "warm_up_steps": warm_up,
        "prepared_seconds": prepared,
        "step_seconds": times,
        "unshuffled_epoch_seconds": without * row.steps_per_epoch,
        "shuffled_epoch_seconds": shuffled * row.steps_per_epoch,
        "ratios": ratios,
        "ratio": statistics.median(ratios),
    }


def measure(
    rows: Sequence[TimedModel],
    device: torch.device,
    *,
    rounds: int = 6,
    warm_up: int = 2,
    seconds: float | None = None,
    stop_after: float | None = None,
    before: dict[str, Any] | None = None,
    on_row: Callable[[dict[str, Any]], object] = lambda found: None,
) -> dict[str, Any]:
    """Every model in turn; none is started once `stop_after` seconds have passed.

    Rows of `before`, an earlier table from the same hardware and versions, are kept as they are.
    """
    started = time.monotonic()
    here = environment(str(device))
    known = {}
    if before is not None and _apart_from_date(before["environment"]) == _apart_from_date(here):
        known = {row["label"]: row for row in before["rows"]}
    found: dict[str, Any] = {
        "batch_size": BATCH_SIZE,
        "precision": "bfloat16 autocast" if device.type == "cuda" else "float32",
        "epoch": "extrapolated: the median step times the steps of an epoch",
        "rows": [],
        "left_out": [],
        "environment": here,
    }
    for row in rows:
        if row.label in known:
            found["rows"].append(known[row.label])
            continue
        if stop_after is not None and time.monotonic() - started >= stop_after:
            found["left_out"].append(row.label)
            continue
        found["rows"].append(
            time_model(row, device, rounds=rounds, warm_up=warm_up, seconds=seconds)
        )
        on_row(found)
    return found


def _read(path: Path) -> dict[str, Any]:
    """A table that was written before, whose rows are kept."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        {row["label"] for row in found["rows"]}, dict(found["environment"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(
            "--json",
            expected="a new file, or one that this program wrote",
            got=str(path),
            remedy="name another, or move it away",
        ) from error
    return dict(found)


def _apart_from_date(versions: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in versions.items() if name != "date"}


def run(scale: str) -> dict[str, Any]:
    """The table at a scale: full-size models need a GPU; `demo` has small ones."""
    device = chosen_device("auto")
    if scale == "paper" and device.type != "cuda":
        raise InvalidArgumentError(
            "--scale",
            expected="demo without a GPU: an epoch of full-size models takes hours here",
            got=scale,
            remedy="or --from-results",
        )
    rows = SMALL if scale == "demo" else MODELS
    found = measure(rows, device, rounds=FEWEST_ROUNDS if scale == "demo" else 6, warm_up=1)
    return {"scale": scale, **found}


def exhibit(raw: dict[str, Any]) -> Exhibit:
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
        return f"about as printed ({spread})"
    return f"costs {'less' if high < printed else 'more'} than printed ({spread})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Time the models of Table 8 and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("results/table8.json"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, help="time a model for about so long")
    parser.add_argument("--stop-after", type=float, help="start no model after so many seconds")
    parser.add_argument("--small", action="store_true", help="small models, for two cores")
    options = parser.parse_args(arguments)
    options.json.parent.mkdir(parents=True, exist_ok=True)

    def write(found: dict[str, Any]) -> None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        row = found["rows"][-1]
        print(
            f"{row['label']}: {row['unshuffled_epoch_seconds']:.1f} s an epoch without, "
            f"{row['shuffled_epoch_seconds']:.1f} s with the shuffle ({row['ratio'] - 1:+.2%}, "
            f"{row['steps_timed']} steps of each, prepared in {row['prepared_seconds']:.0f} s)",
            file=sys.stderr,
            flush=True,
        )

    found = measure(
        SMALL if options.small else MODELS,
        chosen_device(options.device),
        rounds=options.rounds,
        seconds=options.seconds,
        stop_after=options.stop_after,
        before=_read(options.json) if options.json.exists() else None,
        on_row=write,
    )
    options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with errors_on_one_line():
        main()
