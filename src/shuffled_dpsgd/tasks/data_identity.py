"""Is a resumed run given the records it began with? A salted digest that stays with the run.

The budget was planned for one set of records, and the steps before and after an interruption must
see the same one. The digest lies in a file that only its owner reads; its name begins with an
underscore, which the Hugging Face hub's uploads leave out. It says nothing to somebody who does
not have the records, but could confirm a guess of all of them: it is not for publishing.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

from shuffled_dpsgd.distributed import World
from shuffled_dpsgd.distributed.agreement import agree
from shuffled_dpsgd.errors import CheckpointError
from shuffled_dpsgd.training.data import MapStyle
from shuffled_dpsgd.training.equal_records import digest

FILE = "_data.json"


def remember_data(directory: Path, data: MapStyle) -> None:
    """Write down which records a run begins with."""
    salt = secrets.token_bytes(32)
    known = {"num_records": len(data), "salt": salt.hex(), "digest": digest(data, salt)}
    descriptor = os.open(directory / FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump(known, file)


def check_data(directory: Path, data: MapStyle) -> None:
    """Refuse records other than those the run in `directory` began with.

    Raises:
        CheckpointError: their number or their content differs, or the file is not there.
    """
    path = directory / FILE
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        number, salt, expected = known["num_records"], known["salt"], known["digest"]
        same = digest(data, bytes.fromhex(salt)) == expected
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error}), so nobody knows which records this run began "
            "with; put the file back"
        ) from error
    if number != len(data):
        raise CheckpointError(
            f"{directory}: this run began with {number} training records, now there are "
            f"{len(data)}; put the data back as they were, or start another run"
        )
    if not same:
        raise CheckpointError(
            f"{directory}: there are {number} training records as before, but they are not the "
            "ones this run began with; put the data back as they were, or start another run"
        )


def compare_all_data(world: World, data: MapStyle) -> None:
    """Refuse a launch whose ranks have loaded different records, naming the rank."""
    if world.size > 1:
        salt = world.from_first(secrets.token_bytes(32))
        facts = {
            "number of training records": len(data),
            "set of training records": digest(data, salt),
        }
        agree(world, facts, remedy="give every rank the same files")
