"""A shell or Slurm script as the commands that it runs, its variables put in; logic that is open is named."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from fivefold.interop.keys import shown
from fivefold.interop.shell.branches import decided
from fivefold.interop.shell.expand import Variables, expanded, raw_words
from fivefold.interop.shell.statements import CLOSING, OPENING, Statement, first_word, is_function, statements
from fivefold.results.reading import Said

ASSIGNS = re.compile(r"(\w+)(\+?)=(.*)", flags=re.DOTALL)
SBATCH = re.compile(r"^#SBATCH\s+(.*)$", flags=re.MULTILINE)
IDLE = frozenset(
    """set export cd source . echo mkdir module conda unset ulimit readonly local declare cat cp rm touch ls sleep exit
    shift trap wait read chmod date nvidia-smi pip scontrol hostname [ [[ test : true false tee ln which""".split()  # noqa: SIM905
)


class Slurm(NamedTuple):
    """Nodes and GPUs of each, as #SBATCH lines say."""

    nodes: int | None = None
    per_node: int | None = None


class Script(NamedTuple):
    """Commands as words, what Slurm is asked for, and what was not followed."""

    commands: tuple[tuple[str, ...], ...]
    slurm: Slurm
    remarks: tuple[Said, ...]
    variables: dict[str, str | list[str]]


def script(text: str, given: Mapping[str, str] | None = None) -> Script:
    """Read a script; ``given``: variables that are set when it is started."""
    slurm = _slurm(text)
    known: dict[str, str | list[str]] = {}
    if slurm.nodes:
        known |= {"SLURM_NNODES": str(slurm.nodes), "SLURM_JOB_NUM_NODES": str(slurm.nodes)}
    if slurm.per_node:
        known |= {"SLURM_GPUS_PER_NODE": str(slurm.per_node), "SLURM_GPUS_ON_NODE": str(slurm.per_node)}
    known |= given or {}
    commands: list[tuple[str, ...]] = []
    remarks: list[Said] = []
    for each in _followed(text, remarks, known):
        rest = _assigned(raw_words(each.text.removeprefix("export ").strip()), known, fixed=given or {})
        words = [word for raw in rest for word in expanded(raw, known)]
        if words and words[0] not in IDLE:
            commands.append(tuple(words))
        if "-c" in words[:-1] and {word.rpartition("/")[2] for word in words} & {"bash", "sh"}:  # srun bash -c "…"
            plain = {name: value for name, value in known.items() if isinstance(value, str)}
            commands += script(words[words.index("-c") + 1], plain).commands
    return Script(tuple(commands), slurm, tuple(remarks), known)


def _followed(text: str, remarks: list[Said], known: Variables) -> Iterator[Statement]:
    """The statements that are run for certain: those of an ``if`` that the script's own values decide, and no others.

    Any other block of logic leaves one remark.
    """
    inside: list[str] = []  # blocks that are passed over
    opened: Statement | None = None  # the outermost of them, until something in it could matter
    taken: list[str] = []  # of each ``if`` that is followed: on, off, or done
    for each in statements(text):
        word = first_word(each.text)
        if inside:
            if opened and _matters(each.text):
                remarks.append(_open(opened))
                opened = None
            if word in OPENING or is_function(each.text):
                inside.append(word)
            elif word in CLOSING or each.text.rstrip().endswith("}"):
                inside.pop()
            continue
        if taken and word in ("then", "elif", "else", "fi"):
            rest = each.text[len(word) :].strip()
            if _turn(taken, word, rest, known):
                remarks.append(_open(each))
            if word == "elif" or not rest:
                continue
            each = Statement(each.line, rest)
            word = first_word(rest)
        running = all(state == "on" for state in taken)
        if is_function(each.text) or word in OPENING:
            found = decided(each.text[2:], known) if word == "if" and running else None
            if found is not None:
                taken.append("on" if found else "off")
                continue
            whole = each.text.rstrip().endswith("}")
            if running and whole:
                remarks.append(_open(each))
            opened = each if running and not whole else None
            if not whole:
                inside.append(word)
        elif running:
            yield each


def _matters(text: str) -> bool:
    """Whether a statement of a block does more than print, copy or leave."""
    word = first_word(text)
    while word in ("then", "else", "do"):
        text = text[len(word) :].strip()
        word = first_word(text)
    passive = IDLE | CLOSING | {"elif", "if", "", "break", "esac"}
    return word not in passive or "=" in word or (word == "export" and "=" in text)


def _open(each: Statement) -> Said:
    means = "is logic of the shell, which was not followed"
    return Said(key=f"line {each.line}", value=shown(" ".join(each.text.split())), means=means)


def _turn(taken: list[str], word: str, condition: str, known: Variables) -> bool:
    """Go on to the next branch of the innermost ``if``; whether that is open, and no further one is followed."""
    if word == "fi":
        taken.pop()
    elif word != "then" and taken[-1] != "off":
        taken[-1] = "done"
    elif word != "then":
        holds = True if word == "else" else decided(condition, known)
        taken[-1] = "done" if holds is None else "on" if holds else "off"
        return holds is None
    return False


def _assigned(words: list[str], known: dict[str, str | list[str]], *, fixed: Mapping[str, str]) -> list[str]:
    """Take assignments off the front of a statement and remember them, but for ``fixed`` ones; what is left."""
    while words and (found := ASSIGNS.fullmatch(words[0])):
        name, more, value = found.groups()
        if value.startswith("(") and value.endswith(")"):
            inner = [word for raw in raw_words(value[1:-1]) for word in expanded(raw, known)]
            before = known.get(name, []) if more else []
            known[name] = [*(before if isinstance(before, list) else before.split()), *inner]
        else:
            text = " ".join(expanded(value, known))
            before = known.get(name, "") if more else ""
            known[name] = (before if isinstance(before, str) else " ".join(before)) + text
        if name in fixed:
            known[name] = fixed[name]
        words = words[1:]
    return words


def _slurm(text: str) -> Slurm:
    options = " ".join(SBATCH.findall(text)).replace("=", " ")
    found = dict(re.findall(r"(--[\w-]+|-N)\s+(?:gpu:)?(?:[a-zA-Z]\w*:)?(\d+)", options))
    nodes = found.get("--nodes") or found.get("-N")
    names = ("--gpus-per-node", "--gres", "--ntasks-per-node")
    per_node = next((found[name] for name in names if name in found), None)
    return Slurm(int(nodes) if nodes else None, int(per_node) if per_node else None)


def is_script(path: Path) -> bool:
    """Whether a file is a script by its name."""
    return path.suffix in (".sh", ".slurm", ".sbatch", ".bash")
