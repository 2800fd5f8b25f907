"""`shuffled-dpsgd warm-up`: compiles the GPU kernels in several processes, once for a machine.

Each process takes two private steps with one block of a usual model. Afterwards the kernels of
these steps, and those of their probes, are in Triton's cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import typer

from shuffled_dpsgd.cli.output import AsJson, print_json, verb

# Of a usual text, and of an image of 14 by 14 patches.
LENGTHS = (128, 197)
Lengths = Annotated[
    list[int] | None,
    typer.Option("--length", min=1, help="Tokens of a sample, 128 and 197; may be repeated."),
]
Jobs = Annotated[int | None, typer.Option(min=1, help="Processes; one per core, at most 8.")]


@verb("warm-up", "warm-up --length 64 --length 512 --jobs 16")
def warm_up(length: Lengths = None, jobs: Jobs = None, as_json: AsJson = False) -> None:
    """Compile the GPU kernels into Triton's cache and probe them: a first run then starts sooner.

    Without it a first run on a GPU takes 10 to 20 s more. One block of GPT-2, BERT, MiniLM and ViT
    takes two private steps, on the first GPU of CUDA_VISIBLE_DEVICES, in bfloat16 and in float32;
    whatever else a model needs is compiled when it is needed. Each process takes a few GiB of the
    GPU's memory.
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
    runs = short_runs(length or LENGTHS)
    work = [partial(take_steps, run) for run in runs]
    over = run_in_processes(work, jobs or min(8, os.cpu_count() or 1))
    shown = track(over, "Compiling", len(work), console=Console(stderr=True), disable=as_json)
    failed: list[str] = []
    off: dict[str, str] = {}
    for number, outcome in shown:
        if isinstance(outcome, str):
            failed.append(f"{runs[number]}: {outcome}")
        else:
            off |= outcome
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0), "reason": None,
        "done": len(runs) - len(failed), "failed": failed, "off": off,
    }  # fmt: skip
    if as_json:
        print_json(found)
        return
    typer.echo(f"{found['device']}: {found['done']} of {len(runs)} short runs done.")
    for line in failed:
        typer.echo(f"failed: {line}")
    for name, why in off.items():
        typer.echo(f"off: {name}: {why}")


class ShortRun(NamedTuple):
    """Two steps of one model, in bfloat16 autocast or in float32; images have no length."""

    model: str
    length: int | None
    half: bool

    def __str__(self) -> str:
        tokens = "" if self.length is None else f" on {self.length} tokens"
        return f"{self.model}{tokens} in {'bfloat16' if self.half else 'float32'}"


def short_runs(lengths: Sequence[int]) -> list[ShortRun]:
    """The runs that compile the usual kernels for samples of these lengths."""
    texts = [(name, length) for name in ("gpt2", "bert-base", "minilm-l6") for length in lengths]
    return [
        ShortRun(*each, half) for each in [*texts, ("vit-base", None)] for half in (True, False)
    ]


def take_steps(
    run: ShortRun, device: str = "cuda", batch_size: int = 16, **settings: int
) -> dict[str, str]:
    """Take the steps, in a process of their own; the backends that are off, with the reason."""
    import torch
    from torch.nn.functional import cross_entropy

    from shuffled_dpsgd.models import build_model
    from shuffled_dpsgd.runtime import backends
    from shuffled_dpsgd.training import make_private

    depth = "n_layer" if run.model == "gpt2" else "num_hidden_layers"
    model = build_model(run.model, device=device, settings={depth: 1, **settings}).train()
    if run.length is None:
        size = model.config.image_size
        inputs = torch.rand(2 * batch_size, model.config.num_channels, size, size)
    else:
        inputs = torch.randint(100, (2 * batch_size, run.length))

    def loss(model: Any, batch: Any) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=run.half):
            logits = model(batch[0]).logits.float()
        labels = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=device)
        losses = cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
        return losses.view(len(logits), -1).mean(1)

    private = make_private(
        model,
        torch.optim.AdamW(model.parameters()),
        dataset_size=len(inputs),
        expected_batch_size=batch_size,
        num_steps=2,
        delta=1e-3,
        noise_multiplier=1.0,
        scope="full",
        physical_batch_size=batch_size,
        loss=loss,
    )
    for batch in private.batches(torch.utils.data.TensorDataset(inputs), pad_batches=True):
        private.backward(loss(model, batch))
        private.step()
    return backends.switched_off()


def run_in_processes(work: Sequence[Callable[[], Any]], jobs: int) -> Iterator[tuple[int, Any]]:
    """Run functions in `jobs` processes; yields the number of each that is over, and its result.

    An error becomes text.
    """
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from multiprocessing import get_context

    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(function): number for number, function in enumerate(work)}
        for future in as_completed(futures):
            error = future.exception()
            told = future.result() if error is None else f"{type(error).__name__}: {error}"
            yield futures[future], told
