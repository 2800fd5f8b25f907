"""Task `sft`: chats and prompts with completions, adapters that peft loads, answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from shuffled_dpsgd.cli.main import app
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.integrations.per_sample_loss import IGNORED_LABEL
from shuffled_dpsgd.models import build_model
from shuffled_dpsgd.tasks import load_config
from shuffled_dpsgd.tasks.chat import Chat, encode_chats, encode_question
from shuffled_dpsgd.tasks.data.loading import read_chats
from shuffled_dpsgd.tasks.tokens import Tokenizer, load_tokenizer

pytest.importorskip("transformers")
TEMPLATE = (
    "{% for m in messages %}<begin>{{ m.role }}:{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<begin>assistant:{% endif %}"
)
FORGETFUL = TEMPLATE.replace("{{ m.content }}", "{{ m.content if loop.last else '' }}")


def tokenizer(template: str | None = TEMPLATE) -> Any:
    found = load_tokenizer("gpt2-tiny", marked=False)._tokenizer
    found.split_special_tokens = False
    found.chat_template = template
    return found


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def chat(*contents: str) -> list[dict[str, str]]:
    return [said("assistant" if at % 2 else "user", content) for at, content in enumerate(contents)]


def scored(record: Any) -> str:
    ids, labels = record
    assert all(label in (IGNORED_LABEL, id) for id, label in zip(ids, labels, strict=True))
    return str(tokenizer().decode([label for label in labels if label != IGNORED_LABEL]))


def encoded(prompt: Any, completion: Any, max_length: int = 999, **template: Any) -> Any:
    chats = [Chat("file:1", prompt, completion)]
    return encode_chats(chats, Tokenizer(tokenizer(**template)), max_length)[0]


def test_answers_are_scored_and_nothing_else() -> None:
    record = encoded([], [said("system", "Be kind."), *chat("Hi", "Hello!", "Bye", "So long!")])
    assert scored(record) == "Hello!<end>\nSo long!<end>\n"
    assert tokenizer().decode(record[0]) == (
        "<begin>system:Be kind.<end>\n<begin>user:Hi<end>\n<begin>assistant:Hello!<end>\n"
        "<begin>user:Bye<end>\n<begin>assistant:So long!<end>\n"
    )


def test_answers_of_a_prompt_are_not_scored() -> None:
    record = encoded(chat("Hi", "Hello!", "Bye"), [said("assistant", "So long!")])
    assert scored(record) == "So long!<end>\n"


def test_texts_need_no_template_and_end() -> None:
    record = encoded("2 + 2 =", " 4", template=None)
    assert scored(record) == " 4<end>"
    assert tokenizer().decode(record[0]) == "2 + 2 = 4<end>"


def test_an_answer_begins_as_it_is_asked_for() -> None:
    ours = Tokenizer(tokenizer())
    asked = encode_question("Hi", ours, plain=False)
    ids, labels = encoded([], chat("Hi", "Hello!"))
    assert ids[: len(asked)] == asked
    assert labels[len(asked) - 1] == IGNORED_LABEL != labels[len(asked)]
    assert ours.answer_end_id == tokenizer().convert_tokens_to_ids("<end>")
    assert encode_question("Hi", ours, plain=True) == list(b"Hi")


def test_long_records_are_cut_and_it_is_said() -> None:
    with pytest.warns(UserWarning, match="1 of 1 records are longer"):
        ids, labels = encoded([], chat("Hi", "Hello!"), max_length=27)
    assert len(ids) == len(labels) == 27
    chats = [Chat("file:0", "a", "b"), Chat("file:1", "x" * 30, "b")]
    with pytest.raises(InvalidArgumentError, match=r"file:1: expected an answer within"):
        encode_chats(chats, Tokenizer(tokenizer()), 20)


@pytest.mark.parametrize(
    ("record", "template", "match"),
    [
        ([], TEMPLATE, "file:1: expected an answer"),
        (chat("Hi"), TEMPLATE, "file:1: expected an answer"),
        (chat("Hi", "Hello!"), None, "file:1: expected a tokenizer with a chat template"),
        (chat("a", "b", "c", "d"), FORGETFUL, "file:1: expected a chat template that leaves"),
        (chat("a", "b"), "{{ raise_exception('roles must alternate') }}", "must alternate"),
    ],
)
def test_what_cannot_be_learnt_from_is_refused(record: Any, template: Any, match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        encoded([], record, template=template)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template, and a file of each kind of records."""
    place = tmp_path_factory.mktemp("sft")
    settings = {"vocab_size": 260, "n_layer": 1}
    build_model("gpt2-tiny", device="cpu", settings=settings).save_pretrained(place / "base")
    tokenizer().save_pretrained(place / "base")
    rows: dict[str, list[Any]] = {
        "chats": [{"messages": chat(f"What is {i}?", f"It is {i}.")} for i in range(16)],
        "pairs": [{"prompt": f"{i} + 1 =", "completion": f" {i + 1}"} for i in range(16)],
    }
    for name, found in rows.items():
        (place / name).mkdir()
        for split in ("train", "dev"):
            lines = "\n".join(json.dumps(row) for row in found)
            (place / name / f"{split}.jsonl").write_text(lines + "\n")
    return place


