"""GPT-2 of Hugging Face transformers: weights stored input x output, fused query-key-value."""

from __future__ import annotations

from shuffled_dpsgd.permutation.describe.families.describe import Head, Layer, Stem

_GPT2 = "transformers.models.gpt2.modeling_gpt2"

LAYERS = {
    f"{_GPT2}.GPT2Block": (
        Layer(
            fused="attn.c_attn",
            output="attn.c_proj",
            up=("mlp.c_fc",),
            down="mlp.c_proj",
            activation="mlp.act",
            norms=("ln_1", "ln_2"),
            num_heads="attn.num_heads",
            head_dim="attn.head_dim",
        ),
    )
}
STEMS = {f"{_GPT2}.GPT2Model": Stem(layers=("h",), writes=("wte", "wpe", "ln_f"))}
HEADS = {
    f"{_GPT2}.GPT2LMHeadModel": Head(stem="transformer", reads=("lm_head",)),
    f"{_GPT2}.GPT2ForSequenceClassification": Head(stem="transformer", reads=("score",)),
    f"{_GPT2}.GPT2ForTokenClassification": Head(stem="transformer", reads=("classifier",)),
    f"{_GPT2}.GPT2ForQuestionAnswering": Head(stem="transformer", reads=("qa_outputs",)),
}
