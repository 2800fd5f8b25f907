"""The training settings of the paper's Table 1 that its figures 3 and 4 draw."""

from __future__ import annotations

from shuffled_dpsgd_experiments.presets import BATCH_SIZE, PRESETS
from shuffled_dpsgd_experiments.presets import Preset as Setting

VIT = PRESETS["paper/vit-cifar100"]
# The paper says "six representative experiments" and names the models; the data sets of BERT,
# RoBERTa and GPT-2 are not stated, and these are the first of each in its tables.
SIX = (
    VIT,
    *(
        PRESETS[f"paper/{name}"]
        for name in ("bert-sst2", "roberta-sst2", "gpt2-e2e", "gpt2-large-e2e", "gpt2-large-dart")
    ),
)

__all__ = ["BATCH_SIZE", "SIX", "VIT", "Setting"]
