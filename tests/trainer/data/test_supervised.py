"""Records become tokens with marks: as transformers renders them, by any of the formats, and refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fivefold.errors import UserError
from fivefold.trainer.data.chat_template import ChatTemplate, TemplateError, load_template
from fivefold.trainer.data.corpus import list_files, list_slices, read_records
from fivefold.trainer.data.supervised import SampleError, SampleFormat, TrainingSample, find_replies, sample_format
from fivefold.trainer.data.tokenizer import ByteTokenizer, Tokenizer, load
from tests.trainer.data.conversations import CHATML, MARKED, completions, conversations, write_lines, write_tokenizer

transformers = pytest.importorskip("transformers")

MESSAGES = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho."}]


@pytest.fixture(params=[CHATML, MARKED], ids=("chatml", "marked"))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "tokenizer", template=request.param)


def trained_text(sample: TrainingSample, tokenizer: Tokenizer) -> list[str]:
    """The text of each run of trained tokens."""
    edges = np.flatnonzero(np.diff(sample.trained.astype(int), prepend=0, append=0))
    return [
        tokenizer.decode(sample.tokens[start:stop].tolist(), special=True)
        for start, stop in zip(edges[::2], edges[1::2], strict=True)
    ]


def test_tokens_and_marks_are_those_of_transformers(folder: Path) -> None:
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), load(folder)
    form = sample_format("messages", tokenizer=str(folder))
    assert form is not None
    for record in conversations(30):
        sample = form.encode(record, ours)
        told = theirs.apply_chat_template(
            record["messages"],
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=form.template.marks_replies,
        )
        assert sample.tokens.tolist() == told["input_ids"]
        if form.template.marks_replies:
            assert sample.trained.astype(int).tolist() == told["assistant_masks"]
        answers = [
            message["content"] + "<|im_end|>" for message in record["messages"] if message["role"] == "assistant"
        ]
        assert [text.rstrip("\n") for text in trained_text(sample, ours)] == answers


def test_sharegpt_is_the_same_as_messages(folder: Path) -> None:
    tokenizer, form = load(folder), sample_format("messages", tokenizer=str(folder))
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    for record in conversations(6):
        entries = [{"from": names[m["role"]], "value": m["content"]} for m in record["messages"]]
        one, other = form.encode(record, tokenizer), form.encode({"conversations": entries}, tokenizer)  # type: ignore[union-attr]
        assert one.text == other.text
        assert np.array_equal(one.trained, other.trained)


def test_a_completion_is_trained_and_gets_its_end_token(folder: Path) -> None:
    tokenizer, form = load(folder), sample_format("completions", tokenizer=str(folder))
    for record in completions(8):
        sample = form.encode(record, tokenizer)  # type: ignore[union-attr]
        assert trained_text(sample, tokenizer) == [record["completion"] + "<|im_end|>"]
        ended = form.encode({**record, "completion": record["completion"] + "<|im_end|>"}, tokenizer)  # type: ignore[union-attr]
        assert np.array_equal(ended.tokens, sample.tokens)
        messages = {
            "prompt": [{"role": "user", "content": record["prompt"]}],
            "completion": [{"role": "assistant", "content": record["completion"]}],
        }
        sample = form.encode(messages, tokenizer)  # type: ignore[union-attr]
        assert trained_text(sample, tokenizer) == [record["completion"] + "<|im_end|>\n"]


def test_completions_are_read_from_named_fields_with_byte_tokens() -> None:
    form = sample_format("completions", key="question,answer", tokenizer="bytes")
    sample = form.encode({"question": "naïve?", "answer": " ja"}, ByteTokenizer())  # type: ignore[union-attr]
    assert trained_text(sample, ByteTokenizer()) == [" ja\0"]


def test_loss_on_all_leaves_out_only_the_first_token(folder: Path) -> None:
    for kind, record in (
        ("messages", {"messages": MESSAGES}),
        ("completions", {"prompt": "a b, c d", "completion": "e"}),
    ):
        form = sample_format(kind, loss_on="all", tokenizer=str(folder))  # type: ignore[arg-type]
        trained = form.encode(record, load(folder)).trained  # type: ignore[union-attr]
        assert not trained[0]
        assert trained[1:].all()


def test_tools_of_a_conversation_reach_the_chat_template(tmp_path: Path) -> None:
    source = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{{ bos_token }}"
        "{% generation %}{{ messages[1].content }}{% endgeneration %}"
    )
    write_tokenizer(tmp_path, template=source)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"bos_token": {"content": "<|endoftext|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    form = sample_format("messages", tokenizer=str(tmp_path))
    tools = [{"name": "é"}]
    for value in (tools, json.dumps(tools)):
        sample = form.encode({"messages": MESSAGES, "tools": value}, load(tmp_path))  # type: ignore[union-attr]
        assert sample.text == '[{"name": "é"}]<|endoftext|>Ho.'


def test_a_template_cannot_reach_python() -> None:
    for attack in (
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
        "{% for number in range(10 ** 9) %}{% endfor %}",
    ):
        with pytest.raises(TemplateError, match="cannot render it"):
            ChatTemplate(attack).render(MESSAGES)


# Qwen 3 drops what was thought in earlier turns, so a conversation does not begin with its own beginning.
class Chunks(ByteTokenizer):
    """A tokenizer with a token for every four characters, some of which begin before a reply or end after it."""

    def encode_with_offsets(self, text: str, *, special: bool = False) -> tuple[Any, Any]:
        begins = np.arange(0, len(text), 4)
        return begins.astype(np.uint16), np.stack((begins, np.minimum(begins + 4, len(text))), axis=1)


def test_a_token_that_overlaps_a_reply_is_trained(tmp_path: Path) -> None:
    """transformers marks the tokens of the first and of the last character of a reply, and all between them."""
    form = sample_format("messages", tokenizer=str(write_tokenizer(tmp_path, template=MARKED)))
    assert form is not None
    assert form.template is not None
    straddling = 0
    for record in conversations(12):
        sample = form.encode(record, Chunks())
        text, spans = form.template.render(record["messages"])  # type: ignore[arg-type]
        replies = {place for start, stop in spans for place in range(start, stop)}
        tokens = [set(range(begin, min(begin + 4, len(text)))) for begin in range(0, len(text), 4)]
        assert sample.trained.tolist() == [bool(token & replies) for token in tokens]
        straddling += sum(bool(token & replies) and not token <= replies for token in tokens)
    assert straddling > 12


FORGETS = (
    "{% for m in messages %}{{ m.role }}:{% if loop.last and m.role == 'assistant' %}<think>{% endif %}{{ m.content }};"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_a_template_that_renders_earlier_messages_differently_is_an_error() -> None:
    template = ChatTemplate(FORGETS)
    one = find_replies(template, MESSAGES, text=template.render(MESSAGES).text, variables={})  # type: ignore[arg-type]
    assert one == ((19, 30),)
    twice = [*MESSAGES, *MESSAGES]
    with pytest.raises(SampleError, match="message 2 is rendered differently if others follow it"):
        find_replies(template, twice, text=template.render(twice).text, variables={})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [{"content": "a"}]}, "message 1 has no role; it has 'content'"),
        (
            {"messages": [{"role": "robot", "content": "a"}]},
            "message 1 has the unknown role 'robot'; known are system,",
        ),
        ({"messages": [{"role": "user"}]}, "message 1 of 'user' has no content; it has 'role'"),
        ({"messages": ["a"]}, "message 1 is of type str, not an object; give it a role and content"),
        ({"messages": []}, "has a list for its messages; give a list of them, with one at least"),
        ({"messages": "a"}, "has a str for its messages"),
        ({"text": "a"}, r"has no key 'messages'; it has 'text'; set \[data\] key"),
        ({"messages": MESSAGES[:1]}, "has no turn of the assistant, so nothing of it is trained"),
        ({"messages": MESSAGES, "tools": "{"}, "'tools' is not JSON"),
    ],
)
def test_an_invalid_record_is_an_error_with_its_line(record: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    form, tokenizer = sample_format("messages", tokenizer=str(folder)), load(folder)
    lines = write_lines(tmp_path / "a.jsonl", [{"messages": MESSAGES}, record])
    (piece,) = list_slices(list_files(str(lines))[0])
    with pytest.raises(UserError, match=rf"a\.jsonl:2: {message}"):
        list(read_records(piece, parse=lambda values: form.encode(values, tokenizer)))  # type: ignore[union-attr]


def test_a_template_may_reject_a_conversation(tmp_path: Path) -> None:
    source = "{{ raise_exception('roles must alternate') }}"
    form = sample_format("messages", tokenizer=str(write_tokenizer(tmp_path, template=source)))
    with pytest.raises(TemplateError, match="cannot render it: roles must alternate"):
        form.encode({"messages": MESSAGES}, load(tmp_path))  # type: ignore[union-attr]


def test_messages_without_a_chat_template_are_an_error(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", template="")
    for tokenizer, words in ((str(folder), "has no chat_template.jinja"), ("bytes", "tokenizer built here: no chat")):
        with pytest.raises(UserError, match=words):
            sample_format("messages", tokenizer=tokenizer)
    with pytest.raises(SampleError, match="has no chat template"):
        sample_format("completions", tokenizer="bytes").encode(  # type: ignore[union-attr]
            {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]}, ByteTokenizer()
        )
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(UserError, match=r"chat_template\.jinja: not a chat template: line 1"):
        load_template(folder)
    with pytest.raises(UserError, match="completions have 2 fields"):
        sample_format("completions", key="prompt", tokenizer="bytes")


def test_a_template_of_several_and_one_in_a_file_are_found(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]
    folder = write_tokenizer(tmp_path / "tokenizer", template=named)  # type: ignore[arg-type]
    assert load_template(folder / "tokenizer.json").source == CHATML
    (folder / "chat_template.jinja").write_text(MARKED)
    assert load_template(folder).source == MARKED
    (tmp_path / "own.jinja").write_text("own")
    assert load_template(folder, file=tmp_path / "own.jinja").source == "own"


def test_parquet_is_the_same_as_lines(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    folder = write_tokenizer(tmp_path / "tokenizer")
    form: SampleFormat = sample_format("messages", tokenizer=str(folder))  # type: ignore[assignment]
    records, tokenizer = conversations(20), load(folder)
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    write_lines(tmp_path / "b.jsonl", records)
    read = [
        [
            sample.text
            for piece in list_slices(file)
            for sample in read_records(piece, parse=lambda r: form.encode(r, tokenizer))
        ]
        for file in list_files(str(tmp_path))
        if file.path.parent == tmp_path and file.path.suffix != ".json"
    ]
    assert len(read) == 2
    assert read[0] == read[1]
