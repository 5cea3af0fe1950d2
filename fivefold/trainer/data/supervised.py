"""Supervised samples: turns a record of a data set into tokens, and tells which of them are trained.

    messages      a list of {role, content}, or ShareGPT's {from, value}; rendered by a chat template
    completions   a prompt and its completion, both as text or both as messages
    preferences   a prompt, a chosen and a rejected completion, all as text or all as messages: two samples

The tokens and their marks equal those of TRL's SFTTrainer and DPOTrainer (trl@1.16.0: trainer/sft_trainer.py,
trainer/dpo_trainer.py, tokenize_fn).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import UserError
from fivefold.trainer.data.chat_template import ChatMessage, ChatTemplate, Span, load_template, read_special_token
from fivefold.trainer.data.tokenizer import Tokenizer, Tokens

DataFormat = Literal["text", "messages", "completions", "preferences"]
LossOn = Literal["replies", "all"]
Mask = NDArray[np.bool_]

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
# ShareGPT's names of roles, as LLaMA-Factory and Axolotl read them
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "function_call": "assistant",
                  "observation": "tool"}  # fmt: skip
MESSAGE_KEYS = ("messages", "conversations")  # fields in which a record's messages are looked for
FIELDS: dict[DataFormat, tuple[str, ...]] = {  # of a record, in the order in which ``key`` names others
    "completions": ("prompt", "completion"),
    "preferences": ("prompt", "chosen", "rejected"),
}


class SampleError(ValueError):
    """An error in one record; the reader of the file adds where it stands."""


class TrainingSample(NamedTuple):
    """A record as text and tokens [n], and for each token whether it is a target with a loss."""

    text: str
    tokens: Tokens
    trained: Mask


@dataclass(frozen=True)
class SampleFormat:
    """The settings by which records become samples.

    ``key``: the field of the messages, or those of ``FIELDS``, by commas; "": their usual names. ``end``: text that
    ends a completion.
    """

    kind: DataFormat
    key: str = ""
    loss_on: LossOn = "replies"
    template: ChatTemplate | None = None
    end: str = ""

    def encode(self, record: Mapping[str, Any], tokenizer: Tokenizer) -> TrainingSample:
        """Turn a record into a sample; raises ``SampleError`` or ``TemplateError`` for one that is not."""
        (sample,) = self.encode_record(record, tokenizer)
        return sample

    def encode_record(self, record: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[TrainingSample, ...]:
        """Turn a record into its samples: one, or of preferences the chosen and the rejected."""
        if self.kind == "messages":
            return (self._encode_messages(record, tokenizer),)
        keys = tuple(self.key.split(",")) if self.key else FIELDS[self.kind]
        if self.kind == "preferences" and keys[0] not in record:
            record = _extract_prompt(record, keys)
        prompt, *completions = (_get_field(record, key) for key in keys)
        if isinstance(prompt, str) and all(isinstance(completion, str) for completion in completions):
            return self._encode_completions(prompt, completions, tokenizer)
        replies = [read_messages(completion) for completion in completions]
        return self._encode_replies(read_messages(prompt), replies, record, tokenizer)

    def _encode_messages(self, record: Mapping[str, Any], tokenizer: Tokenizer) -> TrainingSample:
        """Render and tokenize one conversation, and mark the tokens that have a loss."""
        key = self.key or next((key for key in MESSAGE_KEYS if key in record), MESSAGE_KEYS[0])
        messages = read_messages(_get_field(record, key))
        template = self._get_template()
        variables = _list_variables(record)
        text, spans = template.render(messages, **variables)
        if self.loss_on == "all":
            spans = ((0, len(text)),)
        elif not template.marks_replies:
            spans = find_replies(template, messages, text=text, variables=variables)
        if not spans:
            raise SampleError(
                "has no turn of the assistant, so nothing of it is trained; remove it, or set [data] loss_on to all"
            )
        tokens, offsets = tokenizer.encode_with_offsets(text)
        trained = np.zeros(len(tokens), bool)
        for start, stop in spans:
            trained |= (offsets[:, 1] > start) & (offsets[:, 0] < stop)
        return _sample(text, tokens, trained)

    def _encode_replies(
        self,
        prompt: list[ChatMessage],
        replies: list[list[ChatMessage]],
        record: Mapping[str, Any],
        tokenizer: Tokenizer,
    ) -> tuple[TrainingSample, ...]:
        """Render and encode the prompt with each reply; only the tokens of the reply are trained."""
        template, variables = self._get_template(), _list_variables(record)
        before = template.render(prompt, for_reply=True, **variables).text
        texts = [template.render([*prompt, *reply], **variables).text for reply in replies]
        tokens = [tokenizer.encode_with_offsets(text)[0] for text in texts]
        return self._mark_after_prompt(texts, tokens, tokenizer.encode_with_offsets(before)[0])

    def _encode_completions(
        self, prompt: str, completions: list[str], tokenizer: Tokenizer
    ) -> tuple[TrainingSample, ...]:
        texts = [f"{prompt}{text}{'' if text.endswith(self.end) else self.end}" for text in completions]
        tokens = [tokenizer.encode_with_offsets(text, special=True)[0] for text in texts]
        if not self.end:  # a tokenizer whose end of document has no text
            tokens = [np.append(ids, ids.dtype.type(tokenizer.end)) for ids in tokens]
        return self._mark_after_prompt(texts, tokens, tokenizer.encode_with_offsets(prompt, special=True)[0])

    def _mark_after_prompt(self, texts: list[str], tokens: list[Tokens], prompt: Tokens) -> tuple[TrainingSample, ...]:
        """Mark as trained, in each of ``tokens``, what follows the prefix that all of them share with ``prompt``."""
        start = 0 if self.loss_on == "all" else min(_count_common(ids, prompt) for ids in tokens)
        return tuple(_sample(text, ids, np.arange(len(ids)) >= start) for text, ids in zip(texts, tokens, strict=True))

    def _get_template(self) -> ChatTemplate:
        if self.template is None:
            raise SampleError("has messages, but the tokenizer has no chat template; set [data] chat_template")
        return self.template


def _sample(text: str, tokens: Tokens, trained: Mask) -> TrainingSample:
    """Return a sample; its first token is never a target, as nothing stands before it."""
    trained[:1] = False
    return TrainingSample(text, tokens, trained)


def _count_common(ids: Tokens, other_ids: Tokens) -> int:
    """Return the number of equal tokens at the beginning."""
    length = min(len(ids), len(other_ids))
    differs = np.flatnonzero(ids[:length] != other_ids[:length])
    return int(differs[0]) if len(differs) else length


def _extract_prompt(record: Mapping[str, Any], keys: tuple[str, ...]) -> Mapping[str, Any]:
    """Return a record of preferences whose prompt is the messages with which both completions begin."""
    chosen, rejected = (_get_field(record, key) for key in keys[1:])
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise SampleError(
            f"has no key {keys[0]!r}; add it, because {keys[1]} and {keys[2]} are plain texts, which do not show "
            "where the prompt ends"
        )
    both = read_messages(chosen), read_messages(rejected)
    common = next((at for at, (one, other) in enumerate(zip(*both, strict=False)) if one != other), min(map(len, both)))
    if not common or common == min(map(len, both)):
        raise SampleError(
            f"has no key {keys[0]!r}, and its completions share {common} messages of {len(both[0])} and "
            f"{len(both[1])}; both must begin with the prompt and differ after it"
        )
    (prompt, chosen_key, rejected_key), (chosen, rejected) = keys, both
    return {**record, prompt: chosen[:common], chosen_key: chosen[common:], rejected_key: rejected[common:]}


def _get_field(record: Mapping[str, Any], key: str) -> Any:
    if key not in record:
        raise SampleError(f"has no key {key!r}; it has {', '.join(map(repr, record)) or 'none'}; set [data] key")
    return record[key]


def _list_variables(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of a template that a record gives: its tools, and any in ``chat_template_kwargs``."""
    tools = record.get("tools")
    variables = record.get("chat_template_kwargs") or {}
    try:
        return {"tools": json.loads(tools) if isinstance(tools, str) and tools else tools or None, **variables}
    except json.JSONDecodeError as error:
        raise SampleError(f"'tools' is not JSON: {error}") from None


