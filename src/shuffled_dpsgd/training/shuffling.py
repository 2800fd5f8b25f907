"""The shuffle of a run: draws a permutation, applies it, and has some of them verified."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch.utils.hooks import RemovableHandle

from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.core.streams import RandomStreams
from shuffled_dpsgd.permutation import (
    Permutation,
    PermutationSpec,
    apply,
    apply_to_tensors,
    draw,
    identity,
)
from shuffled_dpsgd.runtime.shards import Sharding
from shuffled_dpsgd.training.shuffle_check import ShuffleCheck


class PermutedFrame:
    """Lets noise be drawn as if `permutation` had never been applied to the weights.

    The trajectory is that of an unshuffled run up to rounding. The sums are moved back and forth
    instead of the noise, which would need a buffer of the model's size.
    """

    def __init__(self, permutation: Permutation) -> None:
        self._permutation = permutation

    def enter(self, sums: Mapping[str, torch.Tensor]) -> None:
        """Move the sums to where they would lie had nothing been permuted."""
        apply_to_tensors(self._permutation.inverse(), sums)

    def leave(self, sums: Mapping[str, torch.Tensor]) -> None:
        """Move them back."""
        apply_to_tensors(self._permutation, sums)


class Shuffling:
    """Permutes the weights of `model` and the state of `optimizer` together.

    `frame` is the product of all permutations so far. It is kept only where the plan draws noise
    as if the weights had never moved, and is None otherwise.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: PrivacyPlan,
        spec: PermutationSpec | None,
        streams: RandomStreams,
        sharding: Sharding | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._spec = spec
        self._streams = streams
        self.frame: Permutation | None = None
        if plan.noise_frame == "unshuffled" and plan.permutes and spec is not None:
            self.frame = identity(spec, self._device)
        self._check: ShuffleCheck | None = None
        if plan.permutes and spec is not None and spec.groups:
            self._check = ShuffleCheck(model, spec, sharding)
        self._listening: RemovableHandle | None = None

    @property
    def num_verified(self) -> int:
        """Shuffles so far that were seen to leave the model's outputs unchanged."""
        return 0 if self._check is None else self._check.num_verified

    def listen(self) -> None:
        """Record the model's inputs, for shuffles that are verified."""
        if self._check is not None:
            self._listening = self._check.listen()

    def stop_listening(self) -> None:
        """Take the hook off the model again."""
        if self._listening is not None:
            self._listening.remove()
            self._listening = None

    def try_out(self) -> None:
        """Before the first release: refuse a shuffle that changes the model's outputs."""
        if self._check is not None:
            self._check.try_out()

    def forget(self) -> None:
        """Drop the inputs of the batch."""
        if self._check is not None:
            self._check.forget()

    def permute(self, step: int) -> None:
        """Draw the permutation of `step` and apply it."""
        assert self._spec is not None, "a plan that permutes has a spec"
        key = self._streams.key("permutation", step)
        permutation = draw(self._spec, key, self._device)
        check = self._check
        with nullcontext() if check is None else check.watching(permutation, self._optimizer):
            apply(permutation, self._model, self._optimizer)
        if self.frame is not None:
            self.frame = self.frame.then(permutation)

    @property
    def _device(self) -> torch.device:
        """Where the weights are now; a model may move after its run was made."""
        return next(self._model.parameters()).device
