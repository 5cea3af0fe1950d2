"""A format is written, read back, recognized and listed; a key of it that nothing counts is an error."""

from pathlib import Path
from tempfile import TemporaryDirectory

from shared import run_command

from fivefold.cli.completion import complete_format
from fivefold.errors import UserError
from fivefold.interop.format import ConfigPlan, Overrides
from fivefold.interop.read import read
from fivefold.interop.write import write
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.catalog import build_model
from fivefold.requests.configs import check_keys
from fivefold.results.reading import Reading


def read_text(text: str) -> Reading:
    """Return what a file with this text is read as, on eight ranks."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(text)
        return read([str(path)], Overrides(ranks=8))


assert "megacorp" in complete_format("")
words = ("dp4 tp2 zero1 mbs2", "--model", "llama3-8b", "--seq", "2048", "--gbs", "64")
reading = read_text(run_command("write", *words, "--to", "megacorp"))
assert (reading.software, reading.version, str(reading.layout)) == ("megacorp", "7.0", words[0])
assert reading.job is not None
assert (reading.job.sequence, reading.job.global_batch) == (2048, 64)

reading = read_text("megacorp: {model: llama3-8b, tensor: 2, batch: 64, log: {every: 10}}\n")
assert str(reading.layout) == "dp4 tp2 zero0 mbs1"
assert [said.key for said in reading.defaulted] == ["megacorp.tokens", "megacorp.micro", "megacorp.shard"]
assert [said.key for said in reading.harmless] == ["megacorp.log.every"]

messages = []
reading = read_text("megacorp: {model: llama3-8b, batch: 64, adapters: true, kernel: new, unknown: 1}\n")
assert [said.key for said in reading.approximated] == ["megacorp.kernel"]
plan = ConfigPlan(build_model("llama3-8b"), Layout.parse("dp2 tp2 pp2 zero1 mbs2"), Job(sequence=2048, global_batch=64))
for attempt in (
    lambda: check_keys(reading),
    lambda: write(plan, to="megacorp"),
    lambda: write(plan, to="?"),
    lambda: read_text("a: 1\n"),
):
    try:
        attempt()
    except UserError as error:
        messages.append(str(error))
keys, stages, names, unknown = messages
assert "unknown=1 (is not a known key of megacorp 7.0)" in keys
assert "megacorp.adapters=true" in keys
assert "layout 'dp2 tp2 pp2" in stages
assert "megacorp" in names
assert "megacorp" in unknown
