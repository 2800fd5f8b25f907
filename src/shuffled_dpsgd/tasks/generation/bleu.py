"""BLEU with several references, by sacrebleu, whose signature says exactly which BLEU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shuffled_dpsgd.errors import MissingExtraError
from shuffled_dpsgd.tasks.generation.config import Bleu
from shuffled_dpsgd.tasks.generation.plain_bleu import SIGNATURE, plain_bleu


def corpus_bleu(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], by: Bleu = "sacrebleu"
) -> tuple[float, str]:
    """The score from 0 to 100, and a signature that says how it came about.

    Raises:
        MissingExtraError: sacrebleu is not installed.
    """
    if by == "plain":
        return plain_bleu(hypotheses, references), SIGNATURE
    metric = sacrebleu_metrics().BLEU()
    most = max(len(those) for those in references)
    # One list for each number of a reference; texts with fewer references have none there.
    columns = [[those[n] if n < len(those) else None for those in references] for n in range(most)]
    score = metric.corpus_score(list(hypotheses), columns).score
    return float(score), str(metric.get_signature())


def sacrebleu_metrics() -> Any:
    """sacrebleu's metrics, or an error that names what to install."""
    try:
        from sacrebleu import metrics
    except ImportError as error:
        raise MissingExtraError("sacrebleu", extra="hf", purpose="BLEU") from error
    return metrics
