"""Private training: Algorithm 1 end to end, with its plan, ledger, checkpoints and card."""

from __future__ import annotations

from shuffled_dpsgd.core.ledger import Ledger
from shuffled_dpsgd.core.mechanism import ShuffledGaussianMechanism
from shuffled_dpsgd.core.noise import GaussianNoise
from shuffled_dpsgd.core.plan import NoiseBlock, PrivacyPlan
from shuffled_dpsgd.core.sampler import PoissonSampler
from shuffled_dpsgd.core.streams import RandomStreams
from shuffled_dpsgd.options import PrivacyOptions
from shuffled_dpsgd.training.assemble import assemble, make_private
from shuffled_dpsgd.training.batch_norm import fix_model
from shuffled_dpsgd.training.card import AuditedBound, PrivacyCard, write_card
from shuffled_dpsgd.training.checkpoint import load_checkpoint, save_checkpoint
from shuffled_dpsgd.training.checkpoint_folder import find_checkpoints, latest_checkpoint
from shuffled_dpsgd.training.data import Batch
from shuffled_dpsgd.training.loop import LoopSettings, Outcome, Progress, train
from shuffled_dpsgd.training.metrics import Release, StepMetrics
from shuffled_dpsgd.training.physical import find_physical_batch_size
from shuffled_dpsgd.training.planning import make_plan
from shuffled_dpsgd.training.private import PrivateTraining
from shuffled_dpsgd.training.released_weights import compare_weights
from shuffled_dpsgd.training.spending import SpendingCurve

__all__ = [
    "AuditedBound",
    "Batch",
    "GaussianNoise",
    "Ledger",
    "LoopSettings",
    "NoiseBlock",
    "Outcome",
    "PoissonSampler",
    "PrivacyCard",
    "PrivacyOptions",
    "PrivacyPlan",
    "PrivateTraining",
    "Progress",
    "RandomStreams",
    "Release",
    "ShuffledGaussianMechanism",
    "SpendingCurve",
    "StepMetrics",
    "assemble",
    "compare_weights",
    "find_checkpoints",
    "find_physical_batch_size",
    "fix_model",
    "latest_checkpoint",
    "load_checkpoint",
    "make_plan",
    "make_private",
    "save_checkpoint",
    "train",
    "write_card",
]
