"""Configs of other software: plans that must come back from each, and written files with broken lines.

    python -m tests.endure.formats --count 1700 --broken 500 --searched 8 --keys 100

A plan that a format writes is read back as it was; a file with lines cut, doubled or changed is read, or refused in
one line; whatever a search for a stack proposes is written, and comes back; of a config with keys added at random from
its software's own list, each key is in one list of the reading, and one with an effect makes an error. Prints what does
not hold, and exits 1 if anything does not.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fivefold.errors import UserError
from fivefold.interop.format import Overrides
from fivefold.interop.read import read
from fivefold.interop.registry import FORMATS
from fivefold.interop.write import write
from fivefold.rendering.progress import show_progress
from tests.endure.stop_signals import end_at_stop_signal
from tests.interop.drawn_keys import SOFTWARE, draw_keys, find_fault
from tests.interop.draws import Range, check_round_trip, plans
from tests.interop.test_searched import DENSE, EXPERTS, STACKS, check

AMONG = {
    "accelerate": Range(axes=("dp",), recipes=("bf16-grad16", "fp32", "fp16"), acs=("none", "full")),
    "deepspeed": Range(axes=("dp",), recipes=("bf16", "bf16-grad16", "fp16"), acs=("none", "full")),
    "nanotron": Range(models=("tiny", "llama2-7b", "qwen2-7b"), axes=("dp", "tp", "cp", "pp"), acs=("none", "full")),
    "torchtitan": Range(recipes=("bf16", "fp32"), acs=("none", "full")),
    "torchtitan-0.2": Range(models=("llama3-8b", "qwen3-8b", "deepseek-v3"), acs=("none", "full", "full/2")),
}
JUNK = (
    "", "0", "-1", "nan", "1e999", "true", "null", "[]", "{}", "'", '"', "$X", "${X", "x" * 5000, "9" * 40, "\x00",
    "é",
)  # fmt: skip


def check_round_trips(name: str, stack: str, count: int, seed: int) -> Iterator[str]:
    """What does not hold of ``count`` legal plans; the last line says how many were written."""
    taken = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, plan in enumerate(plans(stack, count=count, seed=seed, among=AMONG.get(name, Range()))):
            try:
                taken += check_round_trip(plan._replace(machine="h100:8"), to=name, folder=Path(folder)) is None
            except Exception as error:
                yield f"{name}, seed {seed}, plan {number} ({plan.layout}): {describe_error(error)}"
    print(f"{name}: {taken} of {count} plans were written, and came back")


def check_proposals(stack: str, count: int, seed: int) -> Iterator[str]:
    """What is refused of all that searches of ``count`` questions propose, of models with experts and without."""
    some, proposed = random.Random(f"{stack} {seed}"), 0
    for number in range(count):
        model = some.choice(DENSE if stack == "nanotron" or number % 2 else EXPERTS)
        ranks = some.choice((4, 8, 16) if model in DENSE else (8, 16))
        try:
            proposed += check(stack, some, model=model, ranks=ranks)
        except Exception as error:
            yield f"{stack}, seed {seed}, question {number}, {model} on {ranks}: {describe_error(error)}"
    print(f"{stack}: {proposed} layouts were proposed by {count} searches")


def unsaid(name: str, count: int, seed: int) -> Iterator[str]:
    """Return what of ``count`` configs with 1 to 12 more keys is silently ignored, or fails in several lines."""
    some = random.Random(f"{name} {seed}")
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            keys = draw_keys(name, some, count=some.randint(1, 12))
            try:
                fault = find_fault(name, keys, Path(folder))
            except Exception as error:
                fault = describe_error(error)
            if fault:
                yield f"{name}, seed {seed}, config {number}, {keys}: {fault}"


def check_broken_files(name: str, stack: str, count: int, seed: int) -> Iterator[str]:
    """What a broken file raises that is no ``UserError`` of one line."""
    some = random.Random(seed)
    written: list[dict[str, str]] = []
    while not written:  # of some software few drawn plans can be written
        for plan in plans(stack, count=40, seed=some.getrandbits(32), among=AMONG.get(name, Range())):
            with suppress(UserError):
                written.append(write(plan._replace(machine="h100:8"), to=name).files)
    for number in range(count):
        files = dict(some.choice(written))
        victim = some.choice([file for file in files if file != "train.py"])
        files[victim] = mutate(files[victim], some)
        with tempfile.TemporaryDirectory() as folder:
            for file, text in files.items():
                (Path(folder) / file).write_text(text, encoding="utf-8")
            try:
                read([str(Path(folder) / next(iter(files)))], Overrides(ranks=some.choice((None, 8, 16))))
            except UserError as refusal:
                if "\n" in str(refusal):
                    yield f"{name}, seed {seed}, broken {number}: several lines: {refusal}"
            except Exception as error:
                yield f"{name}, seed {seed}, broken {number}: {describe_error(error)}"


def mutate(text: str, some: random.Random) -> str:
    """A text with some of its lines cut, doubled, moved or changed."""
    lines = text.splitlines()
    for _ in range(some.choice((1, 1, 2, 4))):
        place = some.randrange(len(lines))
        line = lines[place]
        kind = some.randrange(5)
        if kind == 0:
            del lines[place]
        elif kind == 1:
            lines.insert(some.randrange(len(lines)), line)
        elif kind == 2:
            lines[place] = line[: some.randrange(len(line) + 1)]
        else:
            words = line.split(" ")
            chosen = [index for index, word in enumerate(words) if word and not word.startswith("#")]
            if chosen:
                words[some.choice(chosen)] = some.choice(JUNK)
            lines[place] = " ".join(words)
        if not lines:
            return ""
    return "\n".join(lines) + "\n"


def describe_error(error: Exception) -> str:
    """An error with its place, in one line."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} {str(error)[:300]} ({place.filename}:{place.lineno})".replace("\n", " ")


def main() -> int:
    """All formats, one after another."""
    options = argparse.ArgumentParser()
    options.add_argument("--count", type=int, default=500)
    options.add_argument("--broken", type=int, default=500)
    options.add_argument("--searched", type=int, default=8)
    options.add_argument("--keys", type=int, default=100)
    options.add_argument("--seed", type=int, default=0)
    asked = options.parse_args()
    forms = [form for form in FORMATS if form.emit and form.parse]
    wrong: list[str] = []
    with show_progress("formats") as progress, end_at_stop_signal():
        for number, form in enumerate(forms):
            stack = form.stack or "fsdp2"  # of a config that names its software
            wrong += check_round_trips(form.name, stack, asked.count, asked.seed)
            wrong += check_broken_files(form.name, stack, asked.broken, asked.seed)
            progress("formats", number + 1, len(forms))
        for name in SOFTWARE:
            wrong += unsaid(name, asked.keys, asked.seed)
        for stack in STACKS:
            wrong += check_proposals(stack, asked.searched, asked.seed)
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
