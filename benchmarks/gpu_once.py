"""Everything we want to know from a GPU, within one short lease of it.

    python benchmarks/gpu_once.py fetch build/gpu-wheels       # before, with a network; 11 MiB
    python benchmarks/gpu_once.py run --out "$OUT" --seconds 400  # there; as long as the lease is

In this order, each part with a limit of its own: the GPU tests, noise beside `torch.randn`, private
steps beside plain ones, the beginning of a whole run, and more steps. What a part finds is on disk
at once, so one that fails or takes too long costs nothing but its own figures. `facts.json` says
what ran, where, and how each part ended; `log.txt` holds what all of them printed.

Packages that the machine lacks are taken from `build/gpu-wheels`, if they are there; nothing is
installed. The private steps are also taken without kernels in Gluon.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import re
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ROOT / "build" / "gpu-wheels"
# The longest each part may take, in their order; what one leaves over serves those after it.
PARTS = {"tests": 100.0, "noise": 20.0, "steps": 130.0, "loop": 60.0, "more-steps": 120.0}
# What the package and its tests import, and a machine with nothing but PyTorch may lack.
LACKING = (
    "pytest", "pytest-xdist", "execnet", "pluggy", "iniconfig", "packaging", "pygments", "typer",
    "rich", "click", "shellingham", "markdown-it-py", "mdurl", "annotated-doc", "pyyaml",
    "cryptography", "cffi", "pycparser", "dp-accounting", "absl-py", "attrs", "dm-tree", "mpmath",
    "hypothesis", "sortedcontainers",
)  # fmt: skip
FIRST_TESTS = "tests/training/test_triton_noise.py"
# Files whose tests share a process each, unless they are worth several.
TEST_PROCESSES = {"tests/clipping/kernels/test_triton.py": 4, FIRST_TESTS: 2}
# Sides by workload, of as many models at once as the memory holds. "without" names a backend.
ALL = ("plain", "plain:compiled", "training", "training:compiled")
GLUON = " without Gluon"
STAGES = {
    "steps": {
        "gpt2-32x128": ALL,
        "bert-base-64x128": ALL,
        "vit-base-128x197": ("plain", "training", f"training{GLUON}"),
    },
    "more-steps": {"vit-base-128x197": (*ALL, f"training:compiled{GLUON}")},
}
TRY = {"bert-small-2x32": ("plain", f"training{GLUON}")}
Entry = dict[str, Any]


def fetch(options: argparse.Namespace) -> int:
    """Download the packages of `LACKING` for the machine's Python, and note the commit."""
    options.folder.mkdir(parents=True, exist_ok=True)
    platforms = [f"manylinux{which}_x86_64" for which in ("2014", "_2_17", "_2_28", "_2_34")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", options.python]
    command += [word for name in platforms for word in ("--platform", name)]
    subprocess.run([*command, "--dest", str(options.folder), *LACKING], check=True)
    (options.folder / "COMMIT").unlink(missing_ok=True)
    (options.folder / "COMMIT").write_text(commit_of_tree())
    return 0


def commit_of_tree() -> str:
    """The commit noted beside the wheels; without one, that of this tree."""
    noted = WHEELS / "COMMIT"
    if noted.exists():
        return noted.read_text().strip()
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def unpack_lacking(folder: Path) -> list[str]:
    """Unpack the wheels of what is not installed; their names."""
    found = []
    for wheel in sorted(WHEELS.glob("*.whl")):
        name = wheel.name.split("-")[0].replace("_", "-")
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
            found.append(name)
    return found


class Lease:
    """The time there is, and the processes that may use it."""

    def __init__(self, out: Path, log: Path, variables: Mapping[str, str], seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._variables = {**os.environ, **variables}
        self._log = log
        self.out = out

    def left(self) -> float:
        return self._end - time.monotonic()

    def call(self, command: Sequence[str], seconds: float, log: Path | None = None) -> int | None:
        """Run a command and all it starts for so long at most; its exit status, None if killed."""
        with (log or self._log).open("a") as file:
            file.write(f"\n$ {' '.join(command)}\n")
            file.flush()
            process = subprocess.Popen(
                command, cwd=ROOT, env=self._variables, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                return process.wait(max(1.0, min(seconds, self.left())))
            except subprocess.TimeoutExpired:
                return None
            finally:
                with contextlib.suppress(ProcessLookupError):  # all that it started has ended
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def run(options: argparse.Namespace) -> int:
    """All parts in turn; each may fail."""
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        packages = Path(folder) / "packages"
        unpacked = unpack_lacking(packages)
        caches = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
        paths = [str(ROOT / "src"), str(ROOT), str(packages)]
        variables = {
            "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "4", "GPU_ONCE_TINY": "1" if options.tiny else "",
            **{name: str(Path(folder) / name.lower()) for name in caches},
        }  # fmt: skip
        lease = Lease(out, out / "log.txt", variables, options.seconds)
        facts: Entry = {
            "commit": commit_of_tree(),
            "began": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}",
            "unpacked": unpacked,
            "parts": {},
        }
        me = [sys.executable, str(Path(__file__).resolve())]
        lease.call(["sh", "-c", "nvidia-smi; nproc; free -g"], 10.0)
        lease.call([*me, "facts", "--out", str(out)], 30.0)
        for part in options.parts:
            begin = time.monotonic()
            limit = min(PARTS[part], lease.left())
            if part == "tests":
                status = run_tests(lease, limit)
            else:
                seconds = ["--seconds", str(limit)]
                status = lease.call([*me, part, "--out", str(out), *seconds], limit)
            taken = round(time.monotonic() - begin, 1)
            facts["parts"][part] = {"status": status, "seconds": taken}
            write(out / "facts.json", {**read(out / "facts.json"), **facts})
            print(f"{part}: {'killed' if status is None else status} after {taken} s", flush=True)
    return 0


def run_tests(lease: Lease, seconds: float) -> int:
    """The files of GPU tests side by side, the noise's first; the number that did not pass."""
    files = sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"mark\.gpu\b", path.read_text())
    )
    files.sort(key=lambda name: (name != FIRST_TESTS, name not in TEST_PROCESSES))
    end = time.monotonic() + seconds
    found: dict[str, Entry] = {}

    def test(name: str) -> None:
        log = Path(f"{lease.out / 'log.txt'}.{Path(name).stem}.{files.index(name)}")
        # What also runs in Triton's interpreter bears no mark, and shows on a GPU what that cannot.
        marks = "not slow" if "on_triton" in (ROOT / name).read_text() else "gpu"
        command = [sys.executable, "-m", "pytest", "-v", "-rsfE", "-p", "no:cacheprovider"]
        command += ["-p", "no:benchmark"]  # its warning would be an error
        if name in TEST_PROCESSES:
            command += ["-n", str(TEST_PROCESSES[name])]
        begin = time.monotonic()
        status = lease.call([*command, "-m", marks, name], end - begin, log)
        text = log.read_text()
        found[name] = {
            "status": status,
            "seconds": round(time.monotonic() - begin, 1),
            "summary": (text.strip().splitlines() or [""])[-1],
            "failed": sorted(set(re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE))),
        }
        with (lease.out / "log.txt").open("a") as whole:
            whole.write(text)
        log.unlink()
        write(lease.out / "tests.json", found)

    with ThreadPoolExecutor(len(files)) as pool:
        list(pool.map(test, files))
    return sum(each["status"] != 0 for each in found.values())


