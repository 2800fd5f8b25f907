"""How tensors are laid out in what the ranks exchange, and how their coordinates are numbered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from shuffled_dpsgd.core.clip import sum_dtype
from shuffled_dpsgd.core.noise import Place
from shuffled_dpsgd.distributed.world import World
from shuffled_dpsgd.runtime.shards import RowAxis, RowSplit, Span, held, is_sharded


class Numbering:
    """The coordinates of all sums, numbered through per dtype, in the order of the parameters.

    What noise a coordinate receives depends on its number and on nothing else, so it does not
    matter which rank draws it.

    >>> sums = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    >>> numbering = Numbering(sums)
    >>> numbering.totals, numbering.place("b")
    ([10], Place(group=0, first=6))
    """

    def __init__(self, sums: Mapping[str, Tensor]) -> None:
        self.shapes = {name: tensor.shape for name, tensor in sums.items()}
        self.dtypes: list[torch.dtype] = []
        self.totals: list[int] = []
        self._firsts: dict[str, tuple[int, int]] = {}
        for name, tensor in sums.items():
            dtype = sum_dtype(tensor.dtype)
            if tensor.numel() and dtype not in self.dtypes:
                self.dtypes.append(dtype)
                self.totals.append(0)
            group = self.dtypes.index(dtype) if dtype in self.dtypes else 0
            first = self.totals[group] if self.totals else 0
            self._firsts[name] = group, first
            if tensor.numel():
                self.totals[group] += tensor.numel()

    def place(self, name: str, low: int = 0) -> Place:
        """Where the coordinates of a parameter lie, from its own number `low` on."""
        group, first = self._firsts[name]
        return Place(group, first + low)

    def names(self, group: int) -> list[str]:
        """The parameters of one dtype, in order."""
        return [name for name, (own, _) in self._firsts.items() if own == group]

    def span(self, name: str, start: int, stop: int) -> Span:
        """Which of a parameter's own coordinates have numbers from `start` to `stop`."""
        first = self._firsts[name][1]
        size = self.shapes[name].numel()
        low = min(max(start - first, 0), size)
        return Span(low, min(max(stop - first, low), size))


def row_places(world: World, parameters: Mapping[str, Tensor]) -> dict[str, Place]:
    """Where this rank's rows of every parameter lie."""
    numbering = Numbering(parameters)
    found = {}
    for name, shape in numbering.shapes.items():
        low, _ = RowSplit(rows=(*shape, 1)[0], ranks=world.size).span(world.rank)
        found[name] = numbering.place(name, low * shape[1:].numel())
    return found


class RowPieces:
    """Tensors of these shapes as one vector of equal pieces, a piece with every rank's rows."""

    def __init__(self, world: World, shapes: Sequence[torch.Size]) -> None:
        self._world = world
        self._shapes = shapes
        self._splits = [RowSplit(rows=shape[0], ranks=world.size) for shape in shapes]
        self._widths = [
            split.per_rank * shape[1:].numel()
            for split, shape in zip(self._splits, shapes, strict=True)
        ]

    def gather(self, rows: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Whole tensors from the rows that every rank has of them, sent in `dtype`. Collective.

        Beside the result there is a copy of it for a moment, unless it is a single tensor.
        """
        size = self._world.size, sum(self._widths)
        pieces = torch.empty(size, dtype=dtype, device=rows[0].device)
        parts = pieces.split(self._widths, dim=1)
        for own, part in zip(rows, parts, strict=True):
            part[self._world.rank, : own.numel()] = own.reshape(-1)
        self._world.gather_pieces_(pieces.view(-1))
        return [
            part.reshape(-1)[: shape.numel()].view(shape)
            for part, shape in zip(parts, self._shapes, strict=True)
        ]

    def scatter_sum(self, wholes: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Begin to sum whole tensors of one dtype over all ranks. Collective.

        They may be dropped at once. What is returned waits for this rank's rows of the sums.
        """
        pieces = wholes[0].new_zeros(self._world.size, sum(self._widths))
        for part, whole in zip(pieces.split(self._widths, dim=1), wholes, strict=True):
            flat, width = whole.reshape(-1), part.shape[1]
            full = flat.numel() // max(width, 1)
            part[:full] = flat[: full * width].view(full, width)
            if rest := flat.numel() - full * width:
                part[full, :rest] = flat[full * width :]
        finish = self._world.start_scatter_sum_(pieces.view(-1))

        def rows_of_all() -> list[Tensor]:
            found = []
            own = finish().split(self._widths)
            for piece, split, shape in zip(own, self._splits, self._shapes, strict=True):
                low, high = split.span(self._world.rank)
                rows = torch.Size((high - low, *shape[1:]))
                found.append(piece[: rows.numel()].view(rows))
            return found

        return rows_of_all


# Tensors are sent together in about as many bytes.
_TOGETHER = 1 << 28


@torch.no_grad()
def send_first(world: World, tensors: Sequence[Tensor]) -> None:
    """Overwrite tensors with those of rank 0, of one type many at once. Collective."""
    together: dict[tuple[torch.dtype, int], list[Tensor]] = {}
    sent: Counter[torch.dtype] = Counter()
    for tensor in tensors if world.size > 1 else ():
        together.setdefault((tensor.dtype, sent[tensor.dtype] // _TOGETHER), []).append(tensor)
        sent[tensor.dtype] += tensor.nbytes
    for several in together.values():
        flat = torch.cat([each.detach().reshape(-1) for each in several])
        world.copy_first_(flat)
        for each, part in zip(several, flat.split([e.numel() for e in several]), strict=True):
            each.copy_(part.view(each.shape))


def gather_whole(world: World, tensor: Tensor) -> Tensor:
    """All of a tensor, wherever its rows lie; itself where it is not spread. Collective.

    `DTensor.full_tensor` is not used: with gloo and CUDA tensors, as two processes on one GPU have
    them, it ends in a segmentation fault in PyTorch 2.11.
    """
    if not is_sharded(tensor):
        return tensor
    mesh, _, ranks = RowAxis.of(tensor)
    assert ranks is not None, "rows spread over the last axis of a mesh"
    if ranks < world.size:
        world = world.divided(mesh.mesh.view(-1, ranks).tolist())
    (found,) = RowPieces(world, [tensor.shape]).gather([held(tensor).detach()], tensor.dtype)
    return found
