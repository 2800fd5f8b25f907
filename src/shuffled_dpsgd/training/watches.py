"""What must not change behind a run: which tensors are trained, their values, and buffers.

The optimizer updates whatever it holds from whatever gradient is there, and a model is published
with everything in it. Only what passed through the mechanism may reach either, so each update is
preceded by a look at both.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shuffled_dpsgd.errors import InvalidArgumentError, UnsupportedModuleError
from shuffled_dpsgd.runtime.shards import held, parts_of
from shuffled_dpsgd.runtime.structure import Structure


class ModelWatch:
    """Watches a model through a run: `begin` each logical batch, `check` before its update.

    Which modules and parameters there are is compared with the start of the run, and so are
    buffers: running statistics and caches are published with the weights, but no clip and no noise
    reaches them. Parameters may change in updates only: a codebook moved towards its inputs, or
    rows renormalised as they are looked up, are computed from data.

    Identities and version counters are compared every time. Contents are compared at steps 0, 1,
    2, 4, 8 and so on, because a write through `.data` leaves no other trace, and a forward that
    makes such writes makes them from the start.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._structure = Structure(model)
        self._parameters = dict(model.named_parameters())
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._trainable = {id(p): p.requires_grad for p in self._parameters.values()}
        self._values = {
            f"{name}{f' (part {number})' if number else ''}": part
            for name, parameter in self._parameters.items()
            for number, part in enumerate(parts_of(held(parameter)))
            if part.is_floating_point() and part.numel()
        }
        self._versions: list[int] = []
        self._norms: Tensor | None = None
        self._holders = [(path, module._buffers) for path, module in model.named_modules()]
        self.trust_buffers()
        self._check_structure()

    def trust_buffers(self) -> None:
        """Take the buffers as they are now for public."""
        self._public = {
            name: (buffer, buffer._version, buffer.detach().clone())
            for name, buffer in self._buffers().items()
        }

    def begin(self, step: int) -> None:
        """From here to the update the weights must stay as they are."""
        self._versions = [value._version for value in self._values.values()]
        self._norms = self._norms_now() if _is_thorough(step) else None

    def check(self, step: int) -> None:
        """Refuse if anything changed that the mechanism did not change.

        Raises:
            InvalidArgumentError: what is trained, or by whom, naming the first of it.
            UnsupportedModuleError: a value or a buffer.
        """
        self._check_structure()
        self._check_values()
        self._check_buffers(contents=_is_thorough(step))

    def _check_structure(self) -> None:
        """Modules and parameters as they were; an optimizer of all that is trained, and no more."""
        change = self._structure.find_change()
        if change is not None:
            raise _changed(change.name, "the modules and parameters of the plan", change.got)
        for name, parameter in self._parameters.items():
            if parameter.requires_grad != self._trainable[id(parameter)]:
                now = "trainable" if parameter.requires_grad else "frozen"
                raise _changed(name, "what was trainable at first, and nothing else", f"{now} now")
        updated = [p for group in self._optimizer.param_groups for p in group["params"]]
        for parameter in updated:
            if id(parameter) not in self._names:
                got = f"another, of shape {tuple(parameter.shape)}"
                raise _changed("optimizer", "the model's parameters only", got)
            if not self._trainable[id(parameter)] and parameter.grad is not None:
                name = self._names[id(parameter)]
                raise _changed(name, "no gradient of a frozen parameter", "one the optimizer uses")
        present = {id(parameter) for parameter in updated}
        for key, trainable in self._trainable.items():
            if trainable and key not in present:
                raise _changed(self._names[key], "an optimizer that updates it", "one without it")

    def _check_values(self) -> None:
        """Parameters as `begin` found them; nothing to compare with is nothing to refuse."""
        written = [
            name
            for (name, value), version in zip(self._values.items(), self._versions, strict=False)
            if value._version != version
        ]
        if not written and self._norms is not None:
            now = self._norms_now()
            same = (now == self._norms) | (now.isnan() & self._norms.isnan())
            written = [list(self._values)[at] for at in (~same).nonzero().flatten().tolist()]
        self._versions, self._norms = [], None
        if written:
            raise UnsupportedModuleError(
                written[0],
                expected="weights that only updates change",
                got="values written between drawing a batch and its update",
                remedy="what a forward writes into a parameter gets no noise: do not do it, and "
                "change weights by hand only after an update",
            )

    def _check_buffers(self, *, contents: bool) -> None:
        """No new or changed buffer; untouched ones are read only with `contents`."""
        for name, buffer in self._buffers().items():
            known, version, public = self._public.get(name, (None, 0, None))
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
            self._public[name] = (buffer, buffer._version, public)

    def _buffers(self) -> dict[str, Tensor]:
        return {
            f"{path}.{key}" if path else key: buffer
            for path, buffers in self._holders
            for key, buffer in buffers.items()
            if buffer is not None
        }

    @torch.no_grad()
    def _norms_now(self) -> Tensor:
        if not self._values:
            return torch.zeros(0, dtype=torch.float64)
        # One call for all of them: a model has hundreds, and threads beside this one are busy.
        return torch.stack(torch._foreach_norm([*self._values.values()], 2, dtype=torch.float64))


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
