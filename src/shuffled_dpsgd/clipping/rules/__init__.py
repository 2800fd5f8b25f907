"""One rule per layer kind, found by the module's type (Hugging Face's by qualified name)."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from shuffled_dpsgd.clipping.capture.slot import Slot
from shuffled_dpsgd.clipping.rules.attention import MultiheadAttentionSlot
from shuffled_dpsgd.clipping.rules.conv import ConvSlot
from shuffled_dpsgd.clipping.rules.embedding import EmbeddingSlot, ScaledEmbeddingSlot
from shuffled_dpsgd.clipping.rules.linear import Conv1DSlot, LinearSlot
from shuffled_dpsgd.clipping.rules.norms import (
    GroupNormSlot,
    LayerNormSlot,
    LlamaRMSNormSlot,
    RMSNormSlot,
)
from shuffled_dpsgd.clipping.rules.recurrent import RecurrentSlot

BY_TYPE: dict[type[nn.Module], type[Slot]] = {
    nn.Linear: LinearSlot,
    nn.Embedding: EmbeddingSlot,
    nn.LayerNorm: LayerNormSlot,
    nn.RMSNorm: RMSNormSlot,
    nn.GroupNorm: GroupNormSlot,
    nn.Conv1d: ConvSlot,
    nn.Conv2d: ConvSlot,
    nn.LSTM: RecurrentSlot,
    nn.GRU: RecurrentSlot,
    nn.RNN: RecurrentSlot,
    nn.MultiheadAttention: MultiheadAttentionSlot,
}
BY_NAME: dict[str, type[Slot]] = {
    "transformers.pytorch_utils.Conv1D": Conv1DSlot,
    **{
        f"transformers.models.{family}.modeling_{family}.{name}RMSNorm": LlamaRMSNormSlot
        for family, name in {
            "llama": "Llama",
            "mistral": "Mistral",
            "mixtral": "Mixtral",
            "phi3": "Phi3",
            "qwen2": "Qwen2",
            "qwen3": "Qwen3",
        }.items()
    },
    **{
        f"transformers.models.{family}.modeling_{family}.{name}ScaledWordEmbedding": (
            ScaledEmbeddingSlot
        )
        for family, name in {
            "bart": "Bart",
            "bigbird_pegasus": "BigBirdPegasus",
            "biogpt": "BioGpt",
            "gemma": "GemmaText",
            "gemma2": "Gemma2Text",
            "gemma3": "Gemma3Text",
            "m2m_100": "M2M100",
            "mbart": "MBart",
            "nllb_moe": "NllbMoe",
            "pegasus_x": "PegasusX",
            "plbart": "PLBart",
            "trocr": "TrOCR",
            "vaultgemma": "VaultGemmaText",
            "xglm": "XGLM",
        }.items()
    },
}


def find_rule(module: nn.Module) -> type[Slot] | None:
    """The rule of a module, or None.

    A subclass counts only while its forward is inherited, a parametrised module never: its weight
    is computed from parameters somewhere else.
    """
    if is_parametrized(module):
        return None
    for kind in type(module).__mro__:
        rule = BY_TYPE.get(kind) or BY_NAME.get(f"{kind.__module__}.{kind.__qualname__}")
        if rule is not None:
            inherited = type(module).forward is vars(kind).get("forward")
            return rule if inherited and rule.accepts(module) else None
    return None
