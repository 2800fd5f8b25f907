"""Compiles every Triton and Gluon kernel for the chips it serves on several releases of Triton.

    python -m benchmarks.compile_kernels --triton 3.6 3.7 3.8 3.9

Needs no GPU. The newest patch of each release is fetched by pip, by name, and unpacked into a
folder of its own; nothing is installed. Plain Triton is compiled for sm_80, 89, 90 and 100, Gluon
for sm_90. A kernel that asks for more shared memory than a chip has fails too. Prints a table, and
fails if a kernel does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import save
from shuffled_dpsgd.environment import today

ROOT = Path(__file__).resolve().parents[1]
WHEELS = Path.home() / ".cache" / "shuffled_dpsgd" / "triton"
RELEASES = ("3.6", "3.7", "3.8", "3.9")
CHIPS = (80, 89, 90, 100)


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One release's results: a note for each compilation."""

    triton: str
    torch: str
    notes: tuple[dict[str, Any], ...]

    def errors(self, kernel: str, chip: int) -> list[str]:
        return [n["error"] for n in self.of(kernel) if n["chip"] == chip and n["error"]]

    def of(self, kernel: str) -> list[dict[str, Any]]:
        return [note for note in self.notes if note["kernel"] == kernel]

    def chips(self, kernel: str) -> list[int]:
        return sorted({note["chip"] for note in self.of(kernel)})


def fetch(release: str, folder: Path) -> Path:
    """The newest patch of a release, unpacked; fetched if it is not there already."""
    wheels = folder / "wheels"
    unpacked = folder / release
    if not (unpacked / "complete").exists():
        wheels.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--dest", str(wheels), f"triton=={release}.*"]
        subprocess.run(command, check=True)
        newest = max(wheels.glob(f"triton-{release}.*.whl"), key=lambda path: path.stat().st_mtime)
        with zipfile.ZipFile(newest) as wheel:
            wheel.extractall(unpacked)
        for tool in unpacked.glob("triton/backends/*/bin/*"):
            tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        newest.unlink()
        (unpacked / "complete").touch()
    return unpacked


def compile_with(triton: Path, chips: Sequence[int]) -> Compiled:
    """Compile all kernels in a process of their own, with nothing from Triton's cache."""
    path = os.pathsep.join([str(triton), str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, "-m", "benchmarks.kernel_launches", "--chips", *map(str, chips)]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": cache}
        environment.pop("TRITON_INTERPRET", None)
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise SystemExit(f"{triton}: {done.stderr}")
    about, *notes = map(json.loads, done.stdout.splitlines())
    return Compiled(triton=about["triton"], torch=about["torch"], notes=tuple(notes))


def table(results: Sequence[Compiled]) -> list[str]:
    """Kernels by releases; each cell names the chips, struck out where a kernel fails."""
    kernels = sorted({note["kernel"] for result in results for note in result.notes})
    lines = [
        "| kernel | " + " | ".join(result.triton for result in results) + " |",
        "|---" * (len(results) + 1) + "|",
    ]
    for kernel in kernels:
        cells = [
            " ".join(
                f"~~{chip}~~" if result.errors(kernel, chip) else str(chip)
                for chip in result.chips(kernel)
            )
            for result in results
        ]
        lines.append(f"| `{kernel}` | " + " | ".join(cells) + " |")
    return lines


def failures(results: Iterable[Compiled]) -> list[str]:
    """A line for every kernel that fails, with the first of its errors."""
    return [
        f"- `{kernel}` on Triton {result.triton}, sm_{chip}: {errors[0]}"
        for result in results
        for kernel in sorted({note["kernel"] for note in result.notes})
        for chip in result.chips(kernel)
        if (errors := result.errors(kernel, chip))
    ]


def document_of(results: Sequence[Compiled]) -> dict[str, Any]:
    """The record: which chips every kernel was compiled for, by release."""
    return {
        "date": today(),
        "hardware": "none: nothing was run",
        "versions": {"python": platform.python_version(), "torch": results[0].torch},
        "compilations": sum(len(result.notes) for result in results),
        "failures": failures(results),
        "chips_by_kernel_and_triton": {
            kernel: {result.triton: result.chips(kernel) for result in results}
            for kernel in sorted({note["kernel"] for result in results for note in result.notes})
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--triton", nargs="+", default=list(RELEASES), metavar="RELEASE")
    parser.add_argument("--chips", type=int, nargs="+", choices=CHIPS, default=list(CHIPS))
    parser.add_argument("--folder", type=Path, default=WHEELS)
    parser.add_argument("--jobs", type=int, default=2, help="releases at a time")
    parser.add_argument("--json", type=Path, help="a file for the record")
    options = parser.parse_args()
    folders = [fetch(release, options.folder) for release in options.triton]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda folder: compile_with(folder, options.chips), folders))
    failed = failures(results)
    print("\n".join([*table(results), "", *(failed or ["No failure."])]))
    if options.json is not None:
        save(options.json, document_of(results))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
