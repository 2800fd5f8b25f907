"""What must not change behind a run: which tensors are trained, their values, and buffers.

The optimizer updates whatever it holds from whatever gradient is there, and a model is published
with everything in it. Only what passed through the mechanism may reach either, so each update is
preceded by a look at both.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shuffled_dpsgd.errors import InvalidArgumentError, UnsupportedModuleError
from shuffled_dpsgd.runtime.shards import held
from shuffled_dpsgd.runtime.structure import Structure


class ModelWatch:
    """All watches of one run; `begin` at the start of a logical batch, `check` before its update.

    Identities and version counters are compared every time. Contents are compared at steps 0, 1,
    2, 4, 8 and so on, because a write through `.data` leaves no other trace, and a forward that
    makes such writes makes them from the start.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._structure = StructureWatch(model, optimizer)
        self._structure.check()
        self._values = ValueWatch(model)
        self.trust_buffers()

    def trust_buffers(self) -> None:
        """Take the buffers as they are now for public."""
        self._buffers = BufferWatch(self._model)

    def begin(self, step: int) -> None:
        """From here to the update the weights must stay as they are."""
        self._values.note(contents=_is_thorough(step))

    def check(self, step: int) -> None:
        """Refuse if anything changed that the mechanism did not change."""
        self._structure.check()
        self._values.check()
        self._buffers.check(contents=_is_thorough(step))


class StructureWatch:
    """Remembers which modules and parameters the model holds, what is trained, and by whom."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._structure = Structure(model)
        self._parameters = dict(model.named_parameters())
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._trainable = {id(p): p.requires_grad for p in self._parameters.values()}

    def check(self) -> None:
        """Refuse replaced modules, replaced or thawed parameters, and foreign ones being updated.

        Raises:
            InvalidArgumentError: naming the first of them.
        """
        change = self._structure.find_change()
        if change is not None:
            raise _changed(change.name, "the modules and parameters of the plan", change.got)
        for name, parameter in self._parameters.items():
            if parameter.requires_grad != self._trainable[id(parameter)]:
                now = "trainable" if parameter.requires_grad else "frozen"
                raise _changed(name, "what was trainable at first, and nothing else", f"{now} now")
        held = [p for group in self._optimizer.param_groups for p in group["params"]]
        for parameter in held:
            if id(parameter) not in self._names:
                shape = tuple(parameter.shape)
                raise _changed(
                    "optimizer", "the model's parameters only", f"another, of shape {shape}"
                )
            if not self._trainable[id(parameter)] and parameter.grad is not None:
                name = self._names[id(parameter)]
                raise _changed(name, "no gradient of a frozen parameter", "one the optimizer uses")
        present = {id(parameter) for parameter in held}
        for key, trainable in self._trainable.items():
            if trainable and key not in present:
                raise _changed(self._names[key], "an optimizer that updates it", "one without it")


class ValueWatch:
    """Remembers the values of all parameters, and finds that something wrote into them.

    A codebook moved towards its inputs, rows renormalised as they are looked up: what a forward
    writes into a parameter is computed from data and gets no noise.
    """

    def __init__(self, model: nn.Module) -> None:
        self._named = [
            (name, held(parameter))
            for name, parameter in model.named_parameters()
            if parameter.is_floating_point() and held(parameter).numel()
        ]
        self._versions: list[int] = []
        self._norms: Tensor | None = None

    def note(self, *, contents: bool) -> None:
        """Take note of the values, and with `contents` of their norms."""
        self._versions = [parameter._version for _, parameter in self._named]
        self._norms = self._norms_now() if contents else None

    def check(self) -> None:
        """Refuse if a value changed since; nothing to compare with is nothing to refuse.

        Raises:
            UnsupportedModuleError: naming the first parameter.
        """
        for (name, parameter), version in zip(self._named, self._versions, strict=False):
            if parameter._version != version:
                raise _written(name)
        if self._norms is not None:
            now = self._norms_now()
            same = (now == self._norms) | (now.isnan() & self._norms.isnan())
            if not bool(same.all()):
                raise _written(self._named[int((~same).nonzero()[0])][0])
        self._versions, self._norms = [], None

    @torch.no_grad()
    def _norms_now(self) -> Tensor:
        # One call for all of them: a model has hundreds, and threads beside this one are busy.
        tensors = [parameter for _, parameter in self._named]
        if not tensors:
            return torch.zeros(0, dtype=torch.float64)
        return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float64))


class BufferWatch:
    """Remembers the contents of a model's buffers and refuses that they change.

    Running statistics and caches are published with the weights, but no gradient passes through
    them, so nothing clips them and no noise reaches them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._holders = [(path, module._buffers) for path, module in model.named_modules()]
        self._known = {
            name: (buffer, buffer._version, buffer.detach().clone()) for name, buffer in self._now()
        }

    def check(self, *, contents: bool) -> None:
        """Refuse a new or changed buffer; untouched ones are read only with `contents`.

        Raises:
            UnsupportedModuleError: naming the buffer.
        """
        for name, buffer in self._now():
            known, version, public = self._known.get(name, (None, 0, None))
            touched = buffer is not known or buffer._version != version
            if public is not None and not (touched or contents):
                continue
            if public is None or not _equal(buffer, public):
                raise UnsupportedModuleError(
                    name,
                    expected="a buffer that training does not change",
                    got="one written since the run began",
                    remedy="it would release data without noise: remove it, or call "
                    "private.trust_buffers() if you wrote it yourself from public values",
                )
            self._known[name] = (buffer, buffer._version, public)

    def _now(self) -> Iterator[tuple[str, Tensor]]:
        for path, buffers in self._holders:
            for key, buffer in buffers.items():
                if buffer is not None:
                    yield f"{path}.{key}" if path else key, buffer


def _is_thorough(step: int) -> bool:
    return step & (step - 1) == 0


def _equal(buffer: Tensor, public: Tensor) -> bool:
    """Same contents, wherever and in whatever precision the model was moved to since."""
    return buffer.shape == public.shape and torch.equal(
        buffer.detach(), public.to(device=buffer.device, dtype=buffer.dtype)
    )


def _changed(name: str, expected: str, got: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        name,
        expected=expected,
        got=got,
        remedy="the run clips and noises what was trainable when it was planned: put it back, or "
        "close the run, then freeze, replace or clear gradients, and plan a new one",
    )


def _written(name: str) -> UnsupportedModuleError:
    return UnsupportedModuleError(
        name,
        expected="weights that only updates change",
        got="values written between drawing a batch and its update",
        remedy="what a forward writes into a parameter gets no noise: do not do it, and change "
        "weights by hand only after an update",
    )
