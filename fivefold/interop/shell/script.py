"""Read a shell or Slurm script as the commands that it runs, with its variables replaced; undecided logic is listed."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from fivefold.interop.keys import shorten_value
from fivefold.interop.shell.expand import Variables, expand, split_words
from fivefold.results.reading import ParsedKey

OPENING = {"if": "fi", "for": "done", "while": "done", "until": "done", "case": "esac", "select": "done", "{": "}"}
CLOSING = frozenset(OPENING.values())
CONDITIONS = ("if", "elif", "while", "until")  # their words extend to the next ;
HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")
TEXTS: dict[str, Callable[[str, str], bool]] = {"==": operator.eq, "=": operator.eq, "!=": operator.ne}
NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}
ASSIGNS = re.compile(r"(\w+)(\+?)=(.*)", flags=re.DOTALL)
SBATCH = re.compile(r"^#SBATCH\s+(.*)$", flags=re.MULTILINE)
COMMANDS_WITHOUT_EFFECT = frozenset(
    """set export cd source . echo mkdir module conda unset ulimit readonly local declare cat cp rm touch ls sleep exit
    shift trap wait read chmod date nvidia-smi pip scontrol hostname [ [[ test : true false tee ln which""".split()  # noqa: SIM905
)


class Slurm(NamedTuple):
    """Nodes, and GPUs of each, from #SBATCH lines."""

    nodes: int | None = None
    per_node: int | None = None


class Script(NamedTuple):
    """Commands as words, the resources requested of Slurm, and remarks on what was not followed.

    ``environments``: the variables that are set when each command starts.
    """

    commands: tuple[tuple[str, ...], ...]
    slurm: Slurm
    remarks: tuple[ParsedKey, ...]
    variables: dict[str, str | list[str]]
    environments: tuple[Mapping[str, str], ...] = ()


def read_script(text: str, given: Mapping[str, str] | None = None) -> Script:
    """Read a script; ``given``: variables that are set when it is started."""
    slurm = _read_slurm(text)
    known: dict[str, str | list[str]] = {}
    if slurm.nodes:
        known |= {"SLURM_NNODES": str(slurm.nodes), "SLURM_JOB_NUM_NODES": str(slurm.nodes)}
    if slurm.per_node:
        known |= {"SLURM_GPUS_PER_NODE": str(slurm.per_node), "SLURM_GPUS_ON_NODE": str(slurm.per_node)}
    known |= given or {}
    commands: list[tuple[str, ...]] = []
    environments: list[Mapping[str, str]] = []
    remarks: list[ParsedKey] = []
    for statement in _list_executed(text, remarks, known):
        rest = _assign(split_words(statement.text.removeprefix("export ").strip()), known, fixed=given or {})
        words = [word for raw in rest for word in expand(raw, known)]
        texts = {name: value for name, value in known.items() if isinstance(value, str)}
        if words and words[0] not in COMMANDS_WITHOUT_EFFECT:
            commands.append(tuple(words))
            environments.append(texts)
        if "-c" in words[:-1] and {word.rpartition("/")[2] for word in words} & {"bash", "sh"}:  # srun bash -c "…"
            inner = read_script(words[words.index("-c") + 1], texts)
            commands += inner.commands
            environments += inner.environments
    return Script(tuple(commands), slurm, tuple(remarks), known, tuple(environments))


def _list_executed(text: str, remarks: list[ParsedKey], known: Variables) -> Iterator[Statement]:
    """Yield the statements that certainly run: those outside logic, and those of an ``if`` that can be decided.

    Any other block of logic leaves one remark.
    """
    skipped_blocks: list[str] = []  # blocks that are skipped
    outermost_skipped: Statement | None = None  # the outermost of them, until a statement in it has an effect
    branch_states: list[str] = []  # state of each ``if`` that is followed: on, off, or done
    for statement in split_statements(text):
        word = get_first_word(statement.text)
        if skipped_blocks:
            if outermost_skipped and _has_effect(statement.text):
                remarks.append(_describe_skipped(outermost_skipped))
                outermost_skipped = None
            if word in OPENING or is_function(statement.text):
                skipped_blocks.append(word)
            elif word in CLOSING or statement.text.rstrip().endswith("}"):
                skipped_blocks.pop()
            continue
        if branch_states and word in ("then", "elif", "else", "fi"):
            rest = statement.text[len(word) :].strip()
            if _enter_branch(branch_states, word, rest, known):
                remarks.append(_describe_skipped(statement))
            if word == "elif" or not rest:
                continue
            statement = Statement(statement.line, rest)
            word = get_first_word(rest)
        running = all(state == "on" for state in branch_states)
        if is_function(statement.text) or word in OPENING:
            holds = evaluate_condition(statement.text[2:], known) if word == "if" and running else None
            if holds is not None:
                branch_states.append("on" if holds else "off")
                continue
            is_one_line = statement.text.rstrip().endswith("}")
            if running and is_one_line:
                remarks.append(_describe_skipped(statement))
            outermost_skipped = statement if running and not is_one_line else None
            if not is_one_line:
                skipped_blocks.append(word)
        elif running:
            yield statement


def _has_effect(text: str) -> bool:
    """Return whether a statement of a block does more than print, copy or exit."""
    word = get_first_word(text)
    while word in ("then", "else", "do"):
        text = text[len(word) :].strip()
        word = get_first_word(text)
    without_effect = COMMANDS_WITHOUT_EFFECT | CLOSING | {"elif", "if", "", "break", "esac"}
    return word not in without_effect or "=" in word or (word == "export" and "=" in text)


def _describe_skipped(statement: Statement) -> ParsedKey:
    means = "is logic of the shell, which was not followed"
    return ParsedKey(key=f"line {statement.line}", value=shorten_value(" ".join(statement.text.split())), means=means)


def _enter_branch(branches_taken: list[str], word: str, condition: str, known: Variables) -> bool:
    """Go on to the next branch of the innermost ``if``.

    Return whether its condition is undecided, so that no further branch is followed.
    """
    if word == "fi":
        branches_taken.pop()
    elif word != "then" and branches_taken[-1] != "off":
        branches_taken[-1] = "done"
    elif word != "then":
        holds = True if word == "else" else evaluate_condition(condition, known)
        branches_taken[-1] = "done" if holds is None else "on" if holds else "off"
        return holds is None
    return False


def _assign(words: list[str], known: dict[str, str | list[str]], *, fixed: Mapping[str, str]) -> list[str]:
    """Remove the assignments at the front of a statement and store them, except ``fixed`` ones; return the rest."""
    while words and (assignment := ASSIGNS.fullmatch(words[0])):
        name, appends, value = assignment.groups()
        if value.startswith("(") and value.endswith(")"):
            elements = [word for raw in split_words(value[1:-1]) for word in expand(raw, known)]
            previous = known.get(name, []) if appends else []
            known[name] = [*(previous if isinstance(previous, list) else previous.split()), *elements]
        else:
            text = " ".join(expand(value, known))
            previous = known.get(name, "") if appends else ""
            known[name] = (previous if isinstance(previous, str) else " ".join(previous)) + text
        if name in fixed:
            known[name] = fixed[name]
        words = words[1:]
    return words


def _read_slurm(text: str) -> Slurm:
    options = " ".join(SBATCH.findall(text)).replace("=", " ")
    requested = dict(re.findall(r"(--[\w-]+|-N)\s+(?:gpu:)?(?:[a-zA-Z]\w*:)?(\d+)", options))
    nodes = requested.get("--nodes") or requested.get("-N")
    names = ("--gpus-per-node", "--gres", "--ntasks-per-node")
    per_node = next((requested[name] for name in names if name in requested), None)
    return Slurm(int(nodes) if nodes else None, int(per_node) if per_node else None)


def is_script(path: Path) -> bool:
    """Return whether a file is a script by its name."""
    return path.suffix in (".sh", ".slurm", ".sbatch", ".bash")


def evaluate_condition(condition: str, known: Variables) -> bool | None:
    """Return whether ``[ "$A" == b ]`` or ``[[ -z $A ]]`` holds; None if only running the script could tell."""
    holds: bool | None = None
    connective = ""
    words = [*split_words(condition.replace("||", " || ").replace("&&", " && ")), "]]"]
    while words:
        if words[0] not in ("[", "[[") or "]" + "]" * (len(words[0]) - 1) not in words:
            return None
        end = words.index("]" + "]" * (len(words[0]) - 1))
        result = _evaluate_words(words[1:end], known)
        holds = (
            result
            if not connective
            else _combine_and(holds, result)
            if connective == "&&"
            else _combine_or(holds, result)
        )
        connective, words = words[end + 1], words[end + 2 :]
        if connective not in ("||", "&&"):
            return holds if not words else None
    return None


def _combine_and(left: bool | None, right: bool | None) -> bool | None:
    return False if False in (left, right) else None if None in (left, right) else True


def _combine_or(left: bool | None, right: bool | None) -> bool | None:
    return True if True in (left, right) else None if None in (left, right) else False


def _evaluate_words(words: list[str], known: Variables) -> bool | None:
    """Evaluate the words within brackets: ``a || b && c``."""
    for sign, combine in (("||", _combine_or), ("&&", _combine_and)):
        if sign in words:
            position = words.index(sign)
            return combine(_evaluate_words(words[:position], known), _evaluate_words(words[position + 1 :], known))
    negated = words[:1] == ["!"]
    holds = _evaluate_test(words[1:] if negated else words, known)
    return None if holds is None else holds != negated


def _evaluate_test(words: list[str], known: Variables) -> bool | None:
    """Return the result of a shell test such as ``[ $A -gt 8 ]``, or None if it is not known."""
    if len(words) == 2 and words[0] in ("-z", "-n"):
        text = _expand_word(words[1], known)
        return None if text is None else (text == "") == (words[0] == "-z")
    if len(words) != 3:
        return None
    left, right = _expand_word(words[0], known), _expand_word(words[2], known)
    if left is None or right is None:
        return None
    if words[1] in TEXTS and not set(right) & set("*?["):  # not a pattern
        return TEXTS[words[1]](left, right)
    if words[1] in NUMBERS and left.lstrip("-").isdecimal() and right.lstrip("-").isdecimal():
        return NUMBERS[words[1]](int(left), int(right))
    return None


def _expand_word(word: str, known: Variables) -> str | None:
    """Return a word with its variables replaced; None if the script does not set one of them."""
    text = " ".join(expand(word, known))
    return None if "$" in text or "`" in text else text


class Statement(NamedTuple):
    """The text of a statement, with quotes and without comments."""

    line: int
    text: str


def split_statements(script: str) -> Iterator[Statement]:
    """Split at line ends, ``;``, ``&&``, ``||`` and ``|`` outside quotes, brackets and arrays."""
    text, line, start, quote, depth = "", 1, 1, "", 0
    position, end = 0, len(script)
    while position < end:
        char = script[position]
        pair = script[position : position + 2]
        if char == "\n":
            line += 1
        if pair == "\\\n" and quote != "'":
            text, position, line = text + " ", position + 2, line + 1
            continue
        if pair[:1] == "\\" and quote != "'":
            text, position = text + pair, position + 2
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"`":
            quote = char
        elif char == "#" and (not text or text[-1] in " \t\n("):
            position = script.find("\n", position) if "\n" in script[position:] else end
            continue
        elif char in "({":
            depth += 1
        elif char in ")}":
            depth = max(0, depth - 1)
        elif pair in ("||", "&&") and get_first_word(text) in CONDITIONS:
            text, position = text + pair, position + 2
            continue
        elif depth == 0 and (
            char in "\n;|" or pair == "&&" or (char == "&" and script[position - 1 : position] != ">")
        ):
            if text.strip():
                yield Statement(start, text.strip())
                if (heredoc := HEREDOC.search(text)) and char == "\n":
                    position, skipped = _skip_here_document(script, position + 1, heredoc[1])
                    line += skipped
                    text, start = "", line
                    continue
            text, start = "", line
            position += 2 if pair in ("&&", "||") else 1
            continue
        if not text.strip():
            start = line
        text += " " if char == "\n" and quote == "" else char
        position += 1
    if text.strip():
        yield Statement(start, text.strip())


def _skip_here_document(script: str, place: int, delimiter: str) -> tuple[int, int]:
    """Return the position after a here-document that ends with ``delimiter``, and the number of its lines."""
    lines = 0
    while place < len(script):
        end = script.find("\n", place)
        end = len(script) if end < 0 else end
        line, place, lines = script[place:end].strip(), end + 1, lines + 1
        if line == delimiter:
            break
    return place, lines


def get_first_word(text: str) -> str:
    """Return the first word, which tells the kind of a statement."""
    return text.split(None, 1)[0] if text.split() else ""


def is_function(text: str) -> bool:
    """Return whether a statement defines a function."""
    return get_first_word(text) == "function" or re.match(r"\w+\s*\(\s*\)", text) is not None
