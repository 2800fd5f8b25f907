"""The ranks of a launch, as what one of them may ask of all: one process alone, or a process group.

Small facts travel over gloo even where tensors travel over NCCL: so they wait for no device, and a
rank that is gone is noticed by its closed connection, not only by a timeout.
"""

from __future__ import annotations

import functools
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from shuffled_dpsgd.distributed.heartbeat import Heartbeat
from shuffled_dpsgd.errors import InvalidArgumentError, RankError, ShuffledDPError

# How long a rank waits for the others: longer than an evaluation by rank 0 alone.
TIMEOUT_VARIABLE = "SHUFFLED_DPSGD_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 1800.0
_FAILURES = "shuffled_dpsgd/failures"
_HEARD = "shuffled_dpsgd/heard"
# Bytes of a small fact that travel with its length.
_PREFIX, _FRAME = 8, 1016
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

    def gather_texts(self, text: str) -> list[str]:
        """A text of every rank, in their order: what is said in every step, and not pickled."""
        return [text]

    def gather_vectors(self, own: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        """A vector of every rank on the host, of one type and of the `lengths` that all know."""
        return [own]

    def from_first(self, fact: Any) -> Any:
        """The fact of rank 0."""
        return fact

    def first_text(self, text: str) -> str:
        """The text of rank 0, not pickled."""
        return text

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
        return self.start_scatter_sum_(flat)()

    def start_scatter_sum_(self, flat: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin `scatter_sum_`. What is returned waits for it, and has its result."""
        return lambda: flat

    def gather_pieces_(self, flat: torch.Tensor) -> None:
        """Fill a vector from the pieces of all ranks, each of which has its own in place."""

    def divided(self, parts: Sequence[Sequence[int]]) -> World:
        """The part of this launch that this rank is in, as a world of its own.

        Every rank is in one of the `parts`, which name ranks of the launch in ascending order.
        """
        return World()

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

    def meeting(self) -> AbstractContextManager[None]:
        """The same around a single call for which torch waits for all ranks: who hangs is named."""
        return nullcontext()


class GroupWorld(World):
    """The ranks of torch's default process group, or of a part of it.

    `ranks` are those of the launch that take part, all by default. Ranks that take no part must
    call this too.
    """

    def __init__(self, ranks: Sequence[int] | None = None) -> None:
        self._in_launch = dist.get_rank()
        everyone = range(dist.get_world_size()) if ranks is None else ranks
        self.size = len(everyone)
        self.rank = [*everyone].index(self._in_launch) if self._in_launch in everyone else -1
        self._parts: dict[tuple[tuple[int, ...], ...], World] = {}
        self._has_told = False
        store = _store()
        self._heartbeat: Heartbeat | None = None
        if store is not None and self.rank >= 0:
            name = "all" if ranks is None else "-".join(map(str, everyone))
            self._heartbeat = Heartbeat(store, self._in_launch, everyone, name=name)
        has_gloo = dist.get_backend() == "gloo"
        with self._expecting("groups for tensors and for small facts"):
            wait = timedelta(seconds=timeout_s())
            self._group = None if ranks is None else dist.new_group([*ranks], timeout=wait)
            self._facts = self._group
            if not has_gloo:
                self._facts = dist.new_group([*everyone], backend="gloo", timeout=wait)

    def gather(self, fact: Any) -> list[Any]:
        return [pickle.loads(each) for each in self._gather_bytes(pickle.dumps(fact))]

    def gather_texts(self, text: str) -> list[str]:
        return [each.decode() for each in self._gather_bytes(text.encode())]

    def gather_vectors(self, own: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        padded = own.new_zeros(max(lengths))
        padded[: own.numel()] = own
        found = [torch.empty_like(padded) for _ in range(self.size)]
        with self._expecting("facts of all ranks"):
            dist.all_gather(found, padded, group=self._facts)
        return [each[:length] for each, length in zip(found, lengths, strict=True)]

    def from_first(self, fact: Any) -> Any:
        return pickle.loads(self._gather_bytes(pickle.dumps(fact) if self.leads else b"")[0])

    def first_text(self, text: str) -> str:
        return self._gather_bytes(text.encode() if self.leads else b"")[0].decode()

    def is_any(self, flag: bool) -> bool:
        raised = torch.tensor([flag], dtype=torch.uint8)
        with self._expecting("a flag of all ranks"):
            dist.all_reduce(raised, op=dist.ReduceOp.MAX, group=self._facts)
        return bool(raised)

    def add_(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._expecting("sums of all ranks"):
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def copy_first_(self, tensor: torch.Tensor) -> None:
        with self._expecting("values of rank 0"):
            dist.broadcast(tensor, group=self._group, group_src=0)

    def start_scatter_sum_(self, flat: torch.Tensor) -> Callable[[], torch.Tensor]:
        piece = self._piece(flat)
        with self._expecting("sums of all ranks"):
            work = _scatter_sum(piece, flat, group=self._group, async_op=True)

        def finish() -> torch.Tensor:
            with self._expecting("sums of all ranks"):
                work.wait()
            return piece

        return finish

    def gather_pieces_(self, flat: torch.Tensor) -> None:
        with self._expecting("pieces of all ranks"):
            _gather_parts(flat, self._piece(flat), group=self._group)

    def divided(self, parts: Sequence[Sequence[int]]) -> World:
        key = tuple(map(tuple, parts))
        if key not in self._parts:
            made = [GroupWorld(part) for part in parts if len(part) > 1]
            self._parts[key] = next((part for part in made if part.rank >= 0), World())
        return self._parts[key]

    def tell_failure(self, error: BaseException) -> None:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        store = _store()
        agreed = isinstance(error, ShuffledDPError) and error.said_by_rank_0
        # An error that only says that another rank is gone would hide that rank's own.
        of_others = isinstance(error, RankError) or _is_of_communication(error)
        if self._has_told or agreed or of_others or store is None:
            return
        self._has_told = True
        try:
            store.append(_FAILURES, f"rank {self._in_launch}: {text}\n")
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

    @contextmanager
    def meeting(self) -> Iterator[None]:
        with self.explaining(), self._waiting():
            yield

    def end(self) -> None:
        """End the thread that tells the others how far this rank is."""
        if self._heartbeat is not None:
            self._heartbeat.end()
        for part in self._parts.values():
            if isinstance(part, GroupWorld):
                part.end()

    def _gather_bytes(self, own: bytes) -> list[bytes]:
        """In one message where all are short, else in a second one with room for the longest."""
        size = _FRAME
        while True:
            frame = _framed(own, size)
            found = [torch.empty_like(frame) for _ in range(self.size)]
            with self._expecting("facts of all ranks"):
                dist.all_gather(found, frame, group=self._facts)
            longest = max(map(_length_in, found))
            if longest <= size:
                return [*map(_unframed, found)]
            size = longest

    def _piece(self, flat: torch.Tensor) -> torch.Tensor:
        size, rest = divmod(flat.numel(), self.size)
        assert rest == 0, "a vector of equal pieces"
        return flat[self.rank * size : (self.rank + 1) * size]

    @contextmanager
    def _expecting(self, what: str) -> Iterator[None]:
        """Say which rank is gone, if one is, instead of which socket."""
        try:
            with self._waiting():
                yield
        except RuntimeError as error:
            raise self._gone(what, error) from error

    def _waiting(self) -> AbstractContextManager[None]:
        return nullcontext() if self._heartbeat is None else self._heartbeat.waiting()

    def _gone(self, what: str, error: Exception) -> RankError:
        known = _failures(self._in_launch)
        who = self._heartbeat.missing() if self._heartbeat is not None else ""
        gone = f"{who} did not come" if who else "a rank is gone"
        cause = f"another rank failed: {known}" if known else f"{gone} ({_line(error)})"
        return RankError(
            f"rank {self._in_launch} of {dist.get_world_size()} waited for {what}, but {cause}; "
            "the job ends here: nothing was released by this step unless the ledger counts it. "
            "Mend the cause and resume from the last checkpoint"
        )


def _framed(data: bytes, size: int) -> torch.Tensor:
    """The length of some bytes, and as many of them as fit."""
    text = len(data).to_bytes(_PREFIX, "little") + data[:size].ljust(size, b"\0")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _length_in(frame: torch.Tensor) -> int:
    return int.from_bytes(frame[:_PREFIX].numpy().tobytes(), "little")


def _unframed(frame: torch.Tensor) -> bytes:
    return frame[_PREFIX : _PREFIX + _length_in(frame)].numpy().tobytes()


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


def timeout_s() -> float:
    """How long a rank waits for the others, as the environment says."""
    text = os.environ.get(TIMEOUT_VARIABLE, str(DEFAULT_TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise InvalidArgumentError(
            TIMEOUT_VARIABLE, expected="a positive number of seconds", got=text
        )
    return seconds


def _is_of_communication(error: BaseException) -> bool:
    """Whether torch says that it could not reach another rank."""
    spoken = isinstance(error, dist.DistError) or "gloo" in str(error)
    return isinstance(error, RuntimeError) and spoken


def _store() -> Any:
    """The key-value store that the ranks met at."""
    return cast(Any, dist.group.WORLD).get_group_store() if dist.is_initialized() else None


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
