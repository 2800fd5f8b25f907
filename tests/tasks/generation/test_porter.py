"""Porter's stemmer on the examples of his paper, carried through all five steps."""

from __future__ import annotations

import pytest

from shuffled_dpsgd.tasks.generation.porter import stem

STEMS = """
caresses caress; ponies poni; ties ti; caress caress; cats cat; feed feed; agreed agre;
plastered plaster; bled bled; motoring motor; sing sing; conflated conflat; troubled troubl;
sized size; hopping hop; tanned tan; falling fall; hissing hiss; fizzed fizz; failing fail;
filing file; happy happi; sky sky; relational relat; conditional condit; rational ration;
valenci valenc; hesitanci hesit; digitizer digit; conformabli conform; radicalli radic;
differentli differ; vileli vile; analogousli analog; vietnamization vietnam; predication predic;
operator oper; feudalism feudal; decisiveness decis; hopefulness hope; callousness callous;
formaliti formal; sensitiviti sensit; sensibiliti sensibl; triplicate triplic; formative form;
formalize formal; electriciti electr; electrical electr; hopeful hope; goodness good;
revival reviv; allowance allow; inference infer; airliner airlin; gyroscopic gyroscop;
adjustable adjust; defensible defens; irritant irrit; replacement replac; adjustment adjust;
dependent depend; adoption adopt; homologou homolog; communism commun; activate activ;
angulariti angular; homologous homolog; effective effect; bowdlerize bowdler; probate probat;
rate rate; cease ceas; controlling control; rolling roll; generalizations gener;
oscillators oscil
"""


@pytest.mark.parametrize(("word", "expected"), [pair.split() for pair in STEMS.split(";")])
def test_the_papers_examples(word: str, expected: str) -> None:
    assert stem(word) == expected


def test_what_is_no_english_word_stays() -> None:
    assert [stem(word) for word in ("as", "café", "3rds", "'", "")] == [
        "as",
        "café",
        "3rds",
        "'",
        "",
    ]
