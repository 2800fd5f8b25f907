"""Cut a large file into parcels and put them together again, for machines that take small ones.

    python -m shuffled_dpsgd_experiments.pretraining.parcels cut cifar10.med.xz --to parcels
    python -m shuffled_dpsgd_experiments.pretraining.parcels join parcels --to data/cifar10

Each parcel is a folder of its own, so that they can travel one at a time: `parcels/0`,
`parcels/1`, … A file beside the piece says the name, the number of pieces and the digest of the
whole; `join` refuses anything else.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from shuffled_dpsgd.errors import InvalidArgumentError

_PIECE, _LABEL = "piece", "parcel.json"


def cut(file: Path, folder: Path, size: int) -> list[Path]:
    """Write `file` as parcels of at most `size` bytes each."""
    content = file.read_bytes()
    pieces = [content[at : at + size] for at in range(0, len(content), size)] or [b""]
    digest = hashlib.sha256(content).hexdigest()
    parcels = []
    for number, piece in enumerate(pieces):
        parcel = folder / str(number)
        parcel.mkdir(parents=True, exist_ok=True)
        (parcel / _PIECE).write_bytes(piece)
        label = {"name": file.name, "number": number, "of": len(pieces), "sha256": digest}
        (parcel / _LABEL).write_text(json.dumps(label) + "\n", encoding="utf-8")
        parcels.append(parcel)
    return parcels


def join(folder: Path, target: Path) -> Path:
    """Put the parcels in `folder` together again, in the folder `target`.

    Raises:
        InvalidArgumentError: one is missing, or the whole is not what was cut.
    """
    labels = {
        int(parcel.parent.name): json.loads(parcel.read_text(encoding="utf-8"))
        for parcel in folder.glob(f"*/{_LABEL}")
    }
    count = next(iter(labels.values()))["of"] if labels else 1
    missing = [number for number in range(count) if number not in labels]
    if missing:
        raise InvalidArgumentError(
            "FOLDER", expected=f"parcels 0 to {count - 1} in {folder}", got=f"without {missing}"
        )
    content = b"".join((folder / str(n) / _PIECE).read_bytes() for n in range(count))
    if hashlib.sha256(content).hexdigest() != labels[0]["sha256"]:
        raise InvalidArgumentError(
            "FOLDER", expected="parcels of one file", got=str(folder), remedy="cut it again"
        )
    target.mkdir(parents=True, exist_ok=True)
    path = target / Path(labels[0]["name"]).name
    path.write_bytes(content)
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="parcels", description=__doc__.split("\n", 1)[0])
    parser.add_argument("what", choices=("cut", "join"))
    parser.add_argument("place", type=Path, help="the file to cut, or the folder of parcels")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--mebibytes", type=int, default=56, help="the largest parcel")
    options = parser.parse_args(arguments)
    if options.what == "cut":
        for parcel in cut(options.place, options.to, options.mebibytes * 2**20):
            print(parcel)
    else:
        print(join(options.place, options.to))


if __name__ == "__main__":
    main()
