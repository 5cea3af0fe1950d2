"""An optimizer is predicted, searched, run dry and trained; another name is an error that lists it."""

from shared import JOB, LAYOUT, NODE, TINY, check_dry_run, search_few, train

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.planner.predict import predict
from fivefold.planner.run_estimate import count_checkpoint_bytes

job = JOB.replace(optimizer=JOB.optimizer.replace(kind="lion"))
states = [
    predict(model=TINY, machine=NODE, layout=LAYOUT, job=item).memory.stages[0].optimizer_bytes for item in (job, JOB)
]
assert 0 < states[0] < states[1], states
assert count_checkpoint_bytes(TINY, job) < count_checkpoint_bytes(TINY, JOB)
assert search_few(model=TINY, machine=NODE, job=job).best
check_dry_run(TINY, job)
losses = train(TINY, job)
assert losses[-1] < losses[0], losses
try:
    Job.read({"optimizer": {"kind": "tiger"}}, origin="job")
except UserError as error:
    message = str(error)
else:
    raise AssertionError("an unknown optimizer was taken")
assert "'lion'" in message
