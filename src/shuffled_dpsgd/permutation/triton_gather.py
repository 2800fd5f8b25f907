"""Triton kernels that permute many matrices per launch.

Every tensor is seen as a matrix of whole rows. `programs` gives each program its job and its block
of rows; `jobs` gives each job rows, columns, where its row and column indices start in `packed`
(negative: that axis stays), and where its part of the temporary starts; `pointers` gives each
job's address. Elements are moved as integers of their size, so bits are kept whatever the dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl

JOB_FIELDS = 5
ELEMENT = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def permute_columns(  # type: ignore[no-untyped-def]
    pointers, jobs, programs, packed,
    ELEMENT: tl.constexpr, FIELDS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Columns in place: one program holds whole rows, so it may overwrite what it has read."""
    job = tl.load(programs + 2 * tl.program_id(0))
    block = tl.load(programs + 2 * tl.program_id(0) + 1)
    rows = tl.load(jobs + job * FIELDS)
    cols = tl.load(jobs + job * FIELDS + 1)
    col_start = tl.load(jobs + job * FIELDS + 3)
    base = tl.load(pointers + job).to(tl.pointer_type(ELEMENT))
    row = block * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    inside = (row[:, None] < rows) & (col[None, :] < cols)
    source = tl.load(packed + col_start + col, mask=col < cols, other=0)
    line = base + row[:, None] * cols
    moved = tl.load(line + source[None, :], mask=inside)
    tl.debug_barrier()
    tl.store(line + col[None, :], moved, mask=inside)


@triton.jit
def gather_rows(  # type: ignore[no-untyped-def]
    pointers, jobs, programs, packed, temporary,
    ELEMENT: tl.constexpr, FIELDS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Rows, and columns where they move, into the temporary."""
    job = tl.load(programs + 2 * tl.program_id(0))
    block = tl.load(programs + 2 * tl.program_id(0) + 1)
    rows = tl.load(jobs + job * FIELDS)
    cols = tl.load(jobs + job * FIELDS + 1)
    row_start = tl.load(jobs + job * FIELDS + 2)
    col_start = tl.load(jobs + job * FIELDS + 3)
    place = tl.load(jobs + job * FIELDS + 4)
    base = tl.load(pointers + job).to(tl.pointer_type(ELEMENT))
    row = block * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    inside = (row[:, None] < rows) & (col[None, :] < cols)
    source_row = tl.load(packed + row_start + row, mask=row < rows, other=0)
    drawn = tl.load(packed + col_start + col, mask=(col < cols) & (col_start >= 0), other=0)
    source_col = tl.where(col_start >= 0, drawn, col)
    moved = tl.load(base + source_row[:, None] * cols + source_col[None, :], mask=inside)
    tl.store(temporary + place + row[:, None] * cols + col[None, :], moved, mask=inside)


@triton.jit
def copy_rows(  # type: ignore[no-untyped-def]
    pointers, jobs, programs, temporary,
    ELEMENT: tl.constexpr, FIELDS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The temporary back to where its rows belong."""
    job = tl.load(programs + 2 * tl.program_id(0))
    block = tl.load(programs + 2 * tl.program_id(0) + 1)
    rows = tl.load(jobs + job * FIELDS)
    cols = tl.load(jobs + job * FIELDS + 1)
    place = tl.load(jobs + job * FIELDS + 4)
    base = tl.load(pointers + job).to(tl.pointer_type(ELEMENT))
    row = block * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    inside = (row[:, None] < rows) & (col[None, :] < cols)
    where = row[:, None] * cols + col[None, :]
    tl.store(base + where, tl.load(temporary + place + where, mask=inside), mask=inside)
