"""What a finished run leaves: a model that loads anywhere, and verbs that use it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cli.test_bad_input import images, settings, toml, write_good
from shuffled_dpsgd.cli.main import app
from shuffled_dpsgd.tasks.tokens import load_tokenizer
from shuffled_dpsgd.training import write_card
from shuffled_dpsgd.training.planning import plan_from_json
from shuffled_dpsgd.training.saved_card import read_card

transformers = pytest.importorskip("transformers")


def run(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three finished runs: text, images and a language model."""
    folder = tmp_path_factory.mktemp("runs")
    write_good(folder)
    images(folder)
    changes: dict[str, dict[str, Any]] = {
        "csv": {"data__name": "films of the week", "data__label_names": ["bad", "good"]},
        "cifar": {"data__label_names": ["cat", "dog", "emu"]},
        "e2e": {"model__freeze": ["transformer.wte.*", "transformer.wpe.*"]},
    }
    for layout, values in changes.items():
        (folder / f"{layout}.toml").write_text(toml(settings(layout, **values)))
        run("train", "--config", folder / f"{layout}.toml", "--output", folder / layout, "--json")
    return folder


def test_the_report_does_not_call_training_rows_held_out(runs: Path) -> None:
    """In these folders the two splits are the same file twice."""
    for layout in ("csv", "e2e"):
        page = (runs / layout / "report.html").read_text(encoding="utf-8")
        assert "12 of the held-out rows are training records" in page


def test_a_folder_has_a_card_for_the_registry(runs: Path) -> None:
    record = run("card", runs / "csv", "--format", "registry").stdout
    assert "status: Draft" in record
    assert "films of the week" in record
    assert "films of the week" in run("card", runs / "csv").stdout


def test_a_card_of_another_plan_is_not_that_of_the_folder(runs: Path, tmp_path: Path) -> None:
    """The plan of a seeded run is known with the seed of its settings, which the card has not."""
    card = read_card(runs / "csv")
    assert not card.plan["secure"]
    for name in ("ledger.jsonl", "_ledger.jsonl.key", "run.json"):
        shutil.copy(runs / "csv" / name, tmp_path)
    plan = replace(plan_from_json(card.plan), loss_reduction="mean")
    other = replace(write_card(plan, num_steps=card.steps_released), subject=card.subject)
    for written, code in ((card, 0), (other, 2)):
        (tmp_path / "privacy_card.json").write_text(written.dumps(), encoding="utf-8")
        said = run("card", tmp_path, code=code).output
        assert ("ledger of plan" in said) is (code == 2)


@pytest.mark.parametrize(
    "changes", [{"training__weight_averaging": 0.9}, {"model__lora_rank": 2}], ids=["ema", "merged"]
)
def test_the_card_is_about_the_weights_that_were_saved(runs: Path, changes: Any) -> None:
    """Averages and merged factors are others than the last update left, and are what is saved."""
    name = next(iter(changes))
    raw = settings("csv", privacy__shuffle="off", **changes)
    (runs / f"{name}.toml").write_text(toml(raw))
    run("train", "--config", runs / f"{name}.toml", "--output", runs / name, "--json")
    assert "not about" not in (runs / name / "privacy_card.txt").read_text()
    run("verify", runs / name / "privacy_card.json", runs / name / "model")


def test_evaluate_repeats_the_runs_score(runs: Path) -> None:
    for layout in ("csv", "e2e"):
        summary = json.loads((runs / layout / "summary.json").read_text())
        found = json.loads(run("evaluate", runs / layout, "--json").stdout)
        assert found["score"] == pytest.approx(summary["heldout_score"], rel=1e-4)
        assert found["score_name"] == summary["score_name"]
    assert "held-out accuracy" in run("evaluate", runs / "csv", "--data", runs).stdout


def test_texts_and_images_are_classified_by_name(runs: Path, tmp_path: Path) -> None:
    (answer,) = json.loads(run("predict", runs / "csv", "a fine film", "--json").stdout)["answers"]
    assert answer["name"] in ("bad", "good")
    assert 0.5 <= answer["share"] <= 1.0
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (8, 8), (200, 10, 10)).save(tmp_path / "red.png")
    printed = run("predict", runs / "cifar", tmp_path / "red.png").stdout
    assert printed.split("\t")[0] in ("cat", "dog", "emu")


def test_a_language_model_continues_prompts(runs: Path) -> None:
    found = json.loads(
        run("generate", runs / "e2e", "food[3]", "--max-new-tokens", 4, "--json").stdout
    )
    assert found["continuations"][0]["prompt"] == "food[3]"


