"""The keyword ``offload``: as the job's setting, and the host memory that it takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.memory.host import count_host_bytes
from fivefold.planner.predict import Planner, predict
from fivefold.planner.questions import search_longest_sequence
from fivefold.planner.search.rejections import find_fixes
from fivefold.record import UserError
from fivefold.step import FITS_RISK
from fivefold.trainer.supported import check_supported
from fivefold.units import show_bytes

LLAMA, JOB = build_model("llama3-8b"), Job(sequence=4096, global_batch=64)
TWO_NODES = resolve("h100:16", local=Path("/nowhere"))
TEXTS = [
    "dp16 zero3 mbs1",
    "dp4 tp4 zero1 mbs2 ac=full",
    "dp2 tp2 pp4 zero0 1f1b mbs1",
    "dp4 pp4 v2 zero2 interleaved mbs1",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("what", [("optimizer",), ("activations",), ("optimizer", "activations")], ids="+".join)
def test_the_keyword_is_the_jobs_setting(text: str, what: tuple[str, ...]) -> None:
    layout = Layout.parse(text)
    by_job = predict(model=LLAMA, machine=TWO_NODES, layout=layout, job=JOB.replace(offload=what))
    planner = Planner(model=LLAMA, machine=TWO_NODES, job=JOB)
    planner.step(layout)  # what is cached of the layout without it
    by_word = planner.step(layout.replace(offload=what))
    assert by_word.layout == f"{layout} offload={'+'.join(what)}"
    assert (by_word.memory, by_word.time, by_word.traffic) == (by_job.memory, by_job.time, by_job.traffic)
    assert planner.step(layout).memory.peak_bytes > by_word.memory.peak_bytes


def test_offload_parses_in_any_order_and_prints_in_one() -> None:
    layout = Layout.parse("offload=activations+optimizer mbs1 dp8")
    assert str(layout) == "dp8 zero0 mbs1 offload=optimizer+activations"
    assert Layout.parse(str(layout)) == layout
    with pytest.raises(UserError, match="'offload=optimiser'; did you mean offload=optimizer"):
        Layout.parse("dp8 offload=optimiser")


def test_a_node_holds_masters_moments_and_gradients_of_its_ranks() -> None:
    """All of it over two nodes: 4 + 8 + 4 bytes of each parameter, but for padding."""
    result = count_host_bytes(Counts(LLAMA, JOB), Layout.parse("dp16 zero3 mbs1 offload=optimizer"), TWO_NODES)
    assert result == pytest.approx(16 * LLAMA.parameters / 2, rel=1e-3)
    asked = Counts(LLAMA, JOB.replace(offload=("optimizer",)))
    assert count_host_bytes(asked, Layout.parse("dp16 zero3 mbs1"), TWO_NODES) == result
    assert count_host_bytes(Counts(LLAMA, JOB), Layout.parse("dp16 zero3 mbs1"), TWO_NODES) == 0


def test_a_node_that_is_half_full_holds_what_its_ranks_have() -> None:
    """Four ranks on a node of eight hold the 16 bytes of every parameter once."""
    layout = Layout.parse("dp4 zero3 mbs1 offload=optimizer")
    result = count_host_bytes(Counts(LLAMA, JOB), layout, resolve("h100:4", local=Path("/nowhere")))
    assert result == pytest.approx(16 * LLAMA.parameters, rel=1e-3)


def test_what_does_not_fit_is_told_to_offload_and_the_host_memory_that_it_takes() -> None:
    """16 bytes of each of Llama 3 70B's 70.6 B parameters are 1.03 TiB of the one node."""
    model, job, node = build_model("llama3-70b"), Job(global_batch=8), resolve("h100:8", local=Path("/nowhere"))
    layout = Layout.parse("dp8 zero3 mbs1 ac=full")
    words = r"offload=optimizer, which takes 1\.03 TiB of host memory per node"
    with pytest.raises(UserError, match=words):
        search_longest_sequence(model=model, machine=node, job=job, layout=layout)
    first = next(find_fixes(layout, model=model, machine=node, job=job, risk=FITS_RISK))
    peak = Planner(model=model, machine=node, job=job).step(layout.replace(offload=("optimizer",))).memory.peak_bytes
    assert first == f"offload=optimizer: {show_bytes(peak)}, and 1.03 TiB of host memory per node"


def test_the_engine_says_that_it_has_none() -> None:
    with pytest.raises(UserError, match="offload=optimizer: the trainer keeps everything on the device"):
        check_supported(Layout.parse("dp8 mbs1 offload=optimizer"), JOB, model=LLAMA)
