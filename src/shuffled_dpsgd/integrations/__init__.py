"""Bridges to other libraries; each is imported when it is first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shuffled_dpsgd.integrations.hf_trainer import ShuffledDPTrainer
    from shuffled_dpsgd.integrations.privacy_arguments import PrivacyArguments

__all__ = ["PrivacyArguments", "ShuffledDPTrainer"]


def __getattr__(name: str) -> Any:
    if name == "PrivacyArguments":
        from shuffled_dpsgd.integrations.privacy_arguments import PrivacyArguments

        return PrivacyArguments
    if name == "ShuffledDPTrainer":
        from shuffled_dpsgd.integrations.hf_trainer import ShuffledDPTrainer

        return ShuffledDPTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