def test_a_language_model_is_prompted_in_a_pipeline_as_it_was_trained(runs: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(runs / "e2e" / "model")
    prompt = "food[3] ||"
    # A mark of the end behind the prompt would be taken for the end of the text.
    assert list(tokenizer(prompt)) == ["input_ids", "attention_mask"]
    assert tokenizer(prompt)["input_ids"] == list(prompt.encode())
    pipe = transformers.pipeline("text-generation", model=str(runs / "e2e" / "model"))
    arguments = ["generate", runs / "e2e", "food[3]", "--max-new-tokens", 4, "--json"]
    (mine,) = json.loads(run(*arguments).stdout)["continuations"]
    (theirs,) = pipe(prompt, max_new_tokens=4, do_sample=False, return_full_text=False)
    assert theirs["generated_text"].strip() == mine["text"]


def test_the_image_model_loads_in_a_pipeline(runs: Path) -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (32, 32), (200, 10, 10))
    pipe = transformers.pipeline("image-classification", model=str(runs / "cifar" / "model"))
    (best, *_) = pipe(image)
    answer = pipe.model(**pipe.image_processor(image, return_tensors="pt")).logits.argmax()
    assert best["label"] == ("cat", "dog", "emu")[int(answer)]


def test_presets_save_a_tokenizer_with_the_same_ids(runs: Path) -> None:
    saved, plain = load_tokenizer(str(runs / "csv" / "model")), load_tokenizer("bert-tiny")
    for texts in (("a fine film",), ("café — ☂", "zwei"), ("<end>", "<sep>")):
        for typed in (False, True):
            expected = plain.encode([texts], max_length=64, typed=typed)
            assert saved.encode([texts], max_length=64, typed=typed) == expected
        assert saved.encode_plain(texts) == plain.encode_plain(texts)
        assert saved.decode(plain.encode_plain(texts)[0]) == texts[0]
    assert (saved.pad_id, saved.end_id) == (plain.pad_id, plain.end_id)


def test_the_card_says_whose_it_is(runs: Path) -> None:
    import hashlib

    card = json.loads((runs / "csv" / "privacy_card.json").read_text())
    weights = (runs / "csv" / "model" / "model.safetensors").read_bytes()
    assert card["subject"]["model"] == "bert-tiny"
    assert card["subject"]["data"] == "films of the week"
    assert hashlib.sha256(weights).hexdigest() in card["subject"]["weights"]
    assert "torch" in card["subject"]["versions"]
    for name in ("privacy_card.txt", "privacy_card.html", "report.html"):
        text = (runs / "csv" / name).read_text()
        assert "films of the week" in text
        assert card["assumptions"][-1] in text
    title = (runs / "csv" / "report.html").read_text().partition("<title>")[2]
    assert title.startswith("bert-tiny on films of the week, ")


def test_frozen_parameters_stay(runs: Path) -> None:
    from shuffled_dpsgd.models import load_model

    start = dict(load_model("gpt2-tiny", head="causal-lm").named_parameters())
    model = transformers.AutoModelForCausalLM.from_pretrained(runs / "e2e" / "model")
    assert torch.equal(model.transformer.wpe.weight, start["transformer.wpe.weight"])
    assert not torch.equal(model.transformer.ln_f.weight, start["transformer.ln_f.weight"])
    summary = json.loads((runs / "e2e" / "summary.json").read_text())
    assert summary["trainable_parameters"] < summary["total_parameters"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["evaluate", "absent"], "no run.json"),
        (["evaluate", "csv", "--data", "absent"], "data.path"),
        (["predict", "e2e", "a"], "use generate"),
        (["predict", "cifar", "absent.png"], "an image file"),
        (["predict", "cifar", "train.tsv"], "an image file"),
        (["generate", "csv", "a"], "use predict"),
        (["generate", "e2e", "a", "--max-new-tokens", "0"], "at least 1"),
        (["generate", "e2e", "a" * 600], "at most 448 tokens"),
        (["generate", "e2e", "a", "--beams", "0"], "num_beams"),
        (["evaluate", "csv", "--split", "train"], "--split"),
        (["evaluate", "e2e", "--split", "test"], "testset_w_refs.csv"),
        (["evaluate", "e2e", "--texts", "absent/texts.jsonl"], "a folder that is there"),
        (["predict", "csv"], "Missing argument"),
    ],
)
def test_misuse_is_one_line(runs: Path, arguments: list[str], expected: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(runs)
        result = run(*arguments, code=2)
    assert expected in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model__freeze": ["nothing.*"]}, "model.freeze"),
        ({"model__freeze": ["*"]}, "something left to train"),
        ({"model__train_only": ["absent*"]}, "model.train_only"),
        ({"model__freeze": ["*"], "model__lora_rank": 2}, "nothing beside"),
        ({"data__label_names": ["one"]}, "2 different names"),
    ],
)
def test_what_is_trained_and_named_is_checked(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    write_good(tmp_path)
    (tmp_path / "run.toml").write_text(toml(settings("csv", **changes)))
    result = run("train", "--config", tmp_path / "run.toml", "--output", tmp_path / "out", code=2)
    assert expected in result.stderr
    assert not (tmp_path / "out").exists()
