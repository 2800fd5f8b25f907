"""Sorted, padded and loaded ahead: the same steps, up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.integrations.per_sample_loss import classification_losses
from shuffled_dpsgd.tasks.tokens import TokenCollate, TokenRecords, class_labels
from shuffled_dpsgd.training import (
    LoopSettings,
    PrivateTraining,
    make_private,
    save_checkpoint,
    train,
)
from training.cases import FixedSampler, distance, make_bert, make_mlp, mlp_case, vectors, weights

COLLATE = TokenCollate(pad_id=0, labels=class_labels)
RECORDS = 60


def texts(count: int = RECORDS, longest: int = 50) -> TokenRecords:
    generator = torch.Generator().manual_seed(5)
    lengths = [1 + i % longest for i in range(count)]
    ids = [torch.randint(1, 30, (n,), generator=generator).tolist() for n in lengths]
    return TokenRecords([(row, i % 3) for i, row in enumerate(ids)])


def losses_of(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return classification_losses(model(**inputs).logits.double(), labels)


def private_bert(**changes: Any) -> PrivateTraining:
    model = make_bert()
    table = model.bert.embeddings
    table.position_embeddings = nn.Embedding(64, 16)
    table.register_buffer("position_ids", torch.arange(64)[None], persistent=False)
    table.register_buffer("token_type_ids", torch.zeros(1, 64, dtype=torch.long), persistent=False)
    torch.manual_seed(1)
    nn.init.normal_(table.position_embeddings.weight)
    model.config.max_position_embeddings = 64
    model.double().train()
    given: dict[str, Any] = {
        "dataset_size": RECORDS, "expected_batch_size": 12, "num_steps": 3, "delta": 1e-3,
        "noise_multiplier": 1.0, "seed": 3, "clip_norm": 0.1, "physical_batch_size": 8,
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return make_private(model, optimizer, **(given | changes))


def trained(
    private: PrivateTraining, data: TokenRecords | None = None, **options: Any
) -> dict[str, torch.Tensor]:
    for batch in private.batches(data or texts(), collate=COLLATE, **options):
        private.backward(losses_of(private.model, batch))
        private.step()
    return weights(private.model)


@pytest.mark.slow
def test_padded_and_sorted_runs_end_where_plain_ones_do() -> None:
    wanted = trained(private_bert(physical_batch_size=1))
    found = {
        "sorted": trained(private_bert()),
        "padded": trained(private_bert(), pad_batches=True),
        "ahead": trained(private_bert(), pad_batches=True, background=True),
    }
    for name, got in found.items():
        assert distance(got, wanted) < 1e-9, name
    assert distance(found["ahead"], found["padded"]) == 0


def summed_loop(private: PrivateTraining) -> None:
    for batch in private.batches(texts(), collate=COLLATE, pad_batches=True):
        losses_of(private.model, batch).sum().backward()
        private.step()


def test_only_our_backward_knows_which_rows_count() -> None:
    private = private_bert()
    private.sampler = FixedSampler(list(range(9)), dataset_size=RECORDS)
    with pytest.raises(InvalidArgumentError, match=r"6 records drawn, got 8.*private\.backward"):
        summed_loop(private)
    assert private.steps_taken == 0


def test_the_mean_of_a_padded_batch_is_refused() -> None:
    private = private_bert(loss_reduction="mean")
    with pytest.raises(InvalidArgumentError, match="pad_batches"):
        private.batches(texts(), pad_batches=True)


def test_a_torn_record_is_named_in_the_loop() -> None:
    class Torn(TokenRecords):
        def __getitem__(self, index: int) -> Any:
            if index == 17:
                raise OSError("cannot read")
            return super().__getitem__(index)

    private = private_bert()
    private.sampler = FixedSampler(list(range(20)), dataset_size=RECORDS)
    data = Torn([texts()[i] for i in range(RECORDS)])
    with pytest.raises(OSError, match="cannot read") as caught:
        trained(private, data, background=True)
    assert any("record 17" in note for note in caught.value.__notes__)


def test_images_of_one_size_are_padded_too() -> None:
    def run(**options: Any) -> tuple[dict[str, torch.Tensor], set[int]]:
        model = make_mlp(torch.float64)
        private = make_private(
            model, torch.optim.SGD(model.parameters(), lr=0.1), dataset_size=40,
            expected_batch_size=16, num_steps=6, delta=1e-3, noise_multiplier=1.0, seed=3,
            shuffle="off", physical_batch_size=8,
        )  # fmt: skip
        rows = set()
        for batch in private.batches(vectors(torch.float64), **options):
            losses = mlp_case().loss(model, batch)
            rows.add(len(losses))
            private.backward(losses)
            private.step()
        return weights(model), rows

    (plain, _), (padded, rows) = run(), run(pad_batches=True)
    assert distance(padded, plain) < 1e-12
    assert rows == {8}


def counting(model: nn.Module) -> Callable[[], int]:
    calls = [0]
    model.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    return lambda: calls[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the most frequent row")
def test_fifty_lengths_cost_a_handful_of_forwards_more() -> None:
    private = private_bert(shuffle="off", num_steps=50, expected_batch_size=2, dataset_size=100)
    # Checks at random are left out: they do not depend on lengths.
    private.engine._checks.turns._rate = 0.0
    # Each step has two records of one length, and no two steps the same.
    private.sampler = FixedSampler(*([i, i + 50] for i in range(50)), dataset_size=100)
    forwards = counting(private.model)
    trained(private, TokenRecords([texts(50)[i % 50] for i in range(100)]))
    assert private.steps_taken == 50
    assert 50 <= forwards() <= 90


@pytest.mark.slow
def test_the_loop_resumes_padded_runs_bit_for_bit(tmp_path: Path) -> None:
    def settings(name: str) -> LoopSettings:
        return LoopSettings(
            checkpoint_dir=tmp_path / name, checkpoint_every=2, collate=COLLATE, pad_batches=True
        )

    def started(name: str) -> PrivateTraining:
        return private_bert(ledger_path=tmp_path / f"{name}.jsonl")

    whole = started("whole")
    outcome = train(whole, texts(), losses_of, settings=settings("whole"))
    assert outcome.finished
    assert {"data", "forward and backward", "finalize", "noise", "update", "shuffle", "checks",
            "checkpoints"} <= set(outcome.seconds)  # fmt: skip
    halves = started("halves")
    trained(halves, pad_batches=True, num_steps=2)
    save_checkpoint(halves, tmp_path / "halves")
    resumed = started("halves")
    train(resumed, texts(), losses_of, settings=settings("halves"), resume=True)
    assert distance(weights(resumed.model), weights(whole.model)) == 0
