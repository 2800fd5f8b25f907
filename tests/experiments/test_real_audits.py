"""The audits that run beside a GPU, on tiny models with random weights here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shuffled_dpsgd_experiments.real_audits import config_of, main, parser

pytest.importorskip("transformers")


@pytest.fixture
def sst2(tmp_path: Path) -> Path:
    rows = [f"film number {i} is {'good' if i % 2 else 'bad'}\t{i % 2}" for i in range(60)]
    for split in ("train", "dev"):
        text = "\n".join(["sentence\tlabel", *rows]) + "\n"
        (tmp_path / f"{split}.tsv").write_text(text, encoding="utf-8")
    return tmp_path


@pytest.fixture
def e2e(tmp_path: Path) -> Path:
    rows = [f'"name[Place {i}], food[Thai]","Place {i} serves Thai food."' for i in range(40)]
    for stem in ("trainset", "devset"):
        text = "\n".join(["mr,ref", *rows]) + "\n"
        (tmp_path / f"{stem}.csv").write_text(text, encoding="utf-8")
    return tmp_path


def arguments(model: str, layout: str, data: Path, *extra: object) -> list[str]:
    small = ["--steps", 3, "--batch-size", 10, "--observations", 20, "--canaries", 40]
    small += ["--input-canaries", 10, "--delta", 1e-5, "--seeds", 3, "--max-length", 32]
    place = ["--model-dir", model, "--format", layout, "--data", data, "--out", data / "out"]
    return [str(word) for word in (*place, *small, *extra)]


def test_bert_by_one_run(sst2: Path) -> None:
    modes = ["--mode", "one-run", "--noise-multiplier", 0.05]
    (one_run,) = main(arguments("bert-tiny", "sst2", sst2, *modes))
    found = json.loads(one_run.read_text(encoding="utf-8"))
    assert found["config"]["optimizer"]["name"] == "adamw"
    assert found["config"]["privacy"]["shuffle"] == "every-step"
    assert "seed" not in found["config"]
    assert found["claims"][0]["kind"] == "proven"
    assert {"gradient", "mislabelled input"} == {a["canary"] for a in found["attacks"]}
    assert found["notes"] == [
        "re-alignment along the run recovered 100.0% of the permuted positions"
    ]
    assert found["reach"]["ran"]
    assert found["cost"]["seconds"] > 0
    assert found["command"].endswith("--noise-multiplier 0.05 --mode one-run")
    assert str(sst2) not in found["command"]


@pytest.mark.slow
def test_bert_by_black_box(sst2: Path) -> None:
    modes = ["--mode", "black-box", "--noise-multiplier", 0.05]
    (black_box,) = main(arguments("bert-tiny", "sst2", sst2, *modes))
    knocked = json.loads(black_box.read_text(encoding="utf-8"))
    assert knocked["largest_paired_difference"] < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["black-box", "runs"])
def test_several_processes_share_the_runs(sst2: Path, mode: str) -> None:
    modes = ["--mode", mode, "--noise-multiplier", 0.1, "--runs", 24, "--processes", 2]
    (path,) = main(arguments("bert-tiny", "sst2", sst2, *modes))
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["verdicts"][0]["outcome"] == "consistent"
    if mode == "runs":
        assert found["setting"]["runs_with"] + found["setting"]["runs_without"] == 24
    else:
        assert len(found["arms"]["off"]["loss"]["area_by_seed"]) == 3


@pytest.mark.slow
def test_gpt2_with_scrambled_records_and_a_step_audit(e2e: Path) -> None:
    modes = ["--mode", "step", "--mode", "one-run", "--noise-multiplier", 0.5]
    step, one_run = main(arguments("gpt2-tiny", "e2e", e2e, *modes, "--name", "tiny"))
    assert step.name == "audit_tiny_step_certified.json"
    found = json.loads(step.read_text(encoding="utf-8"))
    assert "re-alignment against W_t" in {attack["adversary"] for attack in found["attacks"]}
    found = json.loads(one_run.read_text(encoding="utf-8"))
    assert "scrambled input" in {attack["canary"] for attack in found["attacks"]}


@pytest.mark.slow
def test_gpt2_by_black_box_with_new_tokens(e2e: Path) -> None:
    """Where nothing protects, the loss of a token that no other record has tells members apart."""
    modes = ["--mode", "black-box", "--noise-multiplier", 2, "--input-canary", "new-token"]
    longer = ["--steps", 20, "--batch-size", 20, "--learning-rate", 1e-2, "--input-canaries", 20]
    (path,) = main(arguments("gpt2-tiny", "e2e", e2e, *modes, *longer))
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["setting"]["input_canary"] == "new-token"
    areas = {name: arm["loss"]["area_over_seeds"] for name, arm in found["arms"].items()}
    assert areas["without-privacy"]["mean"] > 0.8 > areas["on"]["mean"]
    assert found["verdicts"][0]["outcome"] == "consistent"


@pytest.mark.slow
def test_it_needs_neither_the_command_line_nor_drawing() -> None:
    """The machine beside the GPU has no typer, no rich, no pydantic and no matplotlib."""
    code = (
        "import sys\n"
        "for name in ('typer', 'rich', 'pydantic', 'matplotlib', 'datasets'):\n"
        "    sys.modules[name] = None\n"
        "import shuffled_dpsgd_experiments.real_audits"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)


def test_the_budget_is_the_callers(sst2: Path) -> None:
    from shuffled_dpsgd.errors import InvalidArgumentError

    with pytest.raises(InvalidArgumentError, match="epsilon"):
        config_of(parser().parse_args(arguments("bert-tiny", "sst2", sst2)))
