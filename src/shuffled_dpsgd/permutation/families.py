"""Known architectures of Hugging Face transformers, and PyTorch's own layers, as data.

Blocks, stems and complete models are listed by the exact names of their classes. Of T5 and BART
only parts are known: their streams stay where they are.
"""

from __future__ import annotations

from shuffled_dpsgd.permutation.blocks import Attention, Chain, Head, HiddenUnits, Layer, Stem

_BERT = "transformers.models.bert.modeling_bert.Bert"
# BERT's code under other names.
_ROBERTAS = (
    "transformers.models.camembert.modeling_camembert.Camembert",
    "transformers.models.roberta.modeling_roberta.Roberta",
    "transformers.models.xlm_roberta.modeling_xlm_roberta.XLMRoberta",
)
_DISTILBERT = "transformers.models.distilbert.modeling_distilbert"
_VIT = "transformers.models.vit.modeling_vit.ViT"
_GPT2 = "transformers.models.gpt2.modeling_gpt2.GPT2"
_OPT = "transformers.models.opt.modeling_opt.OPT"
# Mistral and Qwen2 share Llama's code, but for the window of the one and the biases of the other,
# which move with their rows.
_LLAMA = "transformers.models.llama.modeling_llama.Llama"
_MISTRAL = "transformers.models.mistral.modeling_mistral.Mistral"
_QWEN2 = "transformers.models.qwen2.modeling_qwen2.Qwen2"
_LLAMAS = (_LLAMA, _MISTRAL, _QWEN2)
_T5S = ("transformers.models.t5.modeling_t5.T5", "transformers.models.mt5.modeling_mt5.MT5")
_BARTS = (
    "transformers.models.bart.modeling_bart.Bart",
    "transformers.models.mbart.modeling_mbart.MBart",
)

_BERT_LAYER = Layer(
    attention=Attention(
        reads=("attention.self.query", "attention.self.key", "attention.self.value"),
        output="attention.output.dense",
        num_heads="attention.self.num_attention_heads",
        head_dim="attention.self.attention_head_size",
    ),
    hidden=HiddenUnits(
        up=("intermediate.dense",),
        down="output.dense",
        activation="intermediate.intermediate_act_fn",
    ),
    norms=("attention.output.LayerNorm", "output.LayerNorm"),
)
_DISTILBERT_LAYER = Layer(
    attention=Attention(
        reads=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        output="attention.out_lin",
        num_heads="attention.n_heads",
        head_dim="attention.attention_head_size",
    ),
    hidden=HiddenUnits(up=("ffn.lin1",), down="ffn.lin2", activation="ffn.activation"),
    norms=("sa_layer_norm", "output_layer_norm"),
)
_VIT_LAYER = Layer(
    attention=Attention(
        reads=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        output="attention.o_proj",
        num_heads="attention.num_attention_heads",
        head_dim="attention.head_dim",
    ),
    hidden=HiddenUnits(up=("mlp.fc1",), down="mlp.fc2", activation="mlp.activation_fn"),
    norms=("layernorm_before", "layernorm_after"),
)
_GPT2_LAYER = Layer(
    attention=Attention(
        reads=("attn.c_attn",),
        output="attn.c_proj",
        num_heads="attn.num_heads",
        head_dim="attn.head_dim",
    ),
    hidden=HiddenUnits(up=("mlp.c_fc",), down="mlp.c_proj", activation="mlp.act"),
    norms=("ln_1", "ln_2"),
)
_OPT_LAYER = Layer(
    attention=Attention(
        reads=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output="self_attn.out_proj",
        num_heads="self_attn.num_heads",
        head_dim="self_attn.head_dim",
    ),
    hidden=HiddenUnits(up=("fc1",), down="fc2", activation="activation_fn"),
    norms=("self_attn_layer_norm", "final_layer_norm"),
)
_LLAMA_LAYER = Layer(
    attention=Attention(
        reads=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output="self_attn.o_proj",
        num_heads="self_attn.config.num_attention_heads",
        num_kv_heads="self_attn.config.num_key_value_heads",
        head_dim="self_attn.head_dim",
        rotary=True,
    ),
    hidden=HiddenUnits(
        up=("mlp.gate_proj", "mlp.up_proj"), down="mlp.down_proj", activation="mlp.act_fn"
    ),
    norms=("input_layernorm", "post_attention_layernorm"),
)
# The first block of a stack computes one bias per head from the distance of two positions, and
# every later block adds it to its own heads by number.
_T5_ATTENTION = Attention(
    reads=("q", "k", "v"),
    output="o",
    num_heads="n_heads",
    head_dim="key_value_proj_dim",
    fixed_heads="relative positions are added to every block's heads by their number",
)
# Attention to the encoder has its queries from one stream, keys and values from the other; inside a
# head that makes no difference.
_BART_ATTENTION = Attention(
    reads=("q_proj", "k_proj", "v_proj"),
    output="out_proj",
    num_heads="num_heads",
    head_dim="head_dim",
)
_BART_HIDDEN = HiddenUnits(up=("fc1",), down="fc2", activation="activation_fn")

