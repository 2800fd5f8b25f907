"""The average of weights: what it is, that it is what is saved, and that a resumed run keeps it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks import digits, execute, parse_config, prepare
from shuffled_dpsgd.tasks.averaging import WeightAverage
from shuffled_dpsgd.tasks.config import RunConfig


def config(*, averaging: float = 0.9) -> RunConfig:
    raw = digits.default_config().to_json()
    raw["privacy"] = {"method": "certified", "epsilon": 3.0, "delta": 1e-4, "clip_norm": 1.0}
    raw["training"] = {
        "expected_batch_size": 200,
        "num_steps": 3,
        "weight_averaging": averaging,
        "device": "cpu",
    }
    return parse_config(raw)


def test_the_average_follows_closely_at_first_and_slowly_later() -> None:
    model = torch.nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        model.weight.fill_(0.0)
    average = WeightAverage(model, decay=0.5)
    expected = 0.0
    for step, value in enumerate((1.0, 5.0, 2.0), start=1):
        with torch.no_grad():
            model.weight.fill_(value)
        average.update(model)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * value
        assert average.weights["weight"].item() == pytest.approx(expected, abs=1e-15)
    with average.standing_in(model):
        assert model.weight.item() == pytest.approx(expected, abs=1e-15)
    assert model.weight.item() == 2.0
    other = WeightAverage(torch.nn.Linear(1, 1, bias=False).double(), decay=0.5)
    other.load_state_dict(average.state_dict())
    assert other.state_dict()["steps"] == 3
    assert torch.equal(other.weights["weight"], average.weights["weight"])


@pytest.mark.slow
def test_the_average_is_scored_and_saved(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    transformers = pytest.importorskip("transformers")
    run = prepare(config(), tmp_path / "run")
    result = execute(run)
    model = run.task.model
    saved = transformers.ViTForImageClassification.from_pretrained(tmp_path / "run" / "model")
    for name, value in saved.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    assert result.summary["heldout_score"] == pytest.approx(run.task.evaluate(model).score)
    # The same run without an average, followed by hand.
    plain = prepare(config(averaging=0.0), tmp_path / "plain")
    average = WeightAverage(plain.task.model, decay=0.9)
    execute(plain, observers=(lambda *_: average.update(plain.task.model),))
    for name, value in average.weights.items():
        assert torch.equal(value, model.get_parameter(name)), name
    assert not torch.equal(next(model.parameters()), next(plain.task.model.parameters()))


def test_a_shuffle_and_an_average_contradict() -> None:
    good = config()
    with pytest.raises(InvalidArgumentError, match="weight_averaging"):
        replace(good, privacy=replace(good.privacy, method=None, shuffle="every-step"))
