"""Known architectures as data, one file per family."""

from __future__ import annotations

from shuffled_dpsgd.permutation.describe.families import bert, gpt2, llama, opt, vit
from shuffled_dpsgd.permutation.describe.families.describe import Head, Layer, Stem

_FAMILIES = (bert, vit, gpt2, opt, llama)

LAYERS: dict[str, tuple[Layer, ...]] = {k: v for f in _FAMILIES for k, v in f.LAYERS.items()}
STEMS: dict[str, Stem] = {k: v for f in _FAMILIES for k, v in f.STEMS.items()}
HEADS: dict[str, Head] = {k: v for f in _FAMILIES for k, v in f.HEADS.items()}
