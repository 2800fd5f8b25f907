"""`shuffle="auto"`: ordinary models train with defaults; of adapters only their own ranks move."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.runtime import notices
from shuffled_dpsgd.training import PrivateTraining, make_private
from training.cases import CLASSES, RECORDS, make_bert, make_vit, weights

Make = Callable[[], nn.Module]


class Tagger(nn.Module):
    """Token embeddings, a recurrent layer, and a classifier of its last output."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.layer = kind(8, 12, batch_first=True)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(tokens))[0][:, -1])


class Bag(nn.Module):
    """The mean of token embeddings, classified."""

    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.head = nn.Sequential(*between, nn.Linear(8, CLASSES))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).mean(dim=1))


class TextCnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.filters = nn.Conv1d(8, 6, 3)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        found = F.relu(self.filters(self.embedding(tokens).transpose(1, 2)))
        return self.head(found.max(dim=2).values)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.head = nn.GroupNorm(2, 4), nn.Linear(4, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        found = self.first(images)
        found = found + F.relu(self.norm(self.second(found)))
        return self.head(found.mean((2, 3)))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    sizes = {"vocab_size": 30, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    special = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2ForSequenceClassification(GPT2Config(**sizes, **special, num_labels=CLASSES))


def chain(*layers: nn.Module) -> Make:
    return lambda: copy.deepcopy(nn.Sequential(*layers))


INPUTS: dict[str, Tensor] = {
    "images": torch.randn(RECORDS, 1, 8, 8, generator=torch.Generator().manual_seed(0)),
    "tokens": torch.randint(1, 30, (RECORDS, 6), generator=torch.Generator().manual_seed(0)),
    "vectors": torch.randn(RECORDS, 16, generator=torch.Generator().manual_seed(0)),
}
ORDINARY: dict[str, tuple[str, bool, Make]] = {
    "gru": ("tokens", False, lambda: Tagger(nn.GRU)),
    "lstm": ("tokens", False, lambda: Tagger(nn.LSTM)),
    "rnn": ("tokens", False, lambda: Tagger(nn.RNN)),
    "embedding": ("tokens", False, Bag),
    "embedding and layer": ("tokens", True, lambda: Bag(nn.Linear(8, 8), nn.ReLU())),
    "text cnn": ("tokens", False, TextCnn),
    "cnn": (
        "images",
        False,
        chain(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)),
    ),
    "cnn with norm": (
        "images",
        False,
        chain(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)),
    ),
    "pooled cnn": (
        "images",
        False,
        chain(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.AvgPool2d(6), nn.Flatten(), nn.Linear(4, 3)),
    ),
    "residual": ("images", False, Residual),
    "linear": ("vectors", False, lambda: nn.Linear(16, CLASSES)),
    "regression on pixels": ("images", False, chain(nn.Flatten(), nn.Linear(64, CLASSES))),
    "mlp": ("vectors", True, chain(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, CLASSES))),
    "mlp with norm": (
        "vectors",
        False,
        chain(nn.Linear(16, 32), nn.LayerNorm(32), nn.Dropout(0.1), nn.Linear(32, CLASSES)),
    ),
    "gated": ("vectors", False, chain(nn.Linear(16, 32), nn.GLU(), nn.Linear(16, CLASSES))),
    "vit": ("images", True, make_vit),
    "bert": ("tokens", True, make_bert),
    "gpt2": ("tokens", True, gpt2),
}
DEFAULTS: dict[str, Any] = {
    "dataset_size": RECORDS,
    "expected_batch_size": 8,
    "num_steps": 2,
    "epsilon": 3.0,
    "delta": 1e-3,
}


def train(model: nn.Module, kind: str, **changes: Any) -> PrivateTraining:
    """A loop as README has it, with nothing but defaults."""
    trained = [p for p in model.parameters() if p.requires_grad]
    private = make_private(model, torch.optim.AdamW(trained, lr=1e-2), **(DEFAULTS | changes))
    targets = torch.randint(CLASSES, (RECORDS,), generator=torch.Generator().manual_seed(1))
    for x, y in private.batches(TensorDataset(INPUTS[kind], targets)):
        outputs = model(x)
        logits = getattr(outputs, "logits", outputs)
        private.backward(F.cross_entropy(logits, y, reduction="none"))
        private.step()
    private.release()
    return private


