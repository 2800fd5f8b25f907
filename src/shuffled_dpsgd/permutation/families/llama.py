"""Llama of Hugging Face transformers: grouped-query attention, gated MLP, rotary positions."""

from __future__ import annotations

from shuffled_dpsgd.permutation.families.describe import Head, Layer, Stem

_LLAMA = "transformers.models.llama.modeling_llama"

LAYERS = {
    f"{_LLAMA}.LlamaDecoderLayer": (
        Layer(
            query="self_attn.q_proj",
            key="self_attn.k_proj",
            value="self_attn.v_proj",
            output="self_attn.o_proj",
            up=("mlp.gate_proj", "mlp.up_proj"),
            down="mlp.down_proj",
            activation="mlp.act_fn",
            norms=("input_layernorm", "post_attention_layernorm"),
            num_heads="self_attn.config.num_attention_heads",
            num_kv_heads="self_attn.config.num_key_value_heads",
            head_dim="self_attn.head_dim",
            rotary=True,
        ),
    )
}
STEMS = {f"{_LLAMA}.LlamaModel": Stem(layers=("layers",), writes=("embed_tokens", "norm"))}
HEADS = {
    f"{_LLAMA}.LlamaForCausalLM": Head(stem="model", reads=("lm_head",)),
    f"{_LLAMA}.LlamaForSequenceClassification": Head(stem="model", reads=("score",)),
    f"{_LLAMA}.LlamaForTokenClassification": Head(stem="model", reads=("score",)),
    f"{_LLAMA}.LlamaForQuestionAnswering": Head(stem="transformer", reads=("qa_outputs",)),
}