def say_facts(options: argparse.Namespace) -> int:
    """What the figures depend on, as all our records say it."""
    import torch

    from benchmarks.results import environment

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    write(options.out / "facts.json", environment(device, bfloat16=device.type == "cuda"))
    return 0


def time_noise(options: argparse.Namespace) -> int:
    """Nanoseconds a number takes: ours drawn, added and divided by, beside torch's generator."""
    import torch

    from benchmarks.results import environment
    from shuffled_dpsgd.training.device_noise import DeviceNoise

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    count = 1_000_000 if tiny() else 100_000_000
    sums, source = torch.zeros(count, device=device), DeviceNoise()

    def in_three_passes() -> None:
        sums.add_(torch.randn(count, device=device)).div_(64.0)

    sides: dict[str, Callable[[], object]] = {
        "ours: drawn, added, divided": lambda: source.add_(
            {"sums": sums}, {"sums": 1.0}, key=secrets.token_bytes(32), divide_by=64.0
        ),
        "torch.randn": lambda: torch.randn(count, device=device),
        "torch.randn, added, divided": in_three_passes,
        "nothing drawn: one pass over the sums": lambda: sums.mul_(0.5),
    }
    nanoseconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(3 if tiny() else 30):
        for name, work in sides.items():
            nanoseconds[name].append(1e9 * seconds_of(work, device) / count)
    # The first round compiles and probes.
    kept = {name: found[1:] for name, found in nanoseconds.items()}
    document = {
        "environment": environment(device, bfloat16=False),
        "commit": commit_of_tree(),
        "numbers": count,
        "nanoseconds_a_number": kept,
        "medians": {name: statistics.median(found) for name, found in kept.items()},
    }
    write(options.out / "noise.json", document)
    print(json.dumps(document["medians"]))
    return 0


