"""Kill -9 of a random rank at a random moment, again and again; the last weights are those of the undisturbed run.

    python -m tests.endure.kills --kills 200 --folder runs/endure

Of four kills, one falls somewhere into the start, one into a save, two into training and what it does besides. Whoever
is left ends by itself, as its peers are gone, and all ranks start again. Exits 1 unless every layout ends in the bits
of its undisturbed run. Stopped, it goes on with the next kill when it is called again; delete the folder to start anew.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.layout.spec import Layout
from fivefold.machine.toml import write
from fivefold.rendering.progress import show_progress
from fivefold.text_files import read_lines
from tests.endure.ranks import Ranks
from tests.trainer.test_faults import MACHINE, events, losses, saved_bits, saved_step, set_run

LAYOUTS = ("dp2 zero2 mbs2", "dp3 zero3 mbs1", "dp2 tp2 zero3 mbs2", "dp2 pp2 zero1 mbs1", "cp2 mbs4")
EVERY_STEPS = 2
MORE_STEPS = 4  # after the last kill
SAVE_SECONDS = 0.02  # about as long as one takes
PATIENCE_SECONDS = 60.0  # for a checkpoint to come
LEFT_SECONDS = 1.0  # for those whose peer was killed to end, before a launcher ends them


class Told(NamedTuple):
    """What a run was put through so far, and whether it has ended in the right bits."""

    layout: str
    kills: int = 0
    unfinished: int = 0  # saves that a kill has hit
    start_seconds: float = 2.0  # until the first step was saved, last time
    seconds: float = 0.0
    steps: int = 0
    equal: bool | None = None  # None: it has not ended yet

    def __str__(self) -> str:
        end = "the same bits" if self.equal else "OTHER BITS"
        return (
            f"{self.layout:20} {self.kills:4} kills, {self.unfinished} in a save, {self.steps} steps: {end} "
            f"({self.seconds:.0f} s)"
        )


def endure(told: Told, *, kills: int, seed: int, tell: Callable[[Told], object] = lambda told: None) -> Told:
    """Kill a run so often, in the working directory, end it, and compare it with one that is left alone.

    ``told``: what was done before; ``tell`` is handed what is to be known in order to go on from here.
    """
    changes: dict[str, Any] = {
        "layout": told.layout,
        "job": {"global_batch": 12, "learning_rate": {"kind": "constant"}},
        "checkpoints": {"every_steps": EVERY_STEPS},
    }
    while told.kills < kills:
        set_run(**set_steps(changes, 10**6))
        begin = time.monotonic()
        told = _kill(told, draw=random.Random(f"{seed} {told.layout} {told.kills}"))
        told = told._replace(kills=told.kills + 1, seconds=told.seconds + time.monotonic() - begin)
        tell(told)
    begin, steps = time.monotonic(), max(saved_step(), 0) + MORE_STEPS
    for folder in ("run", "straight"):
        set_run(folder=folder, **set_steps(changes, steps))
        codes = Ranks(Layout.parse(told.layout).world).wait(seconds=600)
        if any(codes.values()):
            raise SystemExit(f"{told.layout}: the run in {folder} ended with {codes}")
    equal = saved_bits() == saved_bits("straight") and losses() == losses("straight") and not events()
    equal = equal and len(losses()) == saved_step() == steps
    told = told._replace(steps=steps, equal=equal, seconds=told.seconds + time.monotonic() - begin)
    tell(told)
    return told


def set_steps(changes: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return ``changes`` with this number of steps."""
    return changes | {"job": changes["job"] | {"steps": steps}}


def _kill(told: Told, *, draw: random.Random) -> Told:
    """Start all ranks and kill one of them."""
    newest, begin, start_seconds = saved_step(), time.monotonic(), told.start_seconds
    ranks = Ranks(Layout.parse(told.layout).world)
    if told.kills % 4 == 0:
        time.sleep(draw.uniform(0, start_seconds))
    else:
        _wait_for(lambda: saved_step() > newest, ranks)
        start_seconds = time.monotonic() - begin
        time.sleep(draw.uniform(0, start_seconds / 4))  # some steps and saves
    if told.kills % 4 == 1:
        _wait_for(_is_saving, ranks)
        time.sleep(draw.uniform(0, SAVE_SECONDS))
    if ranks.poll():
        raise SystemExit(f"{told.layout}: ended by itself with {ranks.codes}:\n{ranks.read_output()}")
    ranks.signal(draw.randrange(len(ranks.pids)), signal.SIGKILL)
    ranks.wait(seconds=LEFT_SECONDS)
    if saved_step() < newest:
        raise SystemExit(
            f"{told.layout}: after step {newest} was saved, the newest checkpoint is of step {saved_step()}"
        )
    return told._replace(unfinished=told.unfinished + _is_saving(), start_seconds=start_seconds)


def _is_saving() -> bool:
    """Return whether there is an incomplete checkpoint."""
    return any(".tmp-" in path.name for path in Path("run").glob("checkpoints/*"))


def _wait_for(condition: Callable[[], bool], ranks: Ranks) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition() and time.monotonic() < end and not ranks.poll():
        time.sleep(0.002)


@contextlib.contextmanager
def enter_folder(folder: Path) -> Iterator[None]:
    """A folder with a corpus and a calibrated machine."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(folder.absolute() / "cache")
    write(MACHINE.replace(ranks=4, ranks_per_node=4), folder / "cache" / "fivefold" / "local.toml")
    corpus = folder / "corpus"
    if not corpus.exists():
        corpus.mkdir()
        for number in range(20):
            (corpus / f"{number}.txt").write_text(f"document {number} says: " + "all work and no play. " * 20)
    with contextlib.chdir(folder):
        yield


def main() -> int:
    """Share the kills among the layouts."""
    parser = argparse.ArgumentParser(description="random kills; the weights must be those of the undisturbed run")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/endure"))
    options = parser.parse_args()
    share, equal = -(-options.kills // len(LAYOUTS)), True
    for number, layout in enumerate(LAYOUTS):
        with enter_folder(options.folder / layout.replace(" ", "-")), show_progress("kills") as progress:

            def tell(told: Told, before: int = number * share) -> None:
                with open("told.jsonl", "a") as file:
                    file.write(json.dumps(told._asdict()) + "\n")
                progress(f"under {told.layout}", before + told.kills, share * len(LAYOUTS))

            lines = read_lines(Path("told.jsonl"))
            told = Told(**lines[-1]) if lines else Told(layout)
            if told.equal is None:
                told = endure(told, kills=share, seed=options.seed, tell=tell)
        print(told, flush=True)
        equal = equal and bool(told.equal)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
