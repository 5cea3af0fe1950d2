"""A model of the catalog is predicted and searched by its name."""

from shared import JOB, LAYOUT, NODE, search_few

from fivefold.job import Job
from fivefold.model.catalog import build_model
from fivefold.planner.predict import predict

model = build_model("fake-1b")
assert model.layers == 16
assert predict(model=model, machine=NODE, layout=LAYOUT, job=JOB).model == "fake-1b"
assert search_few(model=model, machine=NODE, job=Job(sequence=2048, global_batch=16)).best
