"""A run's configuration: every key checked, contradictions refused, files and JSON alike."""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.options.methods import OPEN
from shuffled_dpsgd.tasks import RunConfig, load_config, parse_config
from shuffled_dpsgd.tasks.config import SECTIONS, ModelConfig
from shuffled_dpsgd.tasks.digits import default_config

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "configs"
MINIMAL = """
task = "text-classification"
seed = 3
[model]
name = "bert-tiny"
[data]
format = "sst2"
path = "sst2"
[privacy]
epsilon = 3
delta = 1e-5
clip_norm = 0.1
[training]
expected_batch_size = 8
epochs = 2
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_a_file_is_read_with_folders_relative_to_it(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL))
    assert config.task == "text-classification"
    assert config.privacy.epsilon == 3.0
    assert isinstance(config.privacy.epsilon, float)
    assert config.data.path == str(tmp_path / "sst2")
    assert config.optimizer.name == "adamw"
    assert config.seed == 3


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_example_files_parse(path: Path) -> None:
    config = load_config(path)
    assert config.privacy.epsilon is not None
    assert config.seed is None


def test_the_documents_state_every_key_with_its_default() -> None:
    page = (EXAMPLES.parents[1] / "docs" / "training_cli.md").read_text(encoding="utf-8")
    for name, kind in SECTIONS.items():
        if name == "generation":
            continue  # docs/generation.md
        listed = page.split(f"\n[{name}]\n")[1].split("\n\n")[0].splitlines()
        found = [re.match(r"(\w+) = (\S+)", line) for line in listed]
        stated = {each[1]: each[2] for each in found if each is not None}
        defaults = {item.name: item.default for item in fields(kind)} | (
            OPEN if name == "privacy" else {}
        )
        assert stated == {key: written(default) for key, default in defaults.items()}


def written(default: Any) -> str:
    """A default as the listing has it."""
    if default is MISSING:
        return "…"
    if default is None:
        return "none"
    if default == ():
        return "[]"
    return "1e-3" if default == 1e-3 else json.dumps(default)


def test_there_are_example_files() -> None:
    assert len(list(EXAMPLES.glob("*.toml"))) >= 3


def test_json_round_trip() -> None:
    for config in (default_config(), parse_config(default_config().to_json() | {"seed": 5})):
        assert parse_config(config.to_json()) == config


def test_a_misspelt_task_is_named_before_what_is_missing() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^task: .* did you mean `sft`"):
        parse_config({"task": "sftt"})


def test_what_leaves_the_folder_has_no_seed() -> None:
    assert default_config().seed is not None
    assert "seed" not in default_config().without_seed()


@pytest.mark.parametrize(
    ("section", "key", "value", "match"),
    [
        ("privacy", "epsilom", 1.0, "did you mean `epsilon`"),
        ("privacy", "accounting", "gdp", "accounting"),
        ("privacy", "method", "dpsgd", "method"),
        ("privacy", "noise_frame", "permuted", "noise_frame"),
        ("privacy", "clip_norm", "one", "clip_norm"),
        ("privacy", "noise_multiplier", 1.0, "exactly one of epsilon"),
        ("privacy", "accounting", "paper", "batch_clip_norm"),
        ("privacy", "delta", 0.0, r"privacy\.delta: expected a number in"),
        ("privacy", "epsilon", -1.0, r"privacy\.epsilon: expected a positive"),
        ("privacy", "clip_norm", 0.0, r"privacy\.clip_norm: expected a positive"),
        ("privacy", "batch_clip_norm", -1.0, r"privacy\.batch_clip_norm"),
        ("training", "expected_batch_size", 0, r"training\.expected_batch_size"),
        ("training", "num_steps", 10, "exactly one of epochs"),
        ("training", "epochs", True, "epochs"),
        ("training", "epochs", 1.5, "epochs"),
        ("data", "text_columns", "sentence", "list of strings"),
        ("model", "names", "x", "did you mean `name`"),
        ("privacy", "max_grad_norm", 1.0, "max_grad_norm is clip_norm"),
    ],
)
def test_bad_values_are_refused_by_name(section: str, key: str, value: Any, match: str) -> None:
    raw = default_config().to_json()
    raw[section][key] = value
    with pytest.raises(InvalidArgumentError, match=match):
        parse_config(raw)


def test_missing_values_are_named() -> None:
    raw = default_config().to_json()
    del raw["privacy"]["delta"]
    with pytest.raises(InvalidArgumentError, match=r"privacy\.delta.*\[privacy\]"):
        parse_config(raw)
    with pytest.raises(InvalidArgumentError, match="task"):
        parse_config(
            {key: value for key, value in default_config().to_json().items() if key != "task"}
        )


def test_unknown_sections_and_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="privcy"):
        parse_config(default_config().to_json() | {"privcy": {}})
    with pytest.raises(InvalidArgumentError, match="TOML"):
        load_config(write(tmp_path, "task = ["))
    with pytest.raises(InvalidArgumentError, match="a TOML file"):
        load_config(tmp_path / "absent.toml")
    with pytest.raises(InvalidArgumentError, match="a table"):
        parse_config(default_config().to_json() | {"privacy": 3})


def test_without_a_seed_noise_is_not_repeatable_but_weights_are() -> None:
    raw = default_config().without_seed()
    config: RunConfig = parse_config(raw)
    assert config.seed is None
    assert config.init_seed == 0


def test_all_missing_values_are_named_at_once() -> None:
    raw = {"task": "digits", "privacy": {"epsilon": 1.0}, "training": {}}
    with pytest.raises(InvalidArgumentError) as found:
        parse_config(raw)
    for line in ("`name = …` under [model]", "`format = …` under [data]", "`delta = …`"):
        assert line in str(found.value)
    assert found.value.argument == "model.name"


def test_no_clip_norm_is_missing_from_a_run_without_privacy() -> None:
    raw = {"task": "digits", "privacy": {"method": "non-private"}}
    with pytest.raises(InvalidArgumentError) as found:
        parse_config(raw)
    assert "clip_norm" not in str(found.value)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("gpt2", "gpt2"),
        ("google/vit-base-patch16-224", "google/vit-base-patch16-224"),
        ("sweeps/../models/MiniLM", "MiniLM"),
        ("/no/such/folder/MiniLM", "MiniLM"),
    ],
)
def test_a_model_in_a_folder_is_called_like_it_whether_it_is_there_or_not(
    name: str, given: str
) -> None:
    assert ModelConfig(name=name).given_name == given
