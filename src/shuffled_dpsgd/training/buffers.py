"""Noticing data that leaves through the side door: buffers a forward writes to.

Running statistics and caches are part of the weights one publishes, but no gradient passes
through them, so nothing clips them and no noise reaches them.
"""

from __future__ import annotations

import torch

from shuffled_dpsgd.errors import UnsupportedModuleError


class BufferWatch:
    """Remembers the contents of a model's buffers and refuses that they change."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._known = {
            name: (buffer, buffer._version, buffer.detach().clone())
            for name, buffer in model.named_buffers()
        }

    def check(self) -> None:
        """Refuse if a buffer differs from what it was; contents are read only if it was touched."""
        for name, (buffer, version, contents) in self._known.items():
            if buffer._version == version:
                continue
            if not torch.equal(buffer, contents):
                raise UnsupportedModuleError(
                    name,
                    expected="a buffer that training does not change",
                    got="one written since the run began",
                    remedy="it would release data without noise: remove it, or call "
                    "private.trust_buffers() if you wrote it yourself from public values",
                )
            self._known[name] = (buffer, buffer._version, contents)
