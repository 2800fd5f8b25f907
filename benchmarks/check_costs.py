"""What all checks of a run take together, by the run's own clock.

A small BERT on texts of different lengths, at the default rate, with the loss handed over. The
share of the time so far is written down as the run goes on: large at first, small later.

    python -m benchmarks.check_costs --minutes 10 --json benchmarks/reports/NAME.json
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.false_alarms import CLASSES, WORDS, Sentences, padded, record
from shuffled_dpsgd.training import make_private

EXPECTED, PHYSICAL, LONGEST = 64, 32, 48


class Texts(Sentences):
    """More and longer texts."""

    def __init__(self, records: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        lengths = torch.randint(16, LONGEST, (records,), generator=generator).tolist()
        self.texts = [torch.randint(1, WORDS, (n,), generator=generator).tolist() for n in lengths]
        self.labels = torch.randint(CLASSES, (records,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.texts)


def small_bert() -> nn.Module:
    """128 wide, 4 layers deep: as BERT-mini, with few words."""
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS, hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
            intermediate_size=512, max_position_embeddings=LONGEST, num_labels=CLASSES,
        )
    )  # fmt: skip


def loss(model: nn.Module, batch: Any) -> Tensor:
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    return F.cross_entropy(model(**inputs).logits, batch["labels"], reduction="none")


def measure(minutes: float) -> list[dict[str, Any]]:
    """Train for so long; the share of the checks after more and more steps."""
    model, data = small_bert(), Texts(20_000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    private = make_private(
        model, optimizer, dataset_size=len(data), expected_batch_size=EXPECTED, num_steps=10**6,
        delta=1e-6, noise_multiplier=1.0, physical_batch_size=PHYSICAL, loss=loss,
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    started = time.perf_counter()
    private.clock.start()
    for batch in private.batches(data, collate=padded):
        private.backward(loss(model, batch))
        if not private.step():
            continue
        steps = private.steps_taken
        is_over = time.perf_counter() - started > 60 * minutes
        if steps & (steps - 1) == 0 or is_over:
            seconds = private.clock.seconds()
            whole = sum(seconds.values())
            shares = {part: round(spent / whole, 4) for part, spent in sorted(seconds.items())}
            rows.append({"steps": steps, "seconds": round(whole, 1), "share": shares})
            print(json.dumps(rows[-1]), flush=True)
        if is_over:
            break
    private.close()
    return rows


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = record(measure(options.minutes), model="BERT 128x4", batch=EXPECTED)
    options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
