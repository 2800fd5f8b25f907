"""cuDNN's attention is turned off inside, and everything is put back."""

from __future__ import annotations

import pytest
import torch

from shuffled_dpsgd.runtime.attention import without_cudnn_attention

KINDS = torch.backends.cuda


@pytest.fixture(autouse=True)
def _kinds_are_put_back() -> object:
    names = ("cudnn", "math", "flash", "mem_efficient")
    before = {name: getattr(KINDS, f"{name}_sdp_enabled")() for name in names}
    yield
    for name, enabled in before.items():
        getattr(KINDS, f"enable_{name}_sdp")(enabled)


def test_it_is_off_inside_only() -> None:
    KINDS.enable_cudnn_sdp(True)
    with without_cudnn_attention():
        assert not KINDS.cudnn_sdp_enabled()
    assert KINDS.cudnn_sdp_enabled()


def test_it_is_put_back_after_an_error() -> None:
    KINDS.enable_cudnn_sdp(True)
    with pytest.raises(ValueError, match="inside"), without_cudnn_attention():
        raise ValueError("inside")
    assert KINDS.cudnn_sdp_enabled()


def test_a_user_who_turned_it_off_keeps_it_off() -> None:
    KINDS.enable_cudnn_sdp(False)
    with without_cudnn_attention():
        pass
    assert not KINDS.cudnn_sdp_enabled()


def test_it_stays_where_there_is_no_other() -> None:
    for name in ("math", "flash", "mem_efficient"):
        getattr(KINDS, f"enable_{name}_sdp")(False)
    KINDS.enable_cudnn_sdp(True)
    with without_cudnn_attention():
        assert KINDS.cudnn_sdp_enabled()
