"""What every rank of two nodes does; run by torchrun, one launcher to a node."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from distributed.replicas import several
from shuffled_dpsgd.distributed import launched

if __name__ == "__main__":
    with launched("cpu"):
        found = several(["vit"], sharded="2x2")
    torch.save(found, Path(sys.argv[1]) / f"rank-{os.environ['RANK']}.pt")
