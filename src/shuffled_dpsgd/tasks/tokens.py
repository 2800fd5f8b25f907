"""Text as token ids, in padded batches with attention masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from shuffled_dpsgd.errors import InvalidArgumentError, MissingExtraError
from shuffled_dpsgd.integrations.per_sample_loss import IGNORED_LABEL
from shuffled_dpsgd.models import weights_of

_SPECIAL = {"<pad>": 256, "<begin>": 257, "<end>": 258, "<sep>": 259}


class PairIds(NamedTuple):
    """Token ids of a pair of texts, and which of the two each token belongs to (0 or 1)."""

    ids: list[int]
    type_ids: list[int]


# Token ids, and what belongs to them: a class, the number of ids before the target, or labels.
Record = tuple[list[int] | PairIds, Any]
Message = dict[str, str]
TokenBatch = tuple[dict[str, torch.Tensor], torch.Tensor]


class Tokenizer:
    """What the text tasks need of a tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def pad_id(self) -> int:
        """The padding id; tokenizers without one (GPT-2) pad with their end of text."""
        own = self._tokenizer.pad_token_id
        return self.end_id if own is None else int(own)

    @property
    def end_id(self) -> int:
        """The id that ends a text."""
        for name in ("eos_token_id", "sep_token_id"):
            value = getattr(self._tokenizer, name)
            if value is not None:
                return int(value)
        raise InvalidArgumentError(
            "model.name", expected="a tokenizer with an end-of-text token", got="none"
        )

    @property
    def begin_ids(self) -> list[int]:
        """What the tokenizer puts before every text: Llama's begin of text, GPT-2's nothing."""
        begin = self._tokenizer.bos_token_id
        return [int(begin)] if begin in self._tokenizer("")["input_ids"] else []

    @property
    def answer_end_id(self) -> int:
        """The id that ends an answer in the chat template, or else a text."""
        if not self.has_template:
            return self.end_id
        asked: list[Message] = [{"role": "user", "content": "?"}]
        before = self.render(asked, answer_next=True)
        answered = self.render([*asked, {"role": "assistant", "content": "!"}])
        behind = answered.removeprefix(before).partition("!")[2]
        ids = self.encode_plain([behind])[0][:1]
        return ids[0] if ids and ids[0] in self._tokenizer.all_special_ids else self.end_id

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    def render(self, messages: Sequence[Message], *, answer_next: bool = False) -> str:
        """Messages as the chat template writes them, up to the next answer if one is to come."""
        if not self.has_template:
            raise InvalidArgumentError(
                "model.name",
                expected="a tokenizer with a chat template",
                got="none",
                remedy="take a model for chats (its name often ends in Instruct), or texts in "
                "`prompt` and `completion`",
            )
        from jinja2 import TemplateError  # torch needs it

        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=answer_next
            )
        except TemplateError as error:
            raise InvalidArgumentError(
                "messages", expected="messages that the chat template takes", got=str(error)
            ) from error
        return str(text)

    def encode(
        self, texts: Sequence[tuple[str, ...]], *, max_length: int, typed: bool = False
    ) -> Sequence[list[int] | PairIds]:
        """Texts, or pairs of them, as the model was pre-trained on them, cut to `max_length`.

        Pairs that are `typed` say which text a token belongs to, if the tokenizer does.
        """
        if not texts:
            return []
        columns = [list(column) for column in zip(*texts, strict=True)]
        found = self._tokenizer(*columns, truncation=True, max_length=max_length)
        ids: list[list[int]] = [list(each) for each in found["input_ids"]]
        if not typed or len(columns) == 1 or "token_type_ids" not in found:
            return ids
        return list(map(PairIds, ids, map(list, found["token_type_ids"])))

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Texts without special tokens."""
        if not texts:
            return []
        found = self._tokenizer(list(texts), add_special_tokens=False)
        return [list(each) for each in found["input_ids"]]

    def decode(self, ids: list[int]) -> str:
        """The text of ids, without special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def save(self, directory: Path) -> None:
        """Beside the weights, so that `from_pretrained` finds it."""
        self._tokenizer.save_pretrained(directory)


