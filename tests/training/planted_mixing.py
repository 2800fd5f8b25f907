"""Mixing planted in loaders, transforms, collates, models and losses: is it found in time?

None of it is of a kind that the neighbour test was written for: the test knows nothing of ranks,
quantiles, capacities or hard examples. A run counts as missed if anything was released.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from shuffled_dpsgd.errors import ShuffledDPError
from shuffled_dpsgd.training import make_private

RECORDS, EXPECTED, WIDTH, CLASSES = 200, 20, 6, 3
Loss = Callable[[nn.Module, Any], Tensor]


def vectors() -> TensorDataset:
    """Records of fresh numbers."""
    return TensorDataset(torch.randn(RECORDS, WIDTH), torch.randint(CLASSES, (RECORDS,)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 10), nn.Tanh(), nn.Linear(10, CLASSES))


def plain(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch.x), batch.y, reduction="none")


# --- data sets -----------------------------------------------------------------------------------


class Records(Dataset[Any]):
    """Healthy unless a subclass is not."""

    def __init__(self) -> None:
        self.x, self.y = vectors().tensors

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


class SecondDrawn(Records):
    def __getitem__(self, index: int) -> Any:
        return 0.6 * self.x[index] + 0.4 * self.x[random.randrange(RECORDS)], self.y[index]


class Repaired(Records):
    """One in seven takes the label of some other record."""

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[random.randrange(RECORDS) if index % 7 == 2 else index]


class Nearest(Records):
    """Every record is smoothed by the one that lies next to it."""

    def __getitem__(self, index: int) -> Any:
        apart = (self.x - self.x[index]).norm(dim=1)
        return self.x[apart.topk(2, largest=False).indices].mean(0), self.y[index]


class Ranked(Records):
    """Features as their ranks among the rows loaded together."""

    def __getitems__(self, indices: list[int]) -> Any:
        ranks = self.x[indices].argsort(0).argsort(0).float()
        return list(zip(ranks, self.y[indices], strict=True))


class Clipped(Records):
    """Outliers of what is loaded together are pulled in, now and then."""

    def __getitems__(self, indices: list[int]) -> Any:
        x = self.x[indices]
        if random.random() < 0.2:
            x = x.clamp(max=x.quantile(0.9, 0))
        return list(zip(x, self.y[indices], strict=True))


# --- collate functions ---------------------------------------------------------------------------


def scaled_to_the_largest(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    return x / x.abs().max(), y


def most_frequent_label(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    return x, torch.where(torch.rand(len(y)) < 0.1, y.mode().values, y)


def mixed_in_one_of_ten(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    return (0.7 * x + 0.3 * x[torch.randperm(len(x))] if torch.rand(()) < 0.1 else x), y


def pasted_by_python(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    if random.random() < 0.3:
        x = x.clone()
        x[:, :2] = x[random.sample(range(len(x)), len(x)), :2]
    return x, y


# --- models --------------------------------------------------------------------------------------


class Between(nn.Module):
    """A classifier with dropout and something done to what it is given."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 10), nn.Tanh(), nn.Dropout(0.2))
        self.head, self.mix = nn.Linear(10, CLASSES), mix

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.mix(self.body(x))))


class Rescaled(torch.autograd.Function):
    """Its backward divides by the batch's largest gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / grad.abs().max()


def attention_over_the_batch(h: Tensor) -> Tensor:
    return h + 0.3 * (h @ h.T).softmax(1) @ h


def winners(h: Tensor) -> Tensor:
    """Only the largest activations of a batch are kept, as under a capacity."""
    return h * (h.detach() >= h.detach().flatten().quantile(0.8))


def seldom_rolled(h: Tensor) -> Tensor:
    return h + 0.5 * h.roll(1, 0) if torch.rand(()) < 0.1 else h


def seldom_by_python(h: Tensor) -> Tensor:
    return h + 0.5 * h.flip(0) if random.random() < 0.1 else h


def detached_scale(h: Tensor) -> Tensor:
    return h / h.detach().norm() + 0.05 * torch.randn_like(h)


# --- losses --------------------------------------------------------------------------------------


def hard_examples(model: nn.Module, batch: Any) -> Tensor:
    losses = plain(model, batch)
    return losses * (losses.detach() >= losses.detach().median())


def by_class_counts(model: nn.Module, batch: Any) -> Tensor:
    counts = torch.bincount(batch.y, minlength=CLASSES)[batch.y]
    return plain(model, batch) / counts


def ranked_losses(model: nn.Module, batch: Any) -> Tensor:
    losses = plain(model, batch)
    return losses * (1 + losses.detach().argsort().argsort() / len(losses))


def seldom_normalised(model: nn.Module, batch: Any) -> Tensor:
    losses = plain(model, batch)
    return losses / losses.detach().mean() if torch.rand(()) < 0.1 else losses


# What makes batches (data, collate), the model, and the loss.
Planted = tuple[Callable[[], Any], Any, Callable[[], nn.Module], Loss]
PLANTED: dict[str, Planted] = {
    "data: a second record drawn": (SecondDrawn, None, mlp, plain),
    "data: one in seven labels of another": (Repaired, None, mlp, plain),
    "data: smoothed by its nearest": (Nearest, None, mlp, plain),
    "transform: ranks among the rows loaded": (Ranked, None, mlp, plain),
    "transform: quantiles, one part of five": (Clipped, None, mlp, plain),
    "collate: scaled to the largest": (vectors, scaled_to_the_largest, mlp, plain),
    "collate: the most frequent label, one of ten": (vectors, most_frequent_label, mlp, plain),
    "collate: mixed in one batch of ten": (vectors, mixed_in_one_of_ten, mlp, plain),
    "collate: pasted, by Python at 0.3": (vectors, pasted_by_python, mlp, plain),
    "model: attention over the batch": (
        vectors, None, lambda: Between(attention_over_the_batch), plain),
    "model: winners of the batch": (vectors, None, lambda: Between(winners), plain),
    "model: rolled in one batch of ten": (vectors, None, lambda: Between(seldom_rolled), plain),
    "model: flipped in one of ten, by Python": (
        vectors, None, lambda: Between(seldom_by_python), plain),
    "model: a detached scale beside noise": (vectors, None, lambda: Between(detached_scale), plain),
    "model: a backward that looks at the batch": (
        vectors, None, lambda: Between(Rescaled.apply), plain),
    "loss: hard examples": (vectors, None, mlp, hard_examples),
    "loss: by class counts": (vectors, None, mlp, by_class_counts),
    "loss: ranks": (vectors, None, mlp, ranked_losses),
    "loss: normalised in one batch of ten": (vectors, None, mlp, seldom_normalised),
}  # fmt: skip


def is_missed(name: str, seed: int | None = None) -> bool:
    """One run: whether anything was released before it was stopped."""
    if seed is not None:
        torch.manual_seed(seed)
        random.seed(seed)
    make_data, collate, make_model, loss = PLANTED[name]
    data, model = make_data(), make_model()
    private = make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.05), dataset_size=RECORDS,
        expected_batch_size=EXPECTED, num_steps=4, noise_multiplier=1.0, delta=1e-3, shuffle="off",
        physical_batch_size=16, loss=loss, seed=seed,
    )  # fmt: skip
    try:
        for batch in private.batches(data, collate=collate):
            private.backward(loss(model, batch))
            private.step()
    except ShuffledDPError:
        return private.ledger.spent > 0
    finally:
        private.close()
    return True
