"""The frozen plan of a run: sampler, clips, noise per block and shuffle, coupled.

Everything that decides the privacy of a run is in one immutable object. The sampler and the
mechanism are built from it and the certified claim is priced from it, so they cannot disagree.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from shuffled_dpsgd.core.claim import Adjacency, PrivacyClaim
from shuffled_dpsgd.core.events import SampledGaussian

Accounting = Literal["certified", "rdp", "paper"]
Shuffle = Literal["every-step", "at-release", "off"]
Scope = Literal["paper", "full"]
Clip = Literal["flat", "automatic", "per-layer", "none"]
Sampling = Literal["poisson", "unaccounted"]
LossReduction = Literal["sum", "mean"]
NoiseFrame = Literal["shuffled", "unshuffled"]
BlockName = Literal["shuffled", "rest"]


@dataclass(frozen=True, kw_only=True)
class NoiseBlock:
    """Parameters that share a noise multiplier and, if any, a batch clip."""

    name: BlockName
    parameters: tuple[str, ...]
    dimension: int
    noise_multiplier: float
    batch_clip_norm: float | None = None

    def noise_std(self, clip_norm: float) -> float:
        """Standard deviation of the noise on the block's sum, before the division."""
        return 0.0 if self.noise_multiplier == 0.0 else self.noise_multiplier * clip_norm


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """What a run will do to the data, and what may be claimed about it.

    Fields named like an option of `PrivacyOptions` hold its value. `epsilon` is the target the
    noise was calibrated to, or None when the noise was given. With `falls_back`, Algorithm 1 found
    that shuffling would need more noise, and the run is plain DP-SGD.

    With `records_per_unit`, whoever is drawn and protected has several records (a unit): sizes and
    probabilities count units, and of a unit that is drawn so many records take part at most. Of a
    batch of more than `largest_batch` so many are kept. `noise_rows` says how noise is `banded`.
    """

    dataset_size: int
    expected_batch_size: int
    num_steps: int
    delta: float
    clip_norm: float
    blocks: tuple[NoiseBlock, ...]
    epsilon: float | None = None
    clip: Clip = "flat"
    clip_quantile: float | None = None
    accounting: Accounting = "certified"
    shuffle: Shuffle = "off"
    scope: Scope = "paper"
    sampling: Sampling = "poisson"
    adjacency: Adjacency = "add-remove"
    delta_split: float = 0.5
    loss_reduction: LossReduction = "sum"
    noise_frame: NoiseFrame = "shuffled"
    seed: int | None = None
    records_per_unit: int | None = None
    largest_batch: int | None = None
    noise_rows: tuple[tuple[float, ...], ...] = ()
    falls_back: bool = False

    @property
    def sampling_prob(self) -> float:
        """Probability of one record joining one logical batch."""
        return self.expected_batch_size / self.dataset_size

    @property
    def bands(self) -> int:
        """How many steps a block of noise has; one if every step has noise of its own."""
        return len(self.noise_rows) or 1

    @property
    def secure(self) -> bool:
        """Whether all randomness comes from the operating system."""
        return self.seed is None

    @property
    def permutes(self) -> bool:
        """Whether weights are permuted at all; Algorithm 1's fallback does not."""
        return self.shuffle != "off" and not self.falls_back

    @property
    def smallest_noise_multiplier(self) -> float:
        """What the certified claim is priced at: the weakest noise any block receives."""
        return min(block.noise_multiplier for block in self.blocks)

    @property
    def bounds_samples(self) -> bool:
        """Whether a record's contribution has a bound at all."""
        return self.clip != "none" and math.isfinite(self.clip_norm)

    @property
    def uncertifiable(self) -> tuple[str, ...]:
        """Why no proven epsilon can be given; empty when one can."""
        reasons = []
        if self.sampling != "poisson":
            reasons.append("the batches were not drawn by the Poisson sampler accounted for")
        if self.smallest_noise_multiplier == 0.0:
            reasons.append("some parameters receive no noise")
        if not self.bounds_samples:
            reasons.append("per-sample gradients are not clipped")
        if self.bands > 1 and self.largest_batch is not None:
            reasons.append("nothing is proven for banded noise under a largest batch")
        return tuple(reasons)

    def certified(self, num_steps: int | None = None) -> PrivacyClaim | None:
        """The proven claim after `num_steps` releases (all of them by default).

        Poisson-subsampled Gaussian at the smallest noise multiplier of any block, by privacy-loss
        distributions; shuffling is credited with nothing. None if `uncertifiable` says why not.
        """
        steps = self.num_steps if num_steps is None else num_steps
        if self.uncertifiable:
            return None
        if steps == 0:
            return self.nothing_released("proven")
        # Here, because options import this file and must stay light.
        from shuffled_dpsgd.core.certified import claim_for

        return claim_for(self.mechanism(steps), self.delta)

    def mechanism(self, num_steps: int | None = None) -> SampledGaussian:
        """What `num_steps` releases (all of them by default) are priced as."""
        steps = self.num_steps if num_steps is None else num_steps
        return SampledGaussian(
            noise_multiplier=self.smallest_noise_multiplier,
            sampling_prob=self.sampling_prob * self.bands,
            num_steps=math.ceil(steps / self.bands),
            steps_per_block=len(self.noise_rows) or None,
            adjacency=self.adjacency,
            largest_batch=self.largest_batch,
            dataset_size=None if self.largest_batch is None else self.dataset_size,
        )

    def nothing_released(self, kind: Literal["proven", "heuristic"]) -> PrivacyClaim:
        """The claim before the first release."""
        return PrivacyClaim(
            epsilon=0.0, delta=self.delta, method="nothing being released yet", kind=kind
        )

    def fingerprint(self) -> str:
        """Equal for equal plans; what ledgers and checkpoints know their run by."""
        text = json.dumps(self.comparable(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def comparable(self) -> dict[str, Any]:
        """Every field, the seed included, as plain data."""
        return asdict(self)
