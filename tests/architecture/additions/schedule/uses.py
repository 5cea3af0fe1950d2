"""A schedule is parsed, checked, predicted, searched, run dry and drawn."""

from pathlib import Path

from fivefold.dry_run import dryrun
from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.schedule import schedule
from fivefold.layout.schedule.simulation import simulate_schedule
from fivefold.layout.schedule.table import check
from fivefold.layout.spec import Layout
from fivefold.layout.validity import is_legal
from fivefold.layout.where import Where
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.planner.predict import Planner, predict
from fivefold.planner.search import search
from fivefold.planner.time.spans import build_spans
from fivefold.rendering.pipeline import split_span
from fivefold.results.step_comparison import compare

layout = Layout.parse("pp4 eager")
assert str(layout) == "dp1 pp4 zero0 eager mbs1"
assert Layout.parse(str(layout)) == layout
try:
    Layout.parse("pp4 eagre")
except UserError as error:
    message = str(error)
else:
    raise AssertionError("a word that is none was read")
assert "eager" in message

tiny = build_model("tiny").replace(layers=4, width=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=256)
node, job = resolve("h100:4", local=Path()), Job(sequence=64, global_batch=16)
assert is_legal(layout, model=tiny, job=job)
assert not is_legal(layout, model=tiny, job=job.replace(global_batch=2))  # fewer micro-batches than ranks

table = schedule("eager", pp=4, v=1, micro_batches=16)
check(table)
usual = schedule("1f1b", pp=4, v=1, micro_batches=16)
ends = [
    max(simulate_schedule(item, seconds=lambda task: 1.0, hop_seconds=lambda *_: 0.5).rank_ends)
    for item in (table, usual)
]
assert ends[0] < ends[1]  # messages between stages are hidden

planner = Planner(model=tiny, machine=node, job=job)
step, other = planner.step(layout), planner.step(Layout.parse("pp4"))
assert step.memory.stages[0].activations_bytes > other.memory.stages[0].activations_bytes
assert "eager" in step.layout

found = search(model=tiny, machine=node, job=job, where=Where.parse("schedule=eager pp=4"))
assert found.best
assert {Layout.parse(item.step.layout).schedule for item in found.best} == {"eager"}

run = dryrun(model=tiny, machine=node, layout=layout, job=job).step
assert run is not None
predicted = predict(model=tiny, machine=node, layout=layout, job=job)
assert [row for row in compare(predicted, run) if row.is_wrong] == []

drawn = build_spans(planner, layout)
assert {block.kind for row in drawn for span in row for block in split_span(span, pp=4)} >= {"F", "BW"}
