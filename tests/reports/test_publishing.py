"""Records for others hold certified claims only; a broken card or record is found."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from reports.registry import check_record
from shuffled_dpsgd.errors import InvalidArgumentError, ShuffledDPError
from shuffled_dpsgd.reports import publishing
from shuffled_dpsgd.reports.publishing import TO_FILL
from shuffled_dpsgd.training import AuditedBound, PrivacyCard, PrivacyOptions, make_plan, write_card
from shuffled_dpsgd.training.saved_card import card_from_json

SCHEMA = Path(__file__).resolve().parents[3] / "shared/data/registry/deployments-schema.yaml"
OPTIONAL = {"data_product_sector"}
SUBJECT = {"model": "tiny BERT", "data": "films", "date": "2026-11-19", "unit": "one row"}
Path_ = tuple[Any, ...]


def made_card(**changes: Any) -> PrivacyCard:
    settings: dict[str, Any] = {
        "dataset_size": 1000,
        "expected_batch_size": 100,
        "num_steps": 10,
        "delta": 1e-5,
        "epsilon": 3.0,
    }
    plan = make_plan(PrivacyOptions(**(settings | changes)), sizes={"a": 9}, moved=frozenset("a"))
    return write_card(plan, num_steps=10).about(**SUBJECT)


@pytest.fixture(scope="module")
def made() -> PrivacyCard:
    return made_card()


@pytest.fixture(scope="module")
def record(made: PrivacyCard) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(publishing.registry_yaml(made))
    return found


def leaves(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """The places of all fields that hold no others."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    else:
        yield path


def changed(data: dict[str, Any], path: Path_, value: Any) -> dict[str, Any]:
    """The data with another value there; without the field if it is Ellipsis."""
    found = copy.deepcopy(data)
    table: Any = found
    for key in path[:-1]:
        table = table[key]
    if value is ...:
        del table[path[-1]]
    else:
        table[path[-1]] = value
    return found


def test_the_record_is_a_draft_at_tier_3_of_the_certified_claim(
    made: PrivacyCard, record: dict[str, Any]
) -> None:
    assert (record["status"], record["tier"]) == ("Draft", 3)
    assert made.certified is not None
    loss = record["deployment"]["privacy_loss"]["privacy_parameters"]
    assert loss == {"epsilon": made.certified.epsilon, "delta": 1e-5}
    for place in ("data_curators", "intended_use", "data_product_region"):
        assert TO_FILL in str(record["deployment"]["basic"][place])


def test_the_record_fits_the_published_schema(record: dict[str, Any]) -> None:
    if not SCHEMA.is_file():
        pytest.skip("the registry's schema is not at hand")
    import jsonschema

    schema = yaml.safe_load(SCHEMA.read_text())
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    assert list(validator.iter_errors(record)) == []
    sections = schema["properties"]["deployment"]["properties"]
    ours = record["deployment"]
    for name, section in sections.items():
        # Free fields for more detail are not asked for at any tier.
        asked = {key for key, of in section["properties"].items() if "tier" in of}
        assert asked - OPTIONAL <= ours[name].keys(), name
    for path in leaves(record):
        if path[-1] in ("status", "tier", "model_name", "publication_date"):
            broken = changed(record, path, "something else")
            assert list(validator.iter_errors(broken)) != []


def test_a_card_about_no_day_is_refused(made: PrivacyCard) -> None:
    with pytest.raises(InvalidArgumentError, match="YYYY-MM-DD"):
        publishing.registry_yaml(made.about(date="yesterday"))


@pytest.mark.parametrize("name", ["model", "data", "unit", "date"])
def test_a_field_with_nothing_in_it_is_refused(made: PrivacyCard, name: str) -> None:
    for write in (publishing.registry_yaml, publishing.nist_checklist, publishing.model_card):
        with pytest.raises(InvalidArgumentError, match=f"subject.{name}: expected something"):
            write(made.about(**{name: " "}))


