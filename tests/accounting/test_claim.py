"""No ε leaves the room without its kind."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import pickle

import pytest

from shuffled_dpsgd import accounting
from shuffled_dpsgd.accounting import PrivacyClaim, certified_claim
from shuffled_dpsgd.errors import InvalidArgumentError


def make(**changes: object) -> PrivacyClaim:
    facts = {"epsilon": 1.5, "delta": 1e-5, "method": "PLD", "kind": "proven"} | changes
    return PrivacyClaim(**facts)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["proven", "heuristic", "measured"])
def test_every_text_and_every_json_shows_the_kind(kind: str) -> None:
    claim = make(kind=kind)
    assert f"({kind})" in claim.describe()
    assert claim.to_json()["kind"] == kind


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"kind": "certain"}, "kind"),
        ({"epsilon": -0.1}, "epsilon"),
        ({"epsilon": math.nan}, "epsilon"),
        ({"delta": 1.0}, "delta"),
    ],
)
def test_a_claim_that_claims_nonsense_is_refused(changes: dict[str, object], argument: str) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        make(**changes)
    assert refusal.value.argument == argument


def test_a_claim_cannot_be_edited_after_the_fact() -> None:
    claim = make(inputs={"num_steps": 3})
    with pytest.raises(dataclasses.FrozenInstanceError):
        claim.epsilon = 0.1  # type: ignore[misc]
    with pytest.raises(TypeError):
        claim.inputs["num_steps"] = 4  # type: ignore[index]


def test_nothing_exported_returns_a_bare_number_but_noise() -> None:
    functions = {name: getattr(accounting, name) for name in accounting.__all__}
    returns = {
        name: function.__annotations__["return"]
        for name, function in functions.items()
        if inspect.isfunction(function)
    }
    assert len(returns) >= 10
    assert [name for name, kind in returns.items() if "float" in kind] == []
    for name in ("PrivacyClaim", "Bracket", "Meaning"):
        assert "kind" in {field.name for field in dataclasses.fields(functions[name])}


def test_an_infinite_epsilon_is_never_called_proven() -> None:
    nothing = PrivacyClaim(epsilon=math.inf, delta=1e-5, method="PLD", kind="proven")
    assert str(nothing) == "no ε is proven at δ = 1e-05 by PLD"
    assert f"{nothing:.3g}" == "no ε is proven"


def test_a_claim_survives_json_and_pickle() -> None:
    claim = certified_claim(noise_multiplier=2.0, sampling_prob=0.1, num_steps=10, delta=1e-5)
    assert PrivacyClaim.from_json(json.loads(json.dumps(claim.to_json()))) == claim
    assert pickle.loads(pickle.dumps(claim)) == claim
