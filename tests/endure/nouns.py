"""Random nouns for the command lines of ``words.py``: models, machines, layouts, jobs and files, legal and not."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from fivefold.errors import UserError
from fivefold.job import RECIPES, Job
from fivefold.layout.recomputation import RECOMPUTABLE
from fivefold.layout.schedule.pipeline_schedule import SCHEDULES
from fivefold.layout.spec import Layout
from fivefold.machine import toml
from fivefold.machine.catalog import ALIASES, INSTANCES
from fivefold.machine.catalog import list_names as chips
from fivefold.machine.catalog import resolve as machine
from fivefold.model.catalog import build_model, list_names
from fivefold.model.published import CATALOG, VERSIONS
from fivefold.record import Record
from fivefold.stack.catalog import STACKS
from tests.endure.files import BROKEN, Content, break_file
from tests.endure.settings import list_valid_settings, settings
from tests.endure.spellings import respell_layout, respell_machine, respell_model

SMALL = ("nano", "tiny", "gpt2", "qwen3-0.6b", "deepseek-v2-lite", "gpt-oss-20b", "llama3.2-1b")
NUMBERS = (
    "0", "-1", "1", "1.5", "nan", "inf", "-inf", "1e400", "1e9", "", " 5", "+4", "0x10", "٣", "²", "½", "many", "--",
    "2147483648", "9223372036854775807", "9223372036854775808", "1" + "0" * 20, "1" * 5000,
)  # fmt: skip
EMPTY = ("", "", " ", "\t")
JUNK: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    3,
    1.5,
    -0.5,
    1e300,
    float("nan"),
    float("inf"),
    2**31,
    2**63,
    10**7,
    10**20,
    "",
    "x",
    "64",
    "é\u202e",
    [],
    [1],
    [True],
    [[]],
    {},
    {"a": 1},
    {"factor": 2},
    ["full_attention"],
    "a" * 3000,
)
UNICODE = (
    "é", "模型", "\u202e", "a\nb", "🦙", "nano\t", "`x`", "[red]", "%s{0}", "../..", "/dev/null", "/dev/zero", "/", ".",
    "~", "a" * 300, "a/" * 2100, "a" * 251 + ".toml", "/dev/null/x", "/etc/passwd", "\ud800",
)  # fmt: skip


class Nouns:
    """What one input is about, and the files that it needs."""

    def __init__(self, number: int, *, seed: int) -> None:
        self.rng, self.number_of_case = random.Random(f"{seed}/{number}"), number
        self.clean = self.rng.random() < 0.5  # every word is one of its kind, and together they may still be illegal
        self.files: dict[str, Content] = {}
        self.spelling = random.Random(f"spelling {seed}/{number}")  # leaves the draws of ``rng`` as they were

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def slip(self, share: float) -> bool:
        return not self.clean and self.chance(share)

    def number(self, *sound: object, slips: float = 0.15) -> str:
        return self.rng.choice(NUMBERS) if self.slip(slips) else str(self.rng.choice(sound))

    # Nouns

    def model(self, *, small: bool = False) -> str:
        if self.slip(0.5):
            return self.model_file()
        if self.slip(0.04):
            return self.rng.choice(UNICODE)
        if self.chance(0.12):
            return self.repository()
        name = self.rng.choice(SMALL if small else list_names())
        return respell_model(self.spelling, name) if self.spelling.random() < 0.1 else name

    def repository(self) -> str:
        """Return the Hugging Face repository of a catalog model, with its owner or without, in any case."""
        text = self.rng.choice([*(entry.repository for entry in CATALOG.values() if entry.repository), *VERSIONS])
        text = text if self.chance(0.7) else text.rpartition("/")[2]
        return text if self.chance(0.8) else text.lower()

    def model_file(self) -> str:
        """Write a Hugging Face config or our own fields, complete or with a few values changed."""
        if self.chance(0.5):
            values = deepcopy(CATALOG[self.rng.choice(list(CATALOG))].config)
            name, suffix = self.rng.choice(("config", "m")), ".json"
        else:
            values = build_model(self.rng.choice(SMALL)).model_dump(mode="json", exclude_none=True)
            name, suffix = "m", self.rng.choice((".json", ".toml"))
        return self.file(name + suffix, self.change(values))

    def machine(self, *sizes: int) -> str:
        count = self.number(*(sizes or (8, 16, 64, 64, 72, 256, 512, 16384)), slips=0.05)
        if self.chance(0.12):
            values = machine(self.rng.choice(chips()), local=Path()).model_dump(mode="json", exclude_none=True)
            if self.chance(0.3):
                values = {"base": "l40s", "name": "ours"}
            return f"{self.file('cluster.toml', self.change(values))}:{count}"
        word = "local" if self.slip(0.02) else self.rng.choice((*chips(), "h100", "h100"))
        if self.slip(0.03):
            word = self.rng.choice(UNICODE)
        if self.chance(0.12):
            word = self.rng.choice((*INSTANCES, *ALIASES))
        text = word if self.chance(0.1) else f"{word}:{count}"
        if self.spelling.random() < 0.15 and count.isdecimal() and 0 < len(count) < 8 and word in chips():
            text = respell_machine(self.spelling, word, int(count))
        if self.chance(0.06):
            text = f"{self.rng.choice((1, 2, 3, 4, 12))}x{word}"
        while self.chance(0.12):
            key = self.rng.choice(("nic", "link", "node", "memory", "hbm", "price", "x"))
            unit = self.rng.choice(("Gbit", "Gbit/node", "GB", "GB/s", "GiB", "TB", "", "ft"))
            key, unit = ("nic", "Gbit") if self.clean else (key, unit)
            text += f" {key}={self.number(4, 8, 50, 100, 2.5, slips=0.3)}{unit}"
        return text

    def layout(self) -> str:
        """One that many models take, or any tokens."""
        tokens = self.make_consistent_tokens() if self.chance(0.75) else self.tokens()
        if self.slip(0.08):
            tokens.append(self.rng.choice((*UNICODE, "dp", "tp2x2", "tp4x0", "zero9", "=", "pd8")))
        self.rng.shuffle(tokens)
        text = " ".join(tokens)
        return respell_layout(self.spelling, text) if self.spelling.random() < 0.2 else text

    def make_consistent_tokens(self) -> list[str]:
        """Tokens that agree with one another."""
        rng = self.rng
        dp, tp, cp, pp = (
            rng.choice((1, 2, 4, 8)),
            rng.choice((1, 1, 2, 4)),
            rng.choice((1, 1, 1, 2)),
            rng.choice((1, 1, 2, 4)),
        )
        flat = rng.choice((f"tp{tp}", f"tp{tp}", f"tp{tp}", f"tp{max(1, tp // 2)}x{min(2, tp)}"))
        tokens = [f"dp{dp}", flat, f"cp{cp}", f"pp{pp}", f"mbs{rng.choice((1, 1, 2, 4))}"]
        if pp > 1:
            schedule = rng.choice(SCHEDULES)
            tokens += [schedule, *([f"v{rng.choice((2, 3))}"] if schedule == "interleaved" else [])]
        if tp > 1:
            tokens += rng.choice(([], [], ["nosp"], ["sp"], ["etp2"], [f"etp{tp}"]))
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
                ("dp", (1, 2, 4, 8), 0.8),
                ("tp", (1, 2, 2, 4, 8), 0.4),
                ("cp", (1, 2, 4), 0.2),
                ("pp", (1, 2, 4), 0.4),
                ("ep", (1, 2, 4, 8), 0.15),
                ("etp", (1, 2), 0.08),
                ("v", (1, 2, 3), 0.12),
                ("mbs", (1, 2, 4), 0.7),
            )
            if self.chance(share)
        ]
        if self.chance(0.15):
            tokens = [token for token in tokens if not token.startswith("tp")]
            tokens.append(f"tp{self.number(1, 2, 4, slips=0.04)}x{self.number(1, 2, 4, slips=0.04)}")
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
        return tokens + [word for word in ("cp=ring", "cp=ulysses", "nosp", "sp") if self.chance(0.06)]

    def job(self, *, attention: bool = True) -> list[str]:
        rng, words = self.rng, []
        if self.chance(0.7):
            words += ["--seq", self.number(64, 512, 1024, 1024, 2048, 4096, 8192, 131072, slips=0.05)]
        if self.chance(0.8):  # else one sequence per GPU
            words += ["--gbs", self.number(64, 64, 128, 256, 512, 1536, 7, slips=0.05)]
        if self.chance(0.2):
            words += ["--precision", rng.choice((*RECIPES, *(() if self.clean else ("fp7", ""))))]
        if attention and self.chance(0.15):
            words += [
                "--attention",
                rng.choice(
                    ("flash", "flash2", "flash1", "flash1_triton", "unfused", *(() if self.clean else ("fast",)))
                ),
            ]
        if self.chance(0.12):
            words += (
                ["--stack", rng.choice((*STACKS, *(() if self.clean else UNICODE)))]
                if self.clean or self.chance(0.5)
                else ["--job", self.job_file()]
            )
        while self.chance(0.25):
            words += ["--set", self.setting()]
        return [*words, *self.from_file()] if self.slip(0.04) else words

    def from_file(self) -> list[str]:
        """Words that another noun has said already, or of a file of any kind."""
        words = ["--gpus", self.machine()] if self.chance(0.7) else []
        return [*words, "--from", self.write_any_file()] if self.chance(0.8) else words

    def job_file(self) -> str:
        return self.file("job.toml", self.change(Job().model_dump(mode="json", exclude_none=True)))

    def setting(self) -> str:
        """``FIELD=VALUE``: of all of them the one whose turn it is, or any of the job or of a record within it."""
        if self.clean or self.chance(0.7):
            some = list_valid_settings() if self.clean or self.chance(0.3) else settings()
            return some[(self.number_of_case + 97 * self.rng.choice((0, 0, 1, 2, 3))) % len(some)]
        record: type[Record] = Job
        path: list[str] = []
        while True:
            path.append(self.rng.choice(list(record.model_fields)))
            kinds = (record.model_fields[path[-1]].annotation, *get_args(record.model_fields[path[-1]].annotation))
            inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Record)]
            if not inner or self.chance(0.1):
                break
            record = inner[0]
        words = [str(item) for kind in kinds for item in (kind, *get_args(kind)) if isinstance(item, str)]
        sound: tuple[object, ...] = (*words, *words, "true", "false", 1, 2, 4, 0.5, ",".join(words[:2]), "1,2")
        text = self.rng.choice(('[{of="head"}]', "[1,", "{a=1}", "é")) if self.chance(0.05) else self.number(*sound)
        if self.chance(0.03):
            path.append("x")
        return f"{'.'.join(path)}={text}"

    # Files

    def change(self, values: dict[str, Any]) -> dict[str, Any]:
        """With no, one or some values gone, new or of another kind, also within tables."""
        for _ in range(self.rng.choice((0, 0, 1, 1, 1, 2, 3))):
            table, path = values, 0
            while path < 2 and self.chance(0.5):
                inner = [value for value in table.values() if isinstance(value, dict)]
                inner += [
                    item
                    for value in table.values()
                    if isinstance(value, list)
                    for item in value
                    if isinstance(item, dict)
                ]
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
        if self.chance(0.97):
            self.files[name] = break_file(self.rng, text) if self.chance(0.08) else text
        return name

    def write_any_file(self) -> str:
        """A file of any kind under a name that some command takes for its own."""
        name = self.rng.choice(
            (
                "f.json",
                "f.toml",
                "f.yaml",
                "f.yml",
                "f.sh",
                "f.py",
                "f",
                "f.txt",
                "f.csv",
                "f.jsonl",
                "config.json",
                "run.toml",
                "here/step.json",
                "f.safetensors",
                "f.pickle",
            )
        )
        text = json.dumps(self.change(deepcopy(CATALOG[self.rng.choice(SMALL)].config)))
        self.files[name] = self.rng.choice(BROKEN) if self.chance(0.6) else break_file(self.rng, text)
        return self.rng.choice((name, name, name, "/dev/null", "/dev/zero", *UNICODE)) if self.chance(0.2) else name

    # Several at once

    def make_question(self, *, small: bool = False) -> list[str]:
        """A model, a machine and a layout, which often are of as many ranks."""
        layout = self.layout()
        ranks = self.ranks_of(layout)
        machine = f"{self.rng.choice(chips())}:{ranks}" if ranks and self.chance(0.6) else self.machine()
        model = self.model(small=small)
        return [model, machine, self.cut_stages(layout, model)]

    def cut_stages(self, layout: str, model: str) -> str:
        """Some pipelines with any cut of the model's layers, often with none at one or both ends."""
        rng = self.rng
        try:
            parsed = Layout.parse(layout)
        except UserError:
            return layout
        is_first_bare, is_last_bare = rng.choice(((False, False), (True, False), (False, True), (True, True)))
        inner_stages = parsed.pp * parsed.v - is_first_bare - is_last_bare
        layers = build_model(model).layers if model in CATALOG else 0
        if parsed.pp == 1 or not 0 < inner_stages <= layers or not self.chance(0.4):
            return layout
        cuts = [0, *sorted(rng.sample(range(1, layers), k=inner_stages - 1)), layers]
        sizes = [end - start for start, end in pairwise(cuts)]
        return str(parsed.replace(stages=(*[0] * is_first_bare, *sizes, *[0] * is_last_bare)))

    def ranks_of(self, layout: str) -> int:
        """Ranks of a layout; 0 if it is none."""
        try:
            return Layout.parse(layout).world
        except UserError:
            return 0


def _toml(values: dict[str, Any]) -> str:
    try:
        return toml.emit(values)
    except TypeError:  # TOML has no null
        return toml.emit(_drop_none(values))


def _drop_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop_none(item) for key, item in value.items() if item is not None}
    return [_drop_none(item) for item in value if item is not None] if isinstance(value, list) else value
