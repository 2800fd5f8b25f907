"""Random numbers of one forward, written down so that one of its samples can repeat them alone.

A sample run by itself draws other dropout masks than it drew in its batch, so the two runs cannot
be compared. `RecordedTape` writes down what every random operation of the batch returned;
`ReplayedTape` gives a later run of one sample that sample's part of it.

The replay's cursor is the seed of torch's default generator. Activation checkpointing puts that
generator back before it recomputes a segment, and thereby puts the cursor back as well.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_FIRST_SEED = 1 << 40
# Operations that return random numbers and nothing else. Names without overloads.
_DRAWS = frozenset(
    name + suffix
    for name in ("bernoulli", "uniform", "normal", "exponential", "geometric", "log_normal")
    for suffix in ("", "_")
) | {
    "cauchy_",
    "multinomial",
    "poisson",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "random_",
    "randperm",
}
_active: list[RecordedTape | ReplayedTape] = []


class CannotRepeatError(RuntimeError):
    """A random operation whose outcome for one sample cannot be read off that for the batch."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What one random operation returned: to the whole batch, or to one `sample` run by itself."""

    name: str
    numbers: Tensor
    sample: int | None


@dataclass(kw_only=True)
class Tape:
    """What random operations returned, in order; `unrepeatable` names one that hides its numbers.

    `generators` are those the model owns, with their state before their first use.
    """

    draws: list[Draw] = field(default_factory=list)
    unrepeatable: str = ""
    generators: dict[torch.Generator, Tensor] = field(default_factory=dict)

    def restore_generators(self) -> None:
        """Put the model's own generators back to where they were before the recorded run."""
        for generator, state in self.generators.items():
            generator.set_state(state)


@contextmanager
def generators_kept(generators: Iterable[torch.Generator]) -> Iterator[None]:
    """Put generators of the model's own back to where they are now."""
    before = [(generator, generator.get_state()) for generator in generators]
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


@contextmanager
def paused() -> Iterator[None]:
    """Neither record nor replay inside: for runs that are no part of the forward itself."""
    before = [(tape, tape.paused) for tape in _active]
    for tape, _ in before:
        tape.paused = True
    try:
        yield
    finally:
        for tape, was_paused in before:
            tape.paused = was_paused


@contextmanager
def drawing_for(sample: int) -> Iterator[None]:
    """What is drawn inside is drawn for one sample of the batch: a module runs on it alone."""
    for tape in _active:
        tape.sample_alone = sample
    try:
        yield
    finally:
        for tape in _active:
            tape.sample_alone = None


