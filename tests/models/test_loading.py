"""One catalogue: each name is built, loaded and read by the same rules wherever it is given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from shuffled_dpsgd.cli.main import app
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.models import CATALOGUE, build_model, find_named, load_model, weights_of
from shuffled_dpsgd.tasks.tokens import load_tokenizer

transformers = pytest.importorskip("transformers")

WITHOUT_WEIGHTS = [name for name, model in CATALOGUE.items() if model.checkpoint is None]
BUILT_QUICKLY = [
    name for name in WITHOUT_WEIGHTS if name not in ("llama-7b", "llama-8b", "llama-70b")
]


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_name_is_a_model_on_the_meta_device(name: str) -> None:
    model = build_model(name)
    assert type(model).__name__ == CATALOGUE[name].architecture
    assert all(p.is_meta for p in model.parameters())
    assert CATALOGUE[name].head is not None


@pytest.mark.parametrize(
    "name", {model.architecture: name for name, model in CATALOGUE.items()}.values()
)
def test_the_class_is_the_one_a_task_loads(name: str) -> None:
    """`build_model` and the loader for a head must not give two classes for one name."""
    autos = {
        "sequence": transformers.AutoModelForSequenceClassification,
        "image": transformers.AutoModelForImageClassification,
        "causal-lm": transformers.AutoModelForCausalLM,
    }
    head = CATALOGUE[name].head
    assert head is not None
    with torch.device("meta"):
        model = autos[head].from_config(build_model(name).config)
    assert type(model).__name__ == CATALOGUE[name].architecture


@pytest.mark.parametrize("name", ["vit-digits", "gpt2-tiny"])
def test_weights_follow_the_seed_and_leave_the_generator_alone(name: str) -> None:
    state = torch.random.get_rng_state()
    one, same, other = (build_model(name, device="cpu", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(state, torch.random.get_rng_state())
    first, second, third = (next(iter(m.parameters())) for m in (one, same, other))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def test_names_are_short_or_of_the_hub() -> None:
    assert find_named("google/vit-base-patch16-224") is CATALOGUE["vit-base"]
    assert weights_of("vit-base") == "google/vit-base-patch16-224"
    assert weights_of("someone/something") == "someone/something"
    assert [name for name in CATALOGUE if weights_of(name) is None] == WITHOUT_WEIGHTS
    assert find_named("") is None


@pytest.mark.parametrize("name", BUILT_QUICKLY)
def test_models_without_weights_train_from_scratch_on_bytes(name: str) -> None:
    head = CATALOGUE[name].head
    assert head is not None
    model = load_model(name, head=head)
    assert not any(p.is_meta for p in model.parameters())
    if head != "image":
        assert load_tokenizer(name).encode_plain(["é"]) == [[0xC3, 0xA9]]
        assert model.config.vocab_size >= 260  # type: ignore[union-attr, operator]


def test_a_folder_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved = build_model("gpt2-tiny", device="cpu", seed=7)
    saved.save_pretrained("gpt2")
    assert weights_of("gpt2") == "gpt2"
    loaded = load_model("gpt2", head="causal-lm")
    assert torch.equal(loaded.lm_head.weight, saved.lm_head.weight)  # type: ignore[union-attr]
    drawn = load_model("gpt2", head="causal-lm", from_scratch=True)
    assert drawn.lm_head.weight.shape == saved.lm_head.weight.shape  # type: ignore[union-attr]
    assert not torch.equal(drawn.lm_head.weight, saved.lm_head.weight)  # type: ignore[union-attr]


def test_a_head_that_a_model_lacks_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="a model whose head is image, got 'bert-tiny'"):
        load_model("bert-tiny", head="image")


@pytest.mark.parametrize("name", ["gpt2-tiny", "vit-digits", "bert-tiny", "vit-tiny"])
def test_inspect_takes_the_names_that_tasks_train(name: str) -> None:
    done = CliRunner().invoke(app, ["inspect", "--model", name, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["moved_parameters"] > 0


@pytest.mark.slow
def test_the_replay_check_takes_the_names_that_inspect_shows(tmp_path: Path) -> None:
    """A folder and a Llama; GPT-2 goes the same way and takes longer."""
    config = transformers.RobertaConfig(
        vocab_size=40,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=32,
    )
    transformers.RobertaForMaskedLM(config).save_pretrained(tmp_path)
    for name in ("llama-tiny", str(tmp_path)):
        options = [
            "--model",
            name,
            "--records",
            "2",
            "--strategy",
            "bookkeeping",
            "--single",
            "--json",
        ]
        done = CliRunner().invoke(app, ["audit", "sensitivity", *options])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["reports"][0]["passed"] is True


@pytest.mark.parametrize("from_scratch", [False, True])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_master_weights_are_float32(
    tmp_path: Path, stored: torch.dtype, from_scratch: bool
) -> None:
    saved = build_model("bert-tiny", device="cpu").to(stored)
    saved.save_pretrained(tmp_path)  # type: ignore[operator]
    model = load_model(str(tmp_path), head="sequence", num_labels=2, from_scratch=from_scratch)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
