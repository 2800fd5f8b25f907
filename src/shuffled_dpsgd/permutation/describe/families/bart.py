"""BART and mBART of Hugging Face transformers: encoder and decoder of the same parts.

Attention to the encoder has its queries from one stream, keys and values from the other; inside a
head that makes no difference. The streams themselves stay: embeddings, norms and both sides of
every projection.
"""

from __future__ import annotations

from shuffled_dpsgd.permutation.describe.families.describe import AttentionPart, HiddenUnits

_BARTS = (
    "transformers.models.bart.modeling_bart.Bart",
    "transformers.models.mbart.modeling_mbart.MBart",
)
_ATTENTION = AttentionPart(
    query="q_proj",
    key="k_proj",
    value="v_proj",
    output="out_proj",
    num_heads="num_heads",
    head_dim="head_dim",
)
_HIDDEN = HiddenUnits(up=("fc1",), down="fc2", activation="activation_fn")

ATTENTIONS = {f"{bart}Attention": _ATTENTION for bart in _BARTS}
HIDDEN_UNITS = {
    f"{bart}{block}": _HIDDEN for bart in _BARTS for block in ("EncoderLayer", "DecoderLayer")
}
