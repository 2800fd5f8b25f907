"""A loss that mixes samples outside the model is found out on the first backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clipping.compare import assert_exact
from clipping.tiny_models import Inputs, gpt2
from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.errors import UnsupportedModuleError


def apart(outputs: Tensor) -> Tensor:
    return outputs.square().sum(1)


def contrastive(outputs: Tensor) -> Tensor:
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)), reduction="none")


def centred(outputs: Tensor) -> Tensor:
    return (outputs - outputs.mean(0)).square().sum(1)


def paired(outputs: Tensor) -> Tensor:
    return (outputs - outputs.flip(0)).square().sum(1)


def ordered(outputs: Tensor) -> Tensor:
    """Every sample but the first looks at the one before."""
    return torch.cat([outputs[:1], outputs[1:] - outputs[:-1]]).square().sum(1)


def one_odd_pair(outputs: Tensor) -> Tensor:
    return apart(outputs) * torch.cat([outputs.new_ones(3), outputs[1:2, 0]])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def batch(size: int = 4) -> Tensor:
    return torch.randn(size, 5, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("loss", [contrastive, centred, paired, ordered, one_odd_pair])
@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost"])
def test_losses_that_mix_samples_are_refused(
    loss: Callable[[Tensor], Tensor], strategy: str
) -> None:
    engine = ClippingEngine(model(), strategy=strategy)
    with engine:
        losses = loss(engine.model(batch()))
        with pytest.raises(UnsupportedModuleError, match="that sample alone"):
            engine.backward(losses)
    assert not engine.sample_norms.numel()


def test_a_batch_of_one_shows_nothing_and_settles_nothing() -> None:
    engine = ClippingEngine(model())
    with engine:
        engine.backward(centred(engine.model(batch(1))))
        losses = centred(engine.model(batch()))
        with pytest.raises(UnsupportedModuleError, match="that sample alone"):
            engine.backward(losses)


@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost", "mixed", "instantiate"])
def test_looking_changes_nothing(strategy: str) -> None:
    def losses(model: nn.Module, inputs: Inputs) -> Tensor:
        return apart(model(inputs["x"]))

    assert_exact(model().double(), losses, {"x": batch().double()}, strategy=strategy)


def test_broken_samples_are_not_taken_for_mixing() -> None:
    x = batch()
    x[2] = float("inf")
    engine = ClippingEngine(model())
    with engine:
        engine.backward(apart(engine.model(x)))
    assert engine.num_nonfinite == 1


class WithHidden(nn.Module):
    """Returns what it computed half way too, as models with an encoder do."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.encoder(x))
        return checkpoint(self.decoder, hidden, use_reentrant=False), hidden


def test_the_way_back_ends_at_the_outputs_and_does_not_compute_checkpoints_again() -> None:
    def losses(model: nn.Module, inputs: Inputs) -> Tensor:
        return apart(model(inputs["x"])[0])

    assert_exact(WithHidden().double(), losses, {"x": batch().double()})


@pytest.mark.parametrize("which", [0, 1])
def test_every_output_that_the_loss_uses_is_looked_at(which: int) -> None:
    engine = ClippingEngine(WithHidden())
    with engine, pytest.raises(UnsupportedModuleError, match="that sample alone"):
        engine.backward(centred(engine.model(batch())[which]))


def test_a_number_computed_from_all_samples_is_no_part_of_a_sample_s_loss() -> None:
    """A mixture of experts returns one that balances them over the batch."""

    class Balance(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x.softmax(1).mean(0).square().sum()

    def losses(model: nn.Module, inputs: Inputs) -> Tensor:
        return apart(model(inputs["x"])[0])

    balanced = nn.Sequential(model(), Balance()).double()
    assert_exact(balanced, losses, {"x": batch().double()})
    engine = ClippingEngine(balanced)
    with engine:
        outputs, balance = engine.model(batch().double())
        with pytest.raises(UnsupportedModuleError, match="from all samples"):
            engine.backward(apart(outputs) + balance)


def language_batch(lengths: tuple[int, int]) -> Inputs:
    ids = torch.randint(1, 12, (2, 7), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    for sample, length in enumerate(lengths):
        labels[sample, length:] = -100
    return {"input_ids": ids, "labels": labels}


def test_a_mean_over_the_tokens_of_a_batch_is_refused_where_lengths_differ() -> None:
    """Hugging Face's own loss: a longer sample would take weight from all the others."""
    engine = ClippingEngine(gpt2().model, loss_reduction="mean")
    with engine:
        engine.model(**language_batch((7, 4))).loss.backward()
        with pytest.raises(UnsupportedModuleError, match="whatever the others are"):
            engine.clipped_sum()
    engine = ClippingEngine(gpt2().model, loss_reduction="mean")
    with engine:
        engine.model(**language_batch((5, 5))).loss.backward()
    assert engine.sample_norms.shape == (2,)


def test_a_mean_over_tokens_is_refused_when_lengths_come_to_differ() -> None:
    model = gpt2().model
    engine = ClippingEngine(model, loss_reduction="mean")
    with engine:
        for _ in range(2):
            model(**language_batch((5, 5))).loss.backward()
        model(**language_batch((7, 4))).loss.backward()
        with pytest.raises(UnsupportedModuleError, match="whatever the others are"):
            engine.clipped_sum()
        # Nothing of what was refused is kept.
        model(**language_batch((6, 6))).loss.backward()
    assert engine.sample_norms.shape == (2,)


def test_a_mean_of_means_may_be_of_any_lengths_once_it_has_been_seen() -> None:
    class MeanOfMeans(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = gpt2().model

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            logits = self.body(input_ids).logits[:, :-1].mT
            tokens = nn.functional.cross_entropy(logits, labels[:, 1:], reduction="none")
            return (tokens.sum(1) / (labels[:, 1:] != -100).sum(1)).mean()

    engine = ClippingEngine(MeanOfMeans(), loss_reduction="mean")
    with engine:
        for lengths in ((7, 4), (5, 5), (3, 6)):
            engine.model(**language_batch(lengths)).backward()
    assert engine.sample_norms.shape == (6,)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", [(7, 4), (5, 5)])
def test_a_mean_over_tokens_of_a_compiled_model(first: tuple[int, int]) -> None:
    torch._dynamo.reset()
    case = gpt2()
    compiled = torch.compile(case.model, backend="eager")
    engine = ClippingEngine(case.model, loss_reduction="mean")
    with engine:
        if first == (5, 5):
            compiled(**language_batch(first)).loss.backward()
            assert engine.sample_norms.shape == (2,)
        compiled(**language_batch((7, 4))).loss.backward()
        with pytest.raises(UnsupportedModuleError, match="whatever the others are"):
            engine.clipped_sum()
    engine = ClippingEngine(case.model, loss_reduction="mean")
    with engine:
        # With a loss for each sample it cannot be that one.
        engine.backward(compiled(**language_batch((7, 4))).logits.square().sum((1, 2)))
    assert engine.sample_norms.shape == (2,)


def test_an_unused_mean_over_tokens_is_nobody_s_business() -> None:
    case = gpt2().to(torch.float64)
    assert_exact(case.model, case.losses, language_batch((7, 4)))
