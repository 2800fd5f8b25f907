"""Every error this library raises on purpose.

Each message names the thing at fault, what was expected, what was found, and what to do. All of
them derive from `ShuffledDPError`, so the command line can print them without a traceback.
"""

from __future__ import annotations

from typing import Any


class ShuffledDPError(Exception):
    """Base of every error raised on purpose.

    `said_by_rank_0` marks one that all ranks of a launch raise alike: one of them need print it.
    """

    said_by_rank_0 = False

    def __reduce__(self) -> tuple[Any, ...]:
        """So that it travels between processes: `__init__` does not take what it made of them."""
        return _rebuilt, (type(self), self.args, self.__dict__)


def _rebuilt(kind: type[ShuffledDPError], said: tuple[Any, ...], held: dict[str, Any]) -> Exception:
    error = kind.__new__(kind, *said)
    error.__dict__.update(held)
    return error


class InvalidArgumentError(ShuffledDPError, ValueError):
    """An argument is out of range or contradicts another.

    A text of several words in `got` is a description, and is shown without quotes.

    >>> raise InvalidArgumentError("epsilon", expected="a positive number", got=-1, remedy="use 1")
    Traceback (most recent call last):
        ...
    shuffled_dpsgd.errors.InvalidArgumentError: epsilon: expected a positive number, got -1; use 1
    """

    def __init__(self, argument: str, *, expected: str, got: object, remedy: str = "") -> None:
        self.argument = argument
        self.expected = expected
        self.got = got
        self.remedy = remedy
        found = got if isinstance(got, str) and " " in got else repr(got)
        tail = f"; {remedy}" if remedy else ""
        super().__init__(f"{argument}: expected {expected}, got {found}{tail}")

    def about(self, argument: str) -> InvalidArgumentError:
        """The same error about an argument as the user knows it, say a key of a file.

        >>> str(InvalidArgumentError("name", expected="text", got=3).about("model.name"))
        'model.name: expected text, got 3'
        """
        return InvalidArgumentError(
            argument, expected=self.expected, got=self.got, remedy=self.remedy
        )


def require(holds: object, argument: str, expected: str, got: object, remedy: str = "") -> None:
    """Refuse an argument unless a condition holds.

    Raises:
        InvalidArgumentError: it does not.
    """
    if not holds:
        raise InvalidArgumentError(argument, expected=expected, got=got, remedy=remedy)


class UnsupportedModuleError(ShuffledDPError):
    """A module or parameter cannot be handled exactly, so it is not handled at all."""

    def __init__(self, path: str, *, expected: str, got: object, remedy: str) -> None:
        self.path = path
        super().__init__(f"{path or '<root>'}: expected {expected}, got {got}; {remedy}")


class RefereeError(ShuffledDPError):
    """What was about to be released is not what was promised; nothing was released.

    `name` is the parameter in which it shows, if it shows in one.
    """

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class CannotReplayError(ShuffledDPError):
    """A batch cannot be run once more as it was; says why."""


class InvarianceError(ShuffledDPError):
    """A permutation that should leave the model's function unchanged does not."""


class BudgetExhaustedError(ShuffledDPError):
    """Another step would spend more privacy than the plan allows."""


class CheckpointError(ShuffledDPError):
    """A checkpoint is torn, foreign or disagrees with the plan it should resume."""


class DivergenceError(ShuffledDPError):
    """Loss or weights stopped being finite."""


class MissingExtraError(ShuffledDPError, ImportError):
    """What was asked needs a package that is not installed; the extra `extra` brings it."""

    def __init__(self, package: str, *, extra: str, purpose: str) -> None:
        super().__init__(
            f"{package} is needed for {purpose}: `pip install {package}`, or `pip install -e "
            f"'.[{extra}]'` in a clone of shuffled-dpsgd"
        )


class RankError(ShuffledDPError):
    """Ranks of one launch disagree, or one of them is gone."""
