"""BERT, DistilBERT, and RoBERTa with its relatives, of Hugging Face transformers."""

from __future__ import annotations

from shuffled_dpsgd.permutation.describe.families.describe import Chain, Head, Layer, Stem

_BERT = "transformers.models.bert.modeling_bert"
# The same code under other names.
_ROBERTAS = (
    "transformers.models.camembert.modeling_camembert.Camembert",
    "transformers.models.roberta.modeling_roberta.Roberta",
    "transformers.models.xlm_roberta.modeling_xlm_roberta.XLMRoberta",
)
_DISTILBERT = "transformers.models.distilbert.modeling_distilbert"

_BERT_LAYER = Layer(
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    output="attention.output.dense",
    up=("intermediate.dense",),
    down="output.dense",
    activation="intermediate.intermediate_act_fn",
    norms=("attention.output.LayerNorm", "output.LayerNorm"),
    num_heads="attention.self.num_attention_heads",
    head_dim="attention.self.attention_head_size",
)
_DISTILBERT_LAYER = Layer(
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    output="attention.out_lin",
    up=("ffn.lin1",),
    down="ffn.lin2",
    activation="ffn.activation",
    norms=("sa_layer_norm", "output_layer_norm"),
    num_heads="attention.n_heads",
    head_dim="attention.attention_head_size",
)
_BERT_STEM = Stem(
    layers=("encoder.layer",),
    writes=(
        "embeddings.word_embeddings",
        "embeddings.position_embeddings",
        "embeddings.token_type_embeddings",
        "embeddings.LayerNorm",
    ),
)
_DISTILBERT_STEM = Stem(
    layers=("transformer.layer",),
    writes=(
        "embeddings.word_embeddings",
        "embeddings.position_embeddings",
        "embeddings.LayerNorm",
    ),
)


def _pooled(stem: str, classifier: str) -> Head:
    pooler = f"{stem}.pooler"
    chain = Chain(up=f"{pooler}.dense", activation=f"{pooler}.activation", down=classifier)
    return Head(stem=stem, reads=(f"{pooler}.dense",), chains=(chain,))


_BERT_MLM = Chain(
    up="cls.predictions.transform.dense",
    activation="cls.predictions.transform.transform_act_fn",
    norms=("cls.predictions.transform.LayerNorm",),
    down="cls.predictions.decoder",
)
_ROBERTA_MLM = Chain(up="lm_head.dense", norms=("lm_head.layer_norm",), down="lm_head.decoder")
_DISTILBERT_MLM = Chain(
    up="vocab_transform",
    activation="activation",
    norms=("vocab_layer_norm",),
    down="vocab_projector",
)
_PRE_CLASSIFIER = Chain(up="pre_classifier", down="classifier")

_ROBERTA_HEADS = {
    "ForSequenceClassification": Head(
        stem="roberta",
        reads=("classifier.dense",),
        chains=(Chain(up="classifier.dense", down="classifier.out_proj"),),
    ),
    "ForMultipleChoice": _pooled("roberta", "classifier"),
    "ForTokenClassification": Head(stem="roberta", reads=("classifier",)),
    "ForQuestionAnswering": Head(stem="roberta", reads=("qa_outputs",)),
    "ForMaskedLM": Head(
        stem="roberta",
        reads=(_ROBERTA_MLM.up,),
        chains=(_ROBERTA_MLM,),
        copies=("lm_head.bias",),
    ),
}

LAYERS = {
    f"{_BERT}.BertLayer": (_BERT_LAYER,),
    **{f"{roberta}Layer": (_BERT_LAYER,) for roberta in _ROBERTAS},
    f"{_DISTILBERT}.TransformerBlock": (_DISTILBERT_LAYER,),
}
STEMS = {
    f"{_BERT}.BertModel": _BERT_STEM,
    **{f"{roberta}Model": _BERT_STEM for roberta in _ROBERTAS},
    f"{_DISTILBERT}.DistilBertModel": _DISTILBERT_STEM,
}
HEADS = {
    f"{_BERT}.BertForSequenceClassification": _pooled("bert", "classifier"),
    f"{_BERT}.BertForMultipleChoice": _pooled("bert", "classifier"),
    f"{_BERT}.BertForNextSentencePrediction": _pooled("bert", "cls.seq_relationship"),
    f"{_BERT}.BertForTokenClassification": Head(stem="bert", reads=("classifier",)),
    f"{_BERT}.BertForQuestionAnswering": Head(stem="bert", reads=("qa_outputs",)),
    f"{_BERT}.BertForMaskedLM": Head(
        stem="bert",
        reads=(_BERT_MLM.up,),
        chains=(_BERT_MLM,),
        copies=("cls.predictions.bias",),
    ),
    **{f"{roberta}{task}": head for roberta in _ROBERTAS for task, head in _ROBERTA_HEADS.items()},
    f"{_DISTILBERT}.DistilBertForSequenceClassification": Head(
        stem="distilbert", reads=("pre_classifier",), chains=(_PRE_CLASSIFIER,)
    ),
    f"{_DISTILBERT}.DistilBertForMultipleChoice": Head(
        stem="distilbert", reads=("pre_classifier",), chains=(_PRE_CLASSIFIER,)
    ),
    f"{_DISTILBERT}.DistilBertForTokenClassification": Head(
        stem="distilbert", reads=("classifier",)
    ),
    f"{_DISTILBERT}.DistilBertForQuestionAnswering": Head(stem="distilbert", reads=("qa_outputs",)),
    f"{_DISTILBERT}.DistilBertForMaskedLM": Head(
        stem="distilbert", reads=(_DISTILBERT_MLM.up,), chains=(_DISTILBERT_MLM,)
    ),
}
