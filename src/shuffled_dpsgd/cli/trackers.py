"""Whoever wants to follow a run: a function of one's own, or TensorBoard.

What they see are training metrics, computed from the records without noise: they are for whoever
holds the data, and publishing them is not covered by any ε.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shuffled_dpsgd.errors import InvalidArgumentError, MissingExtraError

if TYPE_CHECKING:
    from shuffled_dpsgd.reports import StepRecord

TENSORBOARD = "tensorboard"
Observer = Callable[["StepRecord", Any], object]


def find_tracker(name: str | None, directory: Path) -> tuple[Observer, ...]:
    """An observer for `tensorboard`, or for `module:function`; none for None.

    The function is called after every step with a dictionary, as `metrics.jsonl` has it.
    """
    if name is None:
        return ()
    if name == TENSORBOARD:
        return (_tensorboard(directory / TENSORBOARD),)
    function = _load(name)
    return (lambda record, _: function(record.to_json()),)


def check_tracker(name: str | None) -> None:
    """Refuse a tracker that is not there, before anything is loaded or spent."""
    if name == TENSORBOARD:
        _summary_writer()
    elif name is not None:
        _load(name)


def _load(name: str) -> Callable[[dict[str, Any]], object]:
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidArgumentError(
            "--tracker",
            expected="tensorboard, or module:function that can be imported",
            got=name,
            remedy=str(error),
        ) from error
    if not callable(function):
        raise InvalidArgumentError("--tracker", expected="a function", got=name)
    return function


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtraError(TENSORBOARD, extra="tensorboard", purpose="--tracker") from error
    return SummaryWriter


def _tensorboard(directory: Path) -> Observer:
    writer = _summary_writer()(str(directory))

    def write(record: StepRecord, _: Any) -> None:
        for key, value in record.to_json().items():
            if isinstance(value, int | float) and key != "step":
                writer.add_scalar(key, value, record.step)
        writer.flush()

    return write
