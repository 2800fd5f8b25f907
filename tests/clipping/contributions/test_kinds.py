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
    "outer": (OuterGrad(left_BTR=drawn(B, T, 3), right_BTC=drawn(B, T, 4), route=NormMethod.GRAM),
              (3, 4)),
    "rows": (RowsGrad(ids_BT=torch.arange(B * T).view(B, T) % 6, grad_BTD=drawn(B, T, 2),
                      padding_idx=1), (6, 2)),
    "dense": (DenseGrad(grads_BS=drawn(B, 3, 4), squares_B=drawn(B)), (3, 4)),
    "number": (DenseGrad(grads_BS=drawn(B)), ()),
    "row sum": (RowSumGrad(grad_BTP=drawn(B, T, 3)), (3,)),
}  # fmt: skip


@pytest.mark.parametrize("samples", [slice(2, 3, 1), slice(1, 6, 4)], ids=["one", "two"])
@pytest.mark.parametrize("case", CASES)
def test_some_samples_are_those_of_the_batch(case: str, samples: slice) -> None:
    whole, sizes = CASES[case]
    some, shape = whole.of_samples(samples), torch.Size(sizes)
    torch.testing.assert_close(some.stored(shape), whole.stored(shape)[samples])
    torch.testing.assert_close(some.rounding(), whole.rounding()[samples])
    expected = whole.stored(shape)[samples].reshape(len(some.rounding()), -1).square().sum(1)
    torch.testing.assert_close(some.sq_norms(), expected)


@pytest.mark.parametrize("case", CASES)
def test_rounding_is_that_of_each_sample(case: str) -> None:
    """A sample's own terms count: those of others, however large, do not."""
    whole, _ = CASES[case]
    assert whole.rounding().shape == (B,)
    alone = [whole.of_samples(slice(i, i + 1)).rounding() for i in range(B)]
    torch.testing.assert_close(whole.rounding(), torch.cat(alone))
