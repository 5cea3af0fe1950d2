"""The keyword ``offload``: as the job's setting, and the host memory that it takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.validity import list_reasons
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.memory.host import count_host_bytes
from fivefold.planner.counts.memory.peak import count_rank_memory
from fivefold.planner.predict import Planner, predict
from fivefold.planner.questions.sequence import search_longest_sequence
from fivefold.planner.search import search
from fivefold.planner.search.rejections import find_fixes
from fivefold.planner.search.space import Space
from fivefold.planner.time.constants import PUBLISHED
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
def test_the_keyword_offload_equals_the_field_of_the_job(text: str, what: tuple[str, ...]) -> None:
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


SHARDED = Layout.parse("dp16 zero3 mbs1 ac=full offload=parameters")


def test_offloaded_parameters_leave_buffers_of_gathers_and_nothing_else() -> None:
    """All 16 bytes of a parameter are in host memory (bf16: 4 of the copy, 8 of moments, 4 of gradients)."""
    counts = Counts(LLAMA, JOB.replace(stack="fsdp2"))
    (rank,) = count_rank_memory(counts, SHARDED)
    assert (rank.parameters_bytes, rank.gradients_bytes, rank.optimizer_bytes) == (0, 0, 0)
    assert count_host_bytes(counts, SHARDED, TWO_NODES) == pytest.approx(16 * LLAMA.parameters / 2, rel=1e-3)
    (stays,) = count_rank_memory(counts, SHARDED.replace(offload=()))
    states = stays.parameters_bytes + stays.gradients_bytes + stays.optimizer_bytes
    shard = 4 * LLAMA.parameters // 16 // 10  # of a unit, copied to the device: at most a tenth of all
    assert stays.peak_bytes - states <= rank.peak_bytes <= stays.peak_bytes - states + shard


def test_offloaded_parameters_cross_the_link_to_the_host_with_every_gather() -> None:
    """Llama 3 8B over 2 ranks: 16 GB of each rank's shard in fp32, twice a micro-batch, and its gradients once."""
    job = JOB.replace(stack="fsdp2", global_batch=2, sequence=512)
    planner = Planner(model=LLAMA, machine=resolve("h100:2", local=Path("/nowhere")), job=job)
    stays, offloads = (
        planner.step(Layout.parse(f"dp2 zero3 mbs1 ac=full{words}")) for words in ("", " offload=parameters")
    )
    link = PUBLISHED.host_link_share * PUBLISHED.host_link_bandwidth
    sent = 3 * 4 * LLAMA.parameters / 2 / link
    assert offloads.time.step_seconds - stays.time.step_seconds == pytest.approx(
        sent + (3 * 4 + 4 * 4) * LLAMA.parameters / 2 / PUBLISHED.host_memory_bandwidth, rel=0.15
    )


@pytest.mark.parametrize(
    ("text", "changes", "words"),
    [
        ("dp8 zero1 mbs1", {}, "offload=parameters is not modelled with zero1"),
        ("dp1 zero2 mbs1", {"stack": "deepspeed"}, "offload=parameters is not modelled with zero2; use zero3, on one"),
        ("dp8 zero3 mbs1", {"stack": "fsdp2", "objective": "dpo", "sequence": 512}, "objective=dpo without an adapter"),
    ],
)
def test_offloaded_parameters_that_are_not_modelled_are_an_error(
    text: str, changes: dict[str, object], words: str
) -> None:
    layout = Layout.parse(f"{text} offload=parameters")
    job = JOB.replace(**changes)
    assert any(words in reason for reason in list_reasons(layout, model=LLAMA, job=job, machine=None))


