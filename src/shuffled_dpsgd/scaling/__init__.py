"""What a run would take on given GPUs, from a model's shapes alone: memory, time, communication."""

from __future__ import annotations

from shuffled_dpsgd.scaling.estimate import Estimate, Job, estimate, largest_batch
from shuffled_dpsgd.scaling.gpus import GPUS, Gpu
from shuffled_dpsgd.scaling.shapes import ModelShapes, shapes_of

__all__ = [
    "GPUS",
    "Estimate",
    "Gpu",
    "Job",
    "ModelShapes",
    "estimate",
    "largest_batch",
    "shapes_of",
]
