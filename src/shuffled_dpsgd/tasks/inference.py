"""Uses of a finished run: scores on a split, classes of texts and images, continuations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shuffled_dpsgd.errors import CheckpointError, InvalidArgumentError, require
from shuffled_dpsgd.tasks.chat import encode_question
from shuffled_dpsgd.tasks.config import GenerationConfig, ModelConfig, RunConfig
from shuffled_dpsgd.tasks.data.image_files import open_image
from shuffled_dpsgd.tasks.data.loading import LabelledText, num_texts
from shuffled_dpsgd.tasks.digits import LARGEST_PIXEL, PIXEL_MEAN, PIXEL_STD
from shuffled_dpsgd.tasks.generation import (
    continue_rows,
    evaluate_generation,
    prompt_ids,
    room_for_prompts,
)
from shuffled_dpsgd.tasks.images import collate_images
from shuffled_dpsgd.tasks.models import prepare_model
from shuffled_dpsgd.tasks.run_folder import load_run
from shuffled_dpsgd.tasks.start import chosen_device
from shuffled_dpsgd.tasks.task import Evaluation, build_task
from shuffled_dpsgd.tasks.text import encode_labelled, uses_token_types
from shuffled_dpsgd.tasks.text_scores import require_libraries
from shuffled_dpsgd.tasks.tokens import TokenCollate, class_labels, load_tokenizer


def trained_config(directory: Path) -> RunConfig:
    """The configuration of a finished run, with the weights it left as its model."""
    config = load_run(directory)
    saved = directory / "model"
    if not any((saved / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise CheckpointError(
            f"{directory}: no model/ yet, so the run has not finished; continue it with "
            f"`shuffled-dpsgd train --resume {directory}`"
        )
    model = ModelConfig(name=str(saved), gradient_checkpointing=config.model.gradient_checkpointing)
    return replace(config, model=model)


def evaluate_run(
    directory: Path,
    *,
    data: Path | None = None,
    split: str | None = None,
    generation: GenerationConfig | None = None,
    texts_to: Path | None = None,
) -> tuple[str, dict[str, Evaluation], dict[str, Any] | None]:
    """Score a run on its held-out data, or on those in another folder of the same layout.

    With `generation`, a language model's texts are scored too, and kept in the file `texts_to`.
    Returns the score's name, the scores of each split, and those of generated texts, if any.
    """
    if texts_to is not None and not texts_to.parent.is_dir():
        raise InvalidArgumentError(
            "--texts", expected="a file in a folder that is there", got=str(texts_to)
        )
    config = trained_config(directory)
    writes = config.task == "causal-lm" and generation is not None
    asked_for = texts_to is not None or generation not in (None, GenerationConfig())
    if config.task != "causal-lm" and asked_for:
        raise InvalidArgumentError(
            "RUN",
            expected="a language model, to be asked for texts",
            got=config.task,
            remedy="leave out what is about beams, tokens, prompts and texts",
        )
    if writes:
        require_libraries()
    if data is not None:
        given = config.data.path is not None
        require(given, "--data", "a run on data from a folder", str(data))
        config = replace(config, data=replace(config.data, path=str(data)))
    # The only held-out split of the digits is called test.
    if split is not None and (split, config.task) != ("test", "digits"):
        try:
            asked = replace(config.data, heldout_split=split, heldout_from_train=None)
        except InvalidArgumentError as error:
            raise error.about("--split") from error
        config = replace(config, data=asked)
    if config.task != "digits":
        # Training records are not scored; a task needs one batch of them at least.
        few = config.training.expected_batch_size
        config = replace(config, data=replace(config.data, max_train_examples=few))
    task = build_task(config)
    model = task.model.to(chosen_device(config.training.device))
    found = {name: of(model) for name, of in task.evaluations.items()}
    if not writes or generation is None:
        return task.score_name, found, None
    tokenizer = load_tokenizer(config.model.name)
    scores = evaluate_generation(model, tokenizer, config.data, generation, texts_to=texts_to)
    return task.score_name, found, scores


@torch.no_grad()
def predict(directory: Path, inputs: list[str]) -> list[dict[str, Any]]:
    """The class of each text, or of each image file, with its probability."""
    config = trained_config(directory)
    writes = config.task in ("causal-lm", "sft")
    require(not writes, "RUN", "a classifier", "a language model", "use generate")
    reads = config.task == "text-classification"
    model = prepare_model(config.model, head="sequence" if reads else "image").eval()
    answers = []
    for given in inputs:
        if reads:
            logits = model(**_tokens(given, config, model)).logits
        else:
            logits = model(pixel_values=_pixels(Path(given), config, model)).logits
        shares = logits[0].float().softmax(dim=-1)
        best = int(shares.argmax())
        name = model.config.id2label.get(best, str(best))
        answers.append({"input": given, "class": best, "name": name, "share": float(shares[best])})
    return answers


def generate(
    directory: Path, prompts: list[str], settings: GenerationConfig, *, plain: bool = False
) -> list[dict[str, Any]]:
    """The likeliest continuation of each prompt, as the run was trained to give it.

    After `sft`, a prompt is a user's message, and the chat template asks for the answer. `plain`
    prompts are continued as they are; so are all where the tokenizer has no template.
    """
    config = trained_config(directory)
    writes = config.task in ("causal-lm", "sft")
    require(writes, "RUN", "a language model", config.task, "use predict")
    model = prepare_model(config.model, head="causal-lm")
    tokenizer = load_tokenizer(config.model.name)
    if config.task == "sft":
        plain = plain or not tokenizer.has_template
        rows = [encode_question(prompt, tokenizer, plain=plain) for prompt in prompts]
        end = tokenizer.end_id if plain else tokenizer.answer_end_id
    else:
        rows, end = [prompt_ids(prompt, tokenizer) for prompt in prompts], tokenizer.end_id
    room, longest = room_for_prompts(model, settings), max(map(len, rows), default=0)
    if room is not None and longest > room:
        raise InvalidArgumentError(
            "PROMPT",
            expected=f"at most {room} tokens, so that {settings.max_new_tokens} more fit",
            got=longest,
        )
    model.to(chosen_device(config.training.device))
    texts = continue_rows(model, tokenizer, rows, settings, end)
    return [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]


def _tokens(given: str, config: RunConfig, model: Any) -> dict[str, torch.Tensor]:
    """One text, or two with a tab between, as the model was trained on them."""
    tokenizer = load_tokenizer(config.model.name)
    texts: tuple[str, ...] = (given,)
    if num_texts(config.data) == 2:
        texts = tuple(given.split("\t", 1))
        require(
            len(texts) != 1,
            "INPUT",
            f"two texts with a tab between: the run's data ({config.data.format}) are pairs",
            given,
        )
    example = LabelledText(texts=texts, label=0)
    records = encode_labelled([example], tokenizer, config.data.max_length, uses_token_types(model))
    return TokenCollate(pad_id=tokenizer.pad_id, labels=class_labels)(records)[0]


def _pixels(path: Path, config: RunConfig, model: Any) -> torch.Tensor:
    image = open_image(path)
    size = int(model.config.image_size)
    if config.task == "digits":
        import numpy as np

        grey = np.asarray(image.convert("L").resize((size, size)), dtype=np.float32)
        scaled = torch.from_numpy((grey * LARGEST_PIXEL / 255 - PIXEL_MEAN) / PIXEL_STD)
        return scaled.expand(1, int(model.config.num_channels), size, size)
    return collate_images([(image, 0)], size)[0]