def seconds_of(work: Callable[[], object], device: Any) -> float:
    """How long the device takes for what a function asks of it."""
    import torch

    if device.type != "cuda":
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize()
    events[0].record()
    work()
    events[1].record()
    torch.cuda.synchronize()
    return 1e-3 * float(events[0].elapsed_time(events[1]))


def time_steps(options: argparse.Namespace) -> int:
    """Whole steps of one stage: all sides are prepared at once, and then timed in turns."""
    import torch

    from benchmarks import step
    from benchmarks.report import describe
    from benchmarks.results import add, new_run

    end = time.monotonic() + options.seconds - 5.0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    stage = TRY if tiny() else STAGES[options.command]
    settings = step.arguments(["--device", device])
    contests = {
        name: step.Contest({side: worker_of(settings, name, side) for side in sides})
        for name, sides in stage.items()
    }
    rounds, steps = (2, 2) if tiny() else (6, 8)
    limit = (0.7 if options.command == "steps" else 0.8) * (end - time.monotonic())
    try:
        with ThreadPoolExecutor(sum(map(len, stage.values()))) as pool:
            asked = [
                pool.submit(contest.prepare_side, side, warmup=8, limit_seconds=limit)
                for contest in contests.values()
                for side in contest.found
            ]
            for each in asked:
                each.result()
        run = new_run()
        for name, contest in contests.items():
            if time.monotonic() > end:
                break
            contest.time(rounds=rounds, steps=steps, traces=False)
            document = step.document_of(run, name, steps, contest.found)
            commit = f"Code: {commit_of_tree()}."
            add(options.out / "steps.json", {"commit": commit, **document})
            for entry in document["measurements"]:
                print(describe(entry), flush=True)
    finally:
        for contest in contests.values():
            contest.close()
    return 0


def worker_of(settings: argparse.Namespace, name: str, label: str) -> Any:
    """The process of a side, which may be told to do without a backend."""
    from benchmarks.step import Worker

    side, _, without = label.partition(" without ")
    switch = {"SHUFFLED_DPSGD_WITHOUT": "Sums of linear layers in Gluon"}
    variables = switch if without == "Gluon" else {}
    return Worker(settings, name, side, variables)


def time_run(options: argparse.Namespace) -> int:
    """The beginning of a cold run on texts as long as SST-2's, private and plain."""
    from benchmarks import loop

    each = max(5.0, options.seconds / 2 - 8.0)
    given = ["--workload", "texts", "--sides", "plain", "private", "--caches", "cold"]
    given += ["--limit-seconds", str(each), "--json", str(options.out / "run.json")]
    given += ["--logical", "4", "--steps", "2", "--records", "50"] if tiny() else []
    sys.argv = [sys.argv[0], *given]
    return loop.main()


def tiny() -> bool:
    """Whether this is a try on a CPU."""
    return bool(os.environ.get("GPU_ONCE_TINY"))


def write(path: Path, document: Any) -> None:
    """Write all at once, for the process may be stopped at any time."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(document, indent=1) + "\n")
    unfinished.replace(path)


def read(path: Path) -> Entry:
    found: Entry = json.loads(path.read_text()) if path.exists() else {}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("fetch", help="download what the machine may lack")
    one.add_argument("folder", type=Path, nargs="?", default=WHEELS)
    one.add_argument("--python", default="3.12")
    one.set_defaults(call=fetch)
    one = commands.add_parser("run", help="all parts, in turn")
    one.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    one.add_argument("--seconds", type=float, default=400.0, help="for all parts together")
    one.add_argument("--tiny", action="store_true", help="a try of the script, on a CPU")
    one.add_argument("--out", type=Path, required=True, help="a folder for the results")
    one.set_defaults(call=run)
    calls = {"facts": say_facts, "noise": time_noise, "loop": time_run}
    calls |= dict.fromkeys(STAGES, time_steps)
    for name, call in calls.items():
        one = commands.add_parser(name, help="one part, as `run` calls it")
        one.add_argument("--out", type=Path, required=True)
        one.add_argument("--seconds", type=float, default=60.0)
        one.set_defaults(call=call)
    options = parser.parse_args()
    status: int = options.call(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
