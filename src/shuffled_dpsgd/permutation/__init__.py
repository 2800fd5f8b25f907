"""Weight permutations that leave a model's function unchanged: find, draw, apply, verify."""

from __future__ import annotations

from shuffled_dpsgd.permutation.discovery import discover
from shuffled_dpsgd.permutation.drawing import Permutation, draw, from_groups, identity
from shuffled_dpsgd.permutation.moving import apply, apply_to_tensors
from shuffled_dpsgd.permutation.spec import (
    AxisLayout,
    Block,
    Group,
    Kind,
    Member,
    PermutationSpec,
    Scope,
)
from shuffled_dpsgd.permutation.verification import Verification, verify

__all__ = [
    "AxisLayout",
    "Block",
    "Group",
    "Kind",
    "Member",
    "Permutation",
    "PermutationSpec",
    "Scope",
    "Verification",
    "apply",
    "apply_to_tensors",
    "discover",
    "draw",
    "from_groups",
    "identity",
    "verify",
]