class _TapeMode(TorchDispatchMode):
    """Sees every operation, and hands random ones to `draw`."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape
        self.paused = False
        self.ended = False
        self.sample_alone: int | None = None

    def __enter__(self) -> Any:
        _active.append(self)  # type: ignore[arg-type]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _active.remove(self)  # type: ignore[arg-type]
        super().__exit__(*error)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do without torch's guard against compiling what is called here.

        It takes a third of the time that a tape costs, and tapes run where nothing is compiled.
        """
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused or not _may_be_random(func):
            return func(*args, **kwargs)
        return self.draw(func, args, kwargs)

    def draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a random operation."""
        raise NotImplementedError


class RecordedTape(_TapeMode):
    """Writes down what random operations return; changes nothing."""

    def draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = _name(func)
        generator = kwargs.get("generator")
        if isinstance(generator, torch.Generator) and generator not in self.tape.generators:
            self.tape.generators[generator] = generator.get_state()
        result = func(*args, **kwargs)
        if name in _DRAWS or name == "native_dropout":
            numbers = result[1] if name == "native_dropout" else result
            draw = Draw(name=name, numbers=numbers.clone(), sample=self.sample_alone)
            self.tape.draws.append(draw)
        elif _drops(func, args, kwargs):
            self.tape.unrepeatable = self.tape.unrepeatable or name
        return result


class ReplayedTape(_TapeMode):
    """Gives a `sample` run alone, one of `size`, what it drew in the recorded run.

    Without a `sample`, the whole batch gets again what it drew.
    """

    def __init__(self, tape: Tape, *, sample: int | None, size: int) -> None:
        super().__init__(tape)
        self._sample = sample
        self._size = size
        self._draws = [draw for draw in tape.draws if draw.sample in (None, sample)]
        if sample is None and len(self._draws) < len(tape.draws):
            raise CannotRepeatError("numbers drawn for one sample after the other")

    def __enter__(self) -> Any:
        torch.default_generator.manual_seed(_FIRST_SEED)
        return super().__enter__()

    def require_end(self) -> None:
        """Refuse a run that drew less than the batch: it may have drawn what others drew there."""
        if torch.default_generator.initial_seed() - _FIRST_SEED != len(self._draws):
            raise CannotRepeatError(f"fewer random numbers than the batch's {len(self._draws)}")

    def draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = _name(func)
        if name not in _DRAWS and name != "native_dropout":
            if _drops(func, args, kwargs):
                raise CannotRepeatError(f"{name} draws numbers that cannot be seen")
            return func(*args, **kwargs)
        position = torch.default_generator.initial_seed() - _FIRST_SEED
        if not 0 <= position < len(self._draws) or self._draws[position].name != name:
            raise CannotRepeatError(f"{name}, where the batch drew other numbers")
        draw = self._draws[position]
        if name == "native_dropout":
            x, rate = args[0], args[1]
            mask = self._part(draw, x.shape)
            scale = 0.0 if rate >= 1.0 else 1.0 / (1.0 - rate)
            result: Any = (x * mask * scale, mask)
        else:
            result = func(*args, **kwargs)
            result.copy_(self._part(draw, result.shape))
        torch.default_generator.manual_seed(_FIRST_SEED + position + 1)
        return result

    def _part(self, draw: Draw, shape: torch.Size) -> Tensor:
        if draw.sample is None and self._sample is not None:
            return sample_of(draw.numbers, shape, self._sample, self._size)
        if draw.numbers.shape != shape:
            raise CannotRepeatError(
                f"random numbers of shape {tuple(draw.numbers.shape)}, then {tuple(shape)}"
            )
        return draw.numbers


def sample_of(recorded: Tensor, shape: torch.Size, sample: int, size: int) -> Tensor:
    """The part of a batch's random numbers that belongs to one of `size` samples.

    Numbers of the same shape belong to all samples alike.

    >>> sample_of(torch.arange(6).view(3, 2), torch.Size([1, 2]), 1, 3)
    tensor([[2, 3]])
    >>> sample_of(torch.arange(6).view(2, 3), torch.Size([2, 1]), 1, 3)
    tensor([[1],
            [4]])
    """
    if recorded.shape == shape:
        return recorded
    if recorded.dim() == len(shape):
        axes = [i for i, (a, b) in enumerate(zip(recorded.shape, shape, strict=True)) if a != b]
        if len(axes) == 1 and recorded.shape[axes[0]] == size * shape[axes[0]]:
            rows = shape[axes[0]]
            return recorded.narrow(axes[0], sample * rows, rows)
    if recorded.numel() == size * shape.numel() and recorded.shape[:1].numel() % size == 0:
        return recorded.reshape(size, -1)[sample].reshape(shape)
    raise CannotRepeatError(
        f"random numbers of shape {tuple(recorded.shape)} in a batch of {size}, and of shape "
        f"{tuple(shape)} for one sample"
    )


@functools.cache
def _may_be_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _name(func: Any) -> str:
    return str(func.overloadpacket.__name__)


def _drops(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation that is no plain draw is random this time: attention without dropout
    is tagged as random, too."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "p", "dropout"):
            value = kwargs.get(argument.name, args[place] if place < len(args) else 0.0)
            return bool(value)
    return True
