"""The numeric primitives of per-sample clipping, each picked for the tensors it is given.

`plain` defines them all in ordinary torch operations and runs anywhere.
"""

from __future__ import annotations

from shuffled_dpsgd.clipping.kernels.plain import (
    embedding_sq_norms,
    gram_sq_norms,
    layer_norm_backward,
    rms_norm_backward,
    tied_cross_terms,
    tile_sq_norms,
    weighted_embedding_sum,
    weighted_outer_sum,
    weighted_row_sum,
)

__all__ = [
    "embedding_sq_norms",
    "gram_sq_norms",
    "layer_norm_backward",
    "rms_norm_backward",
    "tied_cross_terms",
    "tile_sq_norms",
    "weighted_embedding_sum",
    "weighted_outer_sum",
    "weighted_row_sum",
]
