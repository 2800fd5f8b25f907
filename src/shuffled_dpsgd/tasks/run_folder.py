"""The folder of a run: taken when nothing else is in it, given back if nothing was released.

The folder's ledger knows what was released from the data, so starting over in it would forget
spent privacy; that is refused. A run that fails before its first release leaves no trace.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from shuffled_dpsgd.errors import InvalidArgumentError

UNFINISHED = ".run.json.tmp"
"""A run's configuration while it is written."""
# What a start leaves behind that was killed before its configuration was written.
_BEFORE_A_RUN = frozenset({UNFINISHED, ".probe", "_data.json", "ledger.jsonl", "_ledger.jsonl.key"})
_CHECKPOINTS_AT_ONCE = 3
_ADAM_STATE = 2


def claim_directory(directory: Path) -> Path:
    """Create an empty folder that can be written to, or refuse; the first folder made for it.

    What a start left that was killed before its run began is removed: it released nothing.
    """
    try:
        if _was_never_begun(directory):
            for item in directory.iterdir():
                item.unlink()
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise InvalidArgumentError(
                "--output",
                expected="an empty or new folder",
                got=str(directory),
                remedy="choose another, or continue the run in it with --resume",
            )
        made = directory
        while not made.parent.exists():
            made = made.parent
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / ".probe"
        probe.write_text("can be written\n", encoding="utf-8")
        probe.unlink()
    except OSError as error:
        raise InvalidArgumentError(
            "--output",
            expected="a folder that can be written to",
            got=str(directory),
            remedy=error.strerror or str(error),
        ) from error
    return made


def _was_never_begun(directory: Path) -> bool:
    """Whether a folder holds nothing but what comes before a run, with no release in its ledger.

    A process that is still starting there loses nothing: it notices that its ledger is another one
    before it releases anything.
    """
    if not directory.is_dir():
        return False
    names = {item.name for item in directory.iterdir()}
    ledger = directory / "ledger.jsonl"
    # Its first line is the plan; every other one is a release.
    releases = ledger.read_bytes().count(b"\n") - 1 if ledger.is_file() else 0
    return bool(names) and names <= _BEFORE_A_RUN and releases <= 0


@contextmanager
def given_back_on_error(directory: Path, *, made: Path | None) -> Iterator[None]:
    """Empty a folder again when what follows fails; `made` is what `claim_directory` said.

    Only for what comes before the first release: a ledger with one must stay.
    """
    try:
        yield
    except BaseException:
        if made is not None:
            empty_directory(directory, made=made)
        raise


def empty_directory(directory: Path, *, made: Path) -> None:
    """Remove what a run wrote before its first release, and the folders made for it."""
    for item in directory.iterdir():
        shutil.rmtree(item) if item.is_dir() else item.unlink()
    place = directory
    while place != made.parent and not any(place.iterdir()):
        place.rmdir()
        place = place.parent


def check_space(directory: Path, model: nn.Module) -> None:
    """Refuse to start where the checkpoints and the model would not fit."""
    sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in model.parameters()]
    weights = sum(size for size, _ in sizes)
    moments = _ADAM_STATE * sum(size for size, trainable in sizes if trainable)
    needed = _CHECKPOINTS_AT_ONCE * (weights + moments) + weights
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise InvalidArgumentError(
            "--output",
            expected=f"{needed / 2**20:,.0f} MiB free for checkpoints and weights",
            got=f"{free / 2**20:,.0f} MiB in {directory}",
            remedy="free some space, or choose a folder on another disk",
        )
