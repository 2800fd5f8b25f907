"""Five of Opacus' example scripts as they look here, on tiny made-up data.

Models and losses are those of the scripts (Opacus 1.6, `examples/`), smaller where size is all that
differs. In each run the referee compares whole sums of clipped gradients with plain autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from shuffled_dpsgd.errors import InvalidArgumentError, UnsupportedModuleError
from shuffled_dpsgd.training import PrivateTraining, make_private

RECORDS, BATCH = 48, 12
pytestmark = pytest.mark.filterwarnings("ignore")


def private_run(
    model: nn.Module, data: Any, loss: Callable[[nn.Module, Any], Tensor], **options: Any
) -> PrivateTraining:
    """Three steps of Adam at ε = 3; the loss is handed over, so it is tried out too."""
    private = make_private(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-3),
        dataset_size=RECORDS,
        expected_batch_size=BATCH,
        num_steps=3,
        epsilon=3.0,
        delta=1e-3,
        loss=loss,
    )
    for batch in private.batches(data, **options):
        private.backward(loss(model, batch))
        private.step()
    private.release()
    assert private.referee.checks.sums == 3
    assert 2.9 < private.epsilon.epsilon <= 3.0
    assert not any("not checked" in each for each in private.card().assumptions)
    return private


def classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch.x), batch.y, reduction="none")


def seeded() -> torch.Generator:
    torch.manual_seed(0)
    return torch.Generator().manual_seed(0)


class SampleConvNet(nn.Module):
    """`mnist.py`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 8, 2, padding=3)
        self.conv2 = nn.Conv2d(16, 32, 4, 2)
        self.fc1 = nn.Linear(32 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, 1)
        return self.fc2(F.relu(self.fc1(x.view(-1, 32 * 4 * 4))))


def test_mnist() -> None:
    generator = seeded()
    images = torch.randn(RECORDS, 1, 28, 28, generator=generator)
    data = TensorDataset(images, torch.randint(10, (RECORDS,), generator=generator))
    private_run(SampleConvNet(), DataLoader(data, batch_size=BATCH), classify)


class CharNNClassifier(nn.Module):
    """`char-lstm-classification.py`, with torch's LSTM in place of `DPLSTM`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 8)
        self.lstm = nn.LSTM(8, 12, num_layers=1, batch_first=True)
        self.out_layer = nn.Linear(12, 4)

    def forward(self, names: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.embedding(names))
        return self.out_layer(outputs[:, -1])


def test_char_lstm() -> None:
    generator = seeded()
    names = torch.randint(1, 40, (RECORDS, 7), generator=generator)
    data = TensorDataset(names, torch.randint(4, (RECORDS,), generator=generator))
    private_run(CharNNClassifier(), DataLoader(data, batch_size=BATCH), classify)


class SampleNet(nn.Module):
    """`imdb.py`: the mean of the embeddings of a review, which is padded to the longest."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(50, 16)
        self.pool = nn.AdaptiveAvgPool1d(1)
        self.fc1 = nn.Linear(16, 16)
        self.fc2 = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(self.pool(self.emb(x).transpose(1, 2)).squeeze(2)))


def reviews() -> list[tuple[Tensor, int]]:
    generator = seeded()
    lengths = torch.randint(3, 12, (RECORDS,), generator=generator).tolist()
    words = [torch.randint(1, 50, (length,), generator=generator) for length in lengths]
    return [(review, index % 2) for index, review in enumerate(words)]


def padded(samples: list[tuple[Tensor, int]], length: int | None = None) -> tuple[Tensor, Tensor]:
    words = [F.pad(w, (0, length - len(w))) if length else w for w, _ in samples]
    return pad_sequence(words, batch_first=True), torch.tensor([label for _, label in samples])


def test_imdb() -> None:
    """Its own padding to the longest mixes records: the mean is taken over what others are long."""
    with pytest.raises(InvalidArgumentError, match="mask padding"):
        private_run(SampleNet(), DataLoader(reviews(), BATCH, collate_fn=padded), classify)  # type: ignore[arg-type]
    fixed = DataLoader(reviews(), BATCH, collate_fn=lambda samples: padded(samples, 12))  # type: ignore[arg-type]
    private_run(SampleNet(), fixed, classify)


class Discriminator(nn.Module):
    """`dcgan.py` on images of 16 × 16; judges true ones and made ones in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, 8, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(8, 16, 4, 2, 1),
            nn.GroupNorm(4, 16),
            nn.LeakyReLU(0.2),
            nn.Conv2d(16, 1, 4, 1, 0),
        )

    def forward(self, *images: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.main(each).flatten() for each in images)


def test_dcgan_discriminator() -> None:
    """A record's loss is that of its image and of one made up; the generator sees no record.

    Two calls of the model are refused; one call that judges both is exact.
    """
    generator = seeded()
    data = TensorDataset(torch.randn(RECORDS, 1, 16, 16, generator=generator))
    maker = nn.Sequential(nn.Linear(5, 256), nn.Tanh(), nn.Unflatten(1, (1, 16, 16)))

    def made(batch: Any) -> Tensor:
        return maker(torch.randn(len(batch.x), 5)).detach()

    def twice(model: nn.Module, batch: Any) -> Tensor:
        return F.softplus(-model(batch.x)[0]) + F.softplus(model(made(batch))[0])

    def once(model: nn.Module, batch: Any) -> Tensor:
        real, fake = model(batch.x, made(batch))
        return F.softplus(-real) + F.softplus(fake)

    with pytest.raises(UnsupportedModuleError, match="one forward of the model per backward"):
        private_run(Discriminator(), data, twice)
    model = Discriminator()
    private = private_run(model, data, once)
    optimizer = torch.optim.Adam(maker.parameters(), lr=1e-3)
    private.close()
    F.softplus(-model(maker(torch.randn(4, 5)))[0]).mean().backward()
    optimizer.step()


def test_bert() -> None:
    """`building_text_classifier.ipynb`: all but the last block and what follows are frozen."""
    pytest.importorskip("transformers")
    from transformers import BertConfig, BertForSequenceClassification

    generator = seeded()
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, num_labels=3,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("bert.encoder.layer.1", "bert.pooler", "class")))
    tokens = torch.randint(1, 50, (RECORDS, 10), generator=generator)
    mask = torch.ones_like(tokens)
    data = TensorDataset(tokens, mask, torch.randint(3, (RECORDS,), generator=generator))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        tokens, mask, labels = batch
        logits = model(input_ids=tokens, attention_mask=mask).logits
        return F.cross_entropy(logits, labels, reduction="none")

    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    private = private_run(model, DataLoader(data, batch_size=BATCH), loss)
    assert private.plan.permutes
    assert all(torch.equal(model.get_parameter(name), value) for name, value in frozen.items())
