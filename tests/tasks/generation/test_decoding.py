"""Decoding: batches with padding give what single prompts do, and beams find the likeliest text."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.integrations.per_sample_loss import next_token_losses
from shuffled_dpsgd.models import build_model
from shuffled_dpsgd.tasks.config import GenerationConfig
from shuffled_dpsgd.tasks.data.loading import Continuation
from shuffled_dpsgd.tasks.generation import MARK, continue_ids, continue_prompts, prompt_ids
from shuffled_dpsgd.tasks.text import encode_continuations
from shuffled_dpsgd.tasks.tokens import TokenCollate, Tokenizer, continuation_labels, load_tokenizer

transformers = pytest.importorskip("transformers")
PROMPTS = ["name[A]", "name[The Vaults], food[Thai], near[Café]", "x"]


def lively(name: str, **settings: Any) -> Any:
    """A model in float64 whose random weights are large enough to say something."""
    model = build_model(name, device="cpu", settings=settings).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8.0)
    return model


def byte_tokenizer() -> Tokenizer:
    return load_tokenizer("gpt2-tiny", marked=False)


@torch.no_grad()
def continue_slowly(model: Any, row: list[int], end: int, max_new_tokens: int) -> list[int]:
    """The oracle: the likeliest token, one after the other, without padding or cache."""
    ids = list(row)
    for _ in range(max_new_tokens):
        best = int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
        if best == end:
            break
        ids.append(best)
    return ids[len(row) :]


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_greedy_batches_equal_one_prompt_at_a_time(name: str) -> None:
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model = lively(name, **(small if name == "llama-tiny" else {}))
    tokenizer = byte_tokenizer()
    rows = [prompt_ids(prompt, tokenizer) for prompt in PROMPTS]
    found = continue_ids(model, tokenizer, rows, GenerationConfig(max_new_tokens=12))
    slow = [continue_slowly(model, row, tokenizer.end_id, 12) for row in rows]
    assert found == slow
    assert len({tuple(ids) for ids in slow}) == 3


def test_texts_come_back_in_the_order_of_their_prompts() -> None:
    model, tokenizer = lively("gpt2-tiny"), byte_tokenizer()
    decoding = GenerationConfig(max_new_tokens=6)
    together = continue_prompts(model, tokenizer, PROMPTS, decoding)
    alone = [continue_prompts(model, tokenizer, [prompt], decoding)[0] for prompt in PROMPTS]
    assert together == alone


def test_beam_search_finds_the_likeliest_text() -> None:
    """With as many beams as there are beginnings, nothing is overlooked."""
    ends = {"bos_token_id": 1, "eos_token_id": 1}
    model = lively("gpt2-tiny", vocab_size=5, n_embd=16, n_head=2, **ends)
    tokenizer = Tokenizer(SimpleNamespace(pad_token_id=0, eos_token_id=1))
    rows, length = [[2, 3], [4, 2, 2, 3]], 3
    decoding = GenerationConfig(max_new_tokens=length, num_beams=64, length_penalty=0.0)
    found = continue_ids(model, tokenizer, rows, decoding)
    for row, ids in zip(rows, found, strict=True):
        best = max(endings(length), key=lambda ending: log_probability(model, row, ending))
        assert ids == [i for i in best if i != 1]
    greedy = continue_ids(model, tokenizer, rows, GenerationConfig(max_new_tokens=length))
    assert found != greedy


def endings(length: int) -> list[list[int]]:
    """Every continuation: letters or padding up to the end, or up to `length`."""
    inner = [0, 2, 3, 4]
    found = [list(ids) for ids in itertools.product(inner, repeat=length)]
    for size in range(length):
        found += [[*ids, 1] for ids in itertools.product(inner, repeat=size)]
    return found


@torch.no_grad()
def log_probability(model: Any, row: list[int], ending: list[int]) -> float:
    logits = model(input_ids=torch.tensor([[*row, *ending]])).logits[0].log_softmax(dim=-1)
    places = range(len(row) - 1, len(row) + len(ending) - 1)
    return sum(float(logits[at, i]) for at, i in zip(places, ending, strict=True))


def test_a_model_writes_what_it_learnt() -> None:
    """Training and decoding agree on where a prompt ends and a text begins."""
    places = {"Mill": "Thai", "Vaults": "French", "Eagle": "Thai"}
    examples = [
        Continuation(prompt=f"name[{name}], food[{food}]", target=f"{name} serves {food}.")
        for name, food in places.items()
    ]
    model, tokenizer = build_model("gpt2-tiny", device="cpu"), byte_tokenizer()
    collate = TokenCollate(pad_id=tokenizer.pad_id, labels=continuation_labels)
    inputs, labels = collate(encode_continuations(examples, tokenizer, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(120):
        optimizer.zero_grad()
        next_token_losses(model(**inputs).logits, labels).mean().backward()
        optimizer.step()
    for beams in (1, 3):
        decoding = GenerationConfig(max_new_tokens=40, num_beams=beams)
        texts = continue_prompts(model, tokenizer, [one.prompt for one in examples], decoding)
        assert texts == [one.target for one in examples]


def test_long_prompts_are_cut_before_the_mark() -> None:
    tokenizer = byte_tokenizer()
    assert bytes(prompt_ids("a" * 50, tokenizer, 9)) == b"aaaaaa" + MARK.encode()
    model = lively("gpt2-tiny", n_positions=16)
    (text,) = continue_prompts(model, tokenizer, ["a" * 50], GenerationConfig(max_new_tokens=4))
    assert isinstance(text, str)
    with pytest.raises(InvalidArgumentError, match="fewer than the model's 16 positions"):
        continue_prompts(model, tokenizer, ["a"], GenerationConfig(max_new_tokens=16))
    for wrong in ({"max_new_tokens": 0}, {"num_beams": 0}):
        with pytest.raises(InvalidArgumentError, match="at least 1"):
            GenerationConfig(**wrong)