# PyTorch's own attention is described by itself, also inside its layers.
ATTENTION = "torch.nn.modules.activation.MultiheadAttention"
_TORCH_HIDDEN = HiddenUnits(up=("linear1",), down="linear2", activation="activation")

LAYERS: dict[str, Layer] = {
    **{
        f"torch.nn.modules.transformer.Transformer{side}Layer": Layer(hidden=_TORCH_HIDDEN)
        for side in ("Encoder", "Decoder")
    },
    **{f"{bert}Layer": _BERT_LAYER for bert in (_BERT, *_ROBERTAS)},
    f"{_DISTILBERT}.TransformerBlock": _DISTILBERT_LAYER,
    f"{_VIT}Layer": _VIT_LAYER,
    f"{_GPT2}Block": _GPT2_LAYER,
    f"{_OPT}DecoderLayer": _OPT_LAYER,
    **{f"{llama}DecoderLayer": _LLAMA_LAYER for llama in _LLAMAS},
    **{f"{t5}Attention": Layer(attention=_T5_ATTENTION) for t5 in _T5S},
    **{
        f"{t5}Dense{kind}ActDense": Layer(hidden=HiddenUnits(up=up, down="wo", activation="act"))
        for t5 in _T5S
        for kind, up in (("", ("wi",)), ("Gated", ("wi_0", "wi_1")))
    },
    **{f"{bart}Attention": Layer(attention=_BART_ATTENTION) for bart in _BARTS},
    **{
        f"{bart}{side}Layer": Layer(hidden=_BART_HIDDEN)
        for bart in _BARTS
        for side in ("Encoder", "Decoder")
    },
}

_BERT_STEM = Stem(
    layers="encoder.layer",
    writes=(
        "embeddings.word_embeddings",
        "embeddings.position_embeddings",
        "embeddings.token_type_embeddings",
        "embeddings.LayerNorm",
    ),
)
STEMS: dict[str, Stem] = {
    **{f"{bert}Model": _BERT_STEM for bert in (_BERT, *_ROBERTAS)},
    f"{_DISTILBERT}.DistilBertModel": Stem(
        layers="transformer.layer",
        writes=(
            "embeddings.word_embeddings",
            "embeddings.position_embeddings",
            "embeddings.LayerNorm",
        ),
    ),
    f"{_VIT}Model": Stem(
        layers="layers",
        # Of the patch convolution only the output channels are features; its input channels and
        # its kernel belong to the image.
        writes=("embeddings.patch_embeddings.projection", "layernorm"),
        parameters=(
            "embeddings.cls_token",
            "embeddings.mask_token",
            "embeddings.position_embeddings",
        ),
    ),
    f"{_GPT2}Model": Stem(layers="h", writes=("wte", "wpe", "ln_f")),
    # The 350M model embeds its tokens in fewer features than its stream has; that stream stays.
    f"{_OPT}Decoder": Stem(
        layers="layers",
        writes=("embed_tokens", "embed_positions"),
        optional=("final_layer_norm",),
    ),
    **{
        f"{llama}Model": Stem(layers="layers", writes=("embed_tokens", "norm")) for llama in _LLAMAS
    },
}


def _pooled(stem: str, classifier: str) -> Head:
    pooler = f"{stem}.pooler"
    chain = Chain(up=f"{pooler}.dense", activation=f"{pooler}.activation", down=classifier)
    return Head(stem=stem, chain=chain)


