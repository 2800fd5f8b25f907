"""A few samples' contributions are those of the whole batch."""

from __future__ import annotations

import pytest
import torch

from shuffled_dpsgd.clipping.contributions.cost import NormMethod
from shuffled_dpsgd.clipping.contributions.kinds import (
    Contribution,
    DenseGrad,
    OuterGrad,
    RowsGrad,
    RowSumGrad,
)

B, T = 7, 5


def drawn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


CASES: dict[str, tuple[Contribution, tuple[int, ...]]] = {
    "outer": (OuterGrad(left_BTR=drawn(B, T, 3), right_BTC=drawn(B, T, 4), backend=NormMethod.GRAM),
              (3, 4)),
    "rows": (RowsGrad(ids_BT=torch.arange(B * T).view(B, T) % 6, grad_BTD=drawn(B, T, 2),
                      padding_idx=1), (6, 2)),
    "dense": (DenseGrad(grads_BS=drawn(B, 3, 4)), (3, 4)),
    "number": (DenseGrad(grads_BS=drawn(B)), ()),
    "row sum": (RowSumGrad(grad_BTP=drawn(B, T, 3)), (3,)),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(CASES))
def test_norms_are_those_of_the_stored_gradients(case: str) -> None:
    whole, sizes = CASES[case]
    expected = whole.stored(torch.Size(sizes)).reshape(B, -1).square().sum(1)
    torch.testing.assert_close(whole.sq_norms(), expected)


@pytest.mark.parametrize("case", ["dense", "number", "rows"])
def test_weighted_sums_are_those_of_the_stored_gradients(case: str) -> None:
    (whole, sizes), factors = CASES[case], drawn(B).abs()
    shape = torch.Size(sizes)
    expected = torch.tensordot(factors, whole.stored(shape), 1)
    out = torch.ones(shape, dtype=torch.float64)
    assert isinstance(whole, DenseGrad | RowsGrad)
    whole.add_sum(factors, out)
    torch.testing.assert_close(out, 1 + expected)
