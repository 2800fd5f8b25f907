"""Triton kernels that draw a permutation and move many matrices per launch, without a temporary.

Moving: one program owns a region that is closed under the permutation, whole rows where columns
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
    source = tl.load(index + col, mask=col < cols, other=0)
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
    """All rows of COLS columns; ROWS is no less than the number of rows.

    All addresses and the lengths of all rows are multiples of ALIGNMENT bytes.
    """
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


@triton.jit
def sort_groups(keys, drawn, programs, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each group's permutation by its keys, as a stable argsort gives it, all groups at once.

    `programs` gives each program the group's first slot, its size, and the first of the BLOCK
    slots whose places among all keys of the group it counts.
    """
    first = tl.load(programs + 3 * tl.program_id(0))
    size = tl.load(programs + 3 * tl.program_id(0) + 1)
    here = tl.load(programs + 3 * tl.program_id(0) + 2) + tl.arange(0, BLOCK)
    key = tl.load(keys + first + here, mask=here < size, other=0)
    place = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        there = start + tl.arange(0, BLOCK)
        rival = tl.load(keys + first + there, mask=there < size, other=0)
        smaller = rival[None, :] < key[:, None]
        earlier = (rival[None, :] == key[:, None]) & (there[None, :] < here[:, None])
        before = (smaller | earlier) & (there[None, :] < size)
        place += tl.sum(before.to(tl.int32), axis=1)
    tl.store(drawn + first + place, here, mask=here < size)


@triton.jit
def compose_levels(  # type: ignore[no-untyped-def]
    drawn, levels, offsets, packed, length, LEVELS: tl.constexpr, BLOCK: tl.constexpr
):
    """Every position's source, followed through all levels from the last to the first.

    `levels` holds base, slot and step of each level, of `length` entries each.
    """
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = position < length
    source = position.to(tl.int64)
    for level in tl.static_range(LEVELS):
        table = levels + (LEVELS - 1 - level) * 3 * length + source
        base = tl.load(table, mask=inside, other=0)
        slot = tl.load(table + length, mask=inside, other=0)
        step = tl.load(table + 2 * length, mask=inside, other=0)
        source = base + step * tl.load(drawn + slot, mask=inside, other=0)
    offset = tl.load(offsets + position, mask=inside, other=0)
    tl.store(packed + position, source - offset, mask=inside)
