"""T5 and mT5 of Hugging Face transformers, gated or not.

Whole heads stay: the first block of a stack computes one bias per head from the distance of two
positions, and every later block adds it to its own heads by number. The streams stay as well.
"""

from __future__ import annotations

from shuffled_dpsgd.permutation.describe.families.describe import AttentionPart, HiddenUnits

_T5S = (
    "transformers.models.t5.modeling_t5.T5",
    "transformers.models.mt5.modeling_mt5.MT5",
)
_ATTENTION = AttentionPart(
    query="q",
    key="k",
    value="v",
    output="o",
    num_heads="n_heads",
    head_dim="key_value_proj_dim",
    fixed_heads="relative positions are added to every block's heads by their number",
)

ATTENTIONS = {f"{t5}Attention": _ATTENTION for t5 in _T5S}
HIDDEN_UNITS = {
    **{f"{t5}DenseActDense": HiddenUnits(up=("wi",), down="wo", activation="act") for t5 in _T5S},
    **{
        f"{t5}DenseGatedActDense": HiddenUnits(up=("wi_0", "wi_1"), down="wo", activation="act")
        for t5 in _T5S
    },
}
