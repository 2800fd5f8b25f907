"""A trial that has to wait for a kernel first asks for all that it is going to launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("announce_trials.py")
KERNELS = {
    "try_gram": ["gram_kernel"],
    "try_two_part_gram": ["two_part_gram_kernel"],
    "try_wide_gram": ["pair_kernel", "share_kernel"],
    "try_products": ["outer_kernel", "tile_kernel", "token_kernel"],
    "try_gluon_products": ["parted_outer_kernel", "square_kernel"],
    "try_gluon_strips": ["strip_gram_kernel"],
    "try_split_products": ["largest_kernel", "outer_kernel", "split_gram_kernel", "split_kernel"],
    "try_rows": ["add_shares_kernel", "row_sum_kernel", "stored_sum_kernel"],
    "try_norm_layers": ["norm_kernel"],
    "try_tables": ["add_rows_kernel", "row_kernel"],
    "try_tied_tables": ["pick_kernel", "read_kernel", "tie_kernel"],
    "try_casts": ["cast_kernel"],
    "try_kernels": ["compose_levels", "permute_columns", "permute_rows", "sort_groups"],
    "try_kernel": ["_add_normal_kernel"],
}


@pytest.mark.slow
def test_trials_ask_for_all_their_kernels_at_once() -> None:
    pytest.importorskip("triton")
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = {name: sorted({*kernels}) for name, kernels in json.loads(done.stdout).items()}
    assert found == KERNELS
