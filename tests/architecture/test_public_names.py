"""The package's public names resolve, and only they are offered."""

from __future__ import annotations

import pytest

import shuffled_dpsgd


@pytest.mark.parametrize("name", shuffled_dpsgd.__all__)
def test_public_name_resolves(name: str) -> None:
    assert getattr(shuffled_dpsgd, name) is not None
    assert name in dir(shuffled_dpsgd)


def test_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = shuffled_dpsgd.nonsense