def config(folder: Path, data: str, **model: Any) -> Path:
    settings = "\n".join(f"{key} = {json.dumps(value)}" for key, value in model.items())
    file = folder / f"{data}.toml"
    file.write_text(
        f'task = "sft"\nseed = 1\n[model]\nname = "base"\n{settings}\n[data]\npath = "{data}"\n'
        '[privacy]\nmethod = "certified"\nnoise_multiplier = 1.0\ndelta = 1e-3\nclip_norm = 1.0\n'
        "[training]\nexpected_batch_size = 6\nnum_steps = 2\n"
    )
    return file


def run(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == code, result.output
    return result


def test_a_broken_line_is_named(folder: Path, tmp_path: Path) -> None:
    chats = (folder / "chats" / "train.jsonl").read_text().splitlines()
    for split in ("train", "dev"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join([*chats[:2], '{"messages": ["Hi"]}']))
    known = load_config(config(folder, "chats"))
    data = replace(known.data, path=str(tmp_path))
    with pytest.raises(InvalidArgumentError, match=r"train\.jsonl:3: expected a list of"):
        read_chats(data)
    assert known.data.max_length == 1024
    (tmp_path / "train.jsonl").write_text('{"chat": []}')
    with pytest.raises(InvalidArgumentError, match=r"'messages'.* or .*'completion'"):
        read_chats(data)


def test_an_adapter_is_saved_that_peft_loads(folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    out = tmp_path / "out"
    run("train", "--config", config(folder, "chats", lora_rank=2), "--output", out, "--json")
    saved = sorted(each.name for each in (out / "model").glob("*.safetensors"))
    assert saved == ["adapter_model.safetensors"]
    summary = json.loads((out / "summary.json").read_text())
    found = json.loads(run("evaluate", out, "--json").stdout)
    assert found["score"] == pytest.approx(summary["heldout_score"], rel=1e-5)
    run("verify", out / "privacy_card.json", out / "model")
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(out / "model").eval()
    ids = encode_question("What is 3?", Tokenizer(tokenizer()), plain=False)
    wanted = theirs.generate(torch.tensor([ids]), max_new_tokens=4, do_sample=False)
    asked = ("generate", out, "What is 3?", "--max-new-tokens", 4, "--json")
    (answer,) = json.loads(run(*asked).stdout)["continuations"]
    assert answer["text"] == tokenizer().decode(wanted[0, len(ids) :]).strip()


def test_pairs_train_all_weights_and_are_continued(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("train", "--config", config(folder, "pairs"), "--output", out, "--json")
    assert (out / "model" / "model.safetensors").is_file()
    asked = ("generate", out, "3 + 1 =", "--max-new-tokens", 2, "--json")
    texts = [json.loads(run(*asked, *more).stdout)["continuations"] for more in ((), ("--plain",))]
    assert texts[0] != texts[1]
    assert "use generate" in run("predict", out, "3 + 1 =", code=2).output


def test_generation_is_not_for_classifiers_nor_scored_after_sft(folder: Path) -> None:
    file = config(folder, "pairs")
    file.write_text(file.read_text() + "[generation]\n")
    assert "only causal-lm" in run("train", "--config", file, code=2).output
