"""Clipping by Opacus, as a baseline: its hooks make every sample's gradient, which is then clipped.

It has the calls of `ClippingEngine` that training uses, so that a run differs in nothing else. What
Opacus cannot do is refused. Position ids of Hugging Face's BERT and GPT-2 are repeated over the
batch, which it needs. None of our checks of the clipping run here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shuffled_dpsgd.errors import InvalidArgumentError, MissingExtraError, UnsupportedModuleError
from shuffled_dpsgd.runtime.clock import Clock

# Opacus divides by the norm plus this, so that a gradient of zero stays one.
_SMALLEST = 1e-6


class OpacusEngine:
    """Per-sample gradients by Opacus 1.x hooks, clipped to `clip_norm` and summed."""

    num_checked = num_checked_by_coin = 0
    strategy = "opacus"

    def __init__(self, model: nn.Module, *, clip_norm: float) -> None:
        self.clock = Clock()
        self._model = model
        self._clip_norm = clip_norm
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._wrapped: Any = None
        self._positions: RemovableHandle | None = None
        self._asleep: list[nn.Module] = []
        self._norms: list[Tensor] = []
        self._sums: dict[str, Tensor] = {}
        self.reset()

    def __enter__(self) -> Self:
        kind = _grad_sample_module()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self._wrapped = kind(self._model, loss_reduction="sum", strict=True)
            except NotImplementedError as error:
                raise UnsupportedModuleError(
                    "",
                    expected="a model of layers that Opacus supports",
                    got=str(error).splitlines()[0],
                    remedy="freeze what it names (model.freeze), or use another method",
                ) from error
        self._positions = self._model.register_forward_pre_hook(_add_positions, with_kwargs=True)
        # Opacus looks at layers in training mode alone. Those it has hooks on get the flag while it
        # works; dropout and all else that acts by mode is another module and keeps its own.
        self._asleep = [
            module
            for module in self._model.modules()
            if not module.training and any(True for _ in module.parameters(recurse=False))
        ]
        for module in self._asleep:
            module.training = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._positions is not None, "entered before"
        self._positions.remove()
        self._wrapped.remove_hooks()
        self._wrapped = None
        for module in self._asleep:
            module.training = False
        for module in self._model.modules():
            _drop(module, ("activations", "max_batch_len", "ft_compute_sample_grad"))
        for parameter in self._model.parameters():
            _drop(parameter, ("grad_sample", "_forward_counter", "_current_grad_sample"))

    def backward(
        self, losses: Tensor, loss_scale: float = 1.0, *, counted: int | None = None
    ) -> None:
        """Backward of per-sample losses, shape (B,); only the first `counted` of them count."""
        if self._wrapped is None or loss_scale != 1.0:
            raise InvalidArgumentError(
                "losses", expected="losses of a forward inside `with engine:`, not scaled", got=""
            )
        number = len(losses) if counted is None else counted
        if number == 0:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses[:number].sum().backward()
        found = {
            name: _samples_of(name, p)[:number]
            for name, p in self._parameters.items()
            if p.grad is not None or getattr(p, "grad_sample", None) is not None
        }
        parts = [torch.linalg.vector_norm(s.flatten(1), dim=1) for s in found.values()]
        norms = torch.linalg.vector_norm(torch.stack(parts), dim=0)
        finite = torch.isfinite(norms)
        factors = (self._clip_norm / (norms + _SMALLEST)).clamp(max=1.0)
        # Every sample's gradient is read no more often than Opacus itself would read it, so that
        # the baseline is as fast as it can be. Zero times infinity is no zero.
        lost = not bool(finite.all())
        factors = torch.where(finite, factors, 0.0)
        for name, samples in found.items():
            kept = torch.where(_like(finite, samples), samples, 0.0) if lost else samples
            self._sums[name] += torch.einsum("b,b...->...", factors.to(kept.dtype), kept)
        self._norms.append(norms.detach())
        for parameter in self._parameters.values():
            parameter.grad = parameter.grad_sample = None  # type: ignore[attr-defined]

    @property
    def sample_norms(self) -> Tensor:
        """(B,) norms, before clipping, of all samples since the last reset."""
        return torch.cat(self._norms) if self._norms else torch.zeros(0)

    def read_norms(self, *others: Tensor) -> list[Tensor]:
        """`sample_norms` and then the other tensors, all copied to the host."""
        return [self.sample_norms.cpu(), *(other.cpu() for other in others)]

    @property
    def num_nonfinite(self) -> int:
        """Samples since the last reset whose gradient was infinite or NaN; they count as zero."""
        return int((~torch.isfinite(self.sample_norms)).sum())

    is_checking = False

    def check_densely(self, up_to: int) -> None:
        """Opacus checks nothing of its own."""

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Inside, the model runs without Opacus' hooks."""
        self._wrapped.disable_hooks()
        try:
            yield
        finally:
            self._wrapped.enable_hooks()

    def clipped_sum(self) -> dict[str, Tensor]:
        """The sum of clipped per-sample gradients since the last reset, by parameter name."""
        return dict(self._sums)

    def reset(self) -> None:
        """Forget norms and sums."""
        self._norms = []
        self._sums = {
            name: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
            for name, p in self._parameters.items()
        }


def _samples_of(name: str, parameter: nn.Parameter) -> Tensor:
    """(B, ...) gradients of a parameter that took part."""
    samples = getattr(parameter, "grad_sample", None)
    if not isinstance(samples, Tensor):
        raise UnsupportedModuleError(
            name,
            expected="one gradient per sample, of a parameter used in one forward",
            got="none" if samples is None else type(samples).__name__,
            remedy="freeze it (model.freeze), or use another method",
        )
    return samples.to(torch.promote_types(samples.dtype, torch.float32))


def _grad_sample_module() -> Any:
    try:
        from opacus.grad_sample import GradSampleModule
    except ImportError as error:
        raise MissingExtraError("opacus", extra="compare", purpose="method 'opacus'") from error
    return GradSampleModule


def _add_positions(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Position ids for every sample: a table looked up once for all has no batch."""
    ids = kwargs.get("input_ids")
    plain = getattr(getattr(module, "config", None), "model_type", "") in ("bert", "gpt2")
    if ids is None or not plain or kwargs.get("position_ids") is not None:
        return None
    positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape).contiguous()
    return args, {**kwargs, "position_ids": positions}


def _like(per_sample: Tensor, samples: Tensor) -> Tensor:
    return per_sample.view(-1, *([1] * (samples.dim() - 1)))


def _drop(holder: Any, names: Iterable[str]) -> None:
    """Take off what Opacus keeps on modules and parameters."""
    for name in names:
        if name in vars(holder):
            delattr(holder, name)
