"""Every field of the installed releases has been decided on, and the decision is kept."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest

from shuffled_dpsgd.errors import InvalidArgumentError

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")

from shuffled_dpsgd.integrations import trainer_fields  # noqa: E402
from shuffled_dpsgd.integrations.trainer_fields import decisions, settled  # noqa: E402

KINDS = (transformers.TrainingArguments, trl.SFTConfig, trl.DPOConfig)
# Values that are neither a default nor refused when the arguments are made.
OTHERS: dict[str, Any] = {
    "optim_target_modules": ["q_proj"],
    "max_grad_norm": 0.5,
    "average_tokens_across_devices": 3,
    "train_sampling_strategy": "group_by_length",
    "include_num_input_tokens_seen": "all",
    "dataloader_multiprocessing_context": "spawn",
    "data_seed": 3,
    "neftune_noise_alpha": 5.0,
    "router_aux_loss_coef": 0.1,
    "dataloader_prefetch_factor": 4,
    "liger_kernel_config": {"rope": True},
    "debug": "underflow_overflow",
    "parallelism_config": "tensors",
    "deepspeed": "zero3.json",
    "hub_strategy": "checkpoint",
    "loss_type": "aot",
    "f_divergence_type": "another",
}


def made(kind: Any, folder: Path) -> Any:
    with warnings.catch_warnings(action="ignore"):
        return kind(output_dir=str(folder), use_cpu=True, report_to=[], bf16=False)


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_the_installed_release_is_in_the_table(kind: Any) -> None:
    """A field that a new release brings fails here until it is decided on."""
    unknown = {item.name for item in dataclasses.fields(kind)} - decisions().keys()
    assert not unknown, f"decide on these in trainer_fields.toml: {sorted(unknown)}"


def test_the_table_lists_no_field_that_is_gone() -> None:
    known = {item.name for kind in KINDS for item in dataclasses.fields(kind)}
    assert decisions().keys() <= known
    for name, decision in decisions().items():
        assert decision.word in {"used", "inert", "set", "refused"}, name
        assert bool(decision.remedy) == (decision.word in {"set", "refused"} or bool(decision.only))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_no_default_is_refused(tmp_path: Path, kind: Any) -> None:
    given = made(kind, tmp_path)
    found = settled(given)
    assert (given.max_grad_norm, found.max_grad_norm) == (1.0, 0.0)
    assert found.average_tokens_across_devices is False


def kind_with(name: str) -> Any:
    return next(k for k in KINDS if name in {item.name for item in dataclasses.fields(k)})


LEFT_ALONE = {n for n, each in decisions().items() if each.word in ("used", "inert")}
CHOSEN_FROM = {name for name, each in decisions().items() if each.only}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(decisions().keys() - LEFT_ALONE | CHOSEN_FROM))
def test_what_the_table_refuses_is_refused_by_name(tmp_path: Path, name: str) -> None:
    args = made(kind_with(name), tmp_path)
    setattr(args, name, OTHERS.get(name, True))
    with pytest.raises(InvalidArgumentError, match=f"^{name}: ") as refused:
        settled(args)
    assert decisions()[name].remedy in str(refused.value)


@pytest.mark.filterwarnings("ignore")
def test_a_zero_that_was_typed_is_no_default(tmp_path: Path) -> None:
    args = made(transformers.TrainingArguments, tmp_path)
    args.data_seed = 0
    with pytest.raises(InvalidArgumentError, match="data_seed: expected None, got 0"):
        settled(args)
    args = made(trl.SFTConfig, tmp_path)
    args.router_aux_loss_coef = 0.0
    settled(args)


@pytest.mark.filterwarnings("ignore")
def test_what_the_table_leaves_alone_stays_as_it_was_given(tmp_path: Path) -> None:
    for kind in KINDS:
        args, given = made(kind, tmp_path), {}
        for item in dataclasses.fields(kind):
            if item.name in LEFT_ALONE:
                given[item.name] = decisions()[item.name].only[-1:] or {"another": "value"}
                setattr(args, item.name, given[item.name])
        found = settled(args)
        assert {name: getattr(found, name) for name in given} == given
        assert len(given) > 90


@pytest.mark.filterwarnings("ignore")
def test_a_field_that_nobody_has_decided_on_is_refused_once_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = made(transformers.TrainingArguments, tmp_path)
    known = {name: each for name, each in decisions().items() if name != "weight_decay"}
    monkeypatch.setattr(trainer_fields, "decisions", lambda: known)
    settled(args)
    args.weight_decay = 0.1
    with pytest.raises(InvalidArgumentError, match=r"weight_decay: expected 0\.0"):
        settled(args)


@pytest.mark.filterwarnings("ignore")
def test_fields_of_a_users_own_class_are_the_users(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Mine(transformers.TrainingArguments):  # type: ignore[misc, name-defined]
        task: str = "none"

    settled(Mine(output_dir=str(tmp_path), use_cpu=True, report_to=[], task="another"))
