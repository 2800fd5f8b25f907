"""One forward, one backward, and the exact sum of clipped per-sample gradients."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from shuffled_dpsgd.clipping import cost, factors, sites
from shuffled_dpsgd.clipping.batch import Batch, Entry
from shuffled_dpsgd.clipping.inputs import find_batch
from shuffled_dpsgd.clipping.recorder import Recorder
from shuffled_dpsgd.clipping.tied import joint_sq_norms
from shuffled_dpsgd.errors import InvalidArgumentError, UnsupportedModuleError


class ClippingEngine:
    """Per-sample gradient clipping for an unmodified model."""

    def __init__(
        self,
        model: nn.Module,
        clip_norm: float = 1.0,
        clip: str = "flat",
        strategy: str = "bookkeeping",
        loss_reduction: str = "sum",
    ) -> None:
        _check_choice("clip", clip, factors.CLIP_FUNCTIONS)
        _check_choice("strategy", strategy, cost.STRATEGIES)
        _check_choice("loss_reduction", loss_reduction, ("sum", "mean"))
        if not clip_norm > 0:
            raise InvalidArgumentError("clip_norm", expected="a positive number", got=clip_norm)
        self.model = model
        self.clip_norm = float(clip_norm)
        self.clip = clip
        self.strategy = strategy
        self.loss_reduction = loss_reduction
        self._clip_function = factors.CLIP_FUNCTIONS[clip]
        self._choose = cost.STRATEGIES[strategy]
        self._parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self._recorder = Recorder(receive=self._receive, finish=self._finish)
        self._slots = sites.build_slots(model, self._recorder)
        self._patches = [(slot.module.__dict__, slot.forward) for slot in self._slots]
        self._hooks: list[Any] = []
        self._sums: dict[str, Tensor] = {}
        self._norms: list[Tensor] = []
        sites.refuse_batch_statistics(model)

    def __enter__(self) -> Self:
        sites.refuse_batch_statistics(self.model)
        for attributes, forward in self._patches:
            attributes["forward"] = forward
        self._hooks = [
            self.model.register_forward_pre_hook(
                self._begin_forward, prepend=True, with_kwargs=True
            ),
            self.model.register_forward_hook(self._end_forward),
        ]
        self._grads_before = {
            name: (p.grad, p.grad._version if p.grad is not None else 0)
            for name, p in self._parameters.items()
        }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for attributes, _ in self._patches:
            attributes.pop("forward", None)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def sample_norms(self) -> Tensor:
        """(B,) norms of every sample's gradient since the last reset, before clipping."""
        if not self._norms:
            return torch.zeros(0)
        return torch.cat(self._norms)

    @property
    def num_nonfinite(self) -> int:
        """Samples since the last reset whose gradient was infinite or NaN; they count as zero."""
        return int((~torch.isfinite(self.sample_norms)).sum())

    def clipped_sum(self) -> dict[str, Tensor]:
        """The sum of clipped per-sample gradients since the last reset, by parameter name."""
        for name, p in self._parameters.items():
            if name not in self._sums:
                wide = torch.float64 if p.dtype == torch.float64 else torch.float32
                self._sums[name] = torch.zeros_like(p, dtype=wide)
        return {name: self._sums[name] for name in self._parameters}

    def reset(self) -> None:
        """Forget norms and sums; the next backward starts a new batch."""
        self._sums = {}
        self._norms = []

    def backward(self, losses: Tensor) -> None:
        """Backward of per-sample losses (B,)."""
        losses.sum().backward()

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() >= 0:
            return
        size, device = find_batch(args, kwargs)
        scale = float(size) if self.loss_reduction == "mean" else 1.0
        self._recorder.open(Batch(size=size, device=device, slots=len(self._slots), scale=scale))

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._recorder.close_forward()

    def _receive(self, batch: Batch, entry: Entry) -> None:
        batch.entries.append(entry)

    def _finish(self, batch: Batch) -> None:
        batch.closed = True
        if batch.size == 0:
            return
        by_param: dict[str, list[Any]] = {}
        for entry in batch.entries:
            for name, part in entry.contributions():
                by_param.setdefault(name, []).append(part)
        norms = [
            joint_sq_norms(parts, self._parameters[name].shape, self._choose)
            for name, parts in by_param.items()
        ]
        norms_B = torch.stack(norms).sum(0).sqrt() * batch.scale
        factors_B = self._clip_function(norms_B, self.clip_norm) * batch.scale
        self._norms.append(norms_B)
        for name, parts in by_param.items():
            for part in parts:
                self._sums[name] = part.weighted_sum(
                    factors_B, self._parameters[name].shape, self._sums.get(name)
                )
        for name, p in self._parameters.items():
            before, version = self._grads_before[name]
            if p.grad is not None and (p.grad is not before or p.grad._version != version):
                raise UnsupportedModuleError(name, expected="a", got="b", remedy="c")


def _check_choice(argument: str, value: str, allowed: Any) -> None:
    if value not in allowed:
        raise InvalidArgumentError(argument, expected=f"one of {sorted(allowed)}", got=value)
