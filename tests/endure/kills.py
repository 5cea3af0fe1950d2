"""Kill -9 of a random rank at a random moment, again and again; the last weights are those of the undisturbed run.

    python -m tests.endure.kills --kills 200 --folder runs/endure

Of four kills, one falls somewhere into the start, three into training and saving. Whoever is left ends by itself, as
its peers are gone, and all ranks start again. Exits 1 unless every layout ends in the bits of its undisturbed run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.layout.spec import Layout
from fivefold.machine.toml import write
from tests.endure.ranks import Ranks
from tests.train.test_faults import MACHINE, events, losses, saved_bits, saved_step, set_run

LAYOUTS = ("dp2 zero2 mbs2", "dp3 zero3 mbs1", "dp2 tp2 zero3 mbs2", "dp2 pp2 zero1 mbs1", "cp2 mbs4")
EVERY_STEPS = 2
PATIENCE_SECONDS = 60.0  # for a checkpoint to come
LEFT_SECONDS = 5.0  # for those whose peer was killed to end, before a launcher ends them


class Told(NamedTuple):
    """What a killed run did."""

    layout: str
    kills: int
    starts: int
    unfinished: int  # saves that a kill has hit
    steps: int
    equal: bool
    seconds: float

    def __str__(self) -> str:
        end = "the same bits" if self.equal else "OTHER BITS"
        return (
            f"{self.layout:20} {self.kills:4} kills, {self.unfinished} in a save, {self.starts} starts, "
            f"{self.steps} steps: {end} ({self.seconds:.0f} s)"
        )


def endure(layout: str, *, kills: int, seed: int, steps: int) -> Told:
    """Kill a run of ``steps`` steps so often, in the working directory, and compare it with one that is left alone."""
    begin = time.monotonic()
    world = Layout.parse(layout).world
    changes: dict[str, Any] = {
        "layout": layout, "job": {"steps": steps, "global_batch": 12}, "checkpoints": {"every_steps": EVERY_STEPS},
    }  # fmt: skip
    set_run(folder="straight", **changes)
    _must(Ranks(world).wait(seconds=600), "the undisturbed run")
    save_seconds = (time.monotonic() - begin) * EVERY_STEPS / steps
    set_run(**changes)
    draw, newest, done, unfinished, starts = random.Random(seed), -1, 0, 0, 0
    while done < kills:
        starts += 1
        ranks = Ranks(world)
        if done % 4:
            _until_saved(ranks, after=newest)
            time.sleep(draw.uniform(0, 3 * save_seconds))
        else:
            time.sleep(draw.uniform(0, 2.0))
        if len(ranks.poll()) == world:
            break  # it has come to its end
        ranks.signal(draw.randrange(world), signal.SIGKILL)
        done += 1
        ranks.wait(seconds=LEFT_SECONDS)
        if saved_step() < newest:
            raise SystemExit(
                f"{layout}: after step {newest} was saved, the newest checkpoint is of step {saved_step()}"
            )
        newest = saved_step()
        unfinished += any(".tmp-" in path.name for path in Path("run").glob("checkpoints/*"))
    _must(Ranks(world).wait(seconds=600), "the run after the last kill")
    equal = saved_bits() == saved_bits("straight") and len(losses()) == saved_step() == steps and not events()
    return Told(layout, done, starts + 1, unfinished, saved_step(), equal, time.monotonic() - begin)

    return Layout.parse(layout).world


def _must(codes: dict[int, int], what: str) -> None:
    if any(codes.values()):
        raise SystemExit(f"{what} ended with {codes}")


def _until_saved(ranks: Ranks, *, after: int) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while saved_step() <= after and time.monotonic() < end and not ranks.poll():
        time.sleep(0.005)


@contextlib.contextmanager
def standing_in(folder: Path) -> Iterator[None]:
    """A folder with a corpus and a calibrated machine."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(folder.absolute() / "cache")
    write(MACHINE.replace(ranks=4, ranks_per_node=4), folder / "cache" / "fivefold" / "local.toml")
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for number in range(20):
        (corpus / f"{number}.txt").write_text(f"document {number} says: " + "all work and no play. " * 20)
    with contextlib.chdir(folder):
        yield


def main() -> int:
    """Share the kills among the layouts."""
    parser = argparse.ArgumentParser(description="random kills; the weights must be those of the undisturbed run")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--folder", type=Path, default=Path("runs/endure"))
    options = parser.parse_args()
    share = -(-options.kills // len(LAYOUTS))
    print(f"seed {options.seed}", flush=True)
    told = []
    for number, layout in enumerate(LAYOUTS):
        with standing_in(options.folder / f"{options.seed}-{number}"):
            told.append(endure(layout, kills=share, seed=options.seed + number, steps=12 * share + 40))
            print(told[-1], flush=True)
    return 0 if all(one.equal for one in told) else 1


if __name__ == "__main__":
    sys.exit(main())
