"""Known DP-SGD mistakes, planted in the composed parts of a run. Never shipped.

`NaiveEngine` is a slow, correct engine with two seams (how a norm is measured, how a sum is kept)
that the engine bugs bend; unbent it must pass every check, which is itself a test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from auditing.statistics_of_parts import audit_mechanism, check_sampler
from shuffled_dpsgd.auditing.sensitivity import Records, check_sensitivity, quiet_run
from shuffled_dpsgd.auditing.taps import Unwatched
from shuffled_dpsgd.integrations.per_sample_loss import next_token_losses
from shuffled_dpsgd.training import GaussianNoise, ShuffledGaussianMechanism, make_private
from shuffled_dpsgd.training.private import PrivateTraining

CLIP_NORM = 2.0
BATCH_CLIP_NORM = 3.0
NOISE_MULTIPLIER = 0.5
DATASET_SIZE = 400
BATCH_SIZE = 40

Grads = dict[str, torch.Tensor]
Plant = Callable[[PrivateTraining], None]


def build_model() -> torch.nn.Module:
    """A tiny GPT-2: embeddings, biases, norms, and a head tied to the token embedding."""
    config = GPT2Config(
        vocab_size=24, n_embd=16, n_layer=1, n_head=2, n_positions=8, initializer_range=0.1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT2LMHeadModel(config).double().eval()


def build_records(count: int = 6) -> Records:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(24, (count, 8), generator=generator)

    def losses(model: torch.nn.Module, batch: object) -> torch.Tensor:
        (ids,) = batch
        return 20.0 * next_token_losses(model(ids).logits, ids)

    return Records(examples=[(row,) for row in tokens], losses=losses)


def quiet() -> PrivateTraining:
    return quiet_run(
        build_model(),
        expected_batch_size=BATCH_SIZE,
        clip_norm=CLIP_NORM,
        batch_clip_norm=BATCH_CLIP_NORM,
    )


def noisy(noise_multiplier: float = NOISE_MULTIPLIER) -> PrivateTraining:
    model = build_model()
    return make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        dataset_size=DATASET_SIZE,
        expected_batch_size=BATCH_SIZE,
        num_steps=100,
        noise_multiplier=noise_multiplier,
        delta=1e-5,
        clip_norm=CLIP_NORM,
        batch_clip_norm=BATCH_CLIP_NORM,
        seed=3,
    )


class BentNoise:
    """The library's noise with its standard deviations or steps bent."""

    def __init__(self, bend: Callable[[str, float], float], key: bytes | None = None) -> None:
        self._inner = GaussianNoise()
        self._bend, self._key = bend, key

    def add_(self, tensors, stds, *, key: bytes, places=None, divide_by: float = 1.0) -> None:
        bent = {name: self._bend(name, std) for name, std in stds.items()}
        self._inner.add_(tensors, bent, key=self._key or key, places=places, divide_by=divide_by)


def bent_noise(bend: Callable[[str, float], float], key: bytes | None = None) -> Plant:
    def plant(private: PrivateTraining) -> None:
        noise = BentNoise(bend, key)
        private.mechanism = ShuffledGaussianMechanism(private.plan, noise)

    return plant


def divide_by_real_batch(private: PrivateTraining) -> None:
    inner = private.mechanism

    class RealDivisor:
        def privatize(self, sums, *, key, earlier=()):
            release = inner.privatize(sums, key=key, earlier=earlier)
            size = max(private.engine.sample_norms.numel(), 1)
            for tensor in sums.values():
                tensor.mul_(private.plan.expected_batch_size / size)
            return release

    private.mechanism = RealDivisor()


def batch_clip_on_the_rest(private: PrivateTraining) -> None:
    clips = [block.batch_clip_norm for block in private.plan.blocks]
    blocks = tuple(
        replace(block, batch_clip_norm=clip)
        for block, clip in zip(private.plan.blocks, reversed(clips), strict=True)
    )
    bent = replace(private.plan, blocks=blocks)
    private.mechanism = ShuffledGaussianMechanism(bent, GaussianNoise())


