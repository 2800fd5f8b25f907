"""Triton kernels that move many matrices per launch, without a temporary.

One program owns a region that is closed under the permutation, whole rows where columns
move, all rows of a few columns where rows move. It reads its region into registers, waits until all
its threads have, and only then writes; no two programs share an element. `programs` gives each
program its job. A job is a line of `jobs`: the tensor's place in `pointers`, its rows and columns,
where its index starts in `packed`, and the job's first program. Elements are moved as integers of
their size, so bits are kept whatever the dtype.
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
    SIZE: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Columns of ROWS whole rows; COLS is no less than the row's length.

    Rows are read in order and gathered in shared memory: gathering from global memory would take
    a transaction per element.
    """
    job = jobs + tl.load(programs + tl.program_id(0)) * FIELDS
    base = tl.load(pointers + tl.load(job)).to(tl.pointer_type(ELEMENT))
    rows = tl.load(job + 1)
    cols = tl.multiple_of(tl.load(job + 2), ALIGNMENT // SIZE)
    index = packed + tl.load(job + 3)
    place = tl.arange(0, ROWS * COLS)
    row = place // COLS
    col = place % COLS
    line = (tl.program_id(0) - tl.load(job + 4)) * ROWS + row
    inside = (line < rows) & (col < cols)
    here = tl.multiple_of(base + line * cols + col, ALIGNMENT)
    held = tl.load(here, mask=inside)
    source = tl.load(index + col, mask=col < cols, other=0).to(tl.int32)
    # Of one axis: along one of two, the compiler would unroll a gather into thousands of shuffles.
    moved = tl.gather(held, row * COLS + source, 0)
    tl.debug_barrier()
    tl.store(here, moved, mask=inside)


@triton.jit
def permute_rows(  # type: ignore[no-untyped-def]
    pointers, jobs, programs, packed,
    ELEMENT: tl.constexpr, FIELDS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    SIZE: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """All rows of COLS columns; ROWS is no less than the rows, all aligned to ALIGNMENT bytes."""
    job = jobs + tl.load(programs + tl.program_id(0)) * FIELDS
    base = tl.load(pointers + tl.load(job)).to(tl.pointer_type(ELEMENT))
    rows = tl.load(job + 1)
    cols = tl.multiple_of(tl.load(job + 2), ALIGNMENT // SIZE)
    index = packed + tl.load(job + 3)
    row = tl.arange(0, ROWS)
    col = (tl.program_id(0) - tl.load(job + 4)) * COLS + tl.arange(0, COLS)
    inside = (row[:, None] < rows) & (col[None, :] < cols)
    source = tl.load(index + row, mask=row < rows, other=0)
    # The compiler cannot know how addresses from a table are aligned; told so, it moves 16 bytes
    # per instruction, and the region fits into registers.
    there = tl.multiple_of(base + source[:, None] * cols + col[None, :], (1, ALIGNMENT))
    here = tl.multiple_of(base + row[:, None] * cols + col[None, :], (1, ALIGNMENT))
    moved = tl.load(there, mask=inside)
    tl.debug_barrier()
    tl.store(here, moved, mask=inside)
