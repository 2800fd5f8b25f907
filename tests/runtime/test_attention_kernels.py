"""A second run of a batch takes the attention kernels of the first: others draw other masks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.runtime.attention import allowed_kernels, same_attention

MATH = frozenset({SDPBackend.MATH})


class Attends(nn.Module):
    """Attention with dropout, whose kernel PyTorch chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 192)
        self.head = nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.body(x).unflatten(2, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=0.3)
        return self.head(mixed.transpose(1, 2).flatten(2).mean(1))


def test_kernels_are_put_back() -> None:
    before = allowed_kernels()
    with same_attention(MATH):
        assert allowed_kernels() == MATH
    assert allowed_kernels() == before


def test_a_batch_is_run_again_with_the_kernels_of_its_forward() -> None:
    seen: list[frozenset[SDPBackend]] = []
    model = nn.Linear(4, 2)
    model.register_forward_pre_hook(lambda *_: seen.append(allowed_kernels()))
    engine = ClippingEngine(model, check_rate=1.0)
    wanted = MATH
    with engine:
        with same_attention(wanted):
            losses = model(torch.randn(3, 4)).square().sum(1)
        engine.backward(losses)
    assert len(seen) > 1
    assert set(seen) == {wanted}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dropout_in_attention_is_compared_on_a_gpu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Attends().cuda()
    engine = ClippingEngine(model, clip_norm=0.1)
    with engine:
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            losses = model(torch.randn(8, 64, 64, device="cuda")).float().square().sum(1)
        engine.backward(losses)
    assert engine._referee is not None
    assert engine._referee.checks.not_made == 0, engine._referee.checks.reasons
