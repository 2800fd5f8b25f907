"""Llama and its relatives, of Hugging Face transformers.

Grouped-query attention, gated MLP, rotary positions. Mistral and Qwen2 share Llama's code, but for
the window of the one and the biases of the other, which move with their rows.
"""

from __future__ import annotations

from shuffled_dpsgd.permutation.describe.families.describe import Head, Layer, Stem

_LLAMA = "transformers.models.llama.modeling_llama.Llama"
_MISTRAL = "transformers.models.mistral.modeling_mistral.Mistral"
_QWEN2 = "transformers.models.qwen2.modeling_qwen2.Qwen2"
_LLAMAS = (_LLAMA, _MISTRAL, _QWEN2)

_LAYER = Layer(
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
)
_HEADS = {
    "ForCausalLM": Head(stem="model", reads=("lm_head",)),
    "ForSequenceClassification": Head(stem="model", reads=("score",)),
    "ForTokenClassification": Head(stem="model", reads=("score",)),
}

LAYERS = {f"{llama}DecoderLayer": (_LAYER,) for llama in _LLAMAS}
STEMS = {
    f"{llama}Model": Stem(layers=("layers",), writes=("embed_tokens", "norm")) for llama in _LLAMAS
}
HEADS = {
    **{f"{llama}{task}": head for llama in _LLAMAS for task, head in _HEADS.items()},
    # Two of them know their stem by an older name here.
    f"{_LLAMA}ForQuestionAnswering": Head(stem="transformer", reads=("qa_outputs",)),
    f"{_MISTRAL}ForQuestionAnswering": Head(stem="model", reads=("qa_outputs",)),
    f"{_QWEN2}ForQuestionAnswering": Head(stem="transformer", reads=("qa_outputs",)),
}