def load_tokenizer(model_name: str, *, marked: bool = True) -> Tokenizer:
    """The tokenizer saved with the model's weights; one of bytes for a model that has none.

    With `marked`, texts of bytes begin and end with special tokens. A language model's have none,
    so that they can be continued.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtraError("transformers", extra="hf", purpose="tokenizers") from error
    source = weights_of(model_name)
    if source is None:
        return Tokenizer(_byte_tokenizer(marked=marked))
    try:
        return Tokenizer(AutoTokenizer.from_pretrained(source))
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            "model.name",
            expected="a model saved with its tokenizer",
            got=model_name,
            remedy=f"save the tokenizer beside the weights ({str(error).splitlines()[0]})",
        ) from error


def _byte_tokenizer(*, marked: bool) -> Any:
    """UTF-8 bytes as ids 0 to 255, then padding, begin, end and separator.

    It is byte-level BPE without a single merge, so that it needs no vocabulary.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in _SPECIAL])
    if marked:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<begin> $A <end>",
            pair="<begin>:0 $A:0 <sep>:0 $B:1 <end>:1",
            special_tokens=list(_SPECIAL.items()),
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<begin>",
        eos_token="<end>",
        sep_token="<sep>",
        split_special_tokens=True,  # A text that holds "<end>" is bytes like any other.
        model_input_names=["input_ids", *["token_type_ids"] * marked, "attention_mask"],
    )


def ids_of(record: Record) -> list[int]:
    """The token ids of a record."""
    return record[0].ids if isinstance(record[0], PairIds) else record[0]


class TokenRecords(list[Record]):
    """Encoded records as a data set with their lengths."""

    def length(self, index: int) -> int:
        """The number of token ids of a record."""
        return len(ids_of(self[index]))


@dataclass(frozen=True, kw_only=True)
class TokenCollate:
    """Pads records on the right, with an attention mask and labels that hide the padding.

    Pairs of texts carry `token_type_ids`; padding has type 0, as in pre-training.
    `labels(records, length)` makes the labels of a batch that is padded to `length`.
    """

    pad_id: int
    labels: Callable[[Sequence[Record], int], torch.Tensor]

    def __call__(self, samples: list[Record]) -> TokenBatch:
        """A batch padded to its longest record."""
        return self.to_length(samples, max((len(ids_of(s)) for s in samples), default=0))

    def to_length(self, samples: list[Record], length: int) -> TokenBatch:
        """A batch padded to `length`."""
        ids, mask = padded([ids_of(sample) for sample in samples], self.pad_id, length)
        inputs = {"input_ids": ids, "attention_mask": mask.long()}
        types = [sample[0].type_ids for sample in samples if isinstance(sample[0], PairIds)]
        if types:
            inputs["token_type_ids"] = padded(types, 0, length)[0]
        return inputs, self.labels(samples, length)


def class_labels(samples: Sequence[Record], length: int) -> torch.Tensor:
    """One class a record."""
    return torch.tensor([label for _, label in samples])


def continuation_labels(samples: Sequence[Record], length: int) -> torch.Tensor:
    """The ids themselves, where they are neither prompt nor padding."""
    labels, _ = padded([ids_of(sample) for sample in samples], IGNORED_LABEL, length)
    starts = torch.tensor([start for _, start in samples])
    return labels.masked_fill(torch.arange(length) < starts[:, None], IGNORED_LABEL)


def given_labels(samples: Sequence[Record], length: int) -> torch.Tensor:
    """The labels that the records carry."""
    return padded([labels for _, labels in samples], IGNORED_LABEL, length)[0]


def padded(
    rows: Sequence[Sequence[int]], value: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows padded on the right to `length`, and where they are not padding.

    >>> padded([[1], [2, 3]], 0, 3)[0].tolist()
    [[1, 0, 0], [2, 3, 0]]
    """
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    is_token = np.arange(length) < lengths[:, None]
    filled = np.full((len(rows), length), value, dtype=np.int64)
    filled[is_token] = np.fromiter((i for row in rows for i in row), np.int64, int(lengths.sum()))
    return torch.from_numpy(filled), torch.from_numpy(is_token)
