"""A pipeline schedule is added in one file: a generator and its record, in a copy of the package.

Everything that speaks of schedules must then know it. The copy links to the package but for that file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOME = Path("fivefold", "layout", "schedule", "pipeline_schedule.py")

# 1F1B with twice as many forwards before the first backward, which hides messages between stages.
GENERATOR = """
from fivefold.layout.schedule.action import Action


def _eager(*, pp: int, micro_batches: int) -> Table:
    rows = []
    for rank in range(pp):
        ahead = min(micro_batches, 2 * (pp - rank - 1))
        row = [Action("F", rank, i) for i in range(ahead)]
        for i in range(micro_batches):
            if ahead + i < micro_batches:
                row.append(Action("F", rank, ahead + i))
            row.append(Action("BW", rank, i))
        rows.append(tuple(row))
    return Table("eager", tuple(rows), (tuple(range(pp)),) * micro_batches)


"""
RECORD = '    PipelineSchedule("eager", _eager, _zb2p, 0.5, min_rounds=1),\n'

USES = """
from pathlib import Path

from fivefold.dry_run import dryrun
from fivefold.job import Job
from fivefold.layout.legal import is_legal
from fivefold.layout.schedule import schedule
from fivefold.layout.schedule.play import play
from fivefold.layout.schedule.table import check
from fivefold.layout.spec import Layout
from fivefold.layout.where import Where
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import named
from fivefold.planner.predict import Planner, predict
from fivefold.planner.search import search
from fivefold.planner.time.spans import spans
from fivefold.record import Mistake
from fivefold.rendering.pipeline import blocks
from fivefold.results.step_comparison import compare

layout = Layout.parse("pp4 eager")
assert str(layout) == "dp1 pp4 zero0 eager mbs1" and Layout.parse(str(layout)) == layout
try:
    Layout.parse("pp4 eagre")
except Mistake as wrong:
    assert "eager" in str(wrong)
else:
    raise AssertionError("a word that is none was read")

tiny = named("tiny").replace(layers=4, width=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=256)
node, job = resolve("h100:4", local=Path()), Job(sequence=64, global_batch=16)
assert is_legal(layout, model=tiny, job=job)
assert not is_legal(layout, model=tiny, job=job.replace(global_batch=2))  # fewer micro-batches than ranks

table = schedule("eager", pp=4, v=1, micro_batches=16)
check(table)
usual = schedule("1f1b", pp=4, v=1, micro_batches=16)
ends = [max(play(each, seconds=lambda task: 1.0, hop_seconds=lambda *_: 0.5).rank_ends) for each in (table, usual)]
assert ends[0] < ends[1]  # messages between stages are hidden

planner = Planner(model=tiny, machine=node, job=job)
step, other = planner.step(layout), planner.step(Layout.parse("pp4"))
assert step.memory.stages[0].activations_bytes > other.memory.stages[0].activations_bytes
assert "eager" in step.layout

found = search(model=tiny, machine=node, job=job, where=Where.parse("schedule=eager pp=4"))
assert found.best and {Layout.parse(each.step.layout).schedule for each in found.best} == {"eager"}

run = dryrun(model=tiny, machine=node, layout=layout, job=job).step
assert run is not None
predicted = predict(model=tiny, machine=node, layout=layout, job=job)
assert [row for row in compare(predicted, run) if row.wrong] == []

drawn = spans(planner, layout)
assert {block.kind for row in drawn for span in row for block in blocks(span, pp=4)} >= {"F", "BW"}
print("all uses know it")
"""


def copy_with_record(folder: Path) -> None:
    """Link to the package from ``folder``, with the file of the records written anew."""
    place = folder / HOME.parent
    place.mkdir(parents=True)
    for inner in (Path("fivefold"), Path("fivefold", "layout"), HOME.parent):
        for source in (ROOT / inner).iterdir():
            link = folder / inner / source.name
            if not link.exists() and source.name != "__pycache__" and source != ROOT / HOME:
                link.symlink_to(source)
    text = (ROOT / HOME).read_text(encoding="utf-8")
    head, opening, rest = text.partition("_RECORDS = (\n")
    (folder / HOME).write_text(head + GENERATOR + opening + RECORD + rest, encoding="utf-8")


def test_a_record_and_a_generator_are_all_that_a_schedule_needs(tmp_path: Path) -> None:
    copy_with_record(tmp_path)
    found = subprocess.run(
        [sys.executable, "-c", USES], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=False,
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert found.stdout.splitlines()[-1:] == ["all uses know it"], found.stderr[-3000:]
