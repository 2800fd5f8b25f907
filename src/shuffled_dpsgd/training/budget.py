"""One privacy budget for all runs on the same data, kept in a file that counts every run.

A run is entered before its first release. From then on its whole plan counts, however early it
stops, because when it stops may depend on the records. All runs are priced together at the file's
δ: by composition if they were settled beforehand, by a privacy filter if each may be chosen by what
the others released (`adaptive`).

The file is replaced as a whole, under a lock, and is on disk before the release is made. A run is
refused if the file is missing or damaged, if the records differ, if the total would exceed the
limit, or if its seed was used before, so that it would share its noise with another run. It is up
to the user to keep the file unchanged, to name it in every run, and to continue no copy of a run.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shuffled_dpsgd.accounting import Filter, PrivacyClaim, SampledGaussian, claim_together
from shuffled_dpsgd.accounting.calibration import check_epsilon
from shuffled_dpsgd.accounting.together import BestOf, Spent
from shuffled_dpsgd.core.claim import Adjacency
from shuffled_dpsgd.core.events import check_delta
from shuffled_dpsgd.core.ledger import fsync_directory
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.errors import (
    BudgetExhaustedError,
    CheckpointError,
    InvalidArgumentError,
    require,
)
from shuffled_dpsgd.training.record_digest import keyed

_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class CountedRun:
    """A run or a search, with its whole plan.

    `identity` is that of its ledger, so that a resumed run counts once. For a search, `best_of` is
    the mean number of its runs. `seed` is a salted digest, by which equal seeds are recognised.
    `releases` is the number last reported to the file.
    """

    identity: str
    name: str
    began: str
    noise_multiplier: float
    sampling_prob: float
    num_steps: int
    best_of: float | None = None
    seed: str | None = None
    releases: int = 0

    def priced_as(self, adjacency: Adjacency) -> Spent:
        run = SampledGaussian(
            noise_multiplier=self.noise_multiplier,
            sampling_prob=self.sampling_prob,
            num_steps=self.num_steps,
            adjacency=adjacency,
        )
        return run if self.best_of is None else BestOf(run=run, mean=self.best_of)

    @property
    def ending(self) -> str:
        """How far the run got, as last reported to the file."""
        if self.best_of is not None:
            return "counted as a whole"
        if self.releases >= self.num_steps:
            return "finished"
        if self.releases:
            return f"stopped after {self.releases} of {self.num_steps} steps, counted with all"
        return f"begun, not heard of since: counted with all {self.num_steps} steps"


@dataclass(frozen=True, kw_only=True)
class Account:
    """What a budget file holds. `data` are salted digests of the records that it covers.

    In an `adaptive` account, the settings and the number of runs may depend on what earlier runs
    released; all runs together then cost the limit itself.
    """

    delta: float
    epsilon: float | None
    adjacency: Adjacency
    salt: str
    adaptive: bool = False
    data: tuple[str, ...] = ()
    runs: tuple[CountedRun, ...] = ()

    @property
    def spent(self) -> list[Spent]:
        """Every run as it is priced, in order."""
        return [run.priced_as(self.adjacency) for run in self.runs]

    def together(self) -> PrivacyClaim:
        """The proven ε of all runs; there must be one."""
        if self.filter is not None:
            return self.filter.claim(self.spent)
        return claim_together(self.spent, self.delta)

    @property
    def filter(self) -> Filter | None:
        """The filter that enforces the limit, once an adaptive account has a run."""
        if not (self.adaptive and self.runs):
            return None
        assert self.epsilon is not None, "seen to by `create`"
        return Filter(epsilon=self.epsilon, delta=self.delta, first=self.spent[0])

    def with_run(self, run: CountedRun, data: str, path: Path) -> Account:
        """The account with `run` added, on data of this digest; refuses what does not fit."""
        if self.data and data not in self.data:
            raise CheckpointError(
                f"{path}: counts runs on other records than these (mark {data}); name the budget "
                "of these, or, if they are the same records prepared in another way, say so: "
                f"shuffled-dpsgd budget admit {path} {data}"
            )
        known = next((each for each in self.runs if each.identity == run.identity), None)
        if known is not None:
            if run.releases < known.releases:
                raise CheckpointError(
                    f"{path}: knows of {known.releases} releases of this run, whose ledger has "
                    f"{run.releases}; it is a copy or was put back: restore the newest"
                )
            return self
        if run.seed is not None and any(each.seed == run.seed for each in self.runs):
            raise InvalidArgumentError(
                "seed",
                expected=f"a seed that no other run in {path} has, or none",
                got="one whose noise is used already",
                remedy="runs add up only if their noise is independent; leave the seed out",
            )
        grown = replace(self, data=self.data or (data,), runs=(*self.runs, run))
        if self.epsilon is not None and not grown.together().epsilon <= self.epsilon:
            raise BudgetExhaustedError(
                f"{path}: {self.described()} is spent, and this run would make it "
                f"{grown.described()}, above the limit of {self.epsilon:g}; nothing was "
                "released. Plan a run with a smaller ε"
            )
        return grown

    def described(self) -> str:
        """What is spent, in words."""
        if not self.runs:
            return "nothing"
        if self.filter is None:
            return self.together().describe()
        return f"{self.filter.share(self.spent):.1%} of what keeps ε = {self.epsilon:g} (proven)"


class BudgetFile:
    """The file at `path`, read anew each time: several processes may use it at once."""

    def __init__(self, path: str | Path) -> None:
        # Links are resolved: replacing a link would leave two budgets.
        self.path = Path(path).resolve()

    def create(
        self,
        *,
        delta: float,
        epsilon: float | None,
        adjacency: Adjacency,
        adaptive: bool = False,
    ) -> Account:
        """Make the file; an existing one is never overwritten."""
        check_delta(delta)
        if epsilon is not None:
            check_epsilon(epsilon)
        if adaptive and (epsilon is None or adjacency != "add-remove"):
            raise InvalidArgumentError(
                "adaptive",
                expected="a limit of ε, and adjacency add-remove",
                got=f"{epsilon}, {adjacency}",
                remedy="what is proven of runs of any choice is a limit that was kept",
            )
        salt = secrets.token_hex(32)
        made = Account(
            delta=delta, epsilon=epsilon, adjacency=adjacency, salt=salt, adaptive=adaptive
        )
        with self._locked():
            require(
                not self.path.exists(), "FILE", "a new file", str(self.path), "a budget is kept"
            )
            self._write(made, mode=0o600)
        return made

    def read(self) -> Account:
        """What it holds.

        Raises:
            CheckpointError: it is missing, or not as it was written.
        """
        try:
            if self.path.stat().st_nlink > 1:
                raise ValueError("it has a second name, under which it would not change")
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if found.pop("checksum") != _checksum(found) or found.pop("version") != _VERSION:
                raise ValueError("its checksum or its version is another")
            runs = tuple(CountedRun(**run) for run in found.pop("runs"))
            return Account(**{**found, "data": tuple(found["data"]), "runs": runs})
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{self.path}: no such budget; put it back, or make one before the first run on "
                f"these records: shuffled-dpsgd budget new {self.path} --epsilon 3 --delta 1e-6"
            ) from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{self.path}: damaged, so nobody knows what was spent ({error}); restore it"
            ) from error

    def enter(self, run: CountedRun, data: str) -> Account:
        """Count a run; returns once that is on disk."""
        return self._change(lambda now: now.with_run(run, data, self.path))

    def note(self, identity: str, releases: int) -> Account:
        """Record how far a run has got; its whole plan counts all the same."""

        def noted(run: CountedRun) -> CountedRun:
            mine = run.identity == identity
            return replace(run, releases=max(run.releases, releases)) if mine else run

        return self._change(lambda now: replace(now, runs=tuple(map(noted, now.runs))))

    def admit(self, mark: str) -> Account:
        """Let data with another digest, `mark`, count as the same records."""
        return self._change(lambda now: replace(now, data=(*now.data, mark)))

    def _change(self, edit: Callable[[Account], Account]) -> Account:
        """Replace the file by an edited one.

        Raises:
            CheckpointError: it is missing, damaged, read-only, or could not be written.
        """
        try:
            with self._locked():
                before = self.read()
                after = edit(before)
                if after != before:
                    mode = self.path.stat().st_mode & 0o777
                    # Replacing a file asks for no leave to write it.
                    if not mode & 0o222 or not os.access(self.path, os.W_OK):
                        raise PermissionError("it is read-only")
                    self._write(after, mode=mode)
                return after
        except OSError as error:
            reason = error.strerror or error
            raise CheckpointError(
                f"{self.path}: could not be written ({reason}), and no run goes on uncounted; make "
                "the file and its folder writable, or make room"
            ) from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold an exclusive lock, which the system releases when the process ends."""
        lock = self.path.with_name(f".{self.path.name}.lock")
        with open(os.open(lock, os.O_RDWR | os.O_CREAT, 0o666), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _write(self, account: Account, *, mode: int) -> None:
        body = {"version": _VERSION, **asdict(account)}
        text = json.dumps({**body, "checksum": _checksum(body)}, indent=1, ensure_ascii=False)
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        temporary.unlink(missing_ok=True)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)
        fsync_directory(self.path.parent)


def counted(
    plan: PrivacyPlan, *, name: str, salt: str, identity: str = "", releases: int = 0
) -> CountedRun:
    """The entry of a run of `plan`; refuses a run whose ε cannot be certified."""
    special = ("records_per_unit", "largest_batch", "noise_rows")
    if reasons := plan.uncertifiable or [name for name in special if getattr(plan, name)]:
        raise InvalidArgumentError(
            "budget",
            expected="a run on rows, in batches of their own, whose ε can be certified",
            got="; ".join(reasons),
            remedy="no budget covers it: leave the budget out, and these records unprotected",
        )
    seed = None if plan.seed is None else keyed(str(plan.seed).encode(), salt)
    return CountedRun(
        identity=identity or secrets.token_hex(16),
        name=name,
        began=datetime.now(UTC).isoformat(timespec="seconds"),
        noise_multiplier=plan.smallest_noise_multiplier,
        sampling_prob=plan.sampling_prob,
        num_steps=plan.num_steps,
        seed=seed,
        releases=releases,
    )


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
