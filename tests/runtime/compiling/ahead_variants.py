"""Prints the keys under which Triton keeps what is compiled for trials and popular layers, as JSON.

Run by `test_ahead`. A process with torch runs the trials themselves, and settles layers as models
have them, by the code that a run takes (`needed`). A process without torch notes what would be
compiled ahead (`ahead`). Nothing is compiled and nothing computed: tensors are fake, and stand for
some on a Hopper GPU.
"""

from __future__ import annotations

import importlib
import json
import sys
from types import SimpleNamespace
from typing import Any

IS_AHEAD = sys.argv[1:] == ["ahead"]
CHIP = 90
# With a length of 80, one for each way in which up to 128 tokens are cut into chunks or blocks.
LENGTHS = (8, 16, 24, 32, 48, 56, 64, 96, 128)

if IS_AHEAD:
    from shuffled_dpsgd.runtime.compiling.torch_free import leave_torch_out

    leave_torch_out()

from shuffled_dpsgd.runtime.compiling import ahead, worker  # noqa: E402
from shuffled_dpsgd.runtime.compiling.requests import (  # noqa: E402
    CompileRequest,
    key_on_disk,
    request_of,
)

Found = set[tuple[str, str]]


def note_ahead() -> Found:
    found: Found = set()
    worker.compile_request = lambda request: found.add(named(request))
    ahead.only_compile(CHIP)
    for launch in ahead.launches_of(map(importlib.import_module, worker.kernel_modules())):
        launch()
    return found


def named(request: CompileRequest) -> tuple[str, str]:
    return request.source.name, key_on_disk(request)


def note_needed() -> dict[str, Found]:
    """What trials launch, and each kind of model, of modules that take part."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    from shuffled_dpsgd.clipping.contributions import live_positions
    from shuffled_dpsgd.clipping.kernels import choices, host, trials
    from shuffled_dpsgd.clipping.kernels.triton import device_limits, wide
    from shuffled_dpsgd.runtime import routes
    from shuffled_dpsgd.runtime.compiling import announcements

    found: dict[str, Found] = {}
    wanted: Found = set()

    def note(kernel: Any, key: Any, *rest: Any) -> None:
        if hasattr(sys.modules[kernel.fn.__module__], ahead.FUNCTION):
            wanted.add(named(request_of(kernel, *rest)))

    ahead.only_compile(CHIP)
    importlib.import_module("triton.runtime.jit").JITFunction._do_compile = note
    trials._half = lambda device: torch.bfloat16
    announcements._here.announces = True
    for trial in (
        trials.try_gluon_products,
        trials.try_gluon_strips,
        trials.try_gram,
        trials.try_wide_gram,
        trials.try_norm_layers,
    ):
        trial(torch.device("cpu"))
    found["trials"] = set(wanted)
    wide.multiprocessors = lambda device: device_limits.HOPPER_MULTIPROCESSORS
    FakeTensor.data_ptr = lambda tensor: 0
    torch.Tensor.is_cuda = property(lambda tensor: True)
    choices.is_hopper = choices.may_take = routes.Route.serves = lambda *_: True
    host.serves = lambda *_: False
    live_positions.live_positions = lambda *_: None
    with FakeTensorMode():
        for name, settle in {"MiniLM": minilm, "GPT-2": gpt2, "ViT": vit}.items():
            wanted.clear()
            settle()
            found[name] = set(wanted)
    return found


def settle(layers: Any, shapes: dict[str, tuple[int, ...]], lengths: tuple[int, ...] = ()) -> None:
    """Settle two samples of layers that are given these shapes, and of all lengths."""
    import torch

    from shuffled_dpsgd.clipping import ClippingEngine, rehearsal

    rehearsal.may_rehearse = lambda device: True
    rehearsal.choices.try_ahead = lambda *_: None
    rehearsal.REHEARSALS.add = lambda topic, work, device, **_: work()
    engine = ClippingEngine(layers)
    engine.expect_lengths(lengths)
    slots = {slot.path: slot for group in engine._rehearsal._groups for slot in group.slots}
    given = {
        slots[path].index: [
            SimpleNamespace(shape=shape, dtype=torch.int64 if len(shape) == 2 else torch.float32)
        ]
        for path, shape in shapes.items()
    }
    with torch.autocast("cpu", torch.bfloat16):
        engine._rehearsal.begin(given)


def minilm() -> None:
    from torch import nn

    layers = nn.ModuleDict(
        {"table": nn.Embedding(40, 384), "norm": nn.LayerNorm(384), "up": nn.Linear(384, 1536)}
    )
    inputs = 2, 80, 384
    settle(layers, {"table": (2, 80), "norm": inputs, "up": inputs}, LENGTHS)


def gpt2() -> None:
    """With heads over a vocabulary as it is, and over one that is rounded up."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    for words in (50257, 30528):
        layers = nn.ModuleDict(
            {
                "table": nn.Embedding(words, 768),
                "norm": nn.LayerNorm(768),
                "attention": Conv1D(2304, 768),
                "head": nn.Linear(768, words, bias=False),
            }
        )
        layers["head"].weight = layers["table"].weight
        shapes = dict.fromkeys(("norm", "attention", "head"), (2, 80, 768))
        settle(layers, {"table": (2, 80), **shapes}, LENGTHS)


def vit() -> None:
    from torch import nn

    for tokens in (65, 197):
        settle(nn.ModuleDict({"up": nn.Linear(768, 3072)}), {"up": (2, tokens, 768)})


def main() -> None:
    found = {"ahead": note_ahead()} if IS_AHEAD else note_needed()
    print(json.dumps({kind: sorted(variants) for kind, variants in found.items()}))


if __name__ == "__main__":
    main()