def read_messages(value: object) -> list[ChatMessage]:
    """Return messages with ``role`` and ``content``, in this order of keys; raises ``SampleError`` for others."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise SampleError(f"has a {type(value).__name__} for its messages; give a list of them, with one at least")
    return [_read_message(message, number) for number, message in enumerate(value, start=1)]


def _read_message(message: object, number: int) -> ChatMessage:
    """Read one message of a conversation; raises ``SampleError`` with its number."""
    if not isinstance(message, Mapping):
        raise SampleError(
            f"message {number} is of type {type(message).__name__}, not an object; give it a role and content"
        )
    fields = {key: value for key, value in message.items() if value is not None}
    role = fields.pop("role", None) or fields.pop("from", None)
    if role is None:
        raise SampleError(f"message {number} has no role; it has {', '.join(map(repr, message)) or 'no keys'}")
    role = SHAREGPT_ROLES.get(role, role)
    if role not in ROLES:
        known = ", ".join((*ROLES, *SHAREGPT_ROLES))
        raise SampleError(f"message {number} has the unknown role {role!r}; known are {known}")
    content = fields.pop("content", None) if "content" in fields else fields.pop("value", None)
    if content is None and "tool_calls" not in fields:
        raise SampleError(
            f"message {number} of {role!r} has no content; it has {', '.join(map(repr, message))}; add it"
        )
    return {"role": role, "content": content, **fields}


def find_replies(
    template: ChatTemplate, messages: list[ChatMessage], *, text: str, variables: Mapping[str, Any]
) -> tuple[Span, ...]:
    """Return the characters of each turn of the assistant, by rendering the conversation up to it and with it.

    Raises ``SampleError`` if the template renders an earlier turn differently once later ones follow.
    """
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = template.render(messages[:number], for_reply=True, **variables).text
        after = template.render(messages[: number + 1], **variables).text
        if not (text.startswith(before) and text.startswith(after) and len(before) < len(after)):
            raise SampleError(
                f"message {number + 1} is rendered differently if others follow it, so its tokens cannot be located; "
                "set [data] chat_template to a template that marks replies by {% generation %}"
            )
        spans.append((len(before), len(after)))
    return tuple(spans)


def sample_format(
    kind: DataFormat, *, key: str = "", loss_on: LossOn = "replies", tokenizer: str, chat_template: Path | None = None
) -> SampleFormat | None:
    """Return how records become samples, by the files of the tokenizer; None for text.

    Raises ``UserError`` for messages without a chat template.
    """
    if kind == "text":
        return None
    if kind in FIELDS and key and len(key.split(",")) != len(FIELDS[kind]):
        fields = ",".join(FIELDS[kind])
        raise UserError(f'[data] key {key!r}: {kind} have {len(FIELDS[kind])} fields; write key = "{fields}"')
    if kind == "preferences" and loss_on != "replies":
        raise UserError(f'[data] loss_on = "{loss_on}": preferences compare completions; use loss_on = "replies"')
    folder = None if tokenizer == "bytes" or tokenizer.startswith("bpe:") else Path(tokenizer)
    template = None
    if kind == "messages" or chat_template is not None:
        template = load_template(folder, file=chat_template)
    else:  # completions and preferences may be messages
        try:
            template = load_template(folder)
        except UserError:
            template = None
    return SampleFormat(kind, key, loss_on, template, end=read_special_token(folder, "eos_token"))
