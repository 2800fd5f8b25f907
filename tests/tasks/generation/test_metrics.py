"""Metrics of generated texts: worked by hand, and against sacrebleu."""

from __future__ import annotations

import itertools
import math
import random
import sys
from pathlib import Path

import pytest

from shuffled_dpsgd.errors import InvalidArgumentError, MissingExtraError
from shuffled_dpsgd.tasks.generation.bleu import corpus_bleu
from shuffled_dpsgd.tasks.generation.meteor import (
    Alignment,
    align,
    best_alignment,
    corpus_meteor,
)
from shuffled_dpsgd.tasks.generation.meteor_jar import jar_meteor
from shuffled_dpsgd.tasks.generation.nist import corpus_nist
from shuffled_dpsgd.tasks.generation.rouge import longest_common, rouge_l
from shuffled_dpsgd.tasks.generation.scores import score_texts
from shuffled_dpsgd.tasks.generation.words import mteval_words

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


def test_plain_bleu_is_sacrebleus() -> None:
    pytest.importorskip("sacrebleu")
    rng = random.Random(0)
    words = [
        "The",
        "the",
        "cat",
        "Cat",
        "sat",
        "on",
        "a",
        "mat",
        ",",
        ".",
        "3.5",
        "£30",
        "near",
        "riverside",
        "it's",
        "-",
    ]
    for _ in range(60):
        size = rng.randint(1, 4)

        def text(least: int) -> str:
            return " ".join(rng.choices(words, k=rng.randint(least, 9)))

        hypotheses = [text(0) for _ in range(size)]
        references = [[text(1) for _ in range(rng.randint(1, 3))] for _ in range(size)]
        expected, _ = corpus_bleu(hypotheses, references)
        found, signature = corpus_bleu(hypotheses, references, "plain")
        assert found == pytest.approx(expected, abs=1e-9), (hypotheses, references)
    assert "plain" in signature
    assert corpus_bleu([CAT], [[CAT]], "plain")[0] == pytest.approx(100.0)


def test_without_sacrebleu_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(MissingExtraError, match=r"sacrebleu.*\[hf\]"):
        corpus_bleu(["a"], [["a"]])


def test_words_are_those_of_mteval() -> None:
    tokenizers = pytest.importorskip("sacrebleu.tokenizers.tokenizer_13a")
    cut = tokenizers.Tokenizer13a()
    rng = random.Random(0)
    letters = "aB3 .,-&;:!?'\"/()[]{}$%@#<>`~|\\_^+=*£é"
    for _ in range(300):
        text = "".join(rng.choices(letters, k=rng.randint(0, 30)))
        assert mteval_words(text) == cut(text.lower()).split(), text
    text = "He said &quot;3.5-4 &amp; 1,000.&quot; U.S."
    assert mteval_words(text) == cut(text.lower()).split()


# -- METEOR ---------------------------------------------------------------------------------------


def test_meteor_by_hand() -> None:
    assert corpus_meteor([CAT], [[CAT]]) == pytest.approx(1 - 0.5 / 6**3)
    # 6 matches in 2 chunks; precision 6/7, recall 1.
    mean = 10 * (6 / 7) / (1 + 9 * 6 / 7)
    assert corpus_meteor(["the cat was sat on the mat"], [[CAT]]) == pytest.approx(
        mean * (1 - 0.5 * (2 / 6) ** 3)
    )
    # The same words turned round: "on the mat", "sat" and "the cat" are three chunks of six.
    turned = corpus_meteor(["on the mat sat the cat"], [[CAT]])
    assert turned == pytest.approx(1 - 0.5 * (3 / 6) ** 3)
    assert corpus_meteor(["nothing"], [[CAT]]) == 0.0
    assert corpus_meteor([""], [[CAT]]) == 0.0


def test_stems_match_and_case_does_not_matter() -> None:
    assert align(["serv"], ["serv"]).matches == 1
    stemmed = corpus_meteor(["Places serving foods"], [["the place serves food"]])
    # 3 matches in one chunk; precision 1, recall 3/4.
    assert stemmed == pytest.approx(10 * 0.75 / (0.75 + 9) * (1 - 0.5 / 3**3))


def test_the_best_reference_counts_and_a_corpus_is_no_mean() -> None:
    best = Alignment(matches=6, chunks=1, hypothesis_length=6, reference_length=6)
    other = Alignment(matches=1, chunks=1, hypothesis_length=2, reference_length=4)
    found = corpus_meteor([CAT, "a dog"], [["no such thing", CAT], ["one dog runs fast"]])
    assert found == pytest.approx((best + other).score)
    assert (best + other).score != pytest.approx((best.score + other.score) / 2)


