"""`shuffled-dpsgd warm-up`: compiles the GPU kernels in several processes, once for a machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any

import typer

from shuffled_dpsgd.cli.output import AsJson, print_json, reports_errors

EPILOG = (
    "Examples: [bold]shuffled-dpsgd warm-up[/bold] · "
    "[bold]shuffled-dpsgd warm-up --length 64 --length 512 --jobs 16[/bold]"
)
Lengths = Annotated[
    list[int] | None,
    typer.Option("--length", min=1, help="Tokens of a sample, 128 and 197; may be repeated."),
]
Jobs = Annotated[int | None, typer.Option(min=1, help="Processes; one per core, at most 8.")]


@reports_errors
def warm_up(length: Lengths = None, jobs: Jobs = None, as_json: AsJson = False) -> None:
    """Compile the GPU kernels into Triton's cache and probe them: a first run then starts sooner.

    Without it a first run on a GPU takes 10 to 20 s more. Kernels are compiled for the first GPU
    of CUDA_VISIBLE_DEVICES, for bfloat16 and samples of the given lengths; whatever else a model
    needs is compiled when it is needed. Each process takes about half a GiB of the GPU's memory.
    """
    import torch
    from rich.console import Console
    from rich.progress import track

    from shuffled_dpsgd.runtime import backends

    reason = None if backends.triton_available() else "Triton is not available"
    reason = reason if torch.cuda.is_available() else "there is no GPU"
    if reason is not None:
        if as_json:
            print_json({"device": None, "reason": reason, "done": 0, "failed": [], "off": {}})
        else:
            typer.echo(f"Nothing to do: {reason}. Plain torch needs no warm-up.")
        return
    from shuffled_dpsgd.training.kernel_launches import LENGTHS, all_backends, compiling_work

    device, lengths = torch.device("cuda", 0), tuple(length or LENGTHS)
    names = [name for name, _ in compiling_work(device, lengths)]
    work = [partial(_compile, number, lengths) for number in range(len(names))]
    over = run_in_processes(work, jobs or min(8, os.cpu_count() or 1))
    shown = track(over, "Compiling", len(work), console=Console(stderr=True), disable=as_json)
    failed = [f"{names[number]}: {error}" for number, error in shown if error is not None]
    for backend in all_backends(device):
        backend.serves(device)  # Probed here once more, from Triton's cache; the outcome is kept.
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device), "reason": None,
        "done": len(names) - len(failed), "failed": failed, "off": backends.switched_off(),
    }  # fmt: skip
    if as_json:
        print_json(found)
        return
    typer.echo(f"{found['device']}: {found['done']} of {len(names)} probes and launches done.")
    for line in failed:
        typer.echo(f"failed: {line}")
    for name, why in found["off"].items():
        typer.echo(f"off: {name}: {why}")


def run_in_processes(
    work: Sequence[Callable[[], object]], jobs: int
) -> Iterator[tuple[int, str | None]]:
    """Run functions in `jobs` processes; yields the number of each that is over, and its error."""
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from multiprocessing import get_context

    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(function): number for number, function in enumerate(work)}
        for future in as_completed(futures):
            error = future.exception()
            yield futures[future], None if error is None else f"{type(error).__name__}: {error}"


def _compile(number: int, lengths: tuple[int, ...]) -> None:
    """One piece of the work; what a kernel does wrong comes up when the GPU is waited for."""
    import torch

    from shuffled_dpsgd.training.kernel_launches import compiling_work

    compiling_work(torch.device("cuda", 0), lengths)[number][1]()
    torch.cuda.synchronize()
