"""ViT of Hugging Face transformers, under its current and its older submodule names."""

from __future__ import annotations

from shuffled_dpsgd.permutation.describe.families.describe import Head, Layer, Stem

_VIT = "transformers.models.vit.modeling_vit"

_LAYER = Layer(
    query="attention.q_proj",
    key="attention.k_proj",
    value="attention.v_proj",
    output="attention.o_proj",
    up=("mlp.fc1",),
    down="mlp.fc2",
    activation="mlp.activation_fn",
    norms=("layernorm_before", "layernorm_after"),
    num_heads="attention.num_attention_heads",
    head_dim="attention.head_dim",
)
_OLDER_LAYER = Layer(
    query="attention.attention.query",
    key="attention.attention.key",
    value="attention.attention.value",
    output="attention.output.dense",
    up=("intermediate.dense",),
    down="output.dense",
    activation="intermediate.intermediate_act_fn",
    norms=("layernorm_before", "layernorm_after"),
    num_heads="attention.attention.num_attention_heads",
    head_dim="attention.attention.attention_head_size",
)

LAYERS = {f"{_VIT}.ViTLayer": (_LAYER, _OLDER_LAYER)}
STEMS = {
    f"{_VIT}.ViTModel": Stem(
        layers=("layers", "encoder.layer"),
        # Of the patch convolution only the output channels are features; its input channels and
        # its kernel belong to the image.
        writes=("embeddings.patch_embeddings.projection", "layernorm"),
        parameters=(
            "embeddings.cls_token",
            "embeddings.mask_token",
            "embeddings.position_embeddings",
        ),
    )
}
HEADS = {f"{_VIT}.ViTForImageClassification": Head(stem="vit", reads=("classifier",))}
