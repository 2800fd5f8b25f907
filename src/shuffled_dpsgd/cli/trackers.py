"""Trackers of a run: the user's own function, or TensorBoard. No ε covers what they receive."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shuffled_dpsgd.errors import InvalidArgumentError, MissingExtraError, require

if TYPE_CHECKING:
    from shuffled_dpsgd.reports import StepRecord

Observer = Callable[["StepRecord", Any], object]


def find_tracker(name: str | None) -> Callable[[Path], tuple[Observer, ...]]:
    """Import a tracker, before data and model are loaded; what makes observers for a run's folder.

    `name` is `tensorboard`, `module:function` or None. After every step an observer is called with
    a line of `metrics.jsonl`.
    """
    if name is None:
        return lambda _: ()
    if name == "tensorboard":
        return _tensorboard()
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
    require(callable(function), "--tracker", "a function", name)
    return lambda _: (lambda record, _: function(record.to_json()),)


def _tensorboard() -> Callable[[Path], tuple[Observer, ...]]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtraError("tensorboard", extra="tensorboard", purpose="--tracker") from error

    def observers(directory: Path) -> tuple[Observer, ...]:
        writer: Any = SummaryWriter(str(directory / "tensorboard"))

        def write(record: StepRecord, _: Any) -> None:
            for key, value in record.to_json().items():
                if isinstance(value, int | float) and key != "step":
                    writer.add_scalar(key, value, record.step)
            writer.flush()

        return (write,)

    return observers
