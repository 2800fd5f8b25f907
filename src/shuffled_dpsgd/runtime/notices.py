"""Warnings that are said once and never stop the work they are about."""

from __future__ import annotations

import logging
import warnings

_said: set[str] = set()


def say_once(text: str) -> None:
    """Warn with `text`, unless this process has said it already; never raises.

    Where warnings are errors, the text is logged instead: an exception half way through a shuffle
    would leave weights that are updated and not shuffled.
    """
    if text in _said:
        return
    _said.add(text)
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    except RuntimeWarning:
        logging.getLogger("shuffled_dpsgd").warning(text)
