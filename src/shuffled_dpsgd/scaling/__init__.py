"""What a run would take on given GPUs, from a model's shapes alone: memory, time, communication."""

from __future__ import annotations

from shuffled_dpsgd.scaling.adapters import AdapterJob, adapter_memory, largest_adapter_batch
from shuffled_dpsgd.scaling.estimate import Estimate, Job, estimate, largest_batch
from shuffled_dpsgd.scaling.gpus import GPUS, Gpu
from shuffled_dpsgd.scaling.shapes import ModelShapes, shapes_of

__all__ = [
    "GPUS",
    "AdapterJob",
    "Estimate",
    "Gpu",
    "Job",
    "ModelShapes",
    "adapter_memory",
    "estimate",
    "largest_adapter_batch",
    "largest_batch",
    "shapes_of",
]
