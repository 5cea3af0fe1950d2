"""Short runs of the real command, one after the other: each ends with exit code 0 and its closing table.

    python -m tests.endure.runs --runs 300 --load 2 --folder runs/endure-runs

Layout (one to four processes) and options are drawn anew for each; ``--load``: processes that keep the cores busy
meanwhile. Of a run that does not end well, everything stays in FOLDER/bad-NNN, and the exit code is 1. Stopped, it goes
on with the next run when it is called again; delete the folder to start anew.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.validity import refuse
from fivefold.machine.toml import emit
from fivefold.model.catalog import resolve
from fivefold.model.experts import MoE
from fivefold.model.latent_attention import MLA
from fivefold.text_files import read_lines
from fivefold.trainer.supported import check_supported
from tests.endure.kills import enter_folder
from tests.trainer.test_faults import set_run

LAYOUTS = (
    "dp1 mbs4", "dp1 mbs2 ac=full",
    "dp2 zero0 mbs6", "dp2 zero0 mbs1", "dp2 zero1 mbs2", "dp2 zero2 mbs2", "dp2 zero3 mbs1", "tp2 mbs2", "cp2 mbs4",
    "cp2 mbs2 cp=ulysses", "pp2 mbs1", "pp2 gpipe mbs2", "pp2 zb1p mbs1 ac=full",
    "dp3 zero3 mbs1", "dp3 zero1 mbs2",
    "dp4 zero2 mbs1", "dp2 tp2 zero3 mbs2", "dp2 pp2 zero1 mbs1", "cp2 tp2 mbs2", "dp2 cp2 zero2 mbs1",
)  # fmt: skip
NANO = resolve("nano")
MODELS = {  # each of nano's size, written to a file of its name
    "nano": NANO,
    "mixture": NANO.replace(name="mixture", moe=MoE(experts=4, topk=2, ffn=64, shared_experts=1, dense_layers=1)),
    "latent": NANO.replace(
        name="latent", kv_heads=4, mla=MLA(q_rank=32, kv_rank=32, nope_dim=16, rope_dim=8, v_dim=16)
    ),
    "tied": NANO.replace(name="tied", tied_embeddings=True, activation="gelu_tanh", norm="layernorm"),
    "sliding": NANO.replace(name="sliding", window=16, window_kind="sliding", attention_softcap=30.0),
}
ADAPTERS = ("lora:4", "dora:4", "qlora:4", "qdora:4")
PATIENCE_SECONDS = 600.0  # for one run
STACKS = "PYTHONFAULTHANDLER"  # set, it lets an abort leave its stack


class Told(NamedTuple):
    """How one run ended; ``fault`` is empty if well."""

    number: int
    layout: str
    code: int
    seconds: float
    fault: str


def draw_run(draw: random.Random) -> tuple[dict[str, Any], list[str]]:
    """What a run file that the trainer supports sets in addition to the usual, and the arguments of the command."""
    while True:
        changes, words = _draw(draw)
        layout, job = Layout.parse(changes["layout"]), Job.read(changes["job"], origin="drawn")
        with contextlib.suppress(UserError):
            refuse(layout, model=MODELS[changes["model"]], job=job)
            check_supported(layout, job, model=MODELS[changes["model"]])
            return changes, words


def _draw(draw: random.Random) -> tuple[dict[str, Any], list[str]]:
    adapter = draw.choice(ADAPTERS) if draw.random() < 0.3 else None
    job = {
        "sequence": 32,
        "global_batch": 12,
        "steps": draw.randint(5, 16),
        "seed": draw.randrange(99),
        "precision": draw.choice(("fp32", "bf16", "bf16-grad16", "fp16")),
        "optimizer": {"kind": draw.choice(("adamw", "muon"))},
        "loss": draw.choice(("fused", "chunked")),
        "learning_rate": {"kind": "constant"},
    }
    if adapter:
        job["adapter"] = adapter
    changes = {
        "model": draw.choice(sorted(MODELS)),
        "layout": draw.choice(LAYOUTS),
        "job": job,
        "evaluate_every": draw.randint(1, 20),
        "sample": draw.choice(("", "all")),
        "sample_tokens": 8,
        "sample_at": draw.choice(("end", "evaluations")),
        "checkpoints": {"every_steps": draw.randint(1, 20), "keep": 1, "asynchronous": draw.random() < 0.7},
        "faults": {"on_nan": draw.choice(("stop", "skip", "rollback"))},
    }
    return changes, draw.choice(([], ["--json"]))


def run(number: int, *, seed: int) -> Told:
    """Run number ``number`` in the working directory, which keeps all of it if it does not end well."""
    changes, words = draw_run(random.Random(f"{seed} {number}"))
    shutil.rmtree("run", ignore_errors=True)
    if (name := changes["model"]) != "nano":
        Path(f"{name}.toml").write_text(emit(MODELS[name].model_dump(exclude_none=True, exclude_defaults=True)))
        changes["model"] = f"{name}.toml"
    set_run(**changes)
    begin = time.monotonic()
    out, error, code = _run_command([sys.executable, "-m", "fivefold", "train", "run.toml", *words])
    wrong = fault(out, error, code, json_asked=bool(words))
    told = Told(number, str(changes["layout"]), code, round(time.monotonic() - begin, 1), wrong)
    if wrong:
        kept = Path(f"bad-{number:03}")
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir()
        for path in ("run", "run.toml"):
            if Path(path).exists():
                shutil.move(path, kept)
        for name, text in (("stdout", out), ("stderr", error), ("told", f"{told}\n")):
            (kept / f"{name}.txt").write_text(text)
    return told


def _run_command(command: list[str]) -> tuple[str, str, int]:
    """What the command said on its two pipes, and its exit code; with its processes it is killed if it does not end."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, STACKS: "1"}
    )
    try:
        out, error = process.communicate(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()  # its processes end with it
        out, error = process.communicate()
        error += f"\nhad not ended after {PATIENCE_SECONDS:g} s"
    except BaseException:
        process.send_signal(signal.SIGKILL)
        raise
    return out, error, process.returncode


def fault(out: str, error: str, code: int, *, json_asked: bool) -> str:
    """What is wrong with the end of a run."""
    if code:
        return f"exit code {code}"
    if "started again" in error:
        return "it was started again"
    if "Fatal Python error" in error or "Traceback" in error:
        return "an account of an error"
    if "\nfinished " not in error:
        return "no word of its end"
    if json_asked:
        try:
            return "" if set(json.loads(out)) == {"predicted", "measured"} else "no pair of steps"
        except ValueError:
            return "no JSON"
    first = [line.split("  ")[0] for line in out.splitlines()]
    if "tokens/s per GPU" not in first:
        return "no closing table"
    return "" if "rest" in first[first.index("tokens/s per GPU") :] else "no budget of the error"


@contextlib.contextmanager
def keep_busy(processes: int) -> Iterator[None]:
    """Start ``processes`` processes that never idle, and end with this one."""
    spin = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    spinning = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def main() -> int:
    """Run them, tell each, and count."""
    parser = argparse.ArgumentParser(description="short runs; each must end well")
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--load", type=int, default=0, help="processes that keep the cores busy")
    parser.add_argument("--folder", type=Path, default=Path("runs/endure-runs"))
    options = parser.parse_args()
    with enter_folder(options.folder), keep_busy(options.load):
        before = read_lines(Path("told.jsonl"))
        for number in range(len(before), options.runs):
            told = run(number, seed=options.seed)
            with open("told.jsonl", "a") as file:
                file.write(json.dumps(told._asdict()) + "\n")
            if told.fault:
                print(f"bad-{number:03}: {told.layout}: {told.fault}", file=sys.stderr, flush=True)
        every = [Told(**line) for line in read_lines(Path("told.jsonl"))]
    faults = Counter(told.fault for told in every if told.fault)
    seconds = sum(told.seconds for told in every)
    print(f"{len(every)} runs in {seconds:.0f} s, {faults.total()} did not end well{_list(faults)}")
    return 1 if faults else 0


def _list(faults: Counter[str]) -> str:
    return "".join(f"\n  {count} x {fault}" for fault, count in faults.most_common())


if __name__ == "__main__":
    sys.exit(main())
