"""The folder of a run: it must be empty at first, and is emptied again if nothing was released.

Starting another run in it is refused, because its ledger says what was released from the data.

`_data.json` holds a salted digest of the training records, so that a run is resumed with the same
records. Only its owner can read it, and uploads to the Hugging Face hub leave it out because of its
underscore: it could confirm a guess of all records.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from shuffled_dpsgd.errors import CheckpointError, InvalidArgumentError
from shuffled_dpsgd.tasks.config import RunConfig
from shuffled_dpsgd.tasks.config_files import parse_config
from shuffled_dpsgd.training.data import MapStyle
from shuffled_dpsgd.training.record_digest import digest

CONFIG_FILE = "run.json"
SUMMARY_FILE = "summary.json"
LEDGER_FILE = "ledger.jsonl"
DATA_FILE = "_data.json"
UNFINISHED = ".run.json.tmp"
"""A run's configuration while it is written."""
_BY_METHOD = "chosen_by_method"
# Files of a start that was killed before its configuration was written.
_BEFORE_A_RUN = frozenset({UNFINISHED, ".probe", DATA_FILE, LEDGER_FILE, "_ledger.jsonl.key"})
_CHECKPOINTS_AT_ONCE = 3
_ADAM_STATE = 2


def claim_directory(directory: Path) -> Path:
    """Create an empty folder, or refuse; returns the first folder that was made for it.

    Files of a start that was killed before its run began are removed: it released nothing.
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
    """Whether a folder holds only files of a start, with no release in its ledger.

    A process that is still starting there releases nothing: it notices that its ledger changed.
    """
    if not directory.is_dir():
        return False
    names = {item.name for item in directory.iterdir()}
    ledger = directory / LEDGER_FILE
    # Its first line is the plan; every other one is a release.
    releases = ledger.read_bytes().count(b"\n") - 1 if ledger.is_file() else 0
    return bool(names) and names <= _BEFORE_A_RUN and releases <= 0


@contextmanager
def given_back_on_error(directory: Path, *, made: Path | None) -> Iterator[None]:
    """Empty the folder if what is done inside fails; `made` is what `claim_directory` returned.

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
    """Refuse to start if the disk has no room for the checkpoints and the model."""
    weights = sum(p.nbytes for p in model.parameters())
    moments = _ADAM_STATE * sum(p.nbytes for p in model.parameters() if p.requires_grad)
    needed = _CHECKPOINTS_AT_ONCE * (weights + moments) + weights
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise InvalidArgumentError(
            "--output",
            expected=f"{needed / 2**20:,.0f} MiB free for checkpoints and weights",
            got=f"{free / 2**20:,.0f} MiB in {directory}",
            remedy="free some space, or choose a folder on another disk",
        )


def write_start(directory: Path, config: RunConfig, data: MapStyle) -> None:
    """Write the digest of the run's records, and its configuration."""
    salt = secrets.token_bytes(32)
    known = {"num_records": len(data), "salt": salt.hex(), "digest": digest(data, salt)}
    descriptor = os.open(directory / DATA_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump(known, file)
    stated = config.to_json() | {_BY_METHOD: list(config.by_method)}
    # Renamed once complete: half a configuration could not be resumed.
    unfinished = directory / UNFINISHED
    unfinished.write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(directory / CONFIG_FILE)


def check_data(directory: Path, data: MapStyle) -> None:
    """Refuse records other than those the run in `directory` began with."""
    path = directory / DATA_FILE
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        number, salt, expected = known["num_records"], known["salt"], known["digest"]
        same = digest(data, bytes.fromhex(salt)) == expected
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error}), so nobody knows which records this run began "
            "with; put the file back"
        ) from error
    if same and number == len(data):
        return
    now = f"now there are {len(data)}"
    if number == len(data):
        now = "and they are not the ones there are now"
    raise CheckpointError(
        f"{directory}: this run began with {number} training records, {now}; put the data back as "
        "they were, or start another run"
    )


def is_run_folder(directory: Path) -> bool:
    """Whether a run has begun there."""
    return (directory / CONFIG_FILE).is_file()


def load_run(directory: Path) -> RunConfig:
    """The configuration of the run in `directory`."""
    path = directory / CONFIG_FILE
    if not is_run_folder(directory):
        raise CheckpointError(
            f"{directory}: no {CONFIG_FILE}, so not the folder of a run; "
            "pass the folder an earlier run wrote to"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        # Older runs do not have it.
        chosen = raw.pop(_BY_METHOD, ()) if isinstance(raw, dict) else ()
        return replace(parse_config(raw), by_method=tuple(chosen))
    except (ValueError, TypeError, OSError) as error:
        raise CheckpointError(f"{path}: not a run's configuration; {error}") from error


def finished_summary(directory: Path) -> dict[str, Any] | None:
    """The summary of a finished run; None for any other folder."""
    try:
        summary = json.loads((directory / SUMMARY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    done = isinstance(summary, dict) and summary.get("finished") and (directory / "model").is_dir()
    return summary if done else None
