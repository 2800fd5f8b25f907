"""Records of the task `sft`: a chat, or a prompt with its completion, as token ids and labels.

The fields are TRL's. `messages` is a list of `{"role": …, "content": …}`; `prompt` and `completion`
are two such lists, or two texts. The tokenizer's chat template turns messages into text. Only
answers are scored: the assistant's messages, or the completion. Everything else has no label.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.integrations.per_sample_loss import IGNORED_LABEL
from shuffled_dpsgd.tasks.data.tables import Columns, Row, shortened
from shuffled_dpsgd.tasks.tokens import Message, Record, Tokenizer

CHAT_COLUMNS: tuple[Columns, ...] = (("messages",), ("prompt", "completion"))
"""The columns of a chat, and of a prompt with its completion."""


class Chat(NamedTuple):
    """One record and its place in the data; a chat has an empty prompt."""

    where: str
    prompt: str | list[Message]
    completion: str | list[Message]


def read_chat(row: Row, columns: Columns) -> Chat:
    """The record in a row, whose fields must be two texts, or lists of messages."""
    values = [row.cells[column] for column in columns]
    if len(values) == 2 and all(isinstance(value, str) for value in values):
        return Chat(row.where, values[0], values[1])
    lists = [_messages(row, column) for column in columns]
    return Chat(row.where, lists[0] if len(lists) == 2 else [], lists[-1])


def encode_chats(chats: Sequence[Chat], tokenizer: Tokenizer, max_length: int) -> list[Record]:
    """Ids of each record, with the ids that are scored as labels; cut at the end to `max_length`.

    Each part is encoded by itself, so an answer begins with the same token as in generation.
    """
    parts = [list(_parts(chat, tokenizer)) for chat in chats]
    encoded = iter(tokenizer.encode_plain([text for each in parts for text, _ in each]))
    records: list[Record] = []
    num_cut = 0
    for chat, each in zip(chats, parts, strict=True):
        plain = isinstance(chat.prompt, str)
        ids = tokenizer.begin_ids if plain else []
        labels = [IGNORED_LABEL] * len(ids)
        for _, is_answer in each:
            new = next(encoded)
            ids = ids + new
            labels += new if is_answer else [IGNORED_LABEL] * len(new)
        if plain:
            ids, labels = [*ids, tokenizer.end_id], [*labels, tokenizer.end_id]
        num_cut += len(ids) > max_length
        ids, labels = ids[:max_length], labels[:max_length]
        if all(label == IGNORED_LABEL for label in labels[1:]):
            raise InvalidArgumentError(
                chat.where,
                expected=f"an answer within data.max_length = {max_length} tokens",
                got="none",
                remedy="raise data.max_length, or leave the record out",
            )
        records.append((ids, labels))
    if num_cut:
        warnings.warn(
            f"{num_cut} of {len(chats)} records are longer than data.max_length = {max_length} "
            "tokens and were cut at the end",
            stacklevel=2,
        )
    return records


def encode_question(text: str, tokenizer: Tokenizer, *, plain: bool) -> list[int]:
    """Ids of a user's message up to where the answer begins; `plain` ones as they are."""
    if plain:
        return tokenizer.begin_ids + tokenizer.encode_plain([text])[0]
    asked = tokenizer.render([{"role": "user", "content": text}], answer_next=True)
    return tokenizer.encode_plain([asked])[0]


def _parts(chat: Chat, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """The text of a record in parts, each with whether it is an answer."""
    if isinstance(chat.prompt, str) or isinstance(chat.completion, str):
        yield str(chat.prompt), False
        yield str(chat.completion), True
        return
    messages, done = [*chat.prompt, *chat.completion], ""
    for number in range(len(chat.prompt), len(messages)):
        if messages[number]["role"] != "assistant":
            continue
        try:
            before = tokenizer.render(messages[:number], answer_next=True)
            after = tokenizer.render(messages[: number + 1])
        except InvalidArgumentError as error:
            raise error.about(chat.where) from error
        if not before.startswith(done) or not after.startswith(before):
            raise InvalidArgumentError(
                chat.where,
                expected="a chat template that leaves earlier messages as they are",
                got=f"another text before message {number}",
                remedy="keep one answer in each record, or use another template",
            )
        yield before[len(done) :], False
        yield after[len(before) :], True
        done = after


def _messages(row: Row, column: str) -> list[Message]:
    value: Any = row.cells[column]
    fine = isinstance(value, list) and all(
        isinstance(each, dict)
        and isinstance(each.get("role"), str)
        and isinstance(each.get("content"), str)
        for each in value
    )
    if not fine:
        raise InvalidArgumentError(
            row.where,
            expected=f'a list of {{"role": text, "content": text}} in {column!r}',
            got=shortened(str(value)),
        )
    return [{"role": each["role"], "content": each["content"]} for each in value]