class NaiveEngine:
    """One backward per sample; the interface of the library's engine."""

    strategy = "naive"

    def __init__(self, private: PrivateTraining) -> None:
        self.model, self.clip_norm = private.model, private.plan.clip_norm
        self.moved = {n for b in private.plan.blocks if b.name == "shuffled" for n in b.parameters}
        self.parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self._clear()

    def _clear(self) -> None:
        self.norms: list[float] = []
        self.sums = {name: torch.zeros_like(p) for name, p in self.parameters.items()}

    def reset(self) -> None:
        self._clear()

    def __enter__(self) -> NaiveEngine:
        self._hook = self.model.transformer.wte.register_forward_hook(self._capture)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _capture(self, module, inputs, output) -> None:
        self.ids, self.embedded = inputs[0], output

    @property
    def num_checked(self) -> int:
        return 0

    @property
    def num_checked_by_coin(self) -> int:
        return 0

    @property
    def sample_norms(self) -> torch.Tensor:
        return torch.tensor(self.norms)

    def read_norms(self, *others: torch.Tensor) -> list[torch.Tensor]:
        return [self.sample_norms, *others]

    def backward(self, losses: torch.Tensor) -> None:
        targets = [*self.parameters.values(), self.embedded]
        for index, loss in enumerate(losses):
            *found, embedded = torch.autograd.grad(loss, targets, retain_graph=True)
            grads = dict(zip(self.parameters, found, strict=True))
            self.looked_up = torch.zeros_like(grads["transformer.wte.weight"]).index_add_(
                0, self.ids[index], embedded[index]
            )
            norm = self.norm(grads)
            self.norms.append(norm)
            self.add(self.clip(grads, norm))

    def norm(self, grads: Grads) -> float:
        return float(torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt())

    def clip(self, grads: Grads, norm: float) -> Grads:
        factor = min(1.0, self.clip_norm / norm)
        return {name: g * factor for name, g in grads.items()}

    def add(self, grads: Grads) -> None:
        for name, grad in grads.items():
            self.sums[name] += grad

    def clipped_sum(self) -> Grads:
        return {name: tensor.clone() for name, tensor in self.sums.items()}


class NormWithoutBias(NaiveEngine):
    def norm(self, grads: Grads) -> float:
        return super().norm({n: g for n, g in grads.items() if not n.endswith("bias")})


class NormWithoutEmbedding(NaiveEngine):
    def norm(self, grads: Grads) -> float:
        return super().norm({n: g for n, g in grads.items() if "wpe" not in n and "wte" not in n})


class TiedWithoutCrossTerm(NaiveEngine):
    def norm(self, grads: Grads) -> float:
        rest = dict(grads)
        whole = rest.pop("transformer.wte.weight")
        return super().norm(
            {**rest, "used as input": self.looked_up, "as head": whole - self.looked_up}
        )


class TiedCountedOnce(NaiveEngine):
    def norm(self, grads: Grads) -> float:
        rest = dict(grads)
        whole = rest.pop("transformer.wte.weight")
        return super().norm({**rest, "as head": whole - self.looked_up})


class NormOfShuffledBlockOnly(NaiveEngine):
    def norm(self, grads: Grads) -> float:
        return super().norm({n: g for n, g in grads.items() if n in self.moved})


class EachTensorToTheFullClip(NaiveEngine):
    def clip(self, grads: Grads, norm: float) -> Grads:
        return {n: g * min(1.0, self.clip_norm / float(g.norm())) for n, g in grads.items()}


class ClipAfterSumming(NaiveEngine):
    def clip(self, grads: Grads, norm: float) -> Grads:
        return grads

    def clipped_sum(self) -> Grads:
        norm = super().norm(self.sums)
        return {n: t * min(1.0, self.clip_norm / norm) if norm else t for n, t in self.sums.items()}


class MicroBatchesDropped(NaiveEngine):
    def backward(self, losses: torch.Tensor) -> None:
        self.sums = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        super().backward(losses)


class NeverReset(NaiveEngine):
    def reset(self) -> None:
        self.norms = []


def engine(kind: type[NaiveEngine]) -> Plant:
    def plant(private: PrivateTraining) -> None:
        private.engine = kind(private)

    return plant


class FixedSizeBatches:
    dataset_size = DATASET_SIZE

    def indices(self, step: int) -> torch.Tensor:
        rng = np.random.default_rng(step)
        return torch.from_numpy(rng.choice(DATASET_SIZE, size=BATCH_SIZE, replace=False))


