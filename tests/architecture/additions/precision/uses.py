"""A recipe with moments of 16 bits halves the optimizer's state."""

from shared import JOB, LAYOUT, NODE, TINY, search_few

from fivefold.job import get_recipe
from fivefold.planner.predict import predict

usual, job = (JOB.replace(precision=get_recipe(name)) for name in ("bf16-grad16", "bf16-moments16"))
states = [
    predict(model=TINY, machine=NODE, layout=LAYOUT, job=item).memory.stages[0].optimizer_bytes for item in (job, usual)
]
assert 0.5 <= states[0] / states[1] < 0.51, states
assert search_few(model=TINY, machine=NODE, job=job).best
