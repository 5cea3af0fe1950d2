"""A chip is predicted and searched; its steps are those of a chip with the same figures."""

from pathlib import Path

from shared import JOB, LAYOUT, NODE, TINY, search_few

from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.planner.predict import predict

machine, model = resolve("z9:8", local=Path()), build_model("llama3-8b")
steps = [predict(model=model, machine=item, layout=LAYOUT, job=JOB).time.step_seconds for item in (machine, NODE)]
assert steps[0] == steps[1], steps
assert machine.chip.memory_bytes == 2 * NODE.chip.memory_bytes
assert search_few(model=TINY, machine=machine, job=JOB).best
