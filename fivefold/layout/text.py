"""The tokens of a layout's text: how they are split, which spellings are understood, and what each one sets.

    text      "TP 8/PP 4, ZeRO stage 3"
    tokens    ["tp8", "pp4", "zero3"]        ``split_tokens``: ``_REWRITES``, then spaces
    fields    {"tp": 8, "pp": 4, "zero": 3}  ``read_token``: ``_SPELLINGS``, then ``_COUNTED`` and ``_KEYWORDS``

A token that is none of these is a ``UserError``, with a hint for those that people often write (``_HINTS``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import get_args

from fivefold.adapter import ADAPTERS
from fivefold.bounded_types import RANKS
from fivefold.errors import UserError
from fivefold.layout.names import CP_KINDS, Offloaded
from fivefold.layout.schedule.pipeline_schedule import SCHEDULES
from fivefold.spelling import make_unknown_name_error

NODE = "node"  # the shard group of hsdp without a number: the ranks of a node
STAGES = 2**12  # more stages than any model has layers and ends

ZERO_STAGES = {"ddp": "zero0", "fsdp": "zero3", "hsdp": "zero3"}  # PyTorch's names
DATA_PARALLEL = re.compile(r"(ddp|fsdp|hsdp)(?:(?<=fsdp)[12])?(/\d+)?")  # version 1 or 2 of FSDP

_NUMBERED = ("dp", "tp", "cp", "pp", "ep", "etp", "v", "mbs")  # keywords that a number follows
_DEGREES = "|".join(_NUMBERED)
_BEGIN = r"(?<![a-wyz])"  # an x may stand before a token, as in dp2xtp8
_NAME = rf"(?:{_DEGREES}|vpp?|zero[-_]?)"
# What replaces parts of a text in lower case before it is split at spaces.
_REWRITES = (
    (re.compile(","), " "),
    (re.compile(rf"{_BEGIN}zero[\s_-]*stage[\s_=-]*(?=\d)"), "zero"),  # ZeRO stage 3
    (re.compile(rf"{_BEGIN}({_DEGREES}|vpp?|zero) +(?=\d)"), r"\1"),  # TP 8
    (  # tp8/pp4
        re.compile(
            rf"{_BEGIN}({_NAME}=?\d+(?:[x/]\d+)?|[fh]sdp[12]?(?:/\d+)?|ddp)\s*[/x+-]\s*(?={_NAME}=?\d|[fh]sdp|ddp)"
        ),
        r"\1 ",
    ),
)
_OPTION = re.compile(rf"(?<!\S)--?({_DEGREES})[\s=]+(\d+)")  # as launchers write a degree
# Other spellings of a token, and the printed one.
_SPELLINGS = (
    (re.compile(r"zero[-_](\d.*)"), r"zero\1"),  # ZeRO-3
    (re.compile(rf"({_DEGREES}|zero)=([\d*].*)"), r"\1\2"),  # dp=8
    (re.compile(r"vpp?=?(\d+)"), r"v\1"),  # Megatron's size of the virtual pipeline
)
_COUNTED = re.compile(
    rf"(?P<axis>{_DEGREES})(?P<degree>\d+)|tp(?P<outer>\d+)x(?P<inner>\d+)|"
    r"zero(?P<stage>\d+)(?:/(?P<group>\d+))?"
)
# Tokens that are none of a layout, and what to write.
_HINTS = (
    (re.compile(r"(?:mb|bs|micro[-_]?batch(?:[-_]?size)?)=?(\d+)"), r"; did you mean mbs\1?"),
    (
        re.compile(r"ckpt|recompute|recomputation|((gradient|activation)[-_]?)?checkpoint(ing)?"),
        "; did you mean ac=full, ac=selective or ac=norm+act?",
    ),
    (
        re.compile(r"(--)?(seq|sequence)([-_]?parallel(ism)?)?(=(true|1|on))?"),
        "; tp has sequence parallelism by default: leave it out",
    ),
)
_NUMBER_WORDS = {"thousand": "k", "million": "M", "billion": "B", "trillion": "T"}
_JOB_OPTIONS = ("precision", "seq", "gbs", "stack", "adapter", "attention")
_KINDS = [f"cp={kind}" for kind in CP_KINDS]
_WORDS = [
    *(f"{axis}{1 if axis == 'mbs' else 2}" for axis in _NUMBERED),
    *("zero1", "nosp", *SCHEDULES, *ZERO_STAGES),
    *("ac=none", "ac=selective", "ac=full", *_KINDS),
    *("offload=optimizer", "offload=activations", "offload=optimizer+activations", "offload=parameters"),
    "offload=optimizer+parameters",
]
_FORMS = (
    "dpN, tpN, tpNxN, cpN, ppN, vN, epN, etpN, mbsN, zero0 to zero3, zero3/N, "
    f"{', '.join((*ZERO_STAGES, *SCHEDULES))}, "
    f"ac=none, ac=selective, ac=full, ac=norm+act, {', '.join(_KINDS)}, nosp, stages=9-8, order=tp-cp-dp-pp, "
    "offload=optimizer+activations"
)


def check_text(text: str) -> None:
    """Raise ``UserError`` for a text without tokens, or with options as launchers write them."""
    if not text.strip():
        raise UserError(f"layout {text!r} is empty; write for example 'dp8 zero1', or dp1 for a single GPU")
    if (written := _OPTION.sub(r"\1\2", text)) != text:
        raise UserError(f"layout {text!r} has options of a command; write {written!r}")


def split_tokens(text: str) -> list[str]:
    """Split the text of a layout into its tokens, in lower case: at spaces, commas and ``tp8/pp4``, not ``tp 8``."""
    text = text.lower()
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text.split()


def spell_token(token: str) -> str:
    """Return the printed form of a token: ``DP=8`` is ``dp8``, ``ZeRO-3`` ``zero3``, ``fsdp/8`` ``zero3/8``."""
    token = token.lower()
    for pattern, spelling in _SPELLINGS:
        if match := pattern.fullmatch(token):
            return match.expand(spelling)
    if token != "hsdp" and (match := DATA_PARALLEL.fullmatch(token)):  # hsdp's shard group depends on the machine
        return ZERO_STAGES[match[1]] + (match[2] or "")
    if match := re.fullmatch(r"(ddp|fsdp)(\d+)", token):
        raise UserError(
            f"layout token {token!r}: the number of data-parallel ranks is that of dp; write 'dp{match[2]} {match[1]}'"
        )
    return token


def read_token(token: str) -> Mapping[str, object]:
    """Return the fields of ``Layout`` that a token sets; ``UserError`` for an unknown token."""
    printed = spell_token(token)
    if match := _COUNTED.fullmatch(printed):
        return _read_counted(token, match)
    if printed in _WHOLE_TOKENS:
        return _WHOLE_TOKENS[printed]
    name, assigned, value = printed.partition("=")
    if assigned and name in _KEYWORDS:
        return _KEYWORDS[name](token, value)
    raise _make_unknown_token_error(token, printed)


def _read_counted(token: str, match: re.Match[str]) -> Mapping[str, object]:
    """Return what a name with a number sets: a degree, a 2D degree of tp, or a ZeRO stage and its shard group."""
    if axis := match["axis"]:
        return {axis: _parse_degree(token, match["degree"])}
    if match["outer"]:
        outer, inner = _parse_degree(token, match["outer"]), _parse_degree(token, match["inner"])
        return {"tp": outer * inner, "tp_inner": inner}
    if match["stage"] not in ("0", "1", "2", "3"):
        raise UserError(f"layout token {token!r}: ZeRO has stages 0 to 3")
    group = {"shard_group": _parse_degree(token, match["group"])} if match["group"] else {}
    return {"zero": int(match["stage"])} | group


def _read_recomputation(_token: str, value: str) -> Mapping[str, object]:
    """Return the recomputation of ``ac=``, each group once."""
    kind, separator, ranks = value.partition("@")
    return {"ac": "+".join(dict.fromkeys(kind.split("+"))) + separator + ranks}


def _read_stages(token: str, value: str) -> Mapping[str, object]:
    return {"stages": tuple(size for part in value.split("-") for size in _parse_sizes(token, part))}


def _read_order(_token: str, value: str) -> Mapping[str, object]:
    return {"order": tuple(value.split("-"))}


def _read_offload(token: str, value: str) -> Mapping[str, object]:
    """Return what ``offload=optimizer+activations`` keeps in host memory, in a fixed order."""
    words = value.split("+")
    if set(words) - set(get_args(Offloaded)):
        known = [word for word in _WORDS if word.startswith("offload=")]
        raise make_unknown_name_error(token.lower(), known, kind="layout token")
    return {"offload": tuple(word for word in get_args(Offloaded) if word in words)}


_WHOLE_TOKENS: Mapping[str, Mapping[str, object]] = (
    {name: {"schedule": name} for name in SCHEDULES}
    | {kind: {"cp_kind": kind.removeprefix("cp=")} for kind in _KINDS}
    | {"sp": {"sp": True}, "nosp": {"sp": False}, "hsdp": {"zero": 3, "shard_group": NODE}}
)
_KEYWORDS: Mapping[str, Callable[[str, str], Mapping[str, object]]] = {
    "ac": _read_recomputation,
    "stages": _read_stages,
    "order": _read_order,
    "offload": _read_offload,
}


def _make_unknown_token_error(token: str, printed: str) -> UserError:
    """Return the error of a token that no layout has, with what to write where that is known."""
    name, assigned, value = printed.partition("=")
    if assigned and name in _JOB_OPTIONS:
        return UserError(f"layout token {token!r} is not part of a layout; give the option --{name} {value}")
    if letter := _NUMBER_WORDS.get(token.lower()):
        return UserError(f"unknown layout token {token!r}; write a number of tokens as one word: --tokens 15{letter}")
    for pattern, hint in _HINTS:
        if match := pattern.fullmatch(printed):
            return UserError(f"unknown layout token {token!r}{match.expand(hint)}")
    kind, _, rank = printed.partition(":")
    if kind in ADAPTERS:
        option = f"--adapter {kind}:{rank or 16}"
        return UserError(f"layout token {token!r} is not part of a layout; give the option {option}")
    return make_unknown_name_error(token, _WORDS, kind="layout token", forms=_FORMS)


def _parse_degree(token: str, digits: str) -> int:
    if len(digits) > len(str(RANKS)) or int(digits) < 1:
        raise UserError(f"layout token {token!r}: each number must be from 1 to {RANKS}")
    return int(digits)


def _parse_sizes(token: str, part: str) -> list[int]:
    """Return the layers of one stage (``8``) or of several (``8x14``)."""
    size, repeated, count_text = part.partition("x")
    if not size.isdecimal() or (repeated and not count_text.isdecimal()):
        raise UserError(f"layout token {token!r}: {part!r} is not a number of layers; write stages=7-8x14-7")
    count = _parse_degree(token, count_text) if count_text else 1
    if count > STAGES:
        raise UserError(f"layout token {token!r}: no model has layers for {count} stages; write fewer stages")
    return [0 if size == "0" else _parse_degree(token, size)] * count


def format_stages(stages: Sequence[int]) -> str:
    """Format ``stages=7-8x14-7``: the layers of each stage; three or more equal ones in a row as ``LAYERSxSTAGES``."""
    parts = []
    for size, equal_sizes in groupby(stages):
        count = len(list(equal_sizes))
        parts += [f"{size}x{count}"] if count > 2 else [str(size)] * count
    return f"stages={'-'.join(parts)}"
