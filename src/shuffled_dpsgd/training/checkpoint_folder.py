"""Checkpoint folders: written atomically, hashed, found and deleted.

A checkpoint is written under a temporary name, synced, and renamed. What it replaces is deleted
afterwards. Its manifest has a hash of each file, so that an incomplete or changed one is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from shuffled_dpsgd.core.ledger import fsync_directory
from shuffled_dpsgd.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
# A checkpoint that replaces one of the same step has this suffix until the old one is deleted.
_NEWER = "-new"
_NAME = re.compile(rf"checkpoint-\d{{8}}({_NEWER})?")


def find_checkpoints(directory: str | Path) -> list[Path]:
    """Complete checkpoints in `directory`, oldest first."""
    root = Path(directory)
    found = root.iterdir() if root.is_dir() else ()
    return sorted(path for path in found if _NAME.fullmatch(path.name))


def latest_checkpoint(directory: str | Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    found = find_checkpoints(directory)
    return found[-1] if found else None


def choose_checkpoint(path: Path) -> Path:
    """The checkpoint itself, or the newest of those in a folder."""
    if (path / MANIFEST).is_file() or _NAME.fullmatch(path.name):
        return path
    newest = latest_checkpoint(path)
    if newest is None:
        raise CheckpointError(
            f"{path}: no checkpoint and no folder of checkpoints; pass what save_checkpoint was "
            "given, or what it returned"
        )
    return newest


def finish_files(folder: Path, names: Iterable[str], durable: Mapping[str, str]) -> None:
    """Write the manifest, and sync these files and it; `durable` are hashes of synced files."""
    hashes = {name: hash_file(folder / name) for name in names}
    manifest = {"format": FORMAT, "files": {**hashes, **durable}}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for name in (*hashes, MANIFEST):
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
    fsync_directory(folder)


def listed_files(source: Path) -> dict[str, str]:
    """The hash of every file in a checkpoint's manifest, which must be of our format."""
    path = source / MANIFEST
    if not path.is_file():
        raise _broken(source, f"{source}: no {MANIFEST}, so not a complete checkpoint")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version, files = manifest["format"], dict(manifest["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise _broken(source, f"{path}: not a manifest of ours; {error}") from error
    if version != FORMAT:
        raise _broken(source, f"{source}: format {version}, this version reads {FORMAT}")
    return files


def verify_files(source: Path, names: Iterable[str]) -> None:
    """Refuse a checkpoint with a file that is missing or not as it was written."""
    files = listed_files(source)
    for name in names:
        if not (source / name).is_file():
            raise _broken(source, f"{source}: {name} is missing")
        if hash_file(source / name) != files.get(name):
            raise _broken(
                source,
                f"{source / name}: does not match its hash in the manifest; the file is torn or "
                "was altered",
            )


def put_in_place(temporary: Path, target: Path) -> None:
    """Rename a complete checkpoint to its final name; an old one of that name is replaced."""
    newer = target.with_name(f"{target.name}{_NEWER}")
    if newer.exists():  # A process was killed before it could finish the replacement below.
        _replace(target, newer)
    if not target.exists():
        _rename(temporary, target)
        return
    _rename(temporary, newer)
    _replace(target, newer)


def prune(root: Path, *, keep: int, spare: Path) -> None:
    """Delete all but the newest `keep` checkpoints in `root`, never `spare`."""
    for old in find_checkpoints(root)[:-keep]:
        if old != spare:
            _remove(old)


def hash_file(path: Path) -> str:
    """The SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _broken(source: Path, problem: str) -> CheckpointError:
    """The error for a checkpoint that cannot be read, naming the one before."""
    before = [c for c in find_checkpoints(source.parent) if c.name < source.name]
    if not before:
        return CheckpointError(f"{problem}; there is none before it")
    return CheckpointError(
        f"{problem}; the one before it is {before[-1]}: pass that to load_checkpoint, or resume "
        f"with `--checkpoint {before[-1].name}`"
    )


def _replace(target: Path, newer: Path) -> None:
    if target.exists():
        _remove(target)
    _rename(newer, target)


def _remove(checkpoint: Path) -> None:
    """Delete a checkpoint; it is renamed first, so that a partly deleted one is never found."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.removed.tmp")
    _rename(checkpoint, hidden)
    shutil.rmtree(hidden)


def _rename(source: Path, target: Path) -> None:
    os.rename(source, target)
    fsync_directory(target.parent)
