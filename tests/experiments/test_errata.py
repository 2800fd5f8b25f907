"""What docs/errata.md shows in code and arithmetic is what it says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from statistics import mean

import pytest
import torch
from typer.testing import CliRunner

from shuffled_dpsgd.cli.main import app
from shuffled_dpsgd_experiments.presets import PRESETS
from shuffled_dpsgd_experiments.tables.printed import RESULTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errata.md").read_text(encoding="utf-8")
WORDS = " ".join(PAGE.split())
COMMANDS = {
    found[1]: shlex.split(found[0].replace("\\\n", " "))[1:]
    for found in re.finditer(r"^    shuffled-dpsgd (\w+)(?:.*\\\n)*.*$", PAGE, re.MULTILINE)
}


def answer_to(*arguments: str) -> dict:
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def result(name: str) -> dict:
    return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))


def test_independent_permutations_break_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    with torch.random.fork_rng():
        exec(code, {})
    shared, own = (
        float(found) for found in re.findall(r"tensor\(([^,)]+)", capsys.readouterr().out)
    )
    assert shared < 1e-6
    assert own > 0.1
    assert f"the outputs change by {own:.2f}, with a shared one by" in WORDS


def test_softmax_is_not_elementwise_and_moves_with_a_permutation() -> None:
    first = {x: float(torch.tensor([0.0, x]).softmax(0)[0]) for x in (0.0, 9.0)}
    assert first[0.0] == 0.5
    assert first[9.0] < 1e-3
    scores, order = torch.randn(6), torch.randperm(6)
    assert torch.allclose(scores.softmax(0)[order], scores[order].softmax(0))


def test_the_batch_clip_decides_the_noise() -> None:
    command = COMMANDS["calibrate"][:-1]
    found = [answer_to(*command, c)["paper"]["noise_multiplier"] for c in ("1", "10", "100")]
    small, middle, large = (f"{each:.3g}" for each in found)
    assert f"σ is {small}, {middle} and {large}" in WORDS


def test_the_formula_is_below_the_exact_delta() -> None:
    spike = answer_to(*COMMANDS["examine"])["examinations"][0]
    assert spike["pair"] == "spike"
    assert all(truth["low"] > 1e6 * spike["claimed_delta"] for truth in spike["truth"])


def test_the_distances_of_figure_one() -> None:
    unshuffled, shuffled = result("fig1")["panels"]
    printed = result("fig1")["paper_frobenius"]
    ratio = unshuffled["frobenius"] / shuffled["frobenius"]
    assert ratio == pytest.approx(2**0.5, rel=1e-4)
    assert (
        f"so {shuffled['frobenius']:.2f} goes with {unshuffled['frobenius']:.2f}, not "
        f"{printed[0]:.2f}" in WORDS
    )


def test_table_six_prints_what_pure_noise_does() -> None:
    rows = result("audit_paper_table6")["rows"]
    low, _, high = rows[0]["readings"]["strict"]["quantiles_on_pure_noise"]
    assert f"gives {low:.2f} to {high:.2f} on pure noise" in WORDS
    printed = [each["printed_in_the_paper"] for each in rows]
    assert f"prints {printed[0]} and {printed[1]}" in WORDS
    assert all(low < each < high for each in printed)


def test_our_meteor_is_higher_at_a_lower_bleu() -> None:
    cells = [
        json.loads(path.read_text(encoding="utf-8"))["generation"]
        for path in (ROOT / "results" / "e2e").glob("main_non-private_*.json")
    ]
    ours = [mean(cell[key] for cell in cells) for key in ("meteor_exact_stem", "bleu")]
    meteor, bleu = (RESULTS["table5"]["GPT-2", "E2E NLG", key][0] for key in ("METEOR", "BLEU"))
    assert (
        f"{ours[0]:.3f} at BLEU {ours[1]:.1f}, where the paper prints {meteor} at {bleu}" in WORDS
    )
    assert ours[0] > meteor
    assert ours[1] < bleu


def test_counts_and_deltas() -> None:
    assert 774_030_080 + 50_257 * 1_280 == 838_359_040
    for name, printed in (("e2e", "1.19e-5"), ("dart", "8.25e-6")):
        size = PRESETS[f"paper/gpt2-{name}"].dataset_size
        assert 1 / (2 * size) == pytest.approx(float(printed), rel=0.005)
        assert f"{size:,}" in PAGE
        assert printed in PAGE