@pytest.mark.parametrize(("words", "host", "device"), [("optimizer", 16, 2), ("optimizer+parameters", 18, 0)])
def test_host_memory_is_what_deepspeed_estimates_and_its_buffer_of_gradients(
    words: str, host: int, device: int
) -> None:
    """``host`` and ``device``: bytes of a parameter in DeepSpeed's own estimate, on one node and on all its GPUs.

    It leaves half as much again for buffers, of which the reduced gradients are 2 bytes
    (deepspeedai/DeepSpeed@0.19.8:deepspeed/runtime/zero/stage3.py, estimate_zero3_model_states_mem_needs, zero_init).
    """
    counts = Counts(LLAMA, JOB.replace(stack="deepspeed", precision="bf16-grad16"))
    layout = Layout.parse(f"dp8 zero3 mbs1 ac=full offload={words}")
    found = count_host_bytes(counts, layout, resolve("h100:8", local=Path("/nowhere")))
    assert found == pytest.approx((host + 2) * LLAMA.parameters, rel=1e-3)
    assert found <= 1.5 * host * LLAMA.parameters
    (rank,) = count_rank_memory(counts, layout)
    states = rank.parameters_bytes + rank.gradients_bytes + rank.optimizer_bytes
    assert states == pytest.approx(device * LLAMA.parameters / 8, rel=1e-3)


ONE_GPU = resolve("h100:1", local=Path("/nowhere"))


@pytest.mark.parametrize(
    ("text", "host", "device"),
    [
        ("zero1 mbs64 ac=full offload=optimizer", 16 + 2, 2),
        ("zero2 mbs1 ac=full offload=optimizer", 16 + 2 + 2, 2),
        ("zero3 mbs1 ac=full offload=optimizer", 16 + 2, 2),
        ("zero3 mbs1 ac=full offload=optimizer+parameters", 18 + 2, 0),
    ],
)
def test_one_gpu_keeps_what_deepspeed_estimates(text: str, host: int, device: int) -> None:
    """``host`` and ``device``: bytes of a parameter, with buffers of gradients but those of a largest weight.

    DeepSpeed estimates 16 bytes in host memory, or 18 with weights there, leaves half as much again for buffers, and 2
    or none on the GPU (deepspeedai/DeepSpeed@0.19.8:deepspeed/runtime/zero/stage_1_and_2.py,
    estimate_zero2_model_states_mem_needs; stage3.py, estimate_zero3_model_states_mem_needs). ZeRO-1 and -2 send updated
    weights from a buffer in 16 bits, and sum gradients of several micro-batches in another.
    """
    counts, layout = Counts(LLAMA, JOB.replace(stack="deepspeed", precision="bf16-grad16")), Layout.parse(f"dp1 {text}")
    staging = 2 * LLAMA.vocab * LLAMA.width if layout.zero < 3 else 0
    result = count_host_bytes(counts, layout, ONE_GPU)
    assert result == pytest.approx(host * LLAMA.parameters + staging, rel=1e-6)
    assert result <= 1.5 * (16 if device else 18) * LLAMA.parameters
    (rank,) = count_rank_memory(counts, layout)
    states = rank.parameters_bytes + rank.gradients_bytes + rank.optimizer_bytes
    assert states == device * LLAMA.parameters


def test_gradients_of_one_gpu_leave_it_with_their_bucket() -> None:
    """Llama 3 8B has 15 GiB in 16 bits; its gradients, masters and moments would be 105 GiB more."""
    job = JOB.replace(stack="deepspeed", precision="bf16-grad16")
    planner = Planner(model=LLAMA, machine=ONE_GPU, job=job)
    texts = ("zero0", "zero2", "zero2 offload=optimizer", "zero3 offload=optimizer+parameters")
    plain, whole, weights, least = (planner.peak_bytes(Layout.parse(f"dp1 mbs1 ac=full {text}")) for text in texts)
    assert plain > 14 * LLAMA.parameters < whole
    assert weights < 4 * LLAMA.parameters
    assert least < weights - 1.9 * LLAMA.parameters + 2 * LLAMA.vocab * LLAMA.width


