"""What one call of a layer leaves behind for one parameter, and what can be computed from it.

Shapes: B samples, T positions, R and C the rows and columns of a weight, V embedding rows, D the
embedding width, S any parameter shape.

A *contribution* describes every sample's gradient of one parameter without storing it:

- `OuterGrad`      left^T right, for weights of linear maps and convolutions
- `RowsGrad`       rows of a table picked by ids, for embeddings
- `RowSumGrad`     a sum over positions, for biases
- `DenseGrad`      the per-sample gradients themselves, for norms and the generic rule

All of them know their squared norms and their stored form. `finalize/many_layers.py` adds them up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.contributions.cost import NormMethod
from shuffled_dpsgd.clipping.kernels import linear_maps, plain
from shuffled_dpsgd.clipping.kernels.float32 import full_float32


class Contribution(Protocol):
    """Per-sample gradients of one parameter, from one call of one layer."""

    def sq_norms(self) -> Tensor:
        """(B,) squared norms, float32 or float64."""
        ...

    def stored(self, shape: torch.Size) -> Tensor:
        """(B, *shape): every sample's gradient."""
        ...


@full_float32()
def stored_outer(left_BTR: Tensor, right_BTC: Tensor) -> tuple[Tensor, Tensor]:
    """Every sample's left^T right in float32 or float64, (B, R, C), and its (B,) squared norm."""
    stored_BRC = plain.outer_products(left_BTR, right_BTC)
    return stored_BRC, linear_maps.row_sq_norms(stored_BRC.flatten(1))


@dataclass(slots=True, eq=False, kw_only=True)
class OuterGrad:
    """Gradient left_b^T right_b of a (R, C) weight; a linear map's left is the output gradient.

    `backend` is how the squared norm is found: nothing is stored here, so all but Gram means tiles.
    """

    left_BTR: Tensor
    right_BTC: Tensor
    backend: NormMethod

    def sq_norms(self) -> Tensor:
        is_gram = self.backend is NormMethod.GRAM
        norms = linear_maps.gram_sq_norms if is_gram else linear_maps.tile_sq_norms
        return norms(self.right_BTC, self.left_BTR, False)

    @full_float32()
    def stored(self, shape: torch.Size) -> Tensor:
        return plain.outer_products(self.left_BTR, self.right_BTC).view(-1, *shape)


@dataclass(slots=True, eq=False, kw_only=True)
class RowsGrad:
    """Gradient of a table: row ids[b, t] receives grad[b, t]; the padding row receives nothing."""

    ids_BT: Tensor
    grad_BTD: Tensor
    padding_idx: int | None

    def sq_norms(self) -> Tensor:
        return plain.embedding_sq_norms(self.ids_BT, self.grad_BTD, self.padding_idx)

    def stored(self, shape: torch.Size) -> Tensor:
        B, _, D = self.grad_BTD.shape
        wide = torch.float64 if self.grad_BTD.dtype == torch.float64 else torch.float32
        table_BVD = self.grad_BTD.new_zeros((B, *shape), dtype=wide)
        source = self.grad_BTD.to(wide)
        if self.padding_idx is not None:
            source = source.masked_fill((self.ids_BT == self.padding_idx).unsqueeze(2), 0)
        return table_BVD.scatter_add_(1, self.ids_BT.unsqueeze(2).expand(-1, -1, D), source)

    def add_sum(self, factors_B: Tensor, out: Tensor) -> None:
        """Add the factor-weighted sum over the batch; a factor of zero adds zero."""
        plain.weighted_embedding_sum(self.ids_BT, self.grad_BTD, factors_B, self.padding_idx, out)


@dataclass(slots=True, eq=False, kw_only=True)
class DenseGrad:
    """Per-sample gradients that are kept as they are, and their squared norms if known."""

    grads_BS: Tensor
    squares_B: Tensor | None = None

    def _rows(self) -> Tensor:
        # A parameter that is a single number has no axis to flatten.
        return self.grads_BS.flatten(1) if self.grads_BS.dim() > 1 else self.grads_BS.unsqueeze(1)

    def sq_norms(self) -> Tensor:
        return linear_maps.row_sq_norms(self._rows()) if self.squares_B is None else self.squares_B

    def stored(self, shape: torch.Size) -> Tensor:
        return self.grads_BS.view(-1, *shape)

    def add_sum(self, factors_B: Tensor, out: Tensor) -> None:
        """Add the factor-weighted sum over the batch; a factor of zero adds zero."""
        plain.weighted_row_sum(self._rows().unsqueeze(1), factors_B, out.view(-1))


@dataclass(slots=True, eq=False, kw_only=True)
class RowSumGrad:
    """Gradient sum_t g_t of a vector added at every position: a bias."""

    grad_BTP: Tensor

    def _stored(self) -> Tensor:
        wide = torch.float64 if self.grad_BTP.dtype == torch.float64 else torch.float32
        return self.grad_BTP.sum(1, dtype=wide)

    def sq_norms(self) -> Tensor:
        return self._stored().square().sum(1)

    def stored(self, shape: torch.Size) -> Tensor:
        return self._stored().view(-1, *shape)

    def add_sum(self, factors_B: Tensor, out: Tensor) -> None:
        """Add the factor-weighted sum over the batch; a factor of zero adds zero."""
        plain.weighted_row_sum(self.grad_BTP, factors_B, out.view(-1))
