"""What stands for tables 3 to 5 where there is no GPU: small models, digits or generated texts.

Each grid of ten runs takes a few minutes of one core. Generated records cost nothing, so there are
many of them: at a given ε, noise matters less the smaller the share of records in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shuffled_dpsgd_experiments.tables.demo_texts import write_restaurants, write_sentences

GENERATED = "generated texts"


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """One small task; `plain_learning_rate` is that of non-private training.

    `write_texts` puts the records into a folder; None for data that come with the package's extras.
    """

    task: str
    model: str
    data_format: str
    delta: float
    clip_norm: float
    learning_rate: float
    plain_learning_rate: float
    training: Mapping[str, int]
    max_length: int | None = None
    write_texts: Callable[[Path], Path] | None = None
    generation: Mapping[str, Any] | None = None

    def to_run(self, work: Path) -> dict[str, Any]:
        """What all cells share; texts are written below `work`."""
        data: dict[str, Any] = {"format": self.data_format}
        if self.write_texts is not None:
            data["path"] = str(self.write_texts(work / f"generated_{self.data_format}"))
            data |= {"max_length": self.max_length, "name": GENERATED}
        run = {
            "task": self.task,
            "model": {"name": self.model},
            "data": data,
            "privacy": {"delta": self.delta},
            "optimizer": {"learning_rate": self.learning_rate, "schedule": "cosine"},
            "training": {**self.training, "num_threads": 1},
        }
        return run if self.generation is None else {**run, "generation": dict(self.generation)}


DEMONSTRATIONS: Mapping[str, Demonstration] = MappingProxyType(
    {
        "table3": Demonstration(
            task="digits",
            model="vit-digits",
            data_format="digits",
            delta=1e-4,
            clip_norm=1.0,
            learning_rate=1e-2,
            plain_learning_rate=1e-2,
            training={"expected_batch_size": 288, "epochs": 10},
        ),
        "table4": Demonstration(
            task="text-classification",
            model="bert-tiny",
            data_format="sst2",
            delta=2.5e-5,
            clip_norm=0.1,
            learning_rate=2e-2,
            plain_learning_rate=5e-3,
            training={"expected_batch_size": 500, "num_steps": 30},
            max_length=48,
            write_texts=write_sentences,
        ),
        "table5": Demonstration(
            task="causal-lm",
            model="gpt2-tiny",
            data_format="e2e",
            delta=2.5e-5,
            clip_norm=0.1,
            learning_rate=1e-2,
            plain_learning_rate=5e-3,
            training={"expected_batch_size": 250, "num_steps": 20},
            max_length=64,
            write_texts=write_restaurants,
            generation={"max_new_tokens": 32, "bleu": "plain"},
        ),
    }
)
