"""Starts the ranks of a launch as forks of one process, which spares each the import of torch.

For every line of JSON on stdin (module, function, ranks, arguments, a folder for results) fork the
ranks, print their process ids, wait for all of them and print their exit codes. Each rank leaves
what its function returned in `rank-N.pt`, or its error in `rank-N.txt`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import dp_accounting.pld  # noqa: F401  (what is imported here is not imported by every rank)
import torch
import torch._dynamo  # optimizers import it at their first step
import transformers.models.bert.modeling_bert
import transformers.models.gpt2.modeling_gpt2
import transformers.models.vit.modeling_vit  # noqa: F401

import distributed.command
import distributed.replicas
import distributed.resumable
import distributed.shards  # noqa: F401
import shuffled_dpsgd.distributed.sharding
import shuffled_dpsgd.training.sharded_checkpoint  # noqa: F401
from distributed.launching import free_port
from shuffled_dpsgd.distributed import launched


def serve() -> None:
    # A rank whose garbage collector looks through all of this has to copy it.
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        port = free_port()
        children = [fork(order, rank, port) for rank in range(order["ranks"])]
        print(json.dumps(children), flush=True)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)


def fork(order: dict[str, Any], rank: int, port: int) -> int:
    child = os.fork()
    if child:
        return child
    os.dup2(2, 1)  # What a rank prints is not what this server says.
    folder, code = Path(order["folder"]), 1
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(order["ranks"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **order["environment"],
    }
    try:
        function = getattr(importlib.import_module(order["module"]), order["function"])
        with launched("cpu"):
            result = function(**order["arguments"])
        torch.save(result, folder / f"rank-{rank}.pt")
        code = 0
    except BaseException:
        (folder / f"rank-{rank}.txt").write_text(traceback.format_exc(), encoding="utf-8")
    finally:
        os._exit(code)


if __name__ == "__main__":
    serve()
    os._exit(0)  # Taking apart all that was imported takes a second.