def test_a_run_that_draws_units_is_about_units() -> None:
    card = replace(made_card(records_per_unit=3, unit="person"), subject={"model": "m"})
    found = yaml.safe_load(publishing.registry_yaml(card))["deployment"]
    loss = found["privacy_loss"]
    assert loss["privacy_unit"] == "one unit"
    units = "one unit, with all of its records, is added or removed"
    assert f"Adjacent data sets: {units}." in loss["privacy_unit_details"]
    assert "collection of units" in found["dp_variant"]["data_domain"]
    sheet = publishing.nist_checklist(card)
    assert f"[x] **neighbouring data sets**: {units}" in sheet
    assert "one row" not in sheet + loss["privacy_unit_details"]


def test_every_broken_field_of_a_record_is_found(record: dict[str, Any]) -> None:
    assert check_record(record) == record
    places = list(leaves(record))
    assert len(places) > 30
    for path in places:
        for value in (..., None, "", [], {}, True):
            with pytest.raises(InvalidArgumentError, match=str(path[-1])):
                check_record(changed(record, path, value))
        with pytest.raises(InvalidArgumentError, match="surplus"):
            check_record(changed(record, (*path[:-1], "surplus"), "x"))
    choices = ("status", "variant_name", "model_name", "release_type", "publication_date")
    for path in places:
        if path[-1] in choices:
            with pytest.raises(InvalidArgumentError, match=str(path[-1])):
                check_record(changed(record, path, "Unheard of"))
    loss = ("deployment", "privacy_loss", "privacy_parameters")
    for name, value in (("epsilon", -1.0), ("epsilon", float("inf")), ("delta", 1.0)):
        with pytest.raises(InvalidArgumentError, match=f"{'.'.join(loss)}.{name}"):
            check_record(changed(record, (*loss, name), value))


def test_a_saved_card_reads_back_as_it_was(made: PrivacyCard) -> None:
    bound = AuditedBound(
        adversary="one run", estimator="CP", epsilon=0.5, delta=1e-5, confidence=0.95
    )
    settings: list[dict[str, Any]] = [
        {"batch_clip_norm": 1.0, "seed": 1},
        {"noise": "banded", "bands": 2},
        {"largest_batch": 150, "clip_quantile": 0.5},
        {"records_per_unit": 2, "unit": "person", "adjacency": "replace-one"},
    ]
    given = (made_card(epsilon=None, noise_multiplier=1.0, **each) for each in settings)
    paper = made_card(accounting="paper", batch_clip_norm=1.0)
    for card in (made, paper, made.with_audits(bound), *given):
        assert card_from_json(json.loads(card.dumps())) == card
    uncertified = made_card(epsilon=None, noise_multiplier=0.0)
    assert uncertified.certified is None
    assert card_from_json(json.loads(uncertified.dumps())).to_json() == uncertified.to_json()


def test_every_broken_field_of_a_card_is_found(made: PrivacyCard) -> None:
    data = json.loads(made.dumps())
    for key in data:
        with pytest.raises((ValueError, KeyError, TypeError)):
            card_from_json(changed(data, (key,), ...))
    derived = ("certified", "meaning", "verdicts", "assumptions", "not_covered", "threat_model")
    broken = [changed(data, (key,), type(data[key])()) for key in derived]
    claim = ("certified", "inputs")
    lower = json.loads(json.dumps(data).replace(str(data["certified"]["epsilon"]), "0.5"))
    broken += [
        lower,
        changed(data, ("certified", "epsilon"), 0.5),
        changed(data, ("certified", "delta"), 1e-3),
        changed(data, ("certified", "kind"), "heuristic"),
        changed(data, ("certified", "assumptions"), data["certified"]["assumptions"][1:]),
        changed(data, (*claim, "noise_multiplier"), 9.0),
        changed(data, (*claim, "num_steps"), 1),
        changed(data, ("meaning", "attacker", "advantage"), 0.01),
        changed(data, ("private",), False),
        changed(data, ("why_not_certified",), ["a reason"]),
        changed(data, ("not_covered",), data["not_covered"][1:]),
        changed(data, ("surplus",), 1),
        changed(data, ("certified", "method"), "exact, audited"),
        changed(data, ("certified_so_far",), data["certified"]),
        changed(data, ("mechanism", 1), data["mechanism"][1].replace("multiplier", "multiplier 9")),
        changed(data, ("sampler",), data["sampler"].replace("record", "unit")),
        changed(data, ("randomness",), "keyed by the operating system"),
        changed(data, ("exactness",), "verified"),
        changed(data, ("target",), "ε = 1 (proven)"),
        changed(data, ("paper", "epsilon"), 0.001),
        changed(data, ("steps_released",), 800),
        changed(data, ("steps_released",), 5),
        changed(data, ("steps_planned",), 80),
        changed(data, ("checks", "sums"), 10**6),
        changed(data, ("checks", "not_made"), 1),
        changed(data, ("plan", "secure"), False),
        changed(data, ("plan", "records_per_unit"), 3),
        changed(data, ("plan", "adjacency"), "replace-one"),
        changed(data, ("plan", "dataset_size"), 10**6),
        changed(data, ("plan", "blocks", 0, "noise_multiplier"), 9.0),
    ]
    for each in broken:
        assert each != data
        with pytest.raises((ValueError, KeyError, TypeError)):
            card_from_json(each)
    # Caveats may be added by whoever publishes; none may go.
    more = changed(data, ("not_covered",), [*data["not_covered"], "another release"])
    assert card_from_json(more).not_covered[-1] == "another release"


