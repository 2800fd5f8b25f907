"""What a call is given is found among positional arguments, keywords and what they hold."""

from __future__ import annotations

import torch

from shuffled_dpsgd.clipping.capture.batch_size import first_tensor

ONE, TWO = torch.zeros(1), torch.zeros(2)


def test_the_first_tensor_is_found_wherever_it_is() -> None:
    assert first_tensor((ONE, TWO), {}) is ONE
    assert first_tensor((None, 3, (TWO, ONE)), {"x": ONE}) is TWO
    assert first_tensor((), {"mode": "sum", "x": {"ids": ONE}}) is ONE
    assert first_tensor(("sum",), {}) is None