def test_fsdp2_on_one_gpu_copies_each_weight_from_host_memory() -> None:
    counts = Counts(LLAMA, JOB.replace(stack="fsdp2"))
    layout = Layout.parse("dp1 zero3 mbs1 ac=full offload=parameters")
    (rank,) = count_rank_memory(counts, layout)
    assert (rank.parameters_bytes, rank.gradients_bytes, rank.optimizer_bytes) == (0, 0, 0)
    assert count_host_bytes(counts, layout, ONE_GPU) == pytest.approx(16 * LLAMA.parameters, rel=1e-6)
    table = LLAMA.vocab * LLAMA.width  # gathered in 16 bits, its gradient in 16 bits and copied twice in 32
    assert (2 + 2 + 4) * table < rank.peak_bytes < (2 + 2 + 2 * 4 + 2) * table


def test_zero3_updates_group_by_group() -> None:
    """DeepSpeed's ``sub_group_size`` of 1e9: two copies of its gradients, in 16 and in 32 bits, and of no more."""
    job = JOB.replace(stack="deepspeed", precision="bf16-grad16", sequence=512)
    layout = Layout.parse("dp2 zero3 mbs1 ac=full")
    peaks = {}
    for size in (0, 1_000_000_000):
        counts = Counts(LLAMA, job.replace(stack=job.stack.replace(update_group_size=size)))
        (rank,) = count_rank_memory(counts, layout)
        assert rank.updated_numel == LLAMA.parameters // 2
        peaks[size] = rank.peak_bytes
        joined = rank.joined_numel
    assert 1_000_000_000 <= joined < 1_000_000_000 + LLAMA.vocab * LLAMA.width // 2
    assert peaks[0] - peaks[1_000_000_000] > (4 + 2) * (LLAMA.parameters // 2 - joined) // 2


@pytest.mark.parametrize(
    ("stack", "offload", "proposal"),
    [
        ("deepspeed", ("optimizer", "parameters"), "zero3 offload=optimizer+parameters"),
        ("fsdp2", ("parameters",), "zero3 offload=parameters"),
    ],
)
def test_one_gpu_is_searched_and_advised_with_weights_in_host_memory(
    stack: str, offload: tuple[str, ...], proposal: str
) -> None:
    machine, job = resolve("rtx4090:1", local=Path("/nowhere")), JOB.replace(stack=stack, global_batch=16)
    layout = Layout.parse("dp1 mbs1 ac=full")
    fixes = [fix.line for fix in find_fixes(Planner(model=LLAMA, machine=machine, job=job, risk=FITS_RISK), layout)]
    assert fixes[0].startswith(f"{proposal}: ")
    result = search(model=LLAMA, machine=machine, job=job.replace(offload=offload))
    assert Layout.parse(result.best[0].step.layout).zero == 3


def test_an_update_on_the_host_concatenates_nothing_on_the_device() -> None:
    job = JOB.replace(stack="deepspeed", precision="bf16-grad16", global_batch=2)
    planner = Planner(model=LLAMA, machine=resolve("h100:2", local=Path("/nowhere")), job=job)
    memory = planner.step(Layout.parse("dp2 zero3 mbs1 ac=full offload=optimizer+parameters")).memory
    assert memory.reserved_bytes is not None
    assert memory.reserved_bytes < memory.peak_bytes + 2 * LLAMA.parameters / 2


def test_deepspeed_offloads_parameters_without_the_optimizer() -> None:
    """2 bytes of the gathered copy go to the host; 4 of masters, 8 of moments and 2 of gradients stay."""
    counts = Counts(LLAMA, JOB.replace(stack="deepspeed", precision="bf16-grad16"))
    layout = Layout.parse("dp8 zero3 mbs1 ac=full offload=parameters")
    (rank,) = count_rank_memory(counts, layout)
    assert (rank.parameters_bytes, rank.optimizer_bytes, rank.gradients_bytes) == pytest.approx(
        [width * LLAMA.parameters / 8 for width in (4, 8, 2)], rel=1e-3
    )
    found = count_host_bytes(counts, layout, resolve("h100:8", local=Path("/nowhere")))
    assert found == pytest.approx(2 * LLAMA.parameters, rel=1e-3)


def test_deepspeed_sends_weights_with_every_gather_and_gradients_with_every_reduction() -> None:
    """bf16 over 2 ranks: 2 bytes of a weight twice a micro-batch; of a gradient 2 and back, and 4 with the update."""
    job = JOB.replace(stack="deepspeed", precision="bf16-grad16", global_batch=2, sequence=512, overlap=())
    planner = Planner(model=LLAMA, machine=resolve("h100:2", local=Path("/nowhere")), job=job)
    optimizer, both = (
        planner.step(Layout.parse(f"dp2 zero3 mbs1 ac=full offload={words}"))
        for words in ("optimizer", "optimizer+parameters")
    )
    link = PUBLISHED.host_link_share * PUBLISHED.host_link_bandwidth
    shard = LLAMA.parameters / 2
    assert both.time.step_seconds - optimizer.time.step_seconds == pytest.approx((2 * 2 - 2) * shard / link, rel=0.15)
    assert optimizer.time.optimizer_seconds == pytest.approx(
        (4 + 2) * shard / link + (3 * 4 + 4 * 4 + 4 + 2) * shard / PUBLISHED.host_memory_bandwidth, rel=0.01
    )


@pytest.mark.parametrize("stack", ["megatron-core", "fivefold"])
def test_a_layout_that_does_not_fit_is_advised_to_offload_with_its_host_memory(stack: str) -> None:
    """16 bytes of each of Llama 3 70B's 70.6 B parameters are 1.03 TiB of the one node."""
    model, node = build_model("llama3-70b"), resolve("h200:8", local=Path("/nowhere"))
    job = JOB.replace(stack=stack, sequence=1024)
    layout = Layout.parse("tp8 zero1 mbs1 ac=full" if stack == "megatron-core" else "dp8 zero3 mbs1 ac=full")
    with pytest.raises(UserError, match=r"add offload=optimizer, which takes 1\.03 TiB of host memory per"):
        search_longest_sequence(model=model, machine=node, job=job, layout=layout)
    planner = Planner(model=model, machine=node, job=job, risk=FITS_RISK)
    peak = planner.step(layout.replace(offload=("optimizer",))).memory.peak_bytes
    fix = next(find_fixes(planner, layout)).line
    assert fix == f"offload=optimizer: {show_bytes(peak)}, and 1.03 TiB of host memory per node"


@pytest.mark.parametrize(
    ("word", "changed", "line"),
    [
        ("parameters", {}, "offload=parameters+optimizer: the trainer keeps only the optimizer in host memory"),
        ("activations", {}, "offload=activations: the trainer keeps only the optimizer in host memory"),
        ("optimizer", {"optimizer": {"kind": "muon"}}, "offload=optimizer: muon sends messages in its update"),
        ("optimizer", {"precision": "fp8-wire"}, "offload=optimizer: precision 'fp8-wire' gathers weights in fp8"),
    ],
)
def test_the_trainer_keeps_only_the_optimizer_in_host_memory(word: str, changed: dict[str, Any], line: str) -> None:
    layout = Layout.parse("dp8 zero3 mbs1 offload=optimizer")
    check_supported(layout, JOB, model=LLAMA)
    with pytest.raises(UserError, match=re.escape(line)):
        check_supported(layout.replace(offload=(word,)), JOB.replace(**changed), model=LLAMA)


def test_deepspeed_offloads_no_optimizer_under_zero0() -> None:
    """Its engine makes a DeepSpeedCPUAdam of weights on the GPU, which stops at the first step."""
    job = JOB.replace(stack="deepspeed")
    for text in ("dp8 mbs1", "dp1 mbs1"):
        layout = Layout.parse(f"{text} offload=optimizer")
        assert list(list_reasons(layout, model=LLAMA, job=job, machine=None)) == [
            "deepspeed does not run offload=optimizer with zero0; use zero1 or zero2 or zero3, on one rank too"
        ]
    space = Space(LLAMA, job.replace(offload=("optimizer",)), world=1)
    assert space.list_zeros(1, pp=1, cp=1) == [(2, 1), (3, 1)]
    assert {zero for zero, _ in space.list_zeros(8, pp=1, cp=1)} == {1, 2, 3}
