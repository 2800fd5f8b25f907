"""The numeric primitives of per-sample clipping, each picked for the tensors it is given.

`plain` defines them all in ordinary torch operations and runs anywhere. The modules in `triton` and
`gluon` are faster on a GPU. `linear_maps` and `norm_layers` choose among them by `choices`.
"""

from __future__ import annotations

from shuffled_dpsgd.clipping.kernels.choices import aligned_copy
from shuffled_dpsgd.clipping.kernels.linear_maps import (
    add_weighted_outer_sums,
    alike,
    gram_sq_norm_sums,
    gram_sq_norms,
    row_sq_norms,
    tile_sq_norm_sums,
    tile_sq_norms,
)
from shuffled_dpsgd.clipping.kernels.norm_layers import norm_sum_runs
from shuffled_dpsgd.clipping.kernels.plain import (
    add_weighted_row_sums,
    embedding_sq_norms,
    layer_norm_backward,
    outer_products,
    stored_cross_terms,
    tied_cross_terms,
    weighted_embedding_sum,
    weighted_row_sum,
)

__all__ = [
    "add_weighted_outer_sums",
    "add_weighted_row_sums",
    "aligned_copy",
    "alike",
    "embedding_sq_norms",
    "gram_sq_norm_sums",
    "gram_sq_norms",
    "layer_norm_backward",
    "norm_sum_runs",
    "outer_products",
    "row_sq_norms",
    "stored_cross_terms",
    "tied_cross_terms",
    "tile_sq_norm_sums",
    "tile_sq_norms",
    "weighted_embedding_sum",
    "weighted_row_sum",
]
