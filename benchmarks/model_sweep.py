"""Clips tiny models of every Hugging Face type and compares them with the oracle.

    python -m benchmarks.model_sweep --jobs 8 --json results/model_sweep.json    # or to go on

Each type is built from its configuration with small sizes, in float64 and training mode, and five
batch shapes go through one engine: several samples, as many tokens as samples, a single sample, a
single token, and unequal lengths. A batch is `exact` (norms and sums agree with one sample at a
time to 1e-9), `rounded` (to 1e-6: some models compute in float32 whatever they are given),
`random` (the model draws numbers in training that one sample at a time cannot repeat), `refused` by
name, or the model itself `fails` on it; anything else `differs`. Every batch is also checked by the
engine itself, which does repeat draws.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shuffled_dpsgd.clipping import ClippingEngine, clipped_sum_reference
from shuffled_dpsgd.environment import environment
from shuffled_dpsgd.errors import ShuffledDPError

VOCABULARY, CLASSES, IMAGE = 40, 3, 16
SHAPES = ((3, 7), (7, 7), (1, 5), (4, 1), (4, 9))
CLIP_NORM, TOLERANCE, FLOAT32_TOLERANCE = 0.1, 1e-9, 1e-6
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "num_labels": CLASSES, "image_size": IMAGE, "patch_size": 8,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size"), 16),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "hidden_dim", "n_inner"), 24),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "type_vocab_size"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "decoder_start_token_id"), 0),
    "eos_token_id": 1, "head_dim": 8, "rotary_dim": 4, "use_cache": False,
}  # fmt: skip
KINDS = {
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "sequence": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}


def names() -> list[tuple[str, str]]:
    """Every (kind, model type) there is."""
    from transformers.models.auto import modeling_auto

    return [(kind, name) for kind, table in KINDS.items() for name in getattr(modeling_auto, table)]


def build(kind: str, name: str) -> nn.Module:
    """A small model of a type, without dropout."""
    import transformers

    auto = {
        "causal-lm": transformers.AutoModelForCausalLM,
        "sequence": transformers.AutoModelForSequenceClassification,
        "image": transformers.AutoModelForImageClassification,
    }[kind]
    known = transformers.CONFIG_MAPPING[name]().to_dict()
    config = transformers.CONFIG_MAPPING[name](**{k: v for k, v in SMALL.items() if k in known})
    with torch.device("meta"):
        size = sum(p.numel() for p in auto.from_config(config).parameters())
    if size > 3_000_000:
        raise ValueError(f"{size} parameters: its sizes have other names")
    torch.manual_seed(0)
    model = auto.from_config(config).double().train()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others have no kernels for float64
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for key, value in vars(module).items():
            if "drop" in key and isinstance(value, float):
                setattr(module, key, 0.0)
    return model


def inputs(kind: str, size: int, tokens: int) -> dict[str, Tensor]:
    """A batch; the last shape has samples of unequal lengths."""
    generator = torch.Generator().manual_seed(size * 100 + tokens)
    if kind == "image":
        return {"pixel_values": torch.randn(size, 3, IMAGE, IMAGE, generator=generator).double()}
    ids = torch.randint(2, VOCABULARY, (size, tokens), generator=generator)
    ids[:, 0] = 1  # some classifiers want one end of a sentence in every sample
    found = {"input_ids": ids}
    if (size, tokens) == SHAPES[-1]:
        lengths = torch.tensor([tokens, 3, 5, 2])[:, None]
        found["attention_mask"] = (torch.arange(tokens) < lengths).long()
        found["input_ids"] = ids.masked_fill(found["attention_mask"] == 0, 0)
    return found


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A loss for each sample."""
    logits = model(**batch).logits
    targets = torch.arange(logits.shape[-1], device=logits.device) % 2 - 0.5
    per_entry = F.softplus(logits * targets)
    mask = batch.get("attention_mask")
    if mask is not None and per_entry.dim() == 3:
        per_entry = per_entry * mask[..., None]
    return per_entry.flatten(1).sum(1)


