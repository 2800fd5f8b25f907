"""Text to token ids: the model's own tokenizer, or bytes for models that have none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shuffled_dpsgd.errors import InvalidArgumentError, MissingExtraError
from shuffled_dpsgd.models import weights_of
from shuffled_dpsgd.tasks.tokens import PairIds


class Tokenizer(Protocol):
    """What the text tasks need."""

    @property
    def pad_id(self) -> int: ...

    @property
    def end_id(self) -> int: ...

    def encode(self, *texts: str, max_length: int) -> list[int]:
        """Ids of one text, or of a pair, with the model's special tokens."""
        ...

    def encode_all(self, texts: Sequence[tuple[str, ...]], *, max_length: int) -> list[list[int]]:
        """`encode` of each, many at once."""
        ...

    def encode_pairs(
        self, pairs: Sequence[tuple[str, ...]], *, max_length: int
    ) -> list[PairIds] | None:
        """As `encode_all`, with the text each token belongs to; None: it cannot tell."""
        ...

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text alone, without special tokens."""
        ...

    def encode_all_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_plain` of each, many at once."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text of ids, without special tokens."""
        ...

    def save(self, directory: Path, *, marked: bool = True) -> None:
        """For `from_pretrained`. A language model's texts are not `marked`: it continues them."""
        ...


@dataclass(frozen=True, kw_only=True)
class ByteTokenizer:
    """UTF-8 bytes as ids 0–255, then padding, begin, end and separator: needs no vocabulary.

    >>> ByteTokenizer().encode("hi", max_length=8)
    [257, 104, 105, 258]
    >>> ByteTokenizer().encode("a", "b", max_length=8)
    [257, 97, 259, 98, 258]
    """

    pad_id: int = 256
    begin_id: int = 257
    end_id: int = 258
    separator_id: int = 259

    def encode(self, *texts: str, max_length: int) -> list[int]:
        """Begin, the texts with separators between, end; cut to `max_length`."""
        ids = [self.begin_id]
        for place, text in enumerate(texts):
            ids += [self.separator_id] if place else []
            ids += self.encode_plain(text)
        return [*ids[: max_length - 1], self.end_id]

    def encode_all(self, texts: Sequence[tuple[str, ...]], *, max_length: int) -> list[list[int]]:
        """One after the other."""
        return [self.encode(*each, max_length=max_length) for each in texts]

    def encode_pairs(
        self, pairs: Sequence[tuple[str, ...]], *, max_length: int
    ) -> list[PairIds] | None:
        """The second text begins behind the separator.

        >>> ByteTokenizer().encode_pairs([("a", "b")], max_length=8)
        [PairIds(ids=[257, 97, 259, 98, 258], type_ids=[0, 0, 0, 1, 1])]
        """
        found = []
        for pair in pairs:
            ids = self.encode(*pair, max_length=max_length)
            first = min(len(self.encode_plain(pair[0])) + 2, len(ids))
            found.append(PairIds(ids, [0] * first + [1] * (len(ids) - first)))
        return found

    def encode_plain(self, text: str) -> list[int]:
        """The text's bytes."""
        return list(text.encode("utf-8"))

    def encode_all_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """One after the other."""
        return [self.encode_plain(text) for text in texts]

    def decode(self, ids: list[int]) -> str:
        """The bytes among the ids as text; what is no UTF-8 is replaced."""
        return bytes(i for i in ids if i < self.pad_id).decode("utf-8", errors="replace")

    def save(self, directory: Path, *, marked: bool = True) -> None:
        """As a tokenizer of transformers with the same ids, so that `from_pretrained` finds it.

        Texts begin and end with a mark if they are `marked`.
        """
        _byte_level(marked=marked).save_pretrained(directory)


def _byte_level(*, marked: bool) -> Any:
    """`ByteTokenizer` for transformers: byte-level BPE without a single merge."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = {_letter(byte): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = plain
    tokenizer.decoder = decoders.ByteLevel()
    names = {"<pad>": 256, "<begin>": 257, "<end>": 258, "<sep>": 259}
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    if marked:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<begin> $A <end>",
            pair="<begin>:0 $A:0 <sep>:0 $B:1 <end>:1",
            special_tokens=list(names.items()),
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<begin>",
        eos_token="<end>",
        sep_token="<sep>",
        model_input_names=["input_ids", *["token_type_ids"] * marked, "attention_mask"],
    )


def _letter(byte: int) -> str:
    """The letter that byte-level BPE writes a byte with (GPT-2's table).

    >>> _letter(ord("a")), _letter(ord(" "))
    ('a', 'Ġ')
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [b for b in range(256) if b not in printable].index(byte))


class PretrainedTokenizer:
    """A Hugging Face tokenizer behind the same names."""

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

    def encode(self, *texts: str, max_length: int) -> list[int]:
        """As the model was pre-trained, cut to `max_length`."""
        return list(self._tokenizer(*texts, truncation=True, max_length=max_length)["input_ids"])

    def encode_all(self, texts: Sequence[tuple[str, ...]], *, max_length: int) -> list[list[int]]:
        """As `encode`, by the tokenizer's threads."""
        columns = [list(column) for column in zip(*texts, strict=True)]
        return self._many(*columns, truncation=True, max_length=max_length)

    def encode_pairs(
        self, pairs: Sequence[tuple[str, ...]], *, max_length: int
    ) -> list[PairIds] | None:
        """With the tokenizer's own `token_type_ids`, if it makes any (RoBERTa's does not)."""
        if "token_type_ids" not in self._tokenizer.model_input_names:
            return None
        columns = [list(column) for column in zip(*pairs, strict=True)]
        if not columns:
            return []
        found = self._tokenizer(*columns, truncation=True, max_length=max_length)
        both = zip(found["input_ids"], found["token_type_ids"], strict=True)
        return [PairIds(list(ids), list(types)) for ids, types in both]

    def encode_plain(self, text: str) -> list[int]:
        """Without special tokens."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode_all_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode_plain`, by the tokenizer's threads."""
        return self._many(list(texts), add_special_tokens=False)

    def _many(self, *columns: list[str], **options: Any) -> list[list[int]]:
        if not columns or not columns[0]:
            return []
        return [list(ids) for ids in self._tokenizer(*columns, **options)["input_ids"]]

    def decode(self, ids: list[int]) -> str:
        """The text of ids, without special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def save(self, directory: Path, *, marked: bool = True) -> None:
        """As it came, beside the weights, so that `from_pretrained` finds it."""
        self._tokenizer.save_pretrained(directory)


def load_tokenizer(model_name: str) -> Tokenizer:
    """The tokenizer saved with the model's weights; bytes for a model that has none."""
    source = weights_of(model_name)
    if source is None:
        return ByteTokenizer()
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtraError("transformers", extra="hf", purpose="tokenizers") from error
    try:
        return PretrainedTokenizer(AutoTokenizer.from_pretrained(source))
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            "model.name",
            expected="a model saved with its tokenizer",
            got=model_name,
            remedy=f"save the tokenizer beside the weights ({str(error).splitlines()[0]})",
        ) from error
