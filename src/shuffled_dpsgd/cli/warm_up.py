"""`shuffled-dpsgd warm-up`: compiles the GPU kernels in several processes, once for a machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Annotated, Any, NamedTuple

import typer

from shuffled_dpsgd.cli.output import AsJson, print_json, verb

Lengths = Annotated[list[int] | None, typer.Option("--length", min=1, help="Tokens of a sample.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Processes; one per core, at most 8.")]


class ShortRun(NamedTuple):
    """Two steps of one model, in bfloat16 autocast or in float32; images have no length."""

    model: str
    length: int | None
    half: bool

    def __str__(self) -> str:
        tokens = "" if self.length is None else f" on {self.length} tokens"
        return f"{self.model}{tokens} in {'bfloat16' if self.half else 'float32'}"


@verb("warm-up", "warm-up --length 64 --length 512 --jobs 16")
def warm_up(length: Lengths = None, jobs: Jobs = None, as_json: AsJson = False) -> None:
    """Compile the GPU kernels into Triton's cache and probe them: a first run then starts sooner.

    Without it a first run on a GPU takes 10 to 20 s more. One block of GPT-2, BERT, MiniLM and ViT
    takes two private steps in bfloat16 and in float32, with texts of each --length (128 and 197),
    on the first GPU of CUDA_VISIBLE_DEVICES. Each process takes a few GiB of its memory.
    """
    import torch
    from rich.console import Console
    from rich.progress import track

    from shuffled_dpsgd.runtime import backends

    found: dict[str, Any] = {"device": None, "reason": None, "done": 0, "failed": [], "off": {}}
    has_gpu = torch.cuda.is_available()
    if not (has_gpu and backends.triton_available()):
        found["reason"] = "Triton is not available" if has_gpu else "there is no GPU"
        lines = [f"Nothing to do: {found['reason']}. Plain torch needs no warm-up."]
    else:
        kinds = [*product(("gpt2", "bert-base", "minilm-l6"), length or (128, 197))]
        runs = [ShortRun(*k, half) for k in [*kinds, ("vit-base", None)] for half in (True, False)]
        over = run_in_processes(take_steps, runs, jobs or min(8, os.cpu_count() or 1))
        shown = track(over, "Compiling", len(runs), console=Console(stderr=True), disable=as_json)
        for run, outcome in zip(runs, shown, strict=True):
            if isinstance(outcome, str):
                found["failed"].append(f"{run}: {outcome}")
            else:
                found["off"] |= outcome
        found["device"] = torch.cuda.get_device_name(0)
        found["done"] = len(runs) - len(found["failed"])
        lines = [f"{found['device']}: {found['done']} of {len(runs)} short runs done."]
        lines += [f"failed: {line}" for line in found["failed"]]
        lines += [f"off: {name}: {why}" for name, why in found["off"].items()]
    print_json(found) if as_json else typer.echo("\n".join(lines))


def take_steps(run: ShortRun, device: str = "cuda", size: int = 16, **more: int) -> dict[str, str]:
    """Take the steps, in a process of their own; the backends that are off, with the reason."""
    import torch

    from shuffled_dpsgd.models import build_model
    from shuffled_dpsgd.runtime import backends
    from shuffled_dpsgd.training import make_private

    model = build_model(run.model, device=device, settings={"num_hidden_layers": 1, **more}).train()
    inputs = torch.randint(100, (2 * size, run.length or 1))
    if run.length is None:
        inputs = torch.rand(2 * size, 3, *[model.config.image_size] * 2)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=run.half):
            return model(batch[0]).logits.float().square().flatten(1).mean(1)

    options: dict[str, Any] = {"num_steps": 2, "delta": 1e-3, "noise_multiplier": 1.0}
    options |= {"expected_batch_size": size, "physical_batch_size": size, "scope": "full"}
    optimizer = torch.optim.AdamW(model.parameters())
    private = make_private(model, optimizer, dataset_size=2 * size, loss=loss, **options)
    for batch in private.batches(torch.utils.data.TensorDataset(inputs), pad_batches=True):
        private.backward(loss(model, batch))
        private.step()
    return backends.switched_off()


def run_in_processes(do: Callable[[Any], Any], given: Sequence[Any], jobs: int) -> Iterator[Any]:
    """What the function returns for each argument, in another process, or its error as text."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for future in [pool.submit(do, each) for each in given]:
            error = future.exception()
            yield f"{type(error).__name__}: {error}" if error else future.result()
