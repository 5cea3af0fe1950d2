"""Random command lines for the fuzz of ``commands.py``: words a user may type, legal ones and slips of the hand.

Everything is drawn from a ``random.Random``, so that a number names an input for good.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

from fivefold.interop.registry import FORMATS
from fivefold.job import RECIPES
from fivefold.model.published import CATALOG
from fivefold.requests.output_schemas import OUTPUTS
from fivefold.stack.catalog import STACKS
from tests.endure.files import Content
from tests.endure.nouns import EMPTY, NUMBERS, SMALL, UNICODE, Nouns
from tests.profiling.traces import kineto

SETTINGS = "settings/fivefold/config.toml"  # the user's, as ``isolate`` sets XDG_CONFIG_HOME


class Case(NamedTuple):
    """One command line and the files that it needs."""

    words: list[str]
    files: dict[str, Content]


class Draw(Nouns):
    """The words of one input."""

    def case(self) -> Case:
        """A complete input."""
        command: Callable[[], list[str]] = self.rng.choices(
            (
                self.predict,
                self.search,
                self.ask,
                self.ratios,
                self.dryrun,
                self.folder,
                self.doctor,
                self.write_run_files,
                self.traces,
                self.draw_wrong_words,
                self.compare,
                self.plan,
                self.configs,
                self.sweep,
                self.files_of_others,
                self.settings_and_schemas,
            ),
            weights=(40, 6, 24, 8, 4, 10, 4, 8, 4, 3, 8, 2, 12, 4, 8, 4),
        )[0]
        words = command()
        if self.slip(0.06):
            words[self.rng.randrange(len(words))] = self.rng.choice(EMPTY)
        if self.slip(0.04):
            words.insert(self.rng.randrange(len(words) + 1), self.rng.choice((*UNICODE, *NUMBERS, "--jsn", "-x")))
        if self.slip(0.04):
            words.pop(self.rng.randrange(len(words)))
        return Case([word.replace("\0", "") for word in words], self.files)

    def predict(self) -> list[str]:
        words = ["predict", *self.make_question(), *self.job()]
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
        words += ["--also", self.rng.choice((*RECIPES, "x"))] if self.chance(0.1) else []
        if self.spelling.random() < 0.15:  # the fewest GPUs, up to those of the machine, or of any number without one
            words[2] = words[2] if self.spelling.random() < 0.5 else self.spelling.choice(("h100", "2x8 H100", "l4"))
            words += ["--deadline", self.spelling.choice(("30d", "400d", "1h", "0d", "x")), "--tokens", "1e9"]
        return words

    def ask(self) -> list[str]:
        question = self.rng.choice(
            (
                "micro-batch",
                "micro-batch",
                "sequence",
                "batch",
                "run",
                "tokens",
                "changes",
                "changes",
                "gpus",
                "model",
                "finetune",
                "why",
            )
        )
        small = question in ("gpus", "model", "finetune")
        words = ["ask", question]
        words += [self.model(small=True), self.machine(2, 4, 8)] if small else self.make_question()
        words += self.job(attention=False)
        if self.chance(0.8 if question == "tokens" else 0.02):
            words += self.rng.choice((["--deadline", "30d"], ["--budget", "50k", "--price", "2"], ["--budget", "x"]))
        if self.chance(0.05):
            words += ["--noise", self.rng.choice((*NUMBERS, self.write_any_file(), *UNICODE))]
        if self.chance(0.1):
            words += [
                self.rng.choice(("--assume", "--price")),
                self.rng.choice(("x", "", "pue=1.2", "mfu=9", "h100=2/h")),
            ]
        return [*words, "--tokens", self.number("1e12", "1e9", "5", slips=0.5)] if self.chance(0.4) else words

    def ratios(self) -> list[str]:
        words = ["ratios", *self.make_question()[: 3 if self.chance(0.7) else 2]]
        return [*words, *self.job(attention=False), *(["--degrees"] if self.chance(0.3) else [])]

    def dryrun(self) -> list[str]:
        words = ["dryrun", self.rng.choice(("nano", "tiny", self.model_file())), self.machine(1, 2, 4), self.layout()]
        words += ["--gbs", self.number(2, 4, 8, slips=0.05), "--seq", self.number(32, 64, slips=0.05)]
        for option in ("--ranks", "--schedule"):
            words += [option, self.number("0", "0,1", "x.csv", slips=0.3)] if self.chance(0.1) else []
        return [*words, "--schedule", self.write_any_file()] if self.chance(0.05) else words

    def compare(self) -> list[str]:
        """Several layouts on several machines, in any order, or run files."""
        if self.chance(0.2):
            return ["compare", *(self.write_any_file() for _ in range(self.rng.randint(1, 3)))]
        words = [self.model(), *(self.machine() for _ in range(self.rng.choice((1, 1, 2, 0))))]
        words += [self.layout() for _ in range(self.rng.choice((1, 2, 2, 3, 0)))]
        if self.chance(0.1):
            self.rng.shuffle(words)
        for option, some in (("--stacks", STACKS), ("--precisions", RECIPES)):
            words += [option, ",".join((*self.rng.sample([*some], 2), *self.rng.choice(((), ("",)))))] * self.chance(
                0.15
            )
        return ["compare", *words, *self.job()]

    def plan(self) -> list[str]:
        """The steps to a layout of a small model."""
        words = ["plan", self.model(small=True), self.machine(1, 2, 4, 8), *self.job()]
        words += ["--batch", self.number(8, 64)] if self.chance(0.3) else []
        words += ["--where", self.rng.choice(("tp=1", "pp<=2", "tp=2x2", "", "x", "tp>", "dp=0"))] * self.chance(0.3)
        return [*words, "--tokens", self.number("1e9", "2T", slips=0.3)] if self.chance(0.3) else words

    def configs(self) -> list[str]:
        """Configs of other software, read and written."""
        if self.chance(0.5):
            return ["read", self.write_any_file(), *(["--gpus", self.machine()] if self.chance(0.3) else [])]
        to = self.rng.choice((*(form.name for form in FORMATS), "", "x"))
        words = ["write", self.layout(), "--to", to, "--model", self.model(), *self.job()]
        words += ["--gpus", self.machine()] if self.chance(0.7) else []
        if self.chance(0.7):  # what it writes is read back, perhaps with the model before it
            self.files["out"] = None
            words += ["-o", "out"]
        return words

    def settings_and_schemas(self) -> list[str]:
        """User settings, of which some are perhaps there, and schemas of answers."""
        if self.chance(0.3):
            return ["schema", self.rng.choice((*OUTPUTS, *EMPTY))]
        if self.chance(0.6):
            settings = {"stack": "torchtitan", "machine": "h100:8", "prices": {"h100": 2.5}, "output": {"width": 100}}
            self.file(SETTINGS, self.change(settings))
        if self.chance(0.4):
            return ["predict", self.rng.choice(SMALL), *self.rng.choice(((), ("h100:4",))), *self.job()]
        keys = ("stack", "machine", "prices.h100", "prices.x", "output.color", "output.width", "prices", *EMPTY)
        values = ("torchtitan", "h100:64", "2.5", "never", "100", "-1", *EMPTY)
        words = ["config", self.rng.choice(("set", "get", "unset", "list", "x")), self.rng.choice(keys)]
        return [*words, self.rng.choice(values)] if words[1] == "set" else words[: self.rng.choice((2, 3))]

    def sweep(self) -> list[str]:
        """A sweep file with a few values changed, or a file of any kind."""
        values = {
            "models": ["nano"],
            "machines": ["h100:4"],
            "layouts": ["dp* tp{1,2} zero{0,1}", "dp4 zero3", self.layout()],
            "sequences": [64],
            "batches": [8],
            "precisions": ["bf16"],
            "recomputations": ["none"],
            "job": {"steps": 3},
        }
        name = self.file("s.toml", self.change(values)) if self.chance(0.8) else self.write_any_file()
        return ["sweep", name, "--dry"] if self.chance(0.3) else ["sweep", name, "--out", "rows"]

    def files_of_others(self) -> list[str]:
        """A command that reads files, and files of any kind."""
        some = self.write_any_file()
        rng = self.rng
        place = "here" if "here/step.json" in self.files else some
        return rng.choice(
            (
                ["show", place],
                ["report", some],
                ["report", some, self.write_any_file()],
                ["trace", some],
                ["explain", some],
                ["train", some],
                ["data", some],
                ["numerics", some],
                ["generate", some],
                ["import", some],
                ["export", some, "--to", "out"],
                ["doctor", some],
                ["sweep", some],
                ["read", some],
                ["compare", some, some],
                ["draw", "pipeline", *self.make_question()],
                ["draw", rng.choice(("memory", "ring", "", "x")), *self.make_question()],
                ["explain", some, "--against", *self.make_question()],
                ["predict", some, "h100:8", "dp8"],
                ["predict", "nano", some, "dp1"],
                ["predict", "nano", "h100:8", "dp8", "--job", some],
                ["predict", "--from", some, "--gpus", "h100:8"],
            )
        )

    def folder(self) -> list[str]:
        """Commands that read what a run or another program left behind."""
        self.files["here"] = None
        if self.chance(0.7):
            values = self.change(deepcopy(CATALOG[self.rng.choice(SMALL)].config))
            self.files["here/config.json"] = json.dumps(values)
        if self.chance(0.5):
            self.files["here/model.safetensors"] = self.rng.choice(("", "\x08\0\0\0\0\0\0\0{}      ", "garbage" * 9))
        if self.chance(0.5):
            step = {"predicted": {}, "measured": {}}
            self.files["here/step.json"] = json.dumps(self.change(step)) if self.chance(0.8) else "{"
        place = self.rng.choice(("here", "here", "here", "nowhere", "here/config.json", *UNICODE))
        return self.rng.choice(
            (
                ["show", place],
                ["show", place, "--charts"],
                ["show", place, "--json"],
                ["import", place],
                ["import", place, "--to", "run.toml"],
                ["export", place, "--to", "out"],
                ["export", place, "--to", "out", "--file-size", self.number("5GB", "1KiB", "0B", "x", slips=0.5)],
                ["generate", place, "--tokens", self.number(1, 5)],
                [
                    "generate",
                    place,
                    "--temperature",
                    self.number(0, 1, slips=0.7),
                    "--top-p",
                    self.number(0.5, slips=0.7),
                ],
            )
        )

    def doctor(self) -> list[str]:
        self.files["d.py"] = self.rng.choice(
            (
                "",
                "x = (",
                "raise ValueError('mine')",
                "model = 3",
                "def model(): return 3\ndef loss(m): return 4",
                "import torch\ndef model(): return torch.nn.Linear(2, 2)",
                "import nothing_of_this_name",
                "1 / 0",
                "\x00",
            )
        )
        place = self.rng.choice(("d.py", "d.py", "d.py", "nowhere.py", ".", *UNICODE))
        budget = ["--budget", self.number("24GiB", "1B", "0GiB", "7 GB", "x", slips=0.4)] if self.chance(0.4) else []
        return ["doctor", place, *budget]

    def traces(self) -> list[str]:
        """Profiler traces of one or two ranks with changed metadata and events, or cut short."""
        job = kineto.draw(self.rng.randrange(100), kineto.Shape(steps=2, operations=6))
        for rank in range(self.rng.choice((1, 2))):
            values = {**kineto.metadata(rank, 2), "traceEvents": kineto.events(job, rank)}
            self.file(f"t{rank}.json", self.change(values))
        words = ["trace", *self.rng.choice((list(self.files), ["."], ["t0.json"], [self.rng.choice(UNICODE)]))]
        if self.chance(0.3):
            words += ["--against", self.rng.choice(SMALL), self.machine(2), self.layout(), "--gbs", self.number(2, 4)]
        for option in ("--step", "--top"):
            words += [option, self.number(3, 4, slips=0.3)] if self.chance(0.2) else []
        return [*words, *(["--machine", self.machine(2, 8)] if self.chance(0.3) else [])]

    def write_run_files(self) -> list[str]:
        """Run files with a mistake for sure: their corpus is not there."""
        values: dict[str, Any] = {
            "model": self.rng.choice(("nano", "nano", *EMPTY)),
            "machine": self.rng.choice(("h100:2", "nowhere:2", "h100:2 nic=1Gbit")),
            "layout": "dp1",
            "folder": "runs",
            "job": {"sequence": 32, "global_batch": 2, "steps": 1, "precision": "fp32"},
            "data": {"tokenizer": "bytes"},
            "checkpoints": {"keep": 2},
            "faults": {},
            "logs": {},
        }
        values = self.change(values)
        values["data"] = {
            **(result if isinstance(result := values.get("data"), dict) else {}),
            "corpus": "nowhere/text",
        }
        words = [self.rng.choice(("train", "data", "numerics", "generate")), self.file("run.toml", values)]
        if words[0] == "train" and self.chance(0.5):
            words += ["--layout", self.layout()]
        if words[0] == "numerics" and self.chance(0.5):
            words += ["--sequences", self.number(1, 2, 3, slips=0.5), "--precision", self.rng.choice((*RECIPES, "x"))]
        return words

    def draw_wrong_words(self) -> list[str]:
        rng = self.rng
        return rng.choice(
            (
                [
                    "calibrate",
                    "--processes",
                    rng.choice(("", "x", "1,x", "-1", "0", "1,", "99999999999", "٣", "²", "1025")),
                ],
                [rng.choice(UNICODE)],
                ["--help"],
                ["predict", "--help"],
                ["predict"],
                ["ask", "run"],
                ["", ""],
                ["--version"],
                ["search", "nano"],
            )
        )
