"""Training methods by name: what each decides of the options that were left open.

A method is a name for a choice of options, and all of them can be stated without it. Options that
are given are used if the method allows them, and refused if they contradict it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from shuffled_dpsgd.errors import InvalidArgumentError, require

Method = Literal["shuffled", "mixopt", "ghost", "opacus", "certified", "non-private"]
OPEN: Mapping[str, str] = MappingProxyType(
    {"accounting": "certified", "shuffle": "auto", "scope": "full", "strategy": "bookkeeping"}
)
"""Options that may be left open, with their values where no method is named."""

_USUAL_CLIP = 1.0  # That of `Budget`, which cannot be told from a clip that was given.


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What one method allows, by option; the first value is taken where none is given."""

    summary: str
    allowed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_BASELINE = {"accounting": ("rdp", "certified"), "shuffle": ("off",)}
METHODS: Mapping[str, Choices] = MappingProxyType(
    {
        "shuffled": Choices(
            summary="Algorithm 1 of the paper: its own noise (heuristic) and a shuffle every step",
            allowed={
                "accounting": ("paper", "certified"),
                "shuffle": ("every-step", "at-release"),
            },
        ),
        "mixopt": Choices(
            summary="DP-SGD, clipped by the cheaper of two ways per layer; noise by Rényi DP",
            allowed={**_BASELINE, "strategy": ("mixed",)},
        ),
        "ghost": Choices(
            summary="DP-SGD with ghost clipping, norms by Gram matrices; noise by Rényi DP",
            allowed={**_BASELINE, "strategy": ("ghost",)},
        ),
        "opacus": Choices(
            summary="DP-SGD whose samples' gradients Opacus computes and clips; noise by Rényi DP",
            allowed={**_BASELINE, "strategy": ("instantiate",)},
        ),
        "certified": Choices(
            summary="DP-SGD with the least noise that is proven; the shuffle, which buys nothing "
            "proven, is off",
            allowed={"accounting": ("certified",), "shuffle": ("off",)},
        ),
        "non-private": Choices(
            summary="no clip, no noise, no shuffle, and no claim",
            allowed={"shuffle": ("off",), "strategy": ("bookkeeping",)},
        ),
    }
)


def settle(method: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """A value for every open option: the given one, else the method's, else the usual one.

    >>> settle("mixopt", {"accounting": "certified"})
    {'accounting': 'certified', 'shuffle': 'off', 'scope': 'paper', 'strategy': 'mixed'}

    Raises:
        InvalidArgumentError: a given value contradicts the method.
    """
    allowed = METHODS[method].allowed if method is not None else {}
    found: dict[str, Any] = {}
    for name, usual in OPEN.items():
        if name == "shuffle" and _needs_a_shuffle(given):
            usual = "every-step"
        if name == "scope" and found["shuffle"] != "auto":
            usual = "paper"
        value = given.get(name)
        choices = allowed.get(name, ())
        if value is not None and choices and value not in choices:
            raise InvalidArgumentError(
                name,
                expected=f"{' or '.join(choices)} with method={method!r}",
                got=value,
                remedy="leave it out, or leave the method out and state every option",
            )
        found[name] = value if value is not None else (choices or (usual,))[0]
    if allowed and found["shuffle"] == "off" and given.get("batch_clip_norm") is not None:
        raise InvalidArgumentError(
            "batch_clip_norm",
            expected=f"nothing with method={method!r}, which clips samples only",
            got=given["batch_clip_norm"],
        )
    return found


def _needs_a_shuffle(given: Mapping[str, Any]) -> bool:
    """Whether something else that was asked for makes no sense where nothing moves."""
    return (
        given.get("accounting") == "paper"
        or given.get("batch_clip_norm") is not None
        or given.get("noise_frame") == "unshuffled"
    )


def without_privacy(given: Mapping[str, Any]) -> dict[str, Any]:
    """Noise and clip of the method `non-private`; refuses what only a private run has."""
    neutral: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(("epsilon", "unshuffled_noise_multiplier", "budget"), (None,)),
        "noise_multiplier": (None, 0),
        "clip_norm": (None, _USUAL_CLIP, math.inf),
    }
    for name, values in neutral.items():
        require(
            given.get(name) in values, name, "nothing with method='non-private'", given.get(name)
        )
    return {"noise_multiplier": 0.0, "clip_norm": math.inf}
