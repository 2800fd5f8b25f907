"""The ledger: what has been released, written down before it is released.

Fact established here: at most as many releases are made as were planned. An entry is on disk
(fsync) before the noise of its step is drawn, so a crash at any moment can only over-count. Every
entry carries a hash of the one before it under a secret key: a ledger that was edited, cut in the
middle or made up by somebody without the key is refused. An end that was cut off cannot be noticed:
that the file is kept remains the user's word.

A seeded run may repeat a step after a crash. Equal sums under equal noise are the same release and
cost nothing. Other sums at a step that was released before are a new release: it is counted, and
its attempt, which is part of the key of its noise, is the next one. So no noise is ever added to
two different sums.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shuffled_dpsgd.core.streams import KEY_BYTES, STREAM_VERSION
from shuffled_dpsgd.errors import BudgetExhaustedError, CheckpointError

_VERSION = 2


class LedgerEntry(NamedTuple):
    """One release: its step, the number of its attempt, and the token that recognises it."""

    step: int
    attempt: int
    token: str


class Ledger:
    """Counts releases against a budget of `max_releases`; with a path, survives a crash.

    A release is known by its token. In a seeded run it is a fingerprint of the sums under `key`, so
    that the ledger alone says nothing about data; in a secure run it is random.

    >>> ledger = Ledger(plan_fingerprint="p", max_releases=2)
    >>> [ledger.record(step=0, token=token).attempt for token in ("a", "a", "b")]
    [0, 0, 1]
    >>> ledger.spent, ledger.remaining
    (2, 0)
    >>> ledger.record(step=1, token="c")
    Traceback (most recent call last):
        ...
    shuffled_dpsgd.errors.BudgetExhaustedError: step 1 would be release 3 of 2; \
