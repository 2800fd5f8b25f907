"""From options to a privacy plan: calibrates the noise and divides the parameters into blocks.

There are three ways to calibrate. `certified` finds one noise multiplier by privacy-loss
distributions for all parameters; `rdp` does so by Rényi DP, which needs more noise. `paper` is
Algorithm 1's own formula (heuristic): sigma for the shuffled block, sigma_0 for the rest, and
sigma_0 everywhere if sigma is not smaller.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from shuffled_dpsgd.accounting import calibrate_certified, calibrate_paper, calibrate_rdp
from shuffled_dpsgd.accounting.banded import Rows, banded_noise, best_banded, best_rows
from shuffled_dpsgd.core.plan import NoiseBlock, PrivacyPlan
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.options import PrivacyOptions, options_in
from shuffled_dpsgd.training.moving_clip import COORDINATE


def make_plan(
    options: PrivacyOptions, *, sizes: Mapping[str, int], moved: frozenset[str]
) -> PrivacyPlan:
    """Calibrate and freeze.

    `sizes` maps every trainable parameter to its number of coordinates, `moved` names those a
    permutation moves. Under `shuffle="auto"` they decide whether there is a shuffle.
    """
    if options.shuffle == "auto":
        options = replace(options, shuffle="off" if moved.isdisjoint(sizes) else "every-step")
    shuffled = tuple(name for name in sizes if name in moved) if options.needs_blocks else ()
    if options.needs_blocks and not shuffled:
        wider = "" if options.scope == "full" else ", or scope='full'"
        raise InvalidArgumentError(
            "model",
            expected="trainable parameters that a permutation moves",
            got=f"none under scope={options.scope!r}",
            remedy=f"use shuffle='off' without batch_clip_norm{wider}; models that shuffle are "
            "BERT, RoBERTa, DistilBERT, ViT, GPT-2, OPT, Llama, T5, BART, PyTorch's own layers and "
            "their relatives",
        )
    rest = tuple(name for name in sizes if name not in shuffled)
    if options.clip_quantile is not None:
        rest, sizes = (*rest, COORDINATE), {**sizes, COORDINATE: 1}
    dimension = sum(sizes[name] for name in shuffled)
    options, rows = _banded(options)
    noise, unshuffled_noise = _noise_multipliers(options, dimension)
    falls_back = options.accounting == "paper" and noise >= unshuffled_noise
    if falls_back:
        noise = unshuffled_noise
    blocks = []
    if shuffled:
        blocks.append(
            NoiseBlock(
                name="shuffled",
                parameters=shuffled,
                dimension=dimension,
                noise_multiplier=noise,
                batch_clip_norm=None if falls_back else options.batch_clip_norm,
            )
        )
    if rest:
        blocks.append(
            NoiseBlock(
                name="rest",
                parameters=rest,
                dimension=sum(sizes[name] for name in rest),
                noise_multiplier=unshuffled_noise,
            )
        )
    planned = {item.name for item in fields(PrivacyPlan)}
    kept = {name: value for name, value in options_in(options).items() if name in planned}
    kept["num_steps"] = options.steps()
    return PrivacyPlan(**kept, falls_back=falls_back, blocks=tuple(blocks), noise_rows=rows)


def _banded(options: PrivacyOptions) -> tuple[PrivacyOptions, Rows]:
    """Options and rows for noise of blocks of steps, as if the weights had never moved."""
    if options.noise != "banded":
        return options, ()
    if options.shuffle == "every-step":
        options = replace(options, noise_frame="unshuffled")
    if options.epsilon is None:
        assert options.bands is not None, "checked on construction"
        blocks = math.ceil(options.steps() / options.bands)
        return options, best_rows(options.bands, blocks)
    found = banded_noise(
        epsilon=options.epsilon,
        delta=options.delta,
        sampling_prob=options.expected_batch_size / options.dataset_size,
        num_steps=options.steps(),
        adjacency=options.adjacency,
        bands=options.bands,
    )
    best = best_banded(found)
    return replace(options, bands=best.bands), best.rows


def _noise_multipliers(options: PrivacyOptions, dimension: int) -> tuple[float, float]:
    """(sigma of the shuffled block, sigma of the rest)."""
    if options.noise_multiplier is not None:
        other = options.unshuffled_noise_multiplier
        return options.noise_multiplier, options.noise_multiplier if other is None else other
    assert options.epsilon is not None
    common: dict[str, Any] = {
        "epsilon": options.epsilon,
        "delta": options.delta,
        "sampling_prob": options.expected_batch_size / options.dataset_size,
        "num_steps": options.steps(),
    }
    if options.noise == "banded":
        assert options.bands is not None, "chosen"
        rate, steps = options.bands * common["sampling_prob"], options.steps()
        common |= {"sampling_prob": rate, "num_steps": math.ceil(steps / options.bands)}
    if options.accounting == "certified":
        found = calibrate_certified(
            **common,
            adjacency=options.adjacency,
            largest_batch=options.largest_batch,
            dataset_size=options.largest_batch and options.dataset_size,
        )
        return found.noise_multiplier, found.noise_multiplier
    if options.accounting == "rdp":
        calibrated = calibrate_rdp(**common, adjacency=options.adjacency)
        return calibrated.noise_multiplier, calibrated.noise_multiplier
    assert options.batch_clip_norm is not None
    paper = calibrate_paper(
        **common,
        dimension=dimension,
        batch_clip=options.batch_clip_norm / options.clip_norm,
        delta_split=options.delta_split,
    )
    return paper.noise_multiplier, paper.unshuffled_noise_multiplier


def large_delta(plan: PrivacyPlan) -> str | None:
    """A warning about a δ of 1/N or more; None if it is smaller."""
    if plan.uncertifiable or plan.delta * plan.dataset_size < 1.0:
        return None
    return (
        f"δ = {plan.delta:.3g} is not below 1/{plan.dataset_size:,}: publishing one record drawn "
        "at random meets such a δ. Choose one well below that."
    )


def field_fingerprints(plan: PrivacyPlan) -> dict[str, str]:
    """One hash per field, so that a refusal can name what differs."""
    return {
        key: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
        for key, value in plan.comparable().items()
    }


def differences(plan: PrivacyPlan, fingerprints: dict[str, str]) -> list[str]:
    """Names of the fields whose fingerprints differ from those of another plan."""
    mine = field_fingerprints(plan)
    return sorted(
        key for key in mine.keys() | fingerprints if mine.get(key) != fingerprints.get(key)
    )


def without_seed(plan: PrivacyPlan) -> PrivacyPlan:
    """A plan that says that there is a seed and not which: a small one is guessed from its hash."""
    return plan if plan.secure else replace(plan, seed=0)


def plan_json(plan: PrivacyPlan) -> dict[str, Any]:
    """Plain data without the seed, which would let a reader remove the noise."""
    data = plan.comparable()
    del data["seed"]
    data["blocks"] = [{**b, "parameters": list(b["parameters"])} for b in data["blocks"]]
    data["noise_rows"] = [list(row) for row in data["noise_rows"]]
    return data | {
        "clip_norm": plan.clip_norm if math.isfinite(plan.clip_norm) else None,
        "sampling_prob": plan.sampling_prob,
        "secure": plan.secure,
    }


def plan_from_json(data: Mapping[str, Any]) -> PrivacyPlan:
    """The plan of `plan_json`; of a seeded one, with zero in the place of its seed."""
    known = {field.name: data[field.name] for field in fields(PrivacyPlan) if field.name in data}
    blocks = (NoiseBlock(**{**b, "parameters": tuple(b["parameters"])}) for b in data["blocks"])
    changed = {
        "blocks": tuple(blocks),
        "noise_rows": tuple(map(tuple, data["noise_rows"])),
        "clip_norm": math.inf if data["clip_norm"] is None else data["clip_norm"],
        "seed": None if data["secure"] else 0,
    }
    return PrivacyPlan(**(known | changed))
