"""Norms and sums of many layers at once, when a whole backward is there to be finalized.

What slows a GPU down here is less the arithmetic than the number of launches, and a Transformer
repeats its few layer shapes dozens of times. So linear layers of one shape share a launch, and all
small per-sample gradients are put side by side. Everything else is computed group by group.

Shapes: B samples, T positions, D inputs, P outputs, N coordinates of all small per-sample gradients
together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.capture.batch import Entry
from shuffled_dpsgd.clipping.capture.slot import Slot
from shuffled_dpsgd.clipping.contributions import cost
from shuffled_dpsgd.clipping.contributions.kinds import (
    Contribution,
    DenseGrad,
    OuterGrad,
    RowsGrad,
    RowSumGrad,
)
from shuffled_dpsgd.clipping.finalize.shared_parameters import LayerGroup, Named
from shuffled_dpsgd.clipping.kernels import linear_maps, plain

# Per-sample gradients larger than this are worth an operation of their own.
_SMALL, _SMALL_ON_CPU = 1 << 16, 1 << 12
NormRun = tuple[Sequence[Slot], Tensor]
# The norms that many linear layers find together.
_LINEAR_NORMS = {
    cost.NormMethod.GRAM: linear_maps.gram_sq_norm_sums,
    cost.NormMethod.TILES: linear_maps.tile_sq_norm_sums,
}


@dataclass(slots=True, eq=False)
class LinearLayer:
    """A linear map that shares nothing; `transposed` if its weight is stored as (D, P)."""

    x_BTD: Tensor
    g_BTP: Tensor
    weight: str
    bias: str | None
    transposed: bool


class LinearLayers:
    """Linear layers whose norms are found by one backend; those of one shape share every launch."""

    def __init__(self, backend: cost.NormMethod, layers: Sequence[LinearLayer]) -> None:
        self._norms = _LINEAR_NORMS[backend]
        self._layers = layers
        self._pairs = [(layer.x_BTD, layer.g_BTP) for layer in layers]

    def squares(self) -> list[Tensor]:
        """(B,) tensors that add up to the squared norms of all layers."""
        return self._norms(self._pairs, [layer.bias is not None for layer in self._layers])

    def add_sums(self, factors_B: Tensor, sums: dict[str, Tensor], new: bool) -> None:
        """Add all weighted sums, or write them where the sums are `new`."""
        outs, biases = [], []
        for layer in self._layers:
            rows = (layer.x_BTD if layer.transposed else layer.g_BTP).shape[2]
            total = _matrix(sums[layer.weight], rows)
            outs.append(total.mT if layer.transposed else total)
            biases.append(None if layer.bias is None else _vector(sums[layer.bias]))
        linear_maps.add_weighted_outer_sums(
            self._pairs, factors_B, outs, accumulate=not new, biases=biases
        )


class ManyLayers:
    """The entries of one backward, sorted by how they are finalized.

    `filed` pairs each group of layers with its entries. `norm_runs` finds the sums of norm layers
    of one shape, which are computed together.
    Call `squares` before `add_sums`, and each only once.
    """

    def __init__(
        self,
        filed: Iterable[tuple[LayerGroup, Sequence[Entry]]],
        norm_runs: Callable[[], Sequence[NormRun]],
        choose: cost.Chooser,
    ) -> None:
        self._choose = choose
        self._find_norm_runs = norm_runs
        self._norm_runs: Sequence[NormRun] = ()
        # Contributions that meet others in a parameter, by group, and those that meet none.
        self._joined: list[tuple[LayerGroup, Sequence[Named]]] = []
        self._alone: list[Named] = []
        # All of these.
        self._parts: list[Named] = []
        self._small: list[tuple[str, DenseGrad]] = []
        self._side_by_side_BN: Tensor | None = None
        self._linear_names: set[str] = set()
        linear: dict[cost.NormMethod, list[LinearLayer]] = {}
        for group, entries in filed:
            self._sort(group, entries, linear)
        self._linear = [LinearLayers(backend, layers) for backend, layers in linear.items()]

    def _sort(
        self,
        group: LayerGroup,
        entries: Sequence[Entry],
        linear: dict[cost.NormMethod, list[LinearLayer]],
    ) -> None:
        parts = [part for entry in entries for part in entry.slot.contributions(entry.capture)]
        if len(entries) > 1 or group.shared:
            self._joined.append((group, parts))
            self._parts += parts
            return
        outer = parts[0][1] if parts else None
        kinds = [type(part) for _, part in parts]
        if (
            isinstance(outer, OuterGrad)
            and kinds in ([OuterGrad], [OuterGrad, RowSumGrad])
            and outer.backend in _LINEAR_NORMS
        ):
            linear.setdefault(outer.backend, []).append(_linear_layer(parts))
            self._linear_names.update(name for name, _ in parts)
        elif all(_is_small(part) for _, part in parts):
            self._small += [(name, part) for name, part in parts if isinstance(part, DenseGrad)]
        else:
            self._alone += parts
            self._parts += parts

    def squares(self) -> list[Tensor]:
        """(B,) squared norms whose sum is the squared norm over all parameters."""
        found = [square_B for run in self._linear for square_B in run.squares()]
        found += [part.sq_norms() for _, part in self._alone]
        found += [group.sq_norms(parts, self._choose) for group, parts in self._joined]
        return found + self._norm_and_small_squares()

    def _norm_and_small_squares(self) -> list[Tensor]:
        self._norm_runs = self._find_norm_runs()
        found = [sums_LBCD.square().sum((0, 2, 3)) for _, sums_LBCD in self._norm_runs]
        if self._small:
            dtypes = {part.grads_BS.dtype for _, part in self._small}
            wide = torch.float64 if torch.float64 in dtypes else torch.float32
            rows = [_flat(part.grads_BS).to(wide) for _, part in self._small]
            self._side_by_side_BN = torch.cat(rows, 1)
            found.append(self._side_by_side_BN.square().sum(1))
        return found

    def add_sums(self, factors_B: Tensor, sums: dict[str, Tensor], new: bool = False) -> None:
        """Add the weighted sums to `sums`, which hold nothing, not even zeros, if `new`."""
        rounds = list(_rounds(self._parts))
        written = self._linear_names | {name for outers in rounds[:1] for name, _ in outers}
        others = [total for name, total in sums.items() if name not in written]
        if new and others:
            # Matrices and their biases are overwritten instead.
            torch._foreach_zero_(others)
        _add_matrices(rounds[:1], factors_B, sums, new)
        for run in self._linear:
            run.add_sums(factors_B, sums, new)
        _add_matrices(rounds[1:], factors_B, sums, False)
        for name, part in self._parts:
            if isinstance(part, RowSumGrad | RowsGrad | DenseGrad):
                part.add_sum(factors_B, sums[name])
        for slots, sums_LBCD in self._norm_runs:
            _add_norm_run(slots, sums_LBCD, factors_B, sums)
        if self._side_by_side_BN is not None:
            total_N = plain.weighted_row_sum(self._side_by_side_BN.unsqueeze(1), factors_B)
            targets = [_vector(sums[name]) for name, _ in self._small]
            sizes = [target.numel() for target in targets]
            torch._foreach_add_(targets, list(total_N.split(sizes)))


def _linear_layer(parts: Sequence[Named]) -> LinearLayer:
    """A layer from the contributions of its weight and, if it has one, its bias.

    The bias belongs to the output gradient, which a transposed weight has on the right. Without a
    bias the two sides play the same part.
    """
    weight, outer = parts[0]
    bias_name, bias = parts[1] if len(parts) == 2 else (None, None)
    assert isinstance(outer, OuterGrad)
    assert bias is None or isinstance(bias, RowSumGrad)
    left, right = outer.left_BTR, outer.right_BTC
    if bias is not None and bias.grad_BTP is right:
        return LinearLayer(left, right, weight, bias_name, transposed=True)
    return LinearLayer(right, left, weight, bias_name, transposed=False)


def _add_matrices(
    rounds: Sequence[Sequence[tuple[str, OuterGrad]]],
    factors_B: Tensor,
    sums: dict[str, Tensor],
    new: bool,
) -> None:
    """Add the matrices among those that are left to their groups."""
    for outers in rounds:
        pairs = [(part.right_BTC, part.left_BTR) for _, part in outers]
        outs = [_matrix(sums[name], part.left_BTR.shape[2]) for name, part in outers]
        linear_maps.add_weighted_outer_sums(pairs, factors_B, outs, accumulate=not new)


def _rounds(parts: Iterable[Named]) -> Iterator[list[tuple[str, OuterGrad]]]:
    """The matrices among the parts, so dealt out that no parameter comes twice in a round.

    Layers of one round are summed by one launch, whose programs must not meet in an output.
    """
    left = [(name, part) for name, part in parts if isinstance(part, OuterGrad)]
    while left:
        taken: dict[str, OuterGrad] = {}
        later: list[tuple[str, OuterGrad]] = []
        for name, part in left:
            if name in taken:
                later.append((name, part))
            else:
                taken[name] = part
        yield list(taken.items())
        left = later


def _add_norm_run(
    slots: Sequence[Slot], sums_LBCD: Tensor, factors_B: Tensor, sums: dict[str, Tensor]
) -> None:
    factors_B11 = factors_B[:, None, None]
    total_LCD = torch.where(factors_B11 == 0, 0.0, sums_LBCD * factors_B11).sum(1)
    names = [slot.names[key] for slot in slots for key in ("weight", "bias")]
    torch._foreach_add_([_vector(sums[name]) for name in names], total_LCD.flatten(0, 1).unbind())


def _vector(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def _matrix(tensor: Tensor, rows: int) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.view(rows, -1)


def _flat(grads_BS: Tensor) -> Tensor:
    return grads_BS if grads_BS.dim() == 2 else grads_BS.reshape(len(grads_BS), -1)


def _is_small(part: Contribution) -> bool:
    if not isinstance(part, DenseGrad):
        return False
    largest = _SMALL_ON_CPU if part.grads_BS.device.type == "cpu" else _SMALL
    return part.grads_BS.numel() <= largest * part.grads_BS.shape[0]