the budget is spent: stop here, or start a run with a larger plan
    """

    def __init__(
        self, *, plan_fingerprint: str, max_releases: int, path: str | Path | None = None
    ) -> None:
        self._fingerprint = plan_fingerprint
        self._max_releases = max_releases
        self._path = Path(path) if path is not None else None
        self._entries: list[LedgerEntry] = []
        self._at_step: dict[int, list[LedgerEntry]] = {}
        self._tokens: set[str] = set()
        self._chain = ""
        self._size = 0
        exists = self._path is not None and self._path.exists() and self._path.stat().st_size > 0
        self.key = secrets.token_bytes(KEY_BYTES)
        if self._path is not None:
            self.key = _key_of(self._path, self.key, is_new=not exists)
            if exists:
                self._read(self._path)
            if not self._chain:
                header = {"version": _VERSION, "streams": STREAM_VERSION, "plan": plan_fingerprint}
                self._append({**header, "max_releases": max_releases})

    @property
    def spent(self) -> int:
        """Number of distinct releases so far, those of crashed attempts included."""
        return len(self._entries)

    @property
    def remaining(self) -> int:
        """Number of releases the budget still allows."""
        return self._max_releases - self.spent

    @property
    def path(self) -> Path | None:
        """The file, or None when the ledger lives in memory only."""
        return self._path

    @property
    def repeated_steps(self) -> int:
        """Steps that were released more than once, with different sums."""
        return sum(entry.attempt == 1 for entry in self._entries)

    def releases(self, step: int) -> int:
        """How often a step has been released."""
        return len(self._at_step.get(step, ()))

    def allows(self, step: int, *, secure: bool) -> bool:
        """Whether a release at `step` may stay within the budget.

        A seeded run may repeat a release that is known already, which costs nothing.
        """
        return self.remaining > 0 or (not secure and step in self._at_step)

    def record(self, *, step: int, token: str) -> LedgerEntry:
        """Account for a release before it happens; returns once the entry is durable."""
        at_step = self._at_step.get(step, [])
        for entry in at_step:
            if entry.token == token:
                return entry
        if self.remaining <= 0:
            raise BudgetExhaustedError(
                f"step {step} would be release {self.spent + 1} of {self._max_releases}; "
                "the budget is spent: stop here, or start a run with a larger plan"
            )
        entry = LedgerEntry(step, len(at_step), token)
        self._append(entry._asdict())
        self._count(entry)
        return entry

    def entries(self) -> tuple[LedgerEntry, ...]:
        """Every release so far, in order; part of a checkpoint."""
        return tuple(self._entries)

    def adopt(self, entries: Iterable[LedgerEntry], *, durable: bool) -> None:
        """Count the releases a checkpoint knows of.

        `durable` says that run kept its ledger on disk. Such a file is always ahead of its
        checkpoints, and knows of steps taken after the last one; so it must be here and must
        contain them, or steps would go unaccounted.
        """
        unknown = [entry for entry in entries if entry.token not in self._tokens]
        if unknown and durable:
            raise CheckpointError(
                f"{self._path or 'ledger'}: {len(unknown)} releases of the checkpoint are not in "
                "the ledger; it is missing, cut, or of another run: put back the ledger that was "
                "written next to the checkpoint"
            )
        for entry in unknown:
            self._append(entry._asdict())
            self._count(entry)

    def _count(self, entry: LedgerEntry) -> None:
        self._entries.append(entry)
        self._at_step.setdefault(entry.step, []).append(entry)
        self._tokens.add(entry.token)

    def _append(self, body: dict[str, Any]) -> None:
        chain = self._link(body)
        if self._path is not None:
            self._write(self._path, json.dumps({**body, "chain": chain}) + "\n")
        self._chain = chain

    def _link(self, body: dict[str, Any]) -> str:
        text = self._chain + json.dumps(body, sort_keys=True)
        return hmac.new(self.key, text.encode(), hashlib.sha256).hexdigest()[:32]

    def _write(self, path: Path, line: str) -> None:
        import fcntl  # Here, because only a ledger on disk needs POSIX.

        created = not path.exists()
        with open(path, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # Of two processes, one sees the other's entry.
            if os.fstat(file.fileno()).st_size != self._size:
                raise CheckpointError(
                    f"{path}: changed since it was read; another process runs on this ledger: "
                    "stop one of them, or give each run a directory of its own"
                )
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
            self._size = file.tell()
        if created:
            fsync_directory(path.parent)

    def _read(self, path: Path) -> None:
        raw = path.read_bytes()
        whole, _, torn = raw.rpartition(b"\n")
        for number, line in enumerate(whole.split(b"\n") if whole else []):
            self._read_line(path, number, line)
        self._size = len(raw) - len(torn)
        if torn:
            # The entry's fsync never returned, so the release it announces never happened.
            with open(path, "r+b") as file:
                file.truncate(self._size)
                os.fsync(file.fileno())

    def _read_line(self, path: Path, number: int, line: bytes) -> None:
        place = f"{path}: line {number + 1}"
        try:
            body = json.loads(line)
            chain = body.pop("chain")
            entry = LedgerEntry(**body) if number else None
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{place} is not a ledger entry; restore the file") from error
        if number == 0 and (body.get("version"), body.get("streams")) != (_VERSION, STREAM_VERSION):
            raise CheckpointError(
                f"{path}: written by another version of this library, whose noise was drawn "
                "otherwise; use a fresh directory, or the version that began the run"
            )
        if not hmac.compare_digest(chain, self._link(body)):
            raise CheckpointError(
                f"{place} does not follow from the line before; "
                "the ledger was edited or cut: restore the file"
            )
        self._chain = chain
        if entry is None:
            if body["plan"] != self._fingerprint:
                raise CheckpointError(
                    f"{path}: ledger of plan {body['plan']}, this run has plan "
                    f"{self._fingerprint}; use a fresh directory, or the settings of that run"
                )
        elif entry.token in self._tokens:
            raise CheckpointError(f"{place} repeats a release; restore the file")
        else:
            self._count(entry)


def fingerprint(sums: Mapping[str, torch.Tensor], key: bytes) -> str:
    """A digest of names, shapes, dtypes and every bit of the tensors, under a key.

    Without the key it says nothing about the tensors, not even to somebody who guesses them.
    """
    whole = hashlib.blake2b(key=key, digest_size=32)
    for name, tensor in sums.items():
        whole.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}:".encode())
        flat = tensor.detach().contiguous().view(-1).cpu()
        whole.update(flat.view(torch.uint8).numpy().data)
    return whole.hexdigest()


def _key_of(ledger: Path, key: bytes, *, is_new: bool) -> bytes:
    """The secret of a ledger on disk, in a file beside it that only its owner reads.

    A new ledger has a new one, also where one that is gone has left its own. The name begins with
    an underscore, which the Hugging Face hub's uploads leave out.
    """
    path = ledger.with_name(f"_{ledger.name}.key")
    if is_new:
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(key)
            file.flush()
            os.fsync(file.fileno())
        fsync_directory(path.parent)
    elif not path.exists():
        raise CheckpointError(
            f"{path}: missing, and the ledger was written under it; put it back, or start in a "
            "fresh directory"
        )
    found = path.read_bytes()
    if len(found) != KEY_BYTES:
        raise CheckpointError(f"{path}: {len(found)} bytes, expected {KEY_BYTES}; restore it")
    return found


def fsync_directory(directory: Path) -> None:
    """Make a creation or rename inside `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