@pytest.mark.parametrize(("kind", "moves", "make"), ORDINARY.values(), ids=ORDINARY)
@pytest.mark.filterwarnings("ignore")
def test_ordinary_models_train_with_defaults(kind: str, moves: bool, make: Make) -> None:
    torch.manual_seed(0)
    model = make()
    before = weights(model)
    private = train(model, kind)
    assert private.ledger.spent == 2
    assert any(not torch.equal(value, before[name]) for name, value in weights(model).items())
    card = private.card()
    assert card.certified is not None
    assert 2.9 < card.certified.epsilon <= 3.0
    assert card.shuffle.startswith("every-step, scope full: " if moves else "off")


def test_one_line_says_that_nothing_moves(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "_said", set())
    model, moving = nn.Linear(16, CLASSES), chain(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))()
    with caplog.at_level(logging.WARNING, "shuffled_dpsgd"):
        make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), **DEFAULTS)
        make_private(moving, torch.optim.SGD(moving.parameters(), lr=0.1), **DEFAULTS)
    (said,) = caplog.messages
    assert said.startswith("shuffle='auto': no weights of this Linear are shuffled")
    other = nn.Linear(16, CLASSES)
    with pytest.raises(InvalidArgumentError, match="use shuffle='off'"):
        make_private(other, torch.optim.SGD(other.parameters()), **DEFAULTS, shuffle="every-step")


def test_an_optimizer_that_forbids_a_shuffle_leaves_it_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "_said", set())
    model = chain(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))()
    optimizer = torch.optim.Adafactor(model.parameters())
    with caplog.at_level(logging.WARNING, "shuffled_dpsgd"):
        private = make_private(model, optimizer, **DEFAULTS)
    assert private.plan.shuffle == "off"
    assert "row and column averages" in caplog.text
    private.close()
    with pytest.raises(InvalidArgumentError, match="row and column averages"):
        make_private(model, optimizer, **DEFAULTS, shuffle="every-step")


def test_frozen_weights_never_move_under_auto() -> None:
    """A head that is saved alone must fit the public weights below it."""
    model = chain(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))()
    model[0].requires_grad_(False)
    before = weights(model)
    private = train(model, "vectors")
    assert private.spec is not None
    assert private.spec.moved_names == {"2.weight", "2.bias", "4.weight"}
    assert private.spec.unmoved["0.weight"] == "moves with weights that are not trained"
    for name, value in weights(model).items():
        assert torch.equal(value, before[name]) == name.startswith("0."), name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", ["plain", "dora", "embedding"])
def test_an_adapter_fits_the_public_model(tmp_path: Path, variant: str) -> None:
    """It is saved, loaded on the public model, swapped for another and merged."""
    peft = pytest.importorskip("peft")
    targets = ["word_embeddings", "value"] if variant == "embedding" else ["query", "value"]
    config = peft.LoraConfig(
        r=4, target_modules=targets, use_dora=variant == "dora", task_type="SEQ_CLS"
    )
    public, tokens = make_bert(), INPUTS["tokens"]
    model = peft.get_peft_model(copy.deepcopy(public), config)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    private = train(model, "tokens")
    assert private.plan.permutes
    assert {group.kind for group in private.spec.groups} == {"lora-rank"}  # type: ignore[union-attr]
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad or torch.equal(parameter, start[name]), name
    private.close()
    model.eval()
    trained = model(tokens).logits
    model.save_pretrained(tmp_path / "adapter")

    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(public), tmp_path / "adapter").eval()
    torch.testing.assert_close(loaded(tokens).logits, trained, rtol=0, atol=0)
    torch.manual_seed(5)
    loaded.add_adapter("other", peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))
    nn.init.normal_(loaded.get_parameter(_factor_of(loaded, "other")))
    loaded.set_adapter("other")
    assert not torch.equal(loaded(tokens).logits, trained)
    loaded.set_adapter("default")
    torch.testing.assert_close(loaded(tokens).logits, trained, rtol=0, atol=0)

    merged, fresh = model.merge_and_unload(), loaded.merge_and_unload(adapter_names=["default"])
    theirs = dict(fresh.named_parameters())
    assert {name for name, _ in merged.named_parameters()} == set(theirs)
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(parameter, theirs[name], rtol=0, atol=1e-7)
    torch.testing.assert_close(merged(tokens).logits, trained, rtol=1e-4, atol=1e-5)


def _factor_of(model: nn.Module, adapter: str) -> str:
    return next(n for n, _ in model.named_parameters() if f"lora_B.{adapter}" in n)
