"""Chat templates: Jinja templates of a tokenizer that render a conversation as text, as transformers renders them.

A template is untrusted code, so it runs in Jinja's sandbox, which can change nothing that it is given. Text inside
``{% generation %} … {% endgeneration %}`` is what the assistant wrote (transformers: utils/chat_template_utils.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.errors import UserError
from fivefold.text_files import read_text

ChatMessage = Mapping[str, Any]
Span = tuple[int, int]  # characters from the first to the last but one

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


class TemplateError(ValueError):
    """A conversation that its template cannot render."""


class Rendered(NamedTuple):
    """A rendered conversation, and the characters that the template marks as written by the assistant."""

    text: str
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template. ``special_tokens``: variables that it reads, such as ``bos_token``; ``origin``: its file."""

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    origin: str = "chat_template"

    @property
    def marks_replies(self) -> bool:
        """Return whether the template marks what the assistant wrote."""
        return MARKED.search(self.source) is not None

    def render(self, messages: Sequence[ChatMessage], *, for_reply: bool = False, **variables: Any) -> Rendered:
        """Render ``messages``; ``for_reply``: up to where the assistant's next reply begins.

        ``variables``: further variables of the template, such as ``tools``. Raises ``TemplateError``.
        """
        compiled = _compile(self.source)
        compiled.blocks.clear()
        compiled.spans.clear()
        values = {**self.special_tokens, "tools": None, "documents": None} | variables
        try:
            for block in compiled.template.generate(messages=messages, add_generation_prompt=for_reply, **values):
                compiled.blocks.append(block)
        except Exception as error:  # a template is code, which may raise anything
            raise TemplateError(f"the chat template cannot render it: {error}") from None
        return Rendered("".join(compiled.blocks), tuple(compiled.spans))


class _Compiled(NamedTuple):
    """A compiled template, and the state of a rendering: the text so far in blocks, and the marked spans."""

    template: Any
    blocks: list[str]
    spans: list[Span]


@lru_cache(maxsize=4)
def _compile(source: str) -> _Compiled:
    """Compile ``source`` in an environment of its own; raises jinja2's ``TemplateSyntaxError``."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    blocks: list[str] = []
    spans: list[Span] = []

    class Generation(Extension):
        """The tag ``generation``, which notes where its text stands."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            """Turn the tag into a call of ``_note`` on its body."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

        def _note(self, caller: Any) -> str:
            text: str = caller()
            start = sum(map(len, blocks))
            spans.append((start, start + len(text)))
            return text

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False} | options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return _Compiled(environment.from_string(source), blocks, spans)


def load_template(tokenizer: Path | None, *, file: Path | None = None) -> ChatTemplate:
    """Read the template ``file``, or else that of the ``tokenizer``: a folder of Hugging Face, or a file in one.

    Raises ``UserError`` if there is none or it is no template.
    """
    folder = None if tokenizer is None else tokenizer if tokenizer.is_dir() else tokenizer.parent
    config = _read_config(folder)
    special_tokens = {name: text for name in SPECIAL_TOKENS if (text := read_token(config.get(name)))}
    if file is not None:
        source, origin = read_text(file, kind="UTF-8 text"), str(file)
    elif folder is not None and (folder / TEMPLATE_FILE).exists():
        source = read_text(folder / TEMPLATE_FILE, kind="UTF-8 text")
        origin = str(folder / TEMPLATE_FILE)
    else:
        source = _find_default_template(config.get("chat_template"))
        origin = str((folder or Path()) / CONFIG_FILE)
    if not source:
        where = (
            f"{folder} has no {TEMPLATE_FILE}, and no chat_template in {CONFIG_FILE}"
            if folder
            else "a tokenizer that was built here has none"
        )
        raise UserError(
            f"tokenizer {tokenizer or 'built here'}: no chat template: {where}; "
            "set [data] chat_template to a .jinja file"
        )
    _check_syntax(source, origin=origin)
    return ChatTemplate(source, special_tokens, origin)


def read_special_token(tokenizer: Path | None, name: str) -> str:
    """Return a special token of a Hugging Face tokenizer, such as its ``eos_token``; "" if it does not say."""
    if tokenizer is None:
        return ""
    return read_token(_read_config(tokenizer if tokenizer.is_dir() else tokenizer.parent).get(name))


def read_token(value: object) -> str:
    """Return the text of a token of ``tokenizer_config.json``: a text, or an object with its ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _read_config(folder: Path | None) -> dict[str, Any]:
    path = None if folder is None else folder / CONFIG_FILE
    if path is None or not path.exists():
        return {}
    try:
        values = json.loads(read_text(path, kind="UTF-8 text"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    return values if isinstance(values, dict) else {}


def _find_default_template(value: object) -> str:
    """Return the template of ``tokenizer_config.json``: a text, or the one named default in a list."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else ""


def _check_syntax(source: str, *, origin: str) -> None:
    from jinja2 import TemplateSyntaxError

    try:
        _compile(source)
    except TemplateSyntaxError as error:
        raise UserError(f"{origin}: not a chat template: line {error.lineno}: {error.message}") from None
