"""A model that changed is noticed, whatever changed, and is not kept alive by being watched."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from shuffled_dpsgd.runtime.structure import Structure


def make_model() -> Any:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh()))


def test_an_unchanged_model_fits() -> None:
    model = make_model()
    structure = Structure(model)
    assert structure.fits(model)
    assert structure.find_change() is None
    assert not structure.fits(make_model())


def replace_parameter(model: Any) -> None:
    model[1][0].weight = nn.Parameter(model[1][0].weight.detach().clone())


def replace_module(model: Any) -> None:
    model[1][0] = nn.Linear(2, 2, bias=False)


def replace_module_without_parameters(model: Any) -> None:
    model[1][1] = nn.Tanh()


def add_module(model: Any) -> None:
    model[1].extra = nn.Identity()


def drop_parameter(model: Any) -> None:
    model[0].bias = None


def swap_modules(model: Any) -> None:
    model[0], model[1] = model[1], model[0]


def replace_the_dictionary(model: Any) -> None:
    model[0]._parameters = {"weight": nn.Parameter(model[0].weight.detach())}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (replace_parameter, "1.0.weight"),
        (replace_module, "1.0.weight"),
        (replace_module_without_parameters, "1.1"),
        (add_module, "1.extra"),
        (drop_parameter, "0.bias"),
        (swap_modules, "0"),
        (replace_the_dictionary, "0.weight"),
    ],
)
def test_a_change_is_found_and_named(change: Callable[[Any], None], name: str) -> None:
    model = make_model()
    structure = Structure(model)
    change(model)
    assert not structure.fits(model)
    found = structure.find_change()
    assert found is not None
    assert found.name == name


def test_a_watched_model_can_die() -> None:
    model = make_model()
    model.itself = [model]
    structure, alive = Structure(model), weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    assert structure.find_change() is None
