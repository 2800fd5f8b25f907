"""Known architectures as data, one file per family."""

from __future__ import annotations

from shuffled_dpsgd.permutation.describe.families import bart, bert, gpt2, llama, opt, t5, vit
from shuffled_dpsgd.permutation.describe.families.describe import (
    AttentionPart,
    Head,
    HiddenUnits,
    Layer,
    Stem,
)

_FAMILIES = (bert, vit, gpt2, opt, llama)
_ENCODER_DECODERS = (t5, bart)

LAYERS: dict[str, tuple[Layer, ...]] = {k: v for f in _FAMILIES for k, v in f.LAYERS.items()}
STEMS: dict[str, Stem] = {k: v for f in _FAMILIES for k, v in f.STEMS.items()}
HEADS: dict[str, Head] = {k: v for f in _FAMILIES for k, v in f.HEADS.items()}
ATTENTIONS: dict[str, AttentionPart] = {
    k: v for f in _ENCODER_DECODERS for k, v in f.ATTENTIONS.items()
}
HIDDEN_UNITS: dict[str, HiddenUnits] = {
    k: v for f in _ENCODER_DECODERS for k, v in f.HIDDEN_UNITS.items()
}
