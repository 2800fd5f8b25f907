"""Metrics of generated texts: by libraries and by hand."""

from __future__ import annotations

import math
import sys

import pytest

from shuffled_dpsgd.errors import InvalidArgumentError, MissingExtraError
from shuffled_dpsgd.tasks.text_scores import (
    corpus_bleu,
    corpus_nist,
    mean_meteor,
    require_libraries,
    rouge_l,
    score_texts,
)

CAT = "the cat sat on the mat"


# -- BLEU -----------------------------------------------------------------------------------------


def test_bleu_by_hand() -> None:
    pytest.importorskip("sacrebleu")
    score, signature = corpus_bleu(["a b c d e"], [["a b c d f"]])
    assert score == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    assert "nrefs:1" in signature
    short, _ = corpus_bleu(["a b c d"], [["a b c d e"]])
    assert short == pytest.approx(100 * math.exp(1 - 5 / 4))


def test_bleu_takes_any_number_of_references() -> None:
    """A reference that is there twice changes nothing, so lists of equal length must agree."""
    sacrebleu = pytest.importorskip("sacrebleu")
    hypotheses = ["The Mill serves cheap Thai food .", "It is near the river ."]
    references = [
        ["The Mill serves Thai food .", "Cheap Thai food is served at The Mill ."],
        ["It is by the river ."],
    ]
    columns = [["The Mill serves Thai food .", "It is by the river ."]]
    columns += [["Cheap Thai food is served at The Mill .", "It is by the river ."]]
    expected = sacrebleu.corpus_bleu(hypotheses, columns).score
    assert corpus_bleu(hypotheses, references)[0] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("package", ["sacrebleu", "nltk"])
def test_without_a_library_the_extra_is_named(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sacrebleu")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"{package}.*\[hf\]"):
        require_libraries()


# -- METEOR ---------------------------------------------------------------------------------------


def test_meteor_by_hand() -> None:
    pytest.importorskip("nltk")
    assert mean_meteor([CAT], [[CAT]]) == pytest.approx(1 - 0.5 / 6**3)
    # 6 matches in 2 chunks; precision 6/7, recall 1.
    mean = 10 * (6 / 7) / (1 + 9 * 6 / 7)
    assert mean_meteor(["the cat was sat on the mat"], [[CAT]]) == pytest.approx(
        mean * (1 - 0.5 * (2 / 6) ** 3)
    )
    assert mean_meteor(["nothing"], [[CAT]]) == 0.0
    assert mean_meteor([""], [[CAT]]) == 0.0


def test_stems_match_and_case_does_not_matter() -> None:
    pytest.importorskip("nltk")
    stemmed = mean_meteor(["Places serving foods"], [["the place serves food"]])
    # 3 matches in one chunk; precision 1, recall 3/4.
    assert stemmed == pytest.approx(10 * 0.75 / (0.75 + 9) * (1 - 0.5 / 3**3))


def test_meteor_is_the_mean_over_texts_of_the_best_reference() -> None:
    pytest.importorskip("nltk")
    # One match in one chunk; precision 1/2, recall 1/4.
    other = 10 * (1 / 2) * (1 / 4) / (1 / 4 + 9 / 2) / 2
    found = mean_meteor([CAT, "a dog"], [["no such thing", CAT], ["one dog runs fast"]])
    assert found == pytest.approx((1 - 0.5 / 6**3 + other) / 2)


# -- ROUGE-L and NIST -----------------------------------------------------------------------------


def test_rouge_l_by_hand() -> None:
    assert rouge_l("A cat!", ["a cat"]) == pytest.approx(1.0)
    # Longest common subsequence 2: precision 2/3 and recall 2/4 with the first reference;
    # the second has precision 1/3 and recall 1.
    found = rouge_l("a b c", ["a x b y", "c"])
    assert found == pytest.approx((1 + 1.44) * (2 / 3) * 1.0 / (1.0 + 1.44 * (2 / 3)))
    assert rouge_l("", ["a"]) == rouge_l("b", ["a"]) == 0.0


def test_nist_by_hand() -> None:
    pytest.importorskip("nltk")
    # Each of two words is one of two: one bit. Behind "a" there is only "b": no bit.
    assert corpus_nist(["a b"], [["A b"]]) == pytest.approx(1.0)
    # Half the length: 0.5 to the power (ln 2 / ln 1.5)².
    assert corpus_nist(["a"], [["a b"]]) == pytest.approx(
        0.5 ** ((math.log(2) / math.log(1.5)) ** 2)
    )
    # Two thirds of the length cost one half; "a b" is worth log2(3), found once in two words
    # each, and "a" is followed by "b" always.
    assert corpus_nist(["a b"], [["a b c"]]) == pytest.approx(0.5 * math.log2(3))
    # References "a b" and "a c": "a" is two of four words, "b" one of four, "a b" one of two.
    two = corpus_nist(["a b"], [["a b", "a c"]])
    assert two == pytest.approx((1 + 2) / 2 + 1)
    # "b" is in one reference and "c" in the other: only the best reference counts.
    assert corpus_nist(["b c"], [["a b", "a c"]]) == pytest.approx(2 / 2)
    assert corpus_nist(["", "x"], [["a"], ["b"]]) == corpus_nist([""], [["a"]]) == 0.0


# -- all together ---------------------------------------------------------------------------------


def test_scores_say_what_they_are() -> None:
    pytest.importorskip("sacrebleu")
    found = score_texts([CAT, CAT], [[CAT], [CAT, "a dog"]])
    assert found["bleu"] == pytest.approx(100.0)
    assert found["rouge_l"] == pytest.approx(1.0)
    assert "exact and stem" in found["variants"]["meteor_nltk"]
    assert set(found["variants"]) == {"bleu", "meteor_nltk", "rouge_l", "nist_nltk"}
    with pytest.raises(InvalidArgumentError, match="2 prompts"):
        score_texts([CAT], [[CAT], [CAT]])
    with pytest.raises(InvalidArgumentError, match="prompt 1"):
        score_texts([CAT, CAT], [[CAT], []])
