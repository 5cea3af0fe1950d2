"""Random command lines for the fuzz of ``commands.py``: words a user may type, legal ones and slips of the hand.

Everything is drawn from a ``random.Random``, so that a number names an input for good.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple, get_args

from fivefold.job import RECIPES, Job
from fivefold.layout.names import SCHEDULES
from fivefold.layout.spec import RECOMPUTABLE
from fivefold.machine import toml
from fivefold.machine.catalog import names as chips
from fivefold.machine.catalog import resolve as machine
from fivefold.model.catalog import CATALOG, named, names
from fivefold.record import Record
from fivefold.stack.catalog import STACKS
from tests.check.traces import kineto

SMALL = ("nano", "tiny", "gpt2", "qwen3-0.6b", "deepseek-v2-lite", "gpt-oss-20b", "llama3.2-1b")
NUMBERS = ("0", "-1", "1", "1.5", "nan", "inf", "-inf", "1e400", "1e9", "", " 5", "+4", "0x10", "٣", "²", "½", "many",
           "--", "2147483648", "9223372036854775807", "9223372036854775808", "1" + "0" * 20, "1" * 5000)  # fmt: skip
JUNK: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 1.5, -0.5, 1e300, float("nan"), float("inf"), 2**31, 2**63, 10**7, 10**20, "", "x",
    "64", "é\u202e", [], [1], [True], [[]], {}, {"a": 1}, {"factor": 2}, ["full_attention"], "a" * 3000,
)  # fmt: skip
UNICODE = ("é", "模型", "\u202e", "a\nb", "🦙", "nano\t", "`x`", "[red]", "%s{0}", "../..", "/dev/null", "/", ".", "~")


class Case(NamedTuple):
    """One command line and the files that it needs beside it."""

    words: list[str]
    files: dict[str, str | None]  # None: a folder


class Draw:
    """The words of one input."""

    def __init__(self, number: int, *, seed: int) -> None:
        self.rng = random.Random(f"{seed}/{number}")
        self.files: dict[str, str | None] = {}

    def case(self) -> Case:
        """A whole input."""
        command: Callable[[], list[str]] = self.rng.choices(
            (self.predict, self.search, self.ask, self.ratios, self.dryrun, self.published, self.folder, self.doctor,
             self.runs, self.traces, self.wrong), weights=(40, 6, 12, 8, 4, 1, 10, 4, 8, 4, 3),
        )[0]  # fmt: skip
        words = command()
        if self.chance(0.02):
            words.insert(self.rng.randrange(len(words) + 1), self.rng.choice((*UNICODE, *NUMBERS, "--jsn", "-x")))
        if self.chance(0.02):
            words.pop(self.rng.randrange(len(words)))
        return Case([word.replace("\0", "") for word in words], self.files)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def number(self, *sound: object, slips: float = 0.15) -> str:
        return self.rng.choice(NUMBERS) if self.chance(slips) else str(self.rng.choice(sound))

    # Nouns

    def model(self, *, small: bool = False) -> str:
        if self.chance(0.3):
            return self.model_file()
        if self.chance(0.04):
            return self.rng.choice(UNICODE)
        return self.rng.choice(SMALL if small else names())

    def model_file(self) -> str:
        """A Hugging Face config or our own fields, whole or with a few values changed."""
        if self.chance(0.5):
            values = deepcopy(CATALOG[self.rng.choice(list(CATALOG))].config)
            name, suffix = self.rng.choice(("config", "m")), ".json"
        else:
            values = named(self.rng.choice(SMALL)).model_dump(mode="json", exclude_none=True)
            name, suffix = "m", self.rng.choice((".json", ".toml"))
        return self.file(name + suffix, self.changed(values))

    def machine(self, *sizes: int) -> str:
        count = self.number(*(sizes or (8, 16, 64, 64, 72, 256, 512, 16384)), slips=0.05)
        if self.chance(0.12):
            values = machine(self.rng.choice(chips()), local=Path()).model_dump(mode="json", exclude_none=True)
            if self.chance(0.3):
                values = {"base": "l40s", "name": "ours"}
            return f"{self.file('cluster.toml', self.changed(values))}:{count}"
        word = "local" if self.chance(0.02) else self.rng.choice((*chips(), "h100", "h100"))
        if self.chance(0.03):
            word = self.rng.choice(UNICODE)
        text = word if self.chance(0.1) else f"{word}:{count}"
        while self.chance(0.12):
            key = self.rng.choice(("nic", "link", "node", "memory", "hbm", "price", "x"))
            unit = self.rng.choice(("Gbit", "Gbit/node", "GB", "GB/s", "GiB", "TB", "", "ft"))
            text += f" {key}={self.number(4, 8, 50, 100, 2.5, slips=0.3)}{unit}"
        return text

    def layout(self) -> str:
        """One that many models take, or any tokens."""
        tokens = self.sound() if self.chance(0.75) else self.tokens()
        if self.chance(0.04):
            tokens.append(self.rng.choice((*UNICODE, "dp", "tp2x2", "tp4x0", "zero9", "=", "pd8")))
        self.rng.shuffle(tokens)
        return " ".join(tokens)

    def sound(self) -> list[str]:
        """Tokens that agree with one another."""
        rng = self.rng
        dp, tp, cp, pp = (
            rng.choice((1, 2, 4, 8)),
            rng.choice((1, 1, 2, 4)),
            rng.choice((1, 1, 1, 2)),
            rng.choice((1, 1, 2, 4)),
        )
        tokens = [f"dp{dp}", f"tp{tp}", f"cp{cp}", f"pp{pp}", f"mbs{rng.choice((1, 1, 2, 4))}"]
        if pp > 1:
            schedule = rng.choice(SCHEDULES)
            tokens += [schedule, *([f"v{rng.choice((2, 3))}"] if schedule == "interleaved" else [])]
        if tp > 1:
            tokens += rng.choice(([], [], ["nosp"], ["etp2"], [f"etp{tp}"]))
        if cp > 1:
            tokens.append(rng.choice(("cp=ring", "cp=ulysses")))
        tokens += [f"ep{rng.choice((2, 4, 8))}"] if self.chance(0.15) else []
        zero = rng.choice((0, 1, 2, 3))
        tokens.append(f"zero{zero}/{cp}" if zero and self.chance(0.1) else f"zero{zero}")
        groups = rng.choice((["none"], ["selective"], ["full"], ["full/3"], rng.sample(RECOMPUTABLE, k=2)))
        tokens += ["ac=" + "+".join(groups)] if self.chance(0.6) else []
        tokens += ["order=" + "-".join(rng.sample(("tp", "cp", "dp", "pp"), k=4))] if self.chance(0.15) else []
        return tokens

    def tokens(self) -> list[str]:
        """Whatever the grammar has."""
        rng = self.rng
        tokens = [
            f"{axis}{self.number(*sizes, slips=0.04)}"
            for axis, sizes, share in (
                ("dp", (1, 2, 4, 8), 0.8), ("tp", (1, 2, 2, 4, 8), 0.4), ("cp", (1, 2, 4), 0.2), ("pp", (1, 2, 4), 0.4),
                ("ep", (1, 2, 4, 8), 0.15), ("etp", (1, 2), 0.08), ("v", (1, 2, 3), 0.12), ("mbs", (1, 2, 4), 0.7),
            )
            if self.chance(share)
        ]  # fmt: skip
        if self.chance(0.5):
            tokens.append(f"zero{self.number(0, 1, 2, 3, '3/2', '1/4', slips=0.04)}")
        if self.chance(0.3):
            tokens.append(rng.choice(SCHEDULES))
        if self.chance(0.4):
            words = ("none", "selective", "full", "full/2", *RECOMPUTABLE, "x")
            tokens.append("ac=" + "+".join(rng.choices(words, k=rng.choice((1, 1, 1, 2, 3)))))
        if self.chance(0.1):
            tokens.append("stages=" + "-".join(self.number(1, 2, 3, 16, slips=0.1) for _ in range(rng.randint(1, 8))))
        if self.chance(0.12):
            tokens.append("order=" + "-".join(rng.sample(("tp", "cp", "dp", "pp"), k=rng.choice((4, 4, 4, 3)))))
        return tokens + [word for word in ("cp=ring", "cp=ulysses", "nosp") if self.chance(0.06)]

    def job(self, *, attention: bool = True) -> list[str]:
        rng, words = self.rng, []
        if self.chance(0.7):
            words += ["--seq", self.number(64, 512, 1024, 1024, 2048, 4096, 8192, 131072, slips=0.05)]
        if self.chance(0.9):
            words += ["--gbs", self.number(64, 64, 128, 256, 512, 1536, 7, slips=0.05)]
        if self.chance(0.2):
            words += ["--precision", rng.choice((*RECIPES, "fp7", ""))]
        if attention and self.chance(0.15):
            words += ["--attention", rng.choice(("flash", "flash2", "flash1", "unfused", "fast"))]
        if self.chance(0.12):
            words += ["--stack", rng.choice((*STACKS, *UNICODE))] if self.chance(0.5) else ["--job", self.job_file()]
        while self.chance(0.25):
            words += ["--set", self.setting()]
        return words

    def job_file(self) -> str:
        return self.file("job.toml", self.changed(Job().model_dump(mode="json", exclude_none=True)))

    def setting(self) -> str:
        """``FIELD=VALUE`` of the job or of a record within it."""
        record: type[Record] = Job
        path: list[str] = []
        while True:
            path.append(self.rng.choice(list(record.model_fields)))
            kinds = (record.model_fields[path[-1]].annotation, *get_args(record.model_fields[path[-1]].annotation))
            inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Record)]
            if not inner or self.chance(0.1):
                break
            record = inner[0]
        words = [str(each) for kind in kinds for each in (kind, *get_args(kind)) if isinstance(each, str)]
        sound: tuple[object, ...] = (*words, *words, "true", "false", 1, 2, 4, 0.5, ",".join(words[:2]), "1,2")
        text = self.rng.choice(('[{of="head"}]', "[1,", "{a=1}", "é")) if self.chance(0.05) else self.number(*sound)
        if self.chance(0.03):
            path.append("x")
        return f"{'.'.join(path)}={text}"

    # Files

    def changed(self, values: dict[str, Any]) -> dict[str, Any]:
        """With no, one or some values gone, new or of another kind, also within tables."""
        for _ in range(self.rng.choice((0, 0, 1, 1, 1, 2, 3))):
            table, path = values, 0
            while path < 2 and self.chance(0.5):
                inner = [value for value in table.values() if isinstance(value, dict)]
                inner += [each for value in table.values() if isinstance(value, list) for each in value
                          if isinstance(each, dict)]  # fmt: skip
                table, path = (self.rng.choice(inner) if inner else table), path + 1
            key = self.rng.choice(list(table) or ["x"])
            match self.rng.randrange(5):
                case 0:
                    table.pop(key, None)
                case 1:
                    table[self.rng.choice((key + "_", "é", "a.b", ""))] = deepcopy(self.rng.choice(JUNK))
                case 2 if isinstance(table.get(key), int | float):
                    table[key] = table[key] * self.rng.choice((2, 3, 0.5, -1, 10**3, 10**6))
                case _:
                    table[key] = deepcopy(self.rng.choice(JUNK))
        return values

    def file(self, name: str, values: dict[str, Any]) -> str:
        """Its text, sometimes cut short or with a character changed; its name, sometimes of none."""
        text = json.dumps(values) if name.endswith(".json") else _toml(values)
        if self.chance(0.05) and text:
            place = self.rng.randrange(len(text))
            text = self.rng.choice(
                (text[:place], text[:place] + self.rng.choice("}\"'=[é\x00") + text[place + 1 :], "")
            )
        if self.chance(0.97):
            self.files[name] = None if self.chance(0.02) else text
        return name

    # Commands

    def predict(self) -> list[str]:
        words = ["predict", self.model(), self.machine(), self.layout(), *self.job()]
        words += [option for option in ("--json", "--operations", "--over-time") if self.chance(0.15)]
        if self.chance(0.03):
            words += ["--trace", self.rng.choice(("t.json", "no/t.json", ""))]
        return words

    def search(self) -> list[str]:
        words = ["search", self.model(small=True), self.machine(1, 2, 4, 8), *self.job()]
        if self.chance(0.3):
            words += ["--by", self.rng.choice(("time", "cost", "memory", "x"))]
        for option in ("--top", "--front"):
            words += [option, self.number(1, 3, 20)] if self.chance(0.2) else []
        return [*words, *(["--also", self.rng.choice((*RECIPES, "x"))] if self.chance(0.1) else [])]

    def ask(self) -> list[str]:
        question = self.rng.choice(
            ("micro-batch", "sequence", "batch", "run", "changes", "run", "batch", "gpus", "why")
        )
        small = question in ("gpus", "model")
        words = ["ask", question, self.model(small=small), self.machine(*((2, 4, 8) if small else ()))]
        words += [] if small else [self.layout() or "dp1"]
        words += self.job(attention=False)
        return [*words, "--tokens", self.number("1e12", "1e9", "5", slips=0.5)] if self.chance(0.4) else words

    def ratios(self) -> list[str]:
        words = ["ratios", self.model(), self.machine(), *([self.layout()] if self.chance(0.6) else [])]
        return [*words, *self.job(attention=False), *(["--degrees"] if self.chance(0.3) else [])]

    def dryrun(self) -> list[str]:
        words = ["dryrun", self.rng.choice(("nano", "tiny", self.model_file())), self.machine(1, 2, 4), self.layout()]
        words += ["--gbs", self.number(2, 4, 8, slips=0.05), "--seq", self.number(32, 64, slips=0.05)]
        for option in ("--ranks", "--schedule"):
            words += [option, self.number("0", "0,1", "x.csv", slips=0.3)] if self.chance(0.1) else []
        return words

    def published(self) -> list[str]:
        words = ["published", self.rng.choice(("korthikanti2022", "finetune_memory", "x", *UNICODE))]
        return [*words, *(option for option in ("--excluded", "--rows", "--markdown", "--json") if self.chance(0.2))]

    def folder(self) -> list[str]:
        """Commands that read what a run or another program left behind."""
        self.files["here"] = None
        if self.chance(0.7):
            values = self.changed(deepcopy(CATALOG[self.rng.choice(SMALL)].config))
            self.files["here/config.json"] = json.dumps(values)
        if self.chance(0.5):
            self.files["here/model.safetensors"] = self.rng.choice(("", "\x08\0\0\0\0\0\0\0{}      ", "garbage" * 9))
        if self.chance(0.5):
            step = {"predicted": {}, "measured": {}}
            self.files["here/step.json"] = json.dumps(self.changed(step)) if self.chance(0.8) else "{"
        place = self.rng.choice(("here", "here", "here", "nowhere", "here/config.json", *UNICODE))
        return self.rng.choice((
            ["show", place], ["show", place, "--charts"], ["show", place, "--json"], ["import", place],
            ["import", place, "--to", "run.toml"], ["export", place, "--to", "out"],
            ["export", place, "--to", "out", "--file-size", self.number("5GB", "1KiB", "0B", "x", slips=0.5)],
            ["generate", place, "--tokens", self.number(1, 5)],
            ["generate", place, "--temperature", self.number(0, 1, slips=0.7), "--top-p", self.number(0.5, slips=0.7)],
        ))  # fmt: skip

    def doctor(self) -> list[str]:
        self.files["d.py"] = self.rng.choice((
            "", "x = (", "raise ValueError('mine')", "model = 3", "def model(): return 3\ndef loss(m): return 4",
            "import torch\ndef model(): return torch.nn.Linear(2, 2)", "import nothing_of_this_name", "1 / 0", "\x00",
        ))  # fmt: skip
        place = self.rng.choice(("d.py", "d.py", "d.py", "nowhere.py", ".", *UNICODE))
        budget = ["--budget", self.number("24GiB", "1B", "0GiB", "7 GB", "x", slips=0.4)] if self.chance(0.4) else []
        return ["doctor", place, *budget]

    def traces(self) -> list[str]:
        """Profiler traces of one or two ranks with changed metadata and events, or cut short."""
        job = kineto.draw(self.rng.randrange(100), kineto.Shape(steps=2, operations=6))
        for rank in range(self.rng.choice((1, 2))):
            values = {**kineto.metadata(rank, 2), "traceEvents": kineto.events(job, rank)}
            self.file(f"t{rank}.json", self.changed(values))
        words = ["trace", *self.rng.choice((list(self.files), ["."], ["t0.json"], [self.rng.choice(UNICODE)]))]
        if self.chance(0.3):
            words += ["--against", self.rng.choice(SMALL), self.machine(2), self.layout(), "--gbs", self.number(2, 4)]
        for option in ("--step", "--top"):
            words += [option, self.number(3, 4, slips=0.3)] if self.chance(0.2) else []
        return [*words, *(["--machine", self.machine(2, 8)] if self.chance(0.3) else [])]

    def runs(self) -> list[str]:
        """Run files with a mistake for sure: their corpus is not there."""
        values: dict[str, Any] = {
            "model": "nano", "machine": self.rng.choice(("h100:2", "nowhere:2", "h100:2 nic=1Gbit")), "layout": "dp1",
            "folder": "runs", "job": {"sequence": 32, "global_batch": 2, "steps": 1, "precision": "fp32"},
            "data": {"tokenizer": "bytes"}, "checkpoints": {"keep": 2}, "faults": {}, "logs": {},
        }  # fmt: skip
        values = self.changed(values)
        values["data"] = {**(found if isinstance(found := values.get("data"), dict) else {}), "corpus": "nowhere/text"}
        words = [self.rng.choice(("train", "data", "numerics", "generate")), self.file("run.toml", values)]
        if words[0] == "train" and self.chance(0.5):
            words += ["--layout", self.layout()]
        if words[0] == "numerics" and self.chance(0.5):
            words += ["--sequences", self.number(1, 2, 3, slips=0.5), "--precision", self.rng.choice((*RECIPES, "x"))]
        return words

    def wrong(self) -> list[str]:
        rng = self.rng
        return rng.choice((
            ["calibrate", "--ranks", rng.choice(("", "x", "1,x", "-1", "0", "1,", "99999999999", "٣", "²", "1025"))],
            [rng.choice(UNICODE)], ["--help"], ["predict", "--help"], ["predict"], ["ask", "run"], ["", ""],
            ["--version"], ["search", "nano"], ["published", "--learn"],
        ))  # fmt: skip


def _toml(values: dict[str, Any]) -> str:
    try:
        return toml.emit(values)
    except TypeError:  # TOML has no null
        return toml.emit(_without_none(values))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value if each is not None] if isinstance(value, list) else value
