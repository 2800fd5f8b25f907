"""Many gradient canaries in one run: unit vectors on disjoint coordinates, injected as records.

Each canary owns an equal random share of all coordinates, with random signs: the canaries are
orthogonal, adding any subset of them costs one pass over the model, and reading all of them one
more. They live in the frame of the initial weights and move with every shuffle, as the gradient
of a real record does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shuffled_dpsgd.auditing.estimators.scores import Floats
from shuffled_dpsgd.errors import InvalidArgumentError

Tensors = Mapping[str, torch.Tensor]


class CanaryField:
    """`count` orthogonal unit vectors on the coordinates of the given tensors.

    Coordinates are dealt out like cards: in a random order, the k-th goes to canary k modulo
    `count`. So adding and reading are one gather over the model and a sum over rows, on the
    tensors' own device, and reading is the same on every run.
    """

    def __init__(self, like: Tensors, count: int, rng: np.random.Generator) -> None:
        self._shapes = {name: tensor.shape for name, tensor in like.items()}
        dimension = sum(tensor.numel() for tensor in like.values())
        if not 1 <= count <= dimension // 2:
            raise InvalidArgumentError(
                "count", expected=f"from 1 to {dimension // 2} canaries", got=count
            )
        self.count = count
        device = next(iter(like.values())).device
        generator = torch.Generator(device).manual_seed(int(rng.integers(2**63)))
        self._order = torch.randperm(dimension, generator=generator, device=device)
        signs = torch.randint(2, (dimension,), generator=generator, device=device)
        self._sign = (2 * signs - 1).to(torch.int8)
        shares = dimension // count + (np.arange(count) < dimension % count)
        self._scale = np.asarray(shares**-0.5, dtype=np.float64)

    def sum_of(self, active: NDArray[np.bool_]) -> dict[str, torch.Tensor]:
        """The sum of the active canaries, as tensors of the model's shapes."""
        dealt = torch.from_numpy(active * self._scale).to(self._order.device)
        rounds = -(-self._order.numel() // self.count)
        flat = torch.empty(self._order.numel(), dtype=torch.float64, device=dealt.device)
        flat[self._order] = dealt.repeat(rounds)[: flat.numel()]
        parts = (flat * self._sign).split([shape.numel() for shape in self._shapes.values()])
        return {n: p.reshape(s) for (n, s), p in zip(self._shapes.items(), parts, strict=True)}

    def read(self, tensors: Tensors, only: frozenset[str] | None = None) -> Floats:
        """Inner product of every canary with `tensors`, restricted to `only` if given."""
        device = self._order.device
        parts = [
            tensors[name].detach().to(device, torch.float64).reshape(-1)
            if only is None or name in only
            else torch.zeros(shape.numel(), dtype=torch.float64, device=device)
            for name, shape in self._shapes.items()
        ]
        dealt = (torch.cat(parts) * self._sign)[self._order]
        whole = dealt.numel() // self.count * self.count
        sums = dealt[:whole].reshape(-1, self.count).sum(dim=0)
        sums[: dealt.numel() - whole] += dealt[whole:]
        read: Floats = sums.cpu().numpy() * self._scale
        return read


class InjectingEngine:
    """A clipping engine whose clipped sum also holds what `extra()` returns.

    Everything else is the engine's own; the injected vectors must obey the clip by themselves.
    """

    def __init__(self, inner: Any, extra: Callable[[], Tensors]) -> None:
        self._inner = inner
        self._extra = extra

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __enter__(self) -> InjectingEngine:
        self._inner.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._inner.__exit__(kind, error, trace)

    def clipped_sum(self) -> dict[str, torch.Tensor]:
        sums: dict[str, torch.Tensor] = self._inner.clipped_sum()
        for name, tensor in self._extra().items():
            sums[name] = sums[name] + tensor.to(sums[name])
        return sums
