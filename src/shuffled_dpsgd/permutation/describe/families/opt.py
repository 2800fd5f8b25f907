"""OPT of Hugging Face transformers: its decoder lies one level deeper than those of others.

The 350M model embeds its tokens in fewer features than its stream has; that stream stays.
"""

from __future__ import annotations

from shuffled_dpsgd.permutation.describe.families.describe import Head, Layer, Stem

_OPT = "transformers.models.opt.modeling_opt.OPT"
_STEM = "model.decoder"

LAYERS = {
    f"{_OPT}DecoderLayer": (
        Layer(
            query="self_attn.q_proj",
            key="self_attn.k_proj",
            value="self_attn.v_proj",
            output="self_attn.out_proj",
            up=("fc1",),
            down="fc2",
            activation="activation_fn",
            norms=("self_attn_layer_norm", "final_layer_norm"),
            num_heads="self_attn.num_heads",
            head_dim="self_attn.head_dim",
        ),
    )
}
STEMS = {
    f"{_OPT}Decoder": Stem(
        layers=("layers",),
        writes=("embed_tokens", "embed_positions"),
        optional=("final_layer_norm",),
    )
}
HEADS = {
    f"{_OPT}ForCausalLM": Head(stem=_STEM, reads=("lm_head",)),
    f"{_OPT}ForSequenceClassification": Head(stem=_STEM, reads=("score",)),
    f"{_OPT}ForQuestionAnswering": Head(stem=_STEM, reads=("qa_outputs",)),
}
