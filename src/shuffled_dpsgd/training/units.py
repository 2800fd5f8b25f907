"""Units that have several records: a person's messages, a patient's visits.

Poisson sampling draws units. Of each drawn unit, a limited number of records takes part
(`core.sampler.some_of`), and the mean of their gradients is clipped once. To the engine they are
views of one sample: inside the model's forward, inputs have an axis for units and one for a unit's
records, while the user's code sees rows. Units of fewer records are padded with copies of weight
zero, so that all units have the same number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from shuffled_dpsgd.core.sampler import some_of
from shuffled_dpsgd.core.streams import RandomStreams
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.runtime.hooks import put_first
from shuffled_dpsgd.runtime.output_tensors import tensors_in, with_tensors
from shuffled_dpsgd.training.data import MapStyle
from shuffled_dpsgd.training.layout import Part


class Units:
    """The records of every unit, from one id for each record; units are numbered as they appear.

    >>> units = Units(["ann", "bob", "ann"])
    >>> len(units), units.records(0)
    (2, [0, 2])
    """

    def __init__(self, ids: Iterable[Any]) -> None:
        found: dict[Hashable, list[int]] = {}
        for record, one in enumerate(ids.tolist() if isinstance(ids, Tensor) else ids):
            if one is None or one != one or not isinstance(one, Hashable):
                raise InvalidArgumentError(
                    "unit",
                    expected="an id for every record",
                    got=f"{one!r} for record {record}",
                    remedy="give records of nobody known an id each, or leave them out",
                )
            found.setdefault(one, []).append(record)
        self._owned = list(found.values())
        self.num_records = sum(map(len, self._owned))

    def __len__(self) -> int:
        return len(self._owned)

    def records(self, unit: int) -> list[int]:
        """The places of a unit's records in the data."""
        return self._owned[unit]

    @property
    def largest(self) -> int:
        """The most records that any unit has."""
        return max(map(len, self._owned))

    def lengths(self, lengths: Sequence[int] | None) -> list[int] | None:
        """The length of each unit's longest record."""
        if lengths is None:
            return None
        return [max(lengths[record] for record in own) for own in self._owned]

    def rows(self, part: Part, step: int, *, at_most: int, streams: RandomStreams) -> Part:
        """A part of the batch of `step`, which names units, with the records that take part.

        Every unit has `at_most` rows; of those that do not count, all are the first one's.
        """
        rows: list[int] = []
        weights: list[float] = []
        for unit in part.records:
            own = self._owned[unit]
            key = streams.key("sampling", step, 1 + unit)
            chosen = [own[place] for place in some_of(range(len(own)), at_most, key)]
            spare = at_most - len(chosen)
            rows += [*chosen, *[chosen[0]] * spare]
            weights += [1.0 / len(chosen)] * len(chosen) + [0.0] * spare
        return replace(part, records=tuple(rows), weights=tuple(weights), rows_per_sample=at_most)


def column_of(data: Any, name: str) -> Sequence[Any] | None:
    """The column of that name, or None if the data have no such column."""
    if name in (getattr(data, "column_names", None) or ()):
        return list(data[name])
    is_rows = isinstance(data, list | tuple) and data and isinstance(data[0], Mapping)
    return [row.get(name) for row in data] if is_rows and name in data[0] else None


def units_of(data: MapStyle, name: str) -> Units:
    """The units that a column of the data identifies."""
    found = column_of(data, name)
    if found is None:
        raise InvalidArgumentError(
            "unit",
            expected="a column of the data, as records_per_unit is given",
            got=name,
            remedy="pass the ids themselves, one for each record: unit=[...]",
        )
    return Units(found)


def refuse_shared_column(data: MapStyle, name: str) -> None:
    """Refuse a unit named like a column whose values repeat: claims would not cover those units."""
    found = column_of(data, name)
    if found is not None and len(set(map(str, found))) < len(found):
        raise InvalidArgumentError(
            "unit",
            expected=f"records_per_unit, as several records share a {name}",
            got=f"unit={name!r} alone, which says that every row is a {name} of its own",
            remedy="pass records_per_unit= and dataset_size= the number of units, or name the unit "
            "otherwise",
        )


class UnitRows:
    """Shows the engine units where the user's code has rows; `in_hand` is the rows of the batch.

    While it is on, inputs with so many rows get an axis for the records of a unit before anything
    else sees them. The model's own forward gets rows again, and so does the user. `resting` says
    when a call is not the user's.
    """

    def __init__(
        self,
        model: nn.Module,
        per_unit: int,
        in_hand: Callable[[], int | None],
        resting: Callable[[], bool],
    ) -> None:
        if not any(True for _ in model.children()):
            raise InvalidArgumentError(
                "model",
                expected="a model of several modules, where a unit has several records",
                got=type(model).__name__,
                remedy="wrap it: torch.nn.Sequential(model)",
            )
        self._model = model
        self._per_unit = per_unit
        self._in_hand = in_hand
        self._resting = resting
        # Places of inputs that were divided, with the axes they then have.
        self._divided: dict[tuple[Any, int], int] = {}
        # Which of the latest outputs were divided, in the order of `tensors_in`.
        self._outputs: list[bool] = []
        self._hooks: list[Any] = []

    def put_on(self) -> None:
        """Install the hooks; after the engine's, which must see inputs that are divided."""
        self._own = vars(self._model).get("forward")
        self._plain = self._model.forward
        # With the signature of the model's own, which trainers read.
        self._model.forward = wraps(self._plain)(lambda *args, **kwargs: self._run(args, kwargs))
        before = put_first(self._model, self._before)
        self._hooks = [before, self._model.register_forward_hook(self._after)]

    def take_off(self) -> None:
        """Remove everything from the model."""
        for hook in self._hooks:
            hook.remove()
        del self._model.forward
        if self._own is not None:
            self._model.forward = self._own

    def _is_idle(self) -> bool:
        return self._in_hand() is None or self._resting() or not torch.is_grad_enabled()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._is_idle():
            return None
        leaves, spec = tree_flatten((args, dict(kwargs)))
        rows = self._in_hand()
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == rows:
                leaves[place] = leaf.unflatten(0, (-1, self._per_unit))
                self._divided[spec, place] = leaf.dim() + 1
        return tree_unflatten(leaves, spec)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        sizes = set()
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.dim() == self._divided.get((spec, place)):
                leaves[place] = leaf.flatten(0, 1)
                sizes.add(leaves[place].shape[0])
        args, kwargs = tree_unflatten(leaves, spec)
        output = self._plain(*args, **kwargs)
        if not sizes:
            return output
        found = tensors_in(output)
        self._outputs = [bool(one.dim()) and one.shape[0] in sizes for one in found]
        pairs = zip(found, self._outputs, strict=True)
        divided = {id(t): t.unflatten(0, (-1, self._per_unit)) for t, is_rows in pairs if is_rows}
        return with_tensors(output, divided)

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._is_idle():
            return None
        pairs = zip(tensors_in(output), self._outputs, strict=True)
        return with_tensors(output, {id(t): t.flatten(0, 1) for t, is_rows in pairs if is_rows})


def by_unit(losses: Tensor, part: Part) -> Tensor:
    """The mean loss of every unit's records, out of one loss for each row of a part."""
    weights = losses.new_tensor(part.weights)
    # Zero times infinity is NaN.
    weighted = torch.where(weights > 0.0, losses * weights, 0.0)
    return weighted.unflatten(0, (-1, part.rows_per_sample)).sum(1)
