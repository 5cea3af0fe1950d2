"""Bytes, BPE trained here, and tokenizer files: lossless, repeatable, and refused in one line."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import UserError
from fivefold.trainer.data.tokenizer import (
    BpeTokenizer,
    ByteTokenizer,
    Tokenizer,
    build_tokenizer,
    choose_dtype,
    load,
    train_bpe,
)

TEXTS = [Path(__file__).read_text(), json.__doc__ or "", "naïve café, 日本語 \n\n\t x  y"]
BPE = train_bpe(TEXTS, vocab=300)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


@given(TEXT)
def test_encoded_text_decodes(text: str) -> None:
    for item in (ByteTokenizer(), BPE):
        ids = item.encode(text)
        assert item.decode(ids) == text
        assert ids.dtype == np.uint16
        assert ids.max(initial=0) < item.vocab
        assert item.end not in ids


def test_bytes_are_the_bytes_of_utf8() -> None:
    assert ByteTokenizer().encode("aé").tolist() == [97, 0xC3, 0xA9]
    assert ByteTokenizer().decode([97, 0xC3]) == "a�"


def test_a_nul_would_read_as_the_end_of_a_document() -> None:
    with pytest.raises(UserError, match="holds 2 NUL bytes, the first at offset 3"):
        ByteTokenizer().encode("é-\0\0")


def test_the_end_of_document_inside_a_text_is_text() -> None:
    ids = BPE.encode("<|end|>")
    assert len(ids) > 1
    assert BPE.decode(ids) == "<|end|>"
    assert BPE.decode([BPE.end]) == ""


def test_the_same_corpus_gives_the_same_bpe() -> None:
    again = train_bpe(iter(TEXTS), vocab=300)
    assert (again.text, again.fingerprint, again.vocab) == (BPE.text, BPE.fingerprint, 300)
    assert train_bpe(TEXTS, vocab=299).fingerprint != BPE.fingerprint


def test_bpe_compresses_text_like_its_corpus() -> None:
    assert len(BPE.encode("def test_")) < len("def test_")


@pytest.mark.parametrize("each", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
def test_a_saved_tokenizer_is_loaded_unchanged(each: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(each.text)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        again = load(path)
        assert (again.fingerprint, again.vocab, again.end) == (each.fingerprint, each.vocab, each.end)
        assert again.encode("words").tolist() == each.encode("words").tolist()


def test_a_file_that_truncates_pads_and_frames_does_not(tmp_path: Path) -> None:
    values = json.loads(BPE.text)
    values["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    values["added_tokens"][0]["content"] = "<|endoftext|>"
    values["model"]["vocab"] = {
        key.replace("<|end|>", "<|endoftext|>"): i for key, i in values["model"]["vocab"].items()
    }
    values["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    path = tmp_path / "foreign.json"
    path.write_text(json.dumps(values))
    foreign = load(path)
    assert foreign.end == 0
    assert foreign.encode("a longer text").tolist() == BPE.encode("a longer text").tolist()


def test_tokenizers_are_built_by_name() -> None:
    assert build_tokenizer("bytes") == ByteTokenizer()
    assert build_tokenizer("bpe:300", texts=lambda: TEXTS).fingerprint == BPE.fingerprint


def test_the_dtype_of_tokens_follows_the_vocabulary() -> None:
    assert [choose_dtype(vocab).name for vocab in (2**16, 2**16 + 1)] == ["uint16", "uint32"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("byte", "unknown tokenizer 'byte': write bytes, bpe:4096, or the path"),
        ("bpe:many", "'bpe:many': the vocabulary must be a whole number"),
        ("bpe:-1", "'bpe:-1': the vocabulary must be a whole number"),
        ("bpe:256", "bpe:256 is below 257"),
        ("bpe:99999", r"bpe:99999 needs more text: this corpus yields \d+ tokens"),
    ],
)
def test_unknown_tokenizer_names_are_errors(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        build_tokenizer(spec, texts=lambda: TEXTS)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{}", "not a tokenizer.json"),
        (b"\xff", "cannot be read as UTF-8"),
        (BPE.text.replace("<|end|>", "<|stop|>").encode(), "has no end-of-document token; add one of"),
    ],
    ids=["empty", "not UTF-8", "no end"],
)
def test_unreadable_tokenizer_files_are_errors(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data)
    with pytest.raises(UserError, match=message) as error:
        load(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_an_error_while_the_corpus_is_read_ends_the_training() -> None:
    def texts() -> list[str]:
        raise UserError("no corpus")

    with pytest.raises(UserError, match="no corpus"):
        build_tokenizer("bpe:300", texts=lambda: (text for _ in "a" for text in texts()))


def test_vocab_is_above_every_token_even_with_gaps() -> None:
    values = json.loads(BPE.text)
    values["model"]["vocab"]["far"] = 70_000
    far = BpeTokenizer.read(json.dumps(values), origin="here")
    assert far.vocab == 70_001
    assert far.encode("abc").dtype == np.uint32
