"""The ledger: what has been released, written down before it is released.

An entry is on disk (fsync) before the noise of its step is drawn, so a crash at any moment can
only over-count. Every entry carries the hash of the one before it: a ledger that was edited,
truncated in the middle or glued together is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

from shuffled_dpsgd.errors import BudgetExhaustedError, CheckpointError

KEY_BYTES = 32


class Ledger:
    """Counts releases against a budget of `max_releases`; with a path, survives a crash.

    A release is known by its token. Recording a known token again is a repetition of the very
    same release (a seeded run after a crash) and costs nothing; a new token costs one release.
    Tokens of a seeded run are made under `key`, so that the ledger alone says nothing about data.

    >>> ledger = Ledger(plan_fingerprint="p", max_releases=1)
    >>> ledger.record(step=0, token="a")
    >>> ledger.record(step=0, token="a")
    >>> ledger.spent, ledger.remaining
    (1, 0)
    >>> ledger.record(step=1, token="b")
    Traceback (most recent call last):
        ...
    shuffled_dpsgd.errors.BudgetExhaustedError: step 1 would be release 2 of 1; \
the budget is spent: stop here, or start a run with a larger plan
    """

    def __init__(
        self, *, plan_fingerprint: str, max_releases: int, path: str | Path | None = None
    ) -> None:
        self._fingerprint = plan_fingerprint
        self._max_releases = max_releases
        self._path = Path(path) if path is not None else None
        self._tokens: dict[str, int] = {}
        self._key: bytes | None = None
        self._chain = ""
        self._size = 0
        if self._path is not None:
            if self._path.exists():
                self._read(self._path)
            if not self._chain:
                self._append({"plan": plan_fingerprint, "max_releases": max_releases})

    @property
    def spent(self) -> int:
        """Number of distinct releases so far, those of crashed attempts included."""
        return len(self._tokens)

    @property
    def remaining(self) -> int:
        """Number of releases the budget still allows."""
        return self._max_releases - self.spent

    @property
    def path(self) -> Path | None:
        """The file, or None when the ledger lives in memory only."""
        return self._path

    @property
    def key(self) -> bytes:
        """The secret of this ledger's tokens; beside a file, in a file that only its owner reads.

        That name begins with an underscore, which the Hugging Face hub's uploads leave out.

        Raises:
            CheckpointError: the file is gone, so no release could be told from a new one.
        """
        if self._key is None:
            self._key = secrets.token_bytes(KEY_BYTES) if self._path is None else self._keyfile()
        return self._key

    def _keyfile(self) -> bytes:
        assert self._path is not None
        path = self._path.with_name(f"_{self._path.name}.key")
        if not path.exists():
            if self._tokens:
                raise CheckpointError(
                    f"{path}: missing, and {self.spent} releases of the ledger were made under "
                    "it; put it back, or start in a fresh directory"
                )
            _write_secret(path, secrets.token_bytes(KEY_BYTES))
        key = path.read_bytes()
        if len(key) != KEY_BYTES:
            raise CheckpointError(f"{path}: {len(key)} bytes, expected {KEY_BYTES}; restore it")
        return key

    def allows(self, beginning: str) -> bool:
        """Whether recording a token may stay within the budget, given what it begins with."""
        return self.remaining > 0 or any(token.startswith(beginning) for token in self._tokens)

    def record(self, *, step: int, token: str) -> None:
        """Account for a release before it happens; returns once the entry is durable."""
        if token in self._tokens:
            return
        if self.remaining <= 0:
            raise BudgetExhaustedError(
                f"step {step} would be release {self.spent + 1} of {self._max_releases}; "
                "the budget is spent: stop here, or start a run with a larger plan"
            )
        self._append({"step": step, "token": token})
        self._tokens[token] = step

    def tokens(self) -> tuple[str, ...]:
        """Every release so far, in order; part of a checkpoint."""
        return tuple(self._tokens)

    def adopt(self, tokens: tuple[str, ...], *, durable: bool) -> None:
        """Count the releases a checkpoint knows of.

        `durable` says that run kept its ledger on disk. Such a file is always ahead of its
        checkpoints, and knows of steps taken after the last one; so it must be here and must
        contain them, or steps would go unaccounted.
        """
        unknown = [token for token in tokens if token not in self._tokens]
        if unknown and durable:
            raise CheckpointError(
                f"{self._path or 'ledger'}: {len(unknown)} releases of the checkpoint are not in "
                "the ledger; it is missing, cut, or of another run: put back the ledger that was "
                "written next to the checkpoint"
            )
        for token in unknown:
            self.record(step=-1, token=token)

    def _append(self, body: dict[str, Any]) -> None:
        chain = _link(self._chain, body)
        if self._path is not None:
            self._write(self._path, json.dumps({**body, "chain": chain}) + "\n")
        self._chain = chain

    def _write(self, path: Path, line: str) -> None:
        created = not path.exists()
        with open(path, "ab") as file:
            _lock(file.fileno())
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
        try:
            body = json.loads(line)
            chain = body.pop("chain")
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"{path}: line {number + 1} is not a ledger entry; restore the file"
            ) from error
        if chain != _link(self._chain, body):
            raise CheckpointError(
                f"{path}: line {number + 1} does not follow from the line before; "
                "the ledger was edited or cut: restore the file"
            )
        self._chain = chain
        if number == 0:
            if body.get("plan") != self._fingerprint:
                raise CheckpointError(
                    f"{path}: ledger of plan {body.get('plan')}, this run has plan "
                    f"{self._fingerprint}; use a fresh directory, or the settings of that run"
                )
        else:
            self._tokens[str(body["token"])] = int(body["step"])


def _lock(descriptor: int) -> None:
    """Until the file is closed, no other process writes: of two, one sees the other's entry."""
    import fcntl  # Here, because only a ledger on disk needs POSIX.

    fcntl.flock(descriptor, fcntl.LOCK_EX)


def _write_secret(path: Path, content: bytes) -> None:
    """Whole or not at all, and readable by its owner only."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)
    fsync_directory(path.parent)


def fsync_directory(directory: Path) -> None:
    """Make a creation or rename inside `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _link(previous: str, body: dict[str, Any]) -> str:
    text = previous + json.dumps(body, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]
