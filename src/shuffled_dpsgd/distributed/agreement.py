"""What must be the same on all ranks, compared before it matters; a refusal names the odd rank."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from shuffled_dpsgd.distributed.world import World
from shuffled_dpsgd.errors import (
    BudgetExhaustedError,
    CheckpointError,
    RankError,
    ShuffledDPError,
)

Result = TypeVar("Result")
_MOST_SHOWN = 80
# Raised anew on the other ranks, where callers tell them apart.
_PASSED_ON: dict[str, type[ShuffledDPError]] = {
    kind.__name__: kind for kind in (BudgetExhaustedError, CheckpointError)
}


def agree(world: World, facts: Mapping[str, Any], *, remedy: str) -> None:
    """Refuse unless every rank has the same facts; all ranks raise the same error.

    Raises:
        RankError: naming the first fact that differs, and the rank in the minority.
    """
    everyone = world.gather_texts(json.dumps(comparable(facts)))
    compare([json.loads(each) for each in everyone], remedy=remedy)


def comparable(facts: Mapping[str, Any]) -> dict[str, str]:
    """Facts as they are compared: by their `repr`, so they should be plain data."""
    return {name: repr(value) for name, value in facts.items()}


def compare(everyone: Sequence[Mapping[str, str]], *, remedy: str) -> None:
    """Refuse comparable facts of all ranks, gathered in their order, unless they are the same.

    >>> compare([{"step": "3"}, {"step": "4"}], remedy="start again")
    Traceback (most recent call last):
        ...
    shuffled_dpsgd.errors.RankError: rank 1 has another step than rank 0: 4 and 3; start again
    """
    for name in dict.fromkeys(name for one in everyone for name in one):
        values = [one.get(name, "nothing") for one in everyone]
        if len(set(values)) > 1:
            usual = _usual(values)
            odd = next(rank for rank, value in enumerate(values) if value != usual)
            raise _on_all_ranks(
                RankError(
                    f"rank {odd} has another {name} than rank {values.index(usual)}: "
                    f"{_shown(values[odd], usual)} and {_shown(usual, values[odd])}; {remedy}"
                )
            )


def first_does(world: World, work: Callable[[], Result]) -> Result:
    """Have rank 0 do it, and every rank learn the outcome: its result, or its error.

    The result must be small plain data. No rank goes on before rank 0 is done.

    Raises:
        ShuffledDPError: what rank 0 raised, on every rank.
    """
    found: list[Result] = []
    first_writes(world, lambda: _kept(found, work()))
    shared: Result = world.from_first(found[0] if found else None)
    return shared


def first_writes(world: World, work: Callable[[], str]) -> str:
    """As `first_does`, of a result that is a text: nothing is pickled."""
    failure: BaseException | None = None
    result = ""
    if world.leads:
        try:
            result = work()
        except (ShuffledDPError, OSError) as error:
            failure = error
    said = world.first_text(json.dumps([_name(failure), str(failure), result]))
    if failure is not None:
        raise failure
    kind, text, shared = json.loads(said)
    if kind is not None:
        raise _on_all_ranks(_PASSED_ON.get(kind, RankError)(text))
    return str(shared)


def _kept(found: list[Result], result: Result) -> str:
    found.append(result)
    return ""


def all_do(world: World, work: Callable[[], Result]) -> Result:
    """Have every rank do it, and none go on unless all could; each has its own result.

    Raises:
        ShuffledDPError: what happened here, or what happened on another rank.
    """
    failure: ShuffledDPError | OSError | None = None
    result: Result | None = None
    try:
        result = work()
    except (ShuffledDPError, OSError) as error:
        failure = error
    problems = world.gather(None if failure is None else f"{_name(failure)}: {failure}")
    if failure is not None:
        raise failure
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
    if failed:
        raise RankError("; ".join(failed))
    return result  # type: ignore[return-value]  # it has one, as nothing failed


def _on_all_ranks(error: ShuffledDPError) -> ShuffledDPError:
    error.said_by_rank_0 = True
    return error


def _name(error: BaseException | None) -> str | None:
    return None if error is None else type(error).__name__


def _usual(values: list[str]) -> str:
    """The value of most ranks; where two are equally many, that of the lower rank."""
    counts = Counter(values)
    return max(values, key=lambda value: counts[value])


def _shown(text: str, other: str) -> str:
    """All of a short text; of a longer one, what is around its first difference from another."""
    if len(text) <= _MOST_SHOWN:
        return text
    pairs = enumerate(zip(text, other, strict=False))
    first = next((place for place, (one, two) in pairs if one != two), len(other))
    start = max(0, first - _MOST_SHOWN // 2)
    end = start + _MOST_SHOWN
    return f"{'...' * (start > 0)}{text[start:end]}{'...' * (end < len(text))}"