def try_batch(engine: ClippingEngine, batch: dict[str, Tensor]) -> str:
    """What becomes of one batch."""
    model = engine.model
    size = len(next(iter(batch.values())))
    singles = [{key: value[i : i + 1] for key, value in batch.items()} for i in range(size)]
    try:
        losses(model, batch)
        for one in singles:
            losses(model, one)
    except Exception:  # the model's own error, whatever it is
        return "fails"
    engine.reset()
    try:
        with engine:
            engine.backward(losses(model, batch))
        got, norms = engine.clipped_sum(), engine.sample_norms.clone()
    except ShuffledDPError:
        engine.reset()
        return "refused"
    wanted = clipped_sum_reference(model, lambda m, one: losses(m, one).sum(), singles, CLIP_NORM)
    total = sum(float(t.square().sum()) for t in wanted.clipped_sum.values()) ** 0.5
    off = max(float((got[n] - t).norm()) for n, t in wanted.clipped_sum.items()) / max(total, 1e-12)
    apart = float(((norms - wanted.sample_norms) / wanted.sample_norms).abs().max())
    worst = max(off, apart)
    if worst <= TOLERANCE:
        return "exact"
    with torch.no_grad():
        if not torch.equal(losses(model, batch), losses(model, batch)):
            return f"random: its own draws move it by {worst:.1e}"
    return f"{'rounded' if worst <= FLOAT32_TOLERANCE else 'differs'} by {worst:.1e}"


def sweep_one(job: tuple[str, str]) -> dict[str, Any]:
    """All shapes of one type through one engine."""
    kind, name = job
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {"kind": kind, "type": name}
    try:
        model = build(kind, name)
        engine = ClippingEngine(model, clip_norm=CLIP_NORM, check_rate=1.0)
    except ShuffledDPError as error:
        return {**found, "built": f"refused: {str(error)[:160]}"}
    except Exception as error:  # types that need more than small sizes
        return {**found, "built": f"not built: {type(error).__name__}: {str(error)[:100]}"}
    shapes = SHAPES[:1] + SHAPES[2:3] if kind == "image" else SHAPES
    batches = {}
    for size, tokens in shapes:
        try:
            batches[f"{size}x{tokens}"] = try_batch(engine, inputs(kind, size, tokens))
        except Exception as error:
            batches[f"{size}x{tokens}"] = f"raised {type(error).__name__}: {str(error)[:120]}"
    return {**found, "built": "yes", "batches": batches, "samples_checked": engine.num_checked}


def main() -> None:
    """Sweep all types and write what became of each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="model types")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = json.loads(options.json.read_text())["rows"] if resumes(options.json) else []
    done = {(row["kind"], row["type"]) for row in rows}
    wanted = [job for job in names() if not options.only or job[1] in options.only]
    jobs = [job for job in wanted if job not in done]
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=8) as pool:
        for row in pool.imap_unordered(sweep_one, jobs):
            rows.append(row)
            print(len(rows), row["type"], row["kind"], row.get("batches", row["built"]), flush=True)
            if options.json:
                options.json.write_text(json.dumps(document(rows), indent=1) + "\n")
    print(json.dumps(document(rows)["summary"]))


def resumes(path: Path | None) -> bool:
    """Whether a sweep was begun before; its types are not tried again."""
    return path is not None and path.is_file()


def document(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """All rows in order, and how many came out how."""
    outcomes = Counter(
        outcome.split(" ")[0].rstrip(":")
        for row in rows
        for outcome in row.get("batches", {}).values()
    )
    summary = {
        "built": Counter(row["built"].split(":")[0] for row in rows),
        "batches": outcomes,
        "samples_checked": sum(row.get("samples_checked", 0) for row in rows),
    }
    ordered = sorted(rows, key=lambda row: (row["kind"], row["type"]))
    return {"environment": environment(), "summary": summary, "rows": ordered}


if __name__ == "__main__":
    main()
