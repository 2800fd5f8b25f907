"""The frozen plan of a run: sampler, clips, noise per block, shuffle and claims, coupled.

Everything that decides the privacy of a run is in one immutable object. The sampler, the engine
and the mechanism are built from it and the claims are priced from it, so they cannot disagree.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from shuffled_dpsgd.accounting import (
    PrivacyClaim,
    certified_claim,
    certified_curve,
    paper_claim,
)
from shuffled_dpsgd.options import (
    Accounting,
    Adjacency,
    Clip,
    LossReduction,
    NoiseFrame,
    Sampling,
    Scope,
    Shuffle,
)

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
    noise was calibrated to, or None when the noise was given.
    """

    dataset_size: int
    expected_batch_size: int
    num_steps: int
    epsilon: float | None
    delta: float
    clip: Clip
    clip_norm: float
    accounting: Accounting
    shuffle: Shuffle
    scope: Scope
    sampling: Sampling
    adjacency: Adjacency
    delta_split: float
    loss_reduction: LossReduction
    noise_frame: NoiseFrame
    seed: int | None
    falls_back: bool
    blocks: tuple[NoiseBlock, ...]

    @property
    def sampling_prob(self) -> float:
        """Probability of one record joining one logical batch."""
        return self.expected_batch_size / self.dataset_size

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
    def uncertifiable(self) -> tuple[str, ...]:
        """Why no proven epsilon can be given; empty when one can."""
        reasons = []
        if self.sampling != "poisson":
            reasons.append("the batches were not drawn by the Poisson sampler accounted for")
        if self.smallest_noise_multiplier == 0.0:
            reasons.append("some parameters receive no noise")
        if self.clip == "none" or math.isinf(self.clip_norm):
            reasons.append("per-sample gradients are not clipped")
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
            return self._nothing_released("proven")
        return certified_claim(
            noise_multiplier=self.smallest_noise_multiplier,
            sampling_prob=self.sampling_prob,
            num_steps=steps,
            delta=self.delta,
            adjacency=self.adjacency,
        )

    def certified_along(self, steps: Sequence[int]) -> list[PrivacyClaim] | None:
        """Proven claims at several step counts, cheap enough for curves and progress displays."""
        if self.uncertifiable:
            return None
        positive = [step for step in steps if step > 0]
        priced = iter(
            certified_curve(
                noise_multiplier=self.smallest_noise_multiplier,
                sampling_prob=self.sampling_prob,
                steps=positive,
                delta=self.delta,
                adjacency=self.adjacency,
            )
            if positive
            else ()
        )
        return [next(priced) if step > 0 else self._nothing_released("proven") for step in steps]

    def paper_estimate(self, num_steps: int | None = None) -> PrivacyClaim | None:
        """The paper's own estimate, heuristic: Theorem 3 with Theorems 22 and 29.

        Each block is priced as the paper would: the shuffled one with its dimension and batch
        clip, the rest (and everything, in a fallback or without a batch clip) as the Gaussian
        mechanism, d = 1. The run's estimate is the worst block's, the shuffled one's if they
        agree to 0.1 %. None where the formula has nothing to say: no Poisson sampling, no
        clipping, no noise.
        """
        claims = list(self.paper_by_block(num_steps).values())
        if not claims:
            return None
        worst = max(claim.epsilon for claim in claims)
        return next(claim for claim in claims if claim.epsilon >= 0.999 * worst)

    def paper_by_block(self, num_steps: int | None = None) -> dict[str, PrivacyClaim]:
        """The paper's estimate of each block alone, heuristic; empty where there is none."""
        steps = self.num_steps if num_steps is None else num_steps
        if self.uncertifiable:
            return {}
        if steps == 0:
            return {block.name: self._nothing_released("heuristic") for block in self.blocks}
        return {block.name: self._paper_claim(block, steps) for block in self.blocks}

    def paper_dimension(self, block: NoiseBlock) -> int:
        """The `d` the paper's formula is evaluated at for a block."""
        counted = self.permutes and block.name == "shuffled" and block.batch_clip_norm is not None
        return block.dimension if counted else 1

    def to_json(self) -> dict[str, Any]:
        """Plain data without the seed, which would let a reader remove the noise."""
        data = asdict(self)
        del data["seed"]
        for block in data["blocks"]:
            block["parameters"] = list(block["parameters"])
        data["blocks"] = list(data["blocks"])
        return data | {
            "clip_norm": self.clip_norm if math.isfinite(self.clip_norm) else None,
            "sampling_prob": self.sampling_prob,
            "secure": self.secure,
        }

    def fingerprint(self) -> str:
        """Equal for equal plans; what ledgers and checkpoints know their run by."""
        text = json.dumps(self._comparable(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def differences(self, fingerprints: dict[str, str]) -> list[str]:
        """Names of the fields whose fingerprints differ from those of another plan."""
        mine = self.field_fingerprints()
        return sorted(
            key for key in mine.keys() | fingerprints if mine.get(key) != fingerprints.get(key)
        )

    def field_fingerprints(self) -> dict[str, str]:
        """One hash per field, so that a refusal can name what differs without storing the seed."""
        return {
            key: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
            for key, value in self._comparable().items()
        }

    def _comparable(self) -> dict[str, Any]:
        data = asdict(self)
        return {field.name: data[field.name] for field in fields(self)}

    def _paper_claim(self, block: NoiseBlock, steps: int) -> PrivacyClaim:
        clip = block.batch_clip_norm
        return paper_claim(
            noise_multiplier=block.noise_multiplier,
            sampling_prob=self.sampling_prob,
            num_steps=steps,
            delta=self.delta,
            dimension=self.paper_dimension(block),
            batch_clip=1.0 if clip is None else clip / self.clip_norm,
            delta_split=self.delta_split,
        )

    def _nothing_released(self, kind: Literal["proven", "heuristic"]) -> PrivacyClaim:
        return PrivacyClaim(
            epsilon=0.0, delta=self.delta, method="nothing being released yet", kind=kind
        )
