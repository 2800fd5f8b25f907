"""BLEU with several references, by sacrebleu, whose signature says exactly which BLEU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shuffled_dpsgd.errors import MissingExtraError


def corpus_bleu(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> tuple[float, str]:
    """The score from 0 to 100, and sacrebleu's signature.

    Raises:
        MissingExtraError: sacrebleu is not installed.
    """
    metric = _sacrebleu().BLEU()
    most = max(len(those) for those in references)
    # One list for each number of a reference; texts with fewer references have none there.
    columns = [[those[n] if n < len(those) else None for those in references] for n in range(most)]
    score = metric.corpus_score(list(hypotheses), columns).score
    return float(score), str(metric.get_signature())


def _sacrebleu() -> Any:
    try:
        from sacrebleu import metrics
    except ImportError as error:
        raise MissingExtraError("sacrebleu", extra="hf", purpose="BLEU") from error
    return metrics