_BERT_MLM = Chain(
    up="cls.predictions.transform.dense",
    activation="cls.predictions.transform.transform_act_fn",
    norms=("cls.predictions.transform.LayerNorm",),
    down="cls.predictions.decoder",
)
_ROBERTA_MLM = Chain(up="lm_head.dense", norms=("lm_head.layer_norm",), down="lm_head.decoder")
_ROBERTA_CLASSIFIER = Chain(up="classifier.dense", down="classifier.out_proj")
_DISTILBERT_MLM = Chain(
    up="vocab_transform",
    activation="activation",
    norms=("vocab_layer_norm",),
    down="vocab_projector",
)
_PRE_CLASSIFIER = Chain(up="pre_classifier", down="classifier")
_ROBERTA_HEADS = {
    "ForSequenceClassification": Head(stem="roberta", chain=_ROBERTA_CLASSIFIER),
    "ForMultipleChoice": _pooled("roberta", "classifier"),
    "ForTokenClassification": Head(stem="roberta", reads=("classifier",)),
    "ForQuestionAnswering": Head(stem="roberta", reads=("qa_outputs",)),
    "ForMaskedLM": Head(stem="roberta", chain=_ROBERTA_MLM, copies=("lm_head.bias",)),
}
_DISTILBERT_HEADS = {
    "ForSequenceClassification": Head(stem="distilbert", chain=_PRE_CLASSIFIER),
    "ForMultipleChoice": Head(stem="distilbert", chain=_PRE_CLASSIFIER),
    "ForTokenClassification": Head(stem="distilbert", reads=("classifier",)),
    "ForQuestionAnswering": Head(stem="distilbert", reads=("qa_outputs",)),
    "ForMaskedLM": Head(stem="distilbert", chain=_DISTILBERT_MLM),
}
_LLAMA_HEADS = {
    "ForCausalLM": Head(stem="model", reads=("lm_head",)),
    "ForSequenceClassification": Head(stem="model", reads=("score",)),
    "ForTokenClassification": Head(stem="model", reads=("score",)),
}

HEADS: dict[str, Head] = {
    f"{_BERT}ForSequenceClassification": _pooled("bert", "classifier"),
    f"{_BERT}ForMultipleChoice": _pooled("bert", "classifier"),
    f"{_BERT}ForNextSentencePrediction": _pooled("bert", "cls.seq_relationship"),
    f"{_BERT}ForTokenClassification": Head(stem="bert", reads=("classifier",)),
    f"{_BERT}ForQuestionAnswering": Head(stem="bert", reads=("qa_outputs",)),
    f"{_BERT}ForMaskedLM": Head(stem="bert", chain=_BERT_MLM, copies=("cls.predictions.bias",)),
    **{f"{roberta}{task}": head for roberta in _ROBERTAS for task, head in _ROBERTA_HEADS.items()},
    **{f"{_DISTILBERT}.DistilBert{task}": head for task, head in _DISTILBERT_HEADS.items()},
    f"{_VIT}ForImageClassification": Head(stem="vit", reads=("classifier",)),
    f"{_GPT2}LMHeadModel": Head(stem="transformer", reads=("lm_head",)),
    f"{_GPT2}ForSequenceClassification": Head(stem="transformer", reads=("score",)),
    f"{_GPT2}ForTokenClassification": Head(stem="transformer", reads=("classifier",)),
    f"{_GPT2}ForQuestionAnswering": Head(stem="transformer", reads=("qa_outputs",)),
    f"{_OPT}ForCausalLM": Head(stem="model.decoder", reads=("lm_head",)),
    f"{_OPT}ForSequenceClassification": Head(stem="model.decoder", reads=("score",)),
    f"{_OPT}ForQuestionAnswering": Head(stem="model.decoder", reads=("qa_outputs",)),
    **{f"{llama}{task}": head for llama in _LLAMAS for task, head in _LLAMA_HEADS.items()},
    # Two of them know their stem by an older name here.
    f"{_LLAMA}ForQuestionAnswering": Head(stem="transformer", reads=("qa_outputs",)),
    f"{_MISTRAL}ForQuestionAnswering": Head(stem="model", reads=("qa_outputs",)),
    f"{_QWEN2}ForQuestionAnswering": Head(stem="transformer", reads=("qa_outputs",)),
}
