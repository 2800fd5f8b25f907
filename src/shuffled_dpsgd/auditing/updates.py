"""One step of the run's own optimizer from a fixed place, and the gradient read back from it.

Whoever sees all iterates knows the optimizer's state before a step: it is a function of the earlier
releases. So the noisy gradient can be solved for from the weights before and after, also for Adam.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shuffled_dpsgd.auditing.taps import Tensors
from shuffled_dpsgd.training.private import PrivateTraining

FARTHEST = 10.0
"""No noise is larger than so many standard deviations: what is read back beyond that and a canary
is rounding."""


class RewoundOptimizer:
    """The optimizer of a run on copies of weights and state: the same step, any number of times."""

    def __init__(self, private: PrivateTraining) -> None:
        self._sources = {n: p for n, p in private.model.named_parameters() if p.requires_grad}
        self.weights = {n: p.detach().clone() for n, p in self._sources.items()}
        self._copies = {n: torch.nn.Parameter(w.clone()) for n, w in self.weights.items()}
        names = {id(p): n for n, p in self._sources.items()}
        groups = [
            {**group, "params": [self._copies[names[id(p)]] for p in group["params"]]}
            for group in private.optimizer.param_groups
        ]
        kind: Any = type(private.optimizer)
        self._optimizer = kind(groups)
        self._groups = {
            names[id(p)]: g for g in private.optimizer.param_groups for p in g["params"]
        }
        self._state = {
            name: {
                key: value.detach().clone() if isinstance(value, torch.Tensor) else value
                for key, value in private.optimizer.state.get(parameter, {}).items()
            }
            for name, parameter in self._sources.items()
        }
        self._decoupled = isinstance(private.optimizer, torch.optim.AdamW)
        plan = private.plan
        self._limits = {
            name: (FARTHEST * block.noise_std(plan.clip_norm) + plan.clip_norm)
            / plan.expected_batch_size
            for block in plan.blocks
            for name in block.parameters
        }

    @torch.no_grad()
    def step(self, gradients: Tensors) -> dict[str, torch.Tensor]:
        """The weights after one step with these gradients."""
        for name, parameter in self._copies.items():
            parameter.copy_(self.weights[name])
            parameter.grad = gradients[name].to(parameter.dtype)
            self._rewind(name, parameter)
        self._optimizer.step()
        return {name: p.detach().clone() for name, p in self._copies.items()}

    def read_back(self, after: Tensors) -> dict[str, torch.Tensor]:
        """The gradient that led from the fixed place to `after`, in float64.

        Exact up to rounding for SGD and Adam, with momentum and weight decay. For any other
        optimizer, and for Adam's first step, which keeps the signs alone: the displacement over
        the learning rate.
        """
        return {name: self._gradient(name, tensor.double()) for name, tensor in after.items()}

    def _rewind(self, name: str, parameter: torch.nn.Parameter) -> None:
        before = self._state[name]
        if not before:
            self._optimizer.state.pop(parameter, None)
            return
        state = self._optimizer.state[parameter]
        for key, value in before.items():
            if isinstance(value, torch.Tensor) and isinstance(state.get(key), torch.Tensor):
                state[key].copy_(value)
            else:
                state[key] = value.clone() if isinstance(value, torch.Tensor) else value

    def _gradient(self, name: str, after: torch.Tensor) -> torch.Tensor:
        before, group, state = self.weights[name].double(), self._groups[name], self._state[name]
        decay = float(group.get("weight_decay", 0.0))
        rate = float(group["lr"])
        if self._decoupled:
            before, decay = before * (1.0 - rate * decay), 0.0
        taken = (before - after) / rate if rate else torch.zeros_like(after)
        limit = self._limits[name]
        if "betas" in group and "exp_avg_sq" in state and not group.get("amsgrad"):
            taken = solve_adam(taken, group, state)
        elif state.get("momentum_buffer") is not None and not group.get("nesterov"):
            buffer = state["momentum_buffer"].double()
            taken = (taken - float(group["momentum"]) * buffer) / (1.0 - float(group["dampening"]))
        found = taken - decay * before
        return found.clamp(-limit, limit) if "exp_avg_sq" in state else found


def solve_adam(
    update: torch.Tensor, group: Mapping[str, Any], state: Mapping[str, Any]
) -> torch.Tensor:
    """The g for which Adam's update, from the moments in `state`, is `update`.

    With m̂ = a + b·g and v̂ = c + d·g², u·(√v̂ + eps) = m̂ is a quadratic equation. Where two
    gradients give the same update the smaller one is taken: it is the likelier of the two.
    """
    first, second = (float(beta) for beta in group["betas"])
    count = float(state["step"]) + 1.0
    unbias_first, unbias_second = 1.0 - first**count, 1.0 - second**count
    b, d = (1.0 - first) / unbias_first, (1.0 - second) / unbias_second
    a = state["exp_avg"].double() * (first / unbias_first) - float(group["eps"]) * update
    c = state["exp_avg_sq"].double() * (second / unbias_second)
    leading = b * b - update.square() * d
    half = a * b
    constant = a.square() - update.square() * c
    root = (half.square() - leading * constant).clamp(min=0.0).sqrt()
    pivot = -(half + torch.where(half >= 0.0, root, -root))
    candidates = torch.stack([pivot / leading, constant / pivot])
    wrong = ~torch.isfinite(candidates) | ((a + b * candidates) * update < 0.0)
    size = candidates.abs().masked_fill(wrong, torch.inf)
    best = size.argmin(dim=0, keepdim=True)
    found = candidates.gather(0, best).squeeze(0)
    return torch.where(size.gather(0, best).squeeze(0).isfinite(), found, 0.0)