@pytest.mark.parametrize(
    "write", [publishing.registry_yaml, publishing.nist_checklist, publishing.model_card]
)
def test_only_certified_claims_enter(made: PrivacyCard, write: Any) -> None:
    bound = AuditedBound(
        adversary="one run", estimator="CP", epsilon=0.5, delta=1e-5, confidence=0.95
    )
    audited = made.with_audits(bound)
    text = write(audited)
    assert "(proven)" in text
    for word in ("heuristic", "measured", "theorem", "one run,"):
        assert word not in text
    # Noise that was calibrated by the paper's formula is priced as any other.
    paper = made_card(accounting="paper", batch_clip_norm=1.0, epsilon=8.0)
    assert paper.certified is not None
    assert f"{paper.certified.epsilon:.4g}" in write(paper)
    assert "heuristic" not in write(paper)
    for card, why in (
        (made_card(epsilon=None, noise_multiplier=0.0), "no certified ε"),
        (replace(made, steps_released=0), "no step"),
        (made.with_audits(replace(bound, epsilon=9.0)), "refuted"),
        (made.about(**{"not about": "the weights it has now"}), "not about the weights"),
    ):
        with pytest.raises(ShuffledDPError, match=why):
            write(card)


def test_the_privacy_block_is_for_machines(made: PrivacyCard) -> None:
    front = yaml.safe_load(publishing.model_card(made).split("---\n")[1])
    assert "differential-privacy" in front["tags"]
    block = front["differential_privacy"]
    assert made.certified is not None
    assert (block["kind"], block["epsilon"]) == ("proven", made.certified.epsilon)
    assert block["noise_multiplier"] == made.certified.inputs["noise_multiplier"]


def test_the_checklist_ticks_only_what_the_run_answers(made: PrivacyCard) -> None:
    seeded, secure = (publishing.nist_checklist(made_card(seed=seed)) for seed in (3, None))
    assert "[ ] **randomness**" in seeded
    assert "[x] **randomness**" in secure
    assert "[ ] **correctness watched**" in secure
    watched = replace(made, checks=replace(made.checks, releases=10, sums=3))
    assert "[x] **correctness watched**" in publishing.nist_checklist(watched)
    untried = replace(watched, use_assumptions=(*watched.use_assumptions, "not checked: the loss"))
    sheet = publishing.nist_checklist(untried)
    assert "[ ] **correctness watched**: compared" in sheet
    assert "; not checked: the loss" in sheet
    assert "other releases of the same data**: the training data influence" in sheet
    assert "settings chosen without the data**: hyper-parameter search" in sheet
    assert "what else must not be published**: training metrics" in sheet
    large = publishing.nist_checklist(made_card(delta=1e-2))
    assert "[ ] **δ below" in large
    assert "[x] **δ below" in secure
