"""One loss per sample for Hugging Face models, whose own `.loss` is already averaged.

Clipping bounds what one sample contributes, so the loss must be a sum of terms that each depend on
one sample only. A token mean over the batch (GPT-2's `.loss`) divides by a length that depends on
every sample; here each sample's tokens are averaged by themselves.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from shuffled_dpsgd.errors import InvalidArgumentError, UnsupportedModuleError

Head = Literal["classification", "tokens", "next-token"]
IGNORED_LABEL = -100

_HEADS: tuple[tuple[str, Head], ...] = (
    (r"For(Sequence|Image|Audio)Classification$", "classification"),
    (r"For(TokenClassification|MaskedLM)$", "tokens"),
    (r"(ForCausalLM|LMHeadModel)$", "next-token"),
)


def head_of(model: nn.Module) -> Head:
    """Which loss a model's class name calls for; peft and compile wrappers are looked through."""
    inner = unwrapped(model)
    for pattern, head in _HEADS:
        if re.search(pattern, type(inner).__name__):
            return head
    raise UnsupportedModuleError(
        "",
        expected="a model for sequence or image classification, token labels or causal LM",
        got=type(inner).__name__,
        remedy="pass per_sample_loss=function(outputs, labels) returning one loss per sample",
    )


def unwrapped(model: nn.Module) -> nn.Module:
    """The model under peft's and torch.compile's wrappers."""
    inner: Any = model
    while True:
        if hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        elif hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        else:
            assert isinstance(inner, nn.Module)
            return inner


def classification_losses(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0
) -> torch.Tensor:
    """Cross entropy per sample; with a single logit, squared error; float labels per class, BCE.

    >>> classification_losses(torch.zeros(3, 2), torch.tensor([0, 1, 1])).shape
    torch.Size([3])
    """
    logits = logits.float()
    if logits.shape[-1] == 1:
        return F.mse_loss(logits.squeeze(-1), labels.float().reshape(-1), reduction="none")
    if labels.is_floating_point():
        return F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(-1)
    if labels.device.type == "cpu":
        check_labels(labels.flatten().tolist(), logits.shape[-1])
    return F.cross_entropy(logits, labels.reshape(-1), reduction="none", label_smoothing=smoothing)


def check_labels(labels: Sequence[Any], num_labels: int) -> None:
    """Refuse a class that the model has no logit for; labels that are no integers pass."""
    for number, label in enumerate(labels):
        if isinstance(label, int) and not 0 <= label < num_labels and label != IGNORED_LABEL:
            raise InvalidArgumentError(
                "labels",
                expected=f"classes from 0 to {num_labels - 1}",
                got=f"{label}, in row {number}",
                remedy="count classes from 0, or build the model with a larger num_labels",
            )


def loss_of_tokens(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
    """(B, T) cross entropy of every token; zero where there is no label."""
    # Every token is a row of its own: a softmax over the last axis, which is contiguous, reads
    # memory in order. Over the middle axis it takes several times as long on a GPU.
    return F.cross_entropy(
        logits.float().flatten(0, 1),
        labels.flatten(),
        ignore_index=IGNORED_LABEL,
        reduction="none",
        label_smoothing=smoothing,
    ).view(labels.shape)


def token_losses(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0, dynamic: bool = False
) -> torch.Tensor:
    """Cross entropy averaged over each sample's own labelled tokens; none labelled gives zero.

    `dynamic` weighs every token by the probability it has (DFT, arXiv:2508.05629), as a constant.

    >>> labels = torch.tensor([[1, -100], [-100, -100]])
    >>> token_losses(torch.zeros(2, 2, 4), labels).tolist() == [torch.tensor(4.0).log().item(), 0]
    True
    """
    per_token = loss_of_tokens(logits, labels, smoothing)
    if dynamic:
        per_token = per_token * (-per_token.detach()).exp()
    counts = (labels != IGNORED_LABEL).sum(dim=1).clamp(min=1)
    return per_token.sum(dim=1) / counts


def following(labels: torch.Tensor) -> torch.Tensor:
    """The label of the next token at every place.

    The labels are shifted, not the logits, which are far larger and would have to be copied.
    """
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)


def next_token_losses(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0, dynamic: bool = False
) -> torch.Tensor:
    """`token_losses` of predicting each token from those before it."""
    return token_losses(logits, following(labels), smoothing, dynamic)


def per_sample_losses(
    model: nn.Module, outputs: Any, labels: torch.Tensor, smoothing: float = 0.0
) -> torch.Tensor:
    """One loss per sample from a model's outputs, by the kind of head the model has."""
    head = head_of(model)
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
    if head == "classification":
        return classification_losses(logits, labels, smoothing)
    if head == "tokens":
        return token_losses(logits, labels, smoothing)
    return next_token_losses(logits, labels, smoothing)