class ShuffledEpochs:
    dataset_size = DATASET_SIZE

    def indices(self, step: int) -> torch.Tensor:
        epoch, place = divmod(step, DATASET_SIZE // BATCH_SIZE)
        order = np.random.default_rng(epoch).permutation(DATASET_SIZE)
        return torch.from_numpy(order[place * BATCH_SIZE : (place + 1) * BATCH_SIZE])


class TwiceTheRate:
    dataset_size = DATASET_SIZE

    def indices(self, step: int) -> torch.Tensor:
        drawn = np.random.default_rng(step).random(DATASET_SIZE)
        return torch.from_numpy(np.flatnonzero(drawn < 2 * BATCH_SIZE / DATASET_SIZE))


class SameBatchTwice:
    dataset_size = DATASET_SIZE

    def indices(self, step: int) -> torch.Tensor:
        drawn = np.random.default_rng(step // 2).random(DATASET_SIZE)
        return torch.from_numpy(np.flatnonzero(drawn < BATCH_SIZE / DATASET_SIZE))


def sampler(kind: type) -> Plant:
    def plant(private: PrivateTraining) -> None:
        private.sampler = kind()

    return plant


@dataclass(frozen=True, kw_only=True)
class Bug:
    """A mistake and the checks that must notice it, each by itself."""

    plant: Plant
    caught_by: frozenset[str]


def _bug(plant: Plant, *checks: str) -> Bug:
    return Bug(plant=plant, caught_by=frozenset(checks))


MISSING_LAYER = "transformer.h.0.mlp.c_fc.bias"
BUGS: Mapping[str, Bug] = {
    "noise halved": _bug(bent_noise(lambda _, std: std / 2), "audit"),
    "noise missing on one layer": _bug(
        bent_noise(lambda name, std: 0.0 if name == MISSING_LAYER else std), "sweep"
    ),
    "noise divided by the batch size twice": _bug(
        bent_noise(lambda _, std: std / BATCH_SIZE), "audit"
    ),
    "noise not scaled by the clip": _bug(bent_noise(lambda _, std: std / CLIP_NORM), "audit"),
    "same noise each step": _bug(bent_noise(lambda _, std: std, key=bytes(32)), "audit"),
    "divisor from the real batch": _bug(divide_by_real_batch, "replay"),
    "batch clip of the wrong block": _bug(batch_clip_on_the_rest, "replay"),
    "clip applied after summation": _bug(engine(ClipAfterSumming), "replay"),
    "norm without the bias": _bug(engine(NormWithoutBias), "replay"),
    "norm without the embedding": _bug(engine(NormWithoutEmbedding), "replay"),
    "norm of the shuffled block only": _bug(engine(NormOfShuffledBlockOnly), "replay"),
    "each tensor clipped to the full norm": _bug(engine(EachTensorToTheFullClip), "replay"),
    "tied weight counted once": _bug(engine(TiedCountedOnce), "replay"),
    "tied weight without the cross term": _bug(engine(TiedWithoutCrossTerm), "replay"),
    "micro-batches dropped": _bug(engine(MicroBatchesDropped), "replay"),
    "sums carried over to the next step": _bug(engine(NeverReset), "replay"),
    "batches of fixed size": _bug(sampler(FixedSizeBatches), "sampler"),
    "epochs without replacement": _bug(sampler(ShuffledEpochs), "sampler"),
    "twice the sampling rate": _bug(sampler(TwiceTheRate), "sampler"),
    "the same batch twice": _bug(sampler(SameBatchTwice), "sampler"),
}


def replay_fails(plant: Plant) -> bool:
    """Replayed sensitivity and its invariants."""
    private = quiet()
    private.referee = Unwatched()
    plant(private)
    return not check_sensitivity(private, build_records()).passed


def sampler_fails(plant: Plant) -> bool:
    """Statistical tests of Poisson sampling."""
    private = noisy()
    private.referee = Unwatched()
    plant(private)
    rate = BATCH_SIZE / DATASET_SIZE
    return not check_sampler(private.sampler, sampling_prob=rate, num_steps=100).passed


def audit_fails(plant: Plant) -> bool:
    """The mechanism's output, all tensors together, against its proven claim."""
    private = noisy()
    private.referee = Unwatched()
    plant(private)
    return audit_mechanism(private, num_observations=150, num_sweep=0).refutes_a_proven_claim


def sweep_fails(plant: Plant) -> bool:
    """The same, tensor by tensor."""
    private = noisy(noise_multiplier=1.0)
    private.referee = Unwatched()
    plant(private)
    return audit_mechanism(private, num_observations=40, num_sweep=40).refutes_a_proven_claim


CHECKS: Mapping[str, Callable[[Plant], bool]] = {
    "replay": replay_fails,
    "sampler": sampler_fails,
    "audit": audit_fails,
    "sweep": sweep_fails,
}
