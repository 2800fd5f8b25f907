"""Which weights of a model a run may move.

Under `shuffle="auto"`, and in a model with adapters (PEFT), only trained weights move. An adapter
or a head may be saved without the frozen weights around it, which must then be the public ones.
"""

from __future__ import annotations

import torch

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.options import PrivacyOptions
from shuffled_dpsgd.permutation import PermutationSpec, discover
from shuffled_dpsgd.runtime.notices import say_once
from shuffled_dpsgd.training.optimizers import check_optimizer

STAYS = (
    "shuffle='auto': no weights of this {} are shuffled: {}. The certified ε is the same with and "
    "without a shuffle"
)


def symmetries_of(model: torch.nn.Module, options: PrivacyOptions) -> PermutationSpec | None:
    """What may move, or be clipped as a block; None where the options ask for neither."""
    if not options.needs_blocks:
        return None
    assert options.scope is not None, "filled in on construction"
    spec = discover(model, scope=options.scope)
    if options.shuffle == "auto" or hasattr(model, "peft_config"):
        spec = spec.within({n for n, p in model.named_parameters() if p.requires_grad})
    return spec


def usable_symmetries(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    options: PrivacyOptions,
    *,
    split: bool = False,
) -> PermutationSpec | None:
    """What may move with this optimizer; the user is told if `auto` finds nothing.

    Nothing moves where layers are `split` over ranks.
    """
    if split and options.needs_blocks:
        for name, fine in (("shuffle", ("auto", "off")), ("batch_clip_norm", (None,))):
            if (got := getattr(options, name)) not in fine:
                expected = f"{fine[-1]!r} where layers are split over ranks"
                raise InvalidArgumentError(name, expected=expected, got=got)
        say_once(STAYS.format(type(model).__name__, "its layers are split over ranks"))
        return None
    spec = symmetries_of(model, options)
    if options.shuffle != "auto" or spec is None:
        return spec
    why_not = "" if spec.groups else "no exact symmetry of the trained ones is known"
    try:
        check_optimizer(optimizer, shuffled=True)
    except InvalidArgumentError as error:
        why_not = why_not or f"that takes {error.expected}, not {error.got}"
    if why_not:
        say_once(STAYS.format(type(model).__name__, why_not))
    return None if why_not else spec
