"""Recipes are the settings of committed runs; test_pages.py compares their page with those."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks import digits, parse_config
from shuffled_dpsgd.tasks.recipes import RECIPES
from shuffled_dpsgd_experiments.presets import find_preset

ROOT = Path(__file__).resolve().parents[2]


def config_of(name: str, **given: str) -> Any:
    run = find_preset(name).to_run(**given)
    run["privacy"]["epsilon"] = 3.0
    return parse_config(run)


def test_the_digits_recipe_is_what_train_digits_runs() -> None:
    assert config_of("recipe/digits") == digits.default_config()


def test_the_sst2_recipe_is_what_the_sweep_ran() -> None:
    config = config_of("recipe/sst2-minilm", model="MINILM", data="SST2")
    cells = list((ROOT / "results" / "sst2").glob("main_shuffled-certified_eps8_*.json"))
    assert cells
    for cell in cells:
        ran = json.loads(cell.read_text())["config"]
        for section in ("optimizer", "training"):
            for key, value in ran[section].items():
                assert getattr(getattr(config, section), key) == value, key
        assert config.data.max_length == ran["data"]["max_length"]
        for key in ("delta", "clip_norm", "scope"):
            assert getattr(config.privacy, key) == ran["privacy"][key]
        accounting = config.privacy.accounting or "certified"
        assert accounting == ran["privacy"]["accounting"]
    assert (config.model.name, config.data.path) == ("MINILM", "SST2")


def test_a_recipe_without_a_checkpoint_takes_no_folders() -> None:
    with pytest.raises(InvalidArgumentError, match="brings its own"):
        RECIPES["recipe/digits"].to_run(data="elsewhere")
    assert RECIPES["recipe/sst2-minilm"].to_run()["data"]["source"] == "hub"
