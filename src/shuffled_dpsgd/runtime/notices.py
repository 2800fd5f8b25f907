"""Warnings that point at the user's own line, and those that are given once and never raise."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

import torch

_INSIDE = tuple(str(Path(path).parent) for path in (Path(__file__).parent, torch.__file__))
_said: set[str] = set()


def warn_caller(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn, naming the first line on the stack that is neither in this package nor in torch."""
    level, frame = 1, sys._getframe()
    while frame.f_code.co_filename.startswith(_INSIDE) and (behind := frame.f_back):
        level, frame = level + 1, behind
    warnings.warn(text, category, stacklevel=level)


def say_once(text: str) -> None:
    """Warn with `text`, unless this process has said it already; never raises.

    Where warnings are errors, the text is logged instead: an exception half way through a shuffle
    would leave weights that are updated and not shuffled.
    """
    if text in _said:
        return
    _said.add(text)
    try:
        warn_caller(text, RuntimeWarning)
    except RuntimeWarning:
        logging.getLogger("shuffled_dpsgd").warning(text)