def fewest_chunks(hypothesis: list[str], reference: list[str]) -> tuple[int, int]:
    """Every alignment there is: the most matches, and the fewest chunks among those."""
    best = (0, 0)
    options = [[None, *(j for j, r in enumerate(reference) if r == h)] for h in hypothesis]
    for chosen in itertools.product(*options):
        used = [j for j in chosen if j is not None]
        if len(used) != len(set(used)):
            continue
        pairs = itertools.pairwise([None, *chosen])
        chunks = sum(j is not None and (b is None or j != b + 1) for b, j in pairs)
        best = max(best, (len(used), -chunks))
    return best[0], -best[1]


def test_alignments_are_the_best_there_are() -> None:
    rng = random.Random(0)
    for _ in range(150):
        first, second = (rng.choices("abcd", k=rng.randint(0, 6)) for _ in range(2))
        found = align(first, second)
        assert (found.matches, found.chunks) == fewest_chunks(first, second), (first, second)


JAVA = """#!{python}
import sys
assert sys.argv[1:] == ["-Xmx2G", "-jar", {jar!r}, "-", "-", "-stdio", "-l", "en", "-norm"]
for line in sys.stdin:
    kind, *parts = line.rstrip("\\n").split(" ||| ")
    if kind == "SCORE":
        print(len(parts) - 1, float(parts[-1] in parts[:-1]))
    else:
        scores = [float(part.split()[1]) for part in parts]
        print("\\n".join(map(str, [*scores, sum(scores) / len(scores)])))
"""


def test_the_java_program_is_asked_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jar = tmp_path / "meteor-1.5.jar"
    texts, references = ["a ||| b", "c\nd"], [["a b", "x"], ["d"]]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidArgumentError, match="Java on the path"):
        jar_meteor(texts, references, jar)
    java = tmp_path / "java"
    java.write_text(JAVA.format(python=sys.executable, jar=str(jar)))
    java.chmod(0o755)
    with pytest.raises(InvalidArgumentError, match=r"meteor-1\.5\.jar"):
        jar_meteor(texts, references, jar)
    jar.touch()
    assert jar_meteor(texts, references, jar) == 0.5
    java.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('no such class')\n")
    with pytest.raises(InvalidArgumentError, match="no such class"):
        jar_meteor(texts, references, jar)


# -- ROUGE-L and NIST -----------------------------------------------------------------------------


def test_rouge_l_by_hand() -> None:
    assert rouge_l("A cat!", ["a cat"]) == pytest.approx(1.0)
    # Longest common subsequence 2: precision 2/3 and recall 2/4 with the first reference;
    # the second has precision 1/3 and recall 1.
    found = rouge_l("a b c", ["a x b y", "c"])
    assert found == pytest.approx((1 + 1.44) * (2 / 3) * 1.0 / (1.0 + 1.44 * (2 / 3)))
    assert rouge_l("", ["a"]) == rouge_l("b", ["a"]) == 0.0


def test_nist_by_hand() -> None:
    # Each of two words is one of two: one bit. Behind "a" there is only "b": no bit.
    assert corpus_nist(["a b"], [["a b"]]) == pytest.approx(1.0)
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
    # A word that no single reference has twice counts once.
    assert corpus_nist(["b b"], [["a b", "a c"]]) == pytest.approx(2 / 2)


# -- all together ---------------------------------------------------------------------------------


def test_scores_say_what_they_are() -> None:
    pytest.importorskip("sacrebleu")
    found = score_texts([CAT, CAT], [[CAT], [CAT, "a dog"]]).to_json()
    assert found["bleu"] == pytest.approx(100.0)
    assert found["rouge_l"] == pytest.approx(1.0)
    assert "exact and stem" in found["variants"]["meteor_exact_stem"]
    assert "meteor" not in found
    assert set(found["variants"]) == {"bleu", "meteor_exact_stem", "rouge_l", "nist"}
    with pytest.raises(InvalidArgumentError, match="2 prompts"):
        score_texts([CAT], [[CAT], [CAT]])
    with pytest.raises(InvalidArgumentError, match="prompt 1"):
        score_texts([CAT, CAT], [[CAT], []])


def words_at_random(rng: random.Random, length: int) -> list[str]:
    return [rng.choice("abcde") for _ in range(length)]


def test_references_that_cannot_be_best_need_no_alignment() -> None:
    rng = random.Random(0)
    for _ in range(200):
        text = words_at_random(rng, rng.randrange(9))
        references = [words_at_random(rng, rng.randrange(1, 9)) for _ in range(rng.randrange(1, 6))]
        slow = max((align(text, one) for one in references), key=lambda found: found.score)
        assert best_alignment(text, references) == slow


def test_the_longest_common_subsequence_is_that_of_the_table() -> None:
    rng = random.Random(0)
    for _ in range(200):
        first, second = (words_at_random(rng, rng.randrange(12)) for _ in range(2))
        table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
        for i, one in enumerate(first):
            for j, other in enumerate(second):
                longer = max(table[i][j + 1], table[i + 1][j])
                table[i + 1][j + 1] = table[i][j] + 1 if one == other else longer
        assert longest_common(first, second) == table[-1][-1]
