"""A kind of loss is predicted, run dry and trained by what it states of the logits that it keeps."""

from shared import JOB, LAYOUT, NODE, TINY, check_dry_run, train

from fivefold.planner.predict import predict

job = JOB.replace(loss="liger")
model = TINY.replace(vocab=4096)
check_dry_run(model, job)
usual, changed = (
    predict(model=model, machine=NODE, layout=LAYOUT, job=item).memory.peak_bytes
    for item in (JOB.replace(loss="plain"), job)
)
assert changed < usual
losses = train(TINY, job)
assert losses[-1] < losses[0], losses
