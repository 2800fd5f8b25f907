"""The paper's route end to end: the specification's reference table, the split, the fallback."""

from __future__ import annotations

import math

import pytest

from shuffled_dpsgd.accounting import calibrate_paper, paper_claim
from shuffled_dpsgd.accounting.paper import amplify, compose, decompose, unamplify
from shuffled_dpsgd.errors import InvalidArgumentError

VIT = {"delta": 5e-6, "sampling_prob": 0.02, "num_steps": 500, "dimension": 85_800_000}
BERT = {
    "delta": 1 / (2 * 67_349),
    "sampling_prob": 1000 / 67_349,
    "num_steps": 204,
    "dimension": 110_000_000,
}
GPT2_LARGE = {
    "delta": 8e-6,
    "sampling_prob": 1000 / 42_043,
    "num_steps": 430,
    "dimension": 838_000_000,
}
# (run, ε, ε_s, δ_s, σ0, σ at c' = c, 10c, 100c)
REFERENCE = [
    (VIT, 0.1, 0.0430, 2.50e-7, 87.1, 0.274, 0.752, 2.352),
    (VIT, 1.0, 0.3604, 2.50e-7, 11.75, 0.273, 0.746, 2.329),
    (BERT, 0.5, 0.3842, 1.23e-6, 10.19, 0.271, 0.741, 2.311),
    (GPT2_LARGE, 0.25, 0.0965, 3.91e-7, 39.73, 0.258, 0.708, 2.213),
]


@pytest.mark.parametrize("row", REFERENCE, ids=["vit-0.1", "vit-1", "bert-0.5", "gpt2-large-0.25"])
def test_reference_table_to_three_digits(row: tuple) -> None:  # type: ignore[type-arg]
    run, epsilon, step_epsilon, inner_delta, unshuffled, *noises = row
    for batch_clip, noise in zip((1.0, 10.0, 100.0), noises, strict=True):
        found = calibrate_paper(epsilon=epsilon, batch_clip=batch_clip, **run)
        assert found.step_epsilon == pytest.approx(step_epsilon, abs=5.1e-5)
        assert found.step_delta == pytest.approx(inner_delta, rel=5e-3)
        assert found.unshuffled_noise_multiplier == pytest.approx(unshuffled, rel=5e-4)
        assert found.noise_multiplier == pytest.approx(noise, abs=5.1e-4)
        assert not found.falls_back
        assert found.claim.kind == "heuristic"
        assert found.claim.inputs["batch_clip"] == batch_clip


@pytest.mark.parametrize("batch_clip", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_epsilon_from_noise_undoes_noise_from_epsilon(epsilon: float, batch_clip: float) -> None:
    found = calibrate_paper(epsilon=epsilon, batch_clip=batch_clip, **VIT)
    claim = paper_claim(noise_multiplier=found.noise_multiplier, batch_clip=batch_clip, **VIT)
    assert claim.epsilon == pytest.approx(epsilon, rel=1e-6)
    assert claim.inputs["step_epsilon"] == pytest.approx(found.step_epsilon, rel=1e-6)


def test_one_dimension_falls_back_to_the_unshuffled_noise() -> None:
    found = calibrate_paper(epsilon=1.0, batch_clip=1.0, **{**VIT, "dimension": 1})
    assert found.falls_back
    assert found.noise_multiplier == found.unshuffled_noise_multiplier


def test_a_large_batch_clip_falls_back_rather_than_add_more_noise_than_plain_training() -> None:
    found = calibrate_paper(epsilon=4.0, batch_clip=1000.0, **VIT)
    assert found.falls_back
    assert found.theorem_noise_multiplier == pytest.approx(found.unshuffled_noise_multiplier)
    assert found.noise_multiplier == found.unshuffled_noise_multiplier
    claim = paper_claim(noise_multiplier=found.noise_multiplier, batch_clip=1000.0, **VIT)
    assert claim.inputs["falls_back"]
    assert claim.epsilon == pytest.approx(4.0, rel=1e-6)


@pytest.mark.parametrize("epsilon", [1e-6, 0.1, 3.0, 40.0, 1e4])
@pytest.mark.parametrize("num_steps", [1, 17, 100_000])
def test_composition_and_sampling_invert(epsilon: float, num_steps: int) -> None:
    step = decompose(epsilon, num_steps, 1e-6)
    assert compose(step, num_steps, 1e-6) == pytest.approx(epsilon, rel=1e-12)
    for prob in (1e-4, 0.02, 1.0):
        assert amplify(unamplify(step, prob), prob) == pytest.approx(step, rel=1e-10)


def test_composition_takes_the_better_of_basic_and_advanced() -> None:
    assert compose(0.01, 2, 1e-6) == 0.02
    advanced = 0.5 * 1e4 * 1e-4 + 0.01 * math.sqrt(2e4 * math.log(1e6))
    assert compose(0.01, 10_000, 1e-6) == pytest.approx(advanced)
    assert calibrate_paper(epsilon=1.0, batch_clip=1.0, **VIT).step_delta == pytest.approx(2.5e-7)


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": math.inf}, "epsilon"),
        ({"delta": 1.0}, "delta"),
        ({"sampling_prob": 1.5}, "sampling_prob"),
        ({"num_steps": 0}, "num_steps"),
        ({"num_steps": 2.5}, "num_steps"),
        ({"dimension": 0}, "dimension"),
        ({"batch_clip": -1.0}, "batch_clip"),
        ({"delta_split": 0.0}, "delta_split"),
        ({"delta_split": 1.0}, "delta_split"),
        ({"delta_split": "best"}, "delta_split"),
        ({"delta": 0.9, "num_steps": 1, "sampling_prob": 0.01}, "delta_split"),
        ({"epsilon": 1e9}, "epsilon"),
        ({"epsilon": 1e-12}, "epsilon"),
    ],
)
def test_impossible_requests_name_the_argument(changes: dict[str, object], argument: str) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        calibrate_paper(**{"epsilon": 1.0, "batch_clip": 1.0, **VIT, **changes})  # type: ignore[arg-type]
    assert refusal.value.argument == argument


def test_the_batch_clip_has_no_default() -> None:
    with pytest.raises(TypeError, match="batch_clip"):
        calibrate_paper(epsilon=1.0, **VIT)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="batch_clip"):
        paper_claim(noise_multiplier=1.0, **VIT)  # type: ignore[call-arg]


def test_no_noise_is_no_privacy() -> None:
    assert paper_claim(noise_multiplier=0.0, batch_clip=1.0, **VIT).epsilon == math.inf
