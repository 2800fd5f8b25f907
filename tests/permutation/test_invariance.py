"""Permuting leaves outputs, per-sample losses and gradients unchanged, in every family."""

from __future__ import annotations

import pytest
import torch

from permutation.custom import CUSTOM
from permutation.lora import ADAPTED
from permutation.zoo import FAMILIES, Specimen
from shuffled_dpsgd.permutation import Permutation, apply, apply_to_tensors, discover, draw

SCOPES = ("paper", "full")
MODELS = {**FAMILIES, **CUSTOM, **ADAPTED}


def evaluate(
    specimen: Specimen,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    logits = specimen.logits()
    losses = specimen.losses(logits)
    specimen.model.zero_grad()
    losses.sum().backward()
    grads = {n: p.grad.clone() for n, p in specimen.model.named_parameters() if p.grad is not None}
    specimen.model.zero_grad()
    return logits.detach(), losses.detach(), grads


def deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-300))


def shuffle(specimen: Specimen, scope: str, seed: int = 3) -> Permutation:
    spec = discover(specimen.model, scope=scope)
    permutation = draw(spec, torch.Generator().manual_seed(seed))
    apply(permutation, specimen.model)
    return permutation


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("family", MODELS)
def test_function_and_gradients_are_unchanged_in_float64(family: str, scope: str) -> None:
    specimen = MODELS[family]().double()
    logits, losses, grads = evaluate(specimen)
    before = {n: p.detach().clone() for n, p in specimen.model.named_parameters()}
    permutation = shuffle(specimen, scope)
    moved_logits, moved_losses, moved_grads = evaluate(specimen)
    assert deviation(moved_logits, logits) < 1e-12
    assert deviation(moved_losses, losses) < 1e-12
    apply_to_tensors(permutation, grads)
    assert moved_grads.keys() == grads.keys()
    scale = max(float(g.abs().max()) for g in grads.values())
    for name, grad in grads.items():
        assert float((moved_grads[name] - grad).abs().max()) < 1e-12 * scale, name
    moved = {n for n, p in specimen.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == permutation.spec.moved_names


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("family", MODELS)
def test_function_is_unchanged_in_float32(family: str, scope: str) -> None:
    specimen = MODELS[family]()
    logits, losses, _ = evaluate(specimen)
    shuffle(specimen, scope)
    moved_logits, moved_losses, _ = evaluate(specimen)
    assert deviation(moved_logits, logits) < 1e-4
    assert deviation(moved_losses, losses) < 1e-4


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("family", MODELS)
def test_inverse_restores_every_bit(family: str, scope: str) -> None:
    specimen = MODELS[family]()
    before = {n: p.detach().clone() for n, p in specimen.model.named_parameters()}
    permutation = shuffle(specimen, scope)
    apply(permutation.inverse(), specimen.model)
    for name, parameter in specimen.model.named_parameters():
        assert torch.equal(parameter, before[name]), name
