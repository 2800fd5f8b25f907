"""The ranks of a launch, as what one of them may ask of all: one process alone, or a process group.

Small facts travel over gloo even where tensors travel over NCCL: so they wait for no device, and a
rank that is gone is noticed by its closed connection, not only by a timeout.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from shuffled_dpsgd.distributed.heartbeat import Heartbeat
from shuffled_dpsgd.errors import InvalidArgumentError, RankError, ShuffledDPError

_FAILURES = "shuffled_dpsgd/failures"
_HEARD = "shuffled_dpsgd/heard"
# How long rank 0 stays for others to read what it said, or what another rank said.
_LAST_WORDS_S, _PARTING_S = 10.0, 1.0
# Newer releases of torch have renamed both, and warn of the old names.
_scatter_sum = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_gather_parts = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class World:
    """All ranks of a launch, seen from one of them. This is a world of one process.

    Everything here is collective: every rank calls it, in the same order.
    """

    rank = 0
    size = 1

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which writes files and speaks to people."""
        return self.rank == 0

    def gather(self, fact: Any) -> list[Any]:
        """A small fact of every rank, in the order of the ranks."""
        return [fact]

    def gather_numbers(self, number: int) -> list[int]:
        """A whole number of every rank, in their order; faster than `gather`."""
        return [number]

    def from_first(self, fact: Any) -> Any:
        """The fact of rank 0."""
        return fact

    def is_any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return flag

    def add_(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        return tensor

    def copy_first_(self, tensor: torch.Tensor) -> None:
        """Overwrite with the values of rank 0."""

    def scatter_sum_(self, flat: torch.Tensor) -> torch.Tensor:
        """Of a vector cut into one equal piece per rank, the own piece, summed over all ranks."""
        return flat

    def gather_pieces_(self, flat: torch.Tensor) -> None:
        """Fill a vector from the pieces of all ranks, each of which has its own in place."""

    def tell_failure(self, error: BaseException) -> None:
        """Leave word of what went wrong here, for ranks that wait in vain."""

    def last_words(self, error: BaseException) -> AbstractContextManager[None]:
        """Around the end of the process group: the others hear why before this process is gone."""
        return nullcontext()

    def explaining(self) -> AbstractContextManager[None]:
        """Around what may fail because another rank is gone: an error then says so.

        For what torch itself asks of other ranks, as a sharded model does whenever it runs. The
        others are told of any error.
        """
        return nullcontext()


class GroupWorld(World):
    """The ranks of torch's default process group."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._has_told = False
        store = _store()
        self._heartbeat = None if store is None else Heartbeat(store, self.rank, self.size)
        backend = dist.get_backend()
        with self._expecting("a second group for small facts"):
            self._facts = None if backend == "gloo" else dist.new_group(backend="gloo")

    def gather(self, fact: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        with self._expecting("facts of all ranks"):
            dist.all_gather_object(found, fact, group=self._facts)
        return found

    def gather_numbers(self, number: int) -> list[int]:
        found = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        with self._expecting("numbers of all ranks"):
            dist.all_gather(found, torch.tensor([number]), group=self._facts)
        return [int(each) for each in found]

    def from_first(self, fact: Any) -> Any:
        held = [fact]
        with self._expecting("a fact of rank 0"):
            dist.broadcast_object_list(held, src=0, group=self._facts)
        return held[0]

    def is_any(self, flag: bool) -> bool:
        raised = torch.tensor([flag], dtype=torch.uint8)
        with self._expecting("a flag of all ranks"):
            dist.all_reduce(raised, op=dist.ReduceOp.MAX, group=self._facts)
        return bool(raised)

    def add_(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._expecting("sums of all ranks"):
            dist.all_reduce(tensor)
        return tensor

    def copy_first_(self, tensor: torch.Tensor) -> None:
        with self._expecting("values of rank 0"):
            dist.broadcast(tensor, src=0)

    def scatter_sum_(self, flat: torch.Tensor) -> torch.Tensor:
        piece = self._piece(flat)
        with self._expecting("sums of all ranks"):
            _scatter_sum(piece, flat)
        return piece

    def gather_pieces_(self, flat: torch.Tensor) -> None:
        with self._expecting("pieces of all ranks"):
            _gather_parts(flat, self._piece(flat))

    def tell_failure(self, error: BaseException) -> None:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        store = _store()
        agreed = isinstance(error, ShuffledDPError) and error.said_by_rank_0
        # What only says that another rank is gone explains nothing to anybody.
        of_others = isinstance(error, RankError) or _is_of_communication(error)
        if self._has_told or agreed or of_others or store is None:
            return
        self._has_told = True
        try:
            store.append(_FAILURES, f"rank {self.rank}: {text}\n")
        except RuntimeError:
            return  # The store is gone with the rank that held it; there is nobody to tell.

    @contextmanager
    def last_words(self, error: BaseException) -> Iterator[None]:
        self.tell_failure(error)
        store = _store()
        yield
        if store is None:
            return
        # Where rank 0 keeps the store itself, its end is the end of what can be read there.
        waited_for = [f"{_HEARD}/{rank}" for rank in range(1, self.size)]
        until = time.monotonic() + (_LAST_WORDS_S if self._has_told else _PARTING_S)
        try:
            if not self.leads:
                store.set(f"{_HEARD}/{self.rank}", "ended")
                return
            while not store.check(waited_for) and time.monotonic() < until:
                time.sleep(0.02)
        except RuntimeError:
            return  # The store is gone, and with it whoever could be waited for.

    @contextmanager
    def explaining(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.tell_failure(error)
            if _is_of_communication(error):
                raise self._gone("weights of all ranks", error) from error
            raise

    def end(self) -> None:
        """End the thread that tells the others how far this rank is."""
        if self._heartbeat is not None:
            self._heartbeat.end()

    def _piece(self, flat: torch.Tensor) -> torch.Tensor:
        size, rest = divmod(flat.numel(), self.size)
        assert rest == 0, "a vector of equal pieces"
        return flat[self.rank * size : (self.rank + 1) * size]

    @contextmanager
    def _expecting(self, what: str) -> Iterator[None]:
        """Say which rank is gone, if one is, instead of which socket."""
        try:
            with nullcontext() if self._heartbeat is None else self._heartbeat.waiting():
                yield
        except RuntimeError as error:
            raise self._gone(what, error) from error

    def _gone(self, what: str, error: Exception) -> RankError:
        known = _failures(self.rank)
        who = self._heartbeat.missing() if self._heartbeat is not None else ""
        gone = f"{who} did not come" if who else "a rank is gone"
        cause = f"another rank failed: {known}" if known else f"{gone} ({_line(error)})"
        return RankError(
            f"rank {self.rank} of {self.size} waited for {what}, but {cause}; the job ends "
            "here: nothing was released by this step unless the ledger counts it. Mend the "
            "cause and resume from the last checkpoint"
        )


def current_world() -> World:
    """The process group this process belongs to, or one process alone.

    Raises:
        InvalidArgumentError: a launcher started several processes that have not joined.
    """
    if dist.is_available() and dist.is_initialized():
        return _world_of(dist.group.WORLD)
    declared = declared_size()
    if declared > 1:
        raise InvalidArgumentError(
            "WORLD_SIZE",
            expected="processes that have joined one process group",
            got=f"{declared} processes of a launcher, each on its own",
            remedy="wrap the program in `with shuffled_dpsgd.distributed.launched():`, or call "
            "torch.distributed.init_process_group; several separate runs on the same records would "
            "each spend privacy. If no launcher is meant, unset WORLD_SIZE",
        )
    return World()


@functools.lru_cache(maxsize=1)
def _world_of(group: Any) -> World:
    """One for every default group, since making one is collective and starts another group."""
    return GroupWorld() if group.size() > 1 else World()


def leave_world() -> None:
    """End the process group, and with it the connections by which others know of this rank."""
    world = _world_of(dist.group.WORLD)
    if isinstance(world, GroupWorld):
        world.end()
    _world_of.cache_clear()
    dist.destroy_process_group()


def declared_size() -> int:
    """How many processes the launcher says it has started; 1 without a launcher."""
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdigit() and "RANK" in os.environ else 1


def _is_of_communication(error: BaseException) -> bool:
    """Whether torch says that it could not reach another rank."""
    spoken = isinstance(error, dist.DistError) or "gloo" in str(error)
    return isinstance(error, RuntimeError) and spoken


def _store() -> Any:
    """The key-value store the ranks met at; torch has no public name for it."""
    find = getattr(dist.distributed_c10d, "_get_default_store", None)
    return find() if find is not None and dist.is_initialized() else None


def _failures(rank: int) -> str:
    """What ranks have said of their failures; that `rank` has read it is left there too."""
    store = _store()
    try:
        if store is None or not store.check([_FAILURES]):
            return ""
        known = "; ".join(store.get(_FAILURES).decode().split("\n")).strip("; ")
        store.set(f"{_HEARD}/{rank}", "read")
        return known
    except RuntimeError:
        return ""


def _line(error: BaseException) -> str:
    """The first sentence, without the place in torch's sources it comes from."""
    text = re.sub(r"\[/[^\]]*\] *", "", " ".join(str(error).split()))
    return text.split(". ")[0][:200]
