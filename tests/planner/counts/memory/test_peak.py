"""States against the formulas of ZeRO, and the walk through a step against what must hold of it."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.job import LOSS_CHUNK_ELEMENTS, Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.layout.validity import is_legal
from fivefold.model.catalog import build_model
from fivefold.model.spec import Model
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.memory import peak
from fivefold.planner.counts.memory.liveness import GradientSums, SimulatedUnit, simulate_unit
from fivefold.planner.counts.memory.peak import RankMemory, count_rank_memory, list_live_bytes, make_table
from fivefold.planner.counts.operations.layer import get_kind
from fivefold.planner.counts.operations.local_shapes import get_local_degrees
from fivefold.planner.counts.operations.op import elementwise, matmul
from fivefold.planner.counts.operations.recompute import UnitOperations
from fivefold.planner.counts.traffic import list_messages, sum_traffic
from fivefold.units import MIB

# 7.5e9 parameters, as in table 1 of ZeRO; every dim is divisible by 1024, so that nothing is padded.
ZERO_TABLE = Model(name="7.5B", layers=37, width=4096, heads=32, kv_heads=32, head_dim=128, ffn=10240, vocab=32768)
JOB = Job(sequence=16, global_batch=1024, precision=get_recipe("bf16-grad16"))


def count_all_ranks(model: Model, *, layout: Layout, job: Job) -> RankMemory:
    return count_rank_memory(Counts(model, job.replace(overlap=())), layout)[0]


def states_bytes(rank: RankMemory) -> int:
    return rank.parameters_bytes + rank.gradients_bytes + rank.optimizer_bytes


@pytest.mark.parametrize("shards", [1, 4, 16, 64, 256, 1024])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_states_are_those_of_zero_table_1(zero: int, shards: int) -> None:
    """2 + 2 + 12 bytes: w + g + o/S, w + (g + o)/S, (w + g + o)/S; moments alone have a step count per weight."""
    P, S = ZERO_TABLE.parameters, shards
    stage = count_all_ranks(ZERO_TABLE, layout=Layout(dp=shards, zero=zero), job=JOB)
    expected = {1: 2 * P + 2 * P + 12 * P / S, 2: 2 * P + 14 * P / S, 3: 16 * P / S}[zero]
    if S > 1 and zero == 3:
        expected -= 2 * P / S  # the 16-bit weights exist only while they are gathered: the master is the shard
    assert states_bytes(stage) == pytest.approx(expected, rel=1e-4)


def test_zero_0_keeps_all_states_on_every_rank() -> None:
    P = ZERO_TABLE.parameters
    for name, per_parameter in (("fp32", 16), ("bf16", 18), ("bf16-grad16", 16), ("bf16-pure", 12)):
        job = JOB.replace(precision=get_recipe(name))
        stage = count_all_ranks(ZERO_TABLE, layout=Layout(dp=8, zero=0), job=job)
        assert states_bytes(stage) == pytest.approx(per_parameter * P, rel=1e-6)


def test_more_sharding_of_states_never_takes_more_memory() -> None:
    job = Job(sequence=2048, global_batch=64)
    peaks = [
        count_all_ranks(ZERO_TABLE, layout=Layout(dp=8, zero=zero, mbs=8), job=job).peak_bytes for zero in range(4)
    ]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.slow
@settings(deadline=None)
@given(mbs=st.sampled_from([1, 2, 4]), sequence=st.integers(16, 512), zero=st.integers(0, 3))
def test_peak_grows_with_batch_and_sequence(mbs: int, sequence: int, zero: int) -> None:
    model = Model(name="m", layers=3, width=64, heads=2, kv_heads=1, head_dim=32, ffn=128, vocab=300)

    def peak(mbs: int, sequence: int) -> int:
        job = Job(sequence=sequence, global_batch=4 * mbs)  # two micro-batches, however large
        return count_all_ranks(model, layout=Layout(dp=2, zero=zero, mbs=mbs), job=job).peak_bytes

    assert peak(mbs, sequence) < peak(2 * mbs, sequence)
    assert peak(mbs, sequence) < peak(mbs, sequence + 1)


@pytest.mark.slow
@settings(deadline=None)
@given(
    mbs=st.sampled_from([1, 2, 4]),
    sequence=st.sampled_from([64, 256]),
    layers=st.integers(1, 6),
    text=st.sampled_from(["dp2 zero1", "dp2 zero3 ac=full", "tp2 zero0 ac=norm+act", "cp2 zero2", "tp2 zero0 nosp"]),
)
def test_peak_grows_with_batch_sequence_and_layers(mbs: int, sequence: int, layers: int, text: str) -> None:
    def peak(mbs: int, sequence: int, layers: int) -> int:
        model = Model(name="m", layers=layers, width=64, heads=2, kv_heads=2, head_dim=32, ffn=128, vocab=300)
        layout = Layout.parse(f"{text} mbs{mbs}")
        job = Job(sequence=sequence, global_batch=2 * layout.dp * mbs)
        return count_all_ranks(model, layout=layout, job=job).peak_bytes

    here = peak(mbs, sequence, layers)
    assert here < peak(2 * mbs, sequence, layers)
    assert here < peak(mbs, 2 * sequence, layers)
    assert here < peak(mbs, sequence, layers + 1)


LAYOUTS = (
    "dp8 zero1 mbs1",
    "dp8 zero2 mbs1 ac=full/2",
    "dp8 zero3 mbs1",
    "dp4 tp2 zero3 mbs1 ac=full",
    "dp2 pp4 zero1 mbs1",
    "dp2 pp4 zero0 zb1p mbs1",
    "dp2 pp2 v4 zero1 interleaved mbs1",
    "dp4 pp2 zero2 zbv mbs1",
)


@pytest.mark.parametrize("text", LAYOUTS)
def test_parts_of_live_memory_add_up_and_their_maximum_is_the_peak(text: str) -> None:
    counts, layout = Counts(build_model("llama3-8b"), Job(sequence=2048, global_batch=64)), Layout.parse(text)
    for rank, result in enumerate(count_rank_memory(counts, layout)):
        moments = list_live_bytes(counts, layout, rank=rank)
        for moment in moments:
            parts = moment[3:]  # gradients, states, activations, gathers, logits, temporary
            assert min(parts) >= 0, moment
            assert sum(parts) == moment.live_bytes
        fullest = max(moments, key=lambda moment: moment.live_bytes)
        assert (fullest.cause, fullest.live_bytes) == (result.peak_cause, result.peak_bytes)
        assert moments[-1].cause == "optimizer"
        assert moments[-1].activations_bytes == 0
        assert any(moment.logits_bytes for moment in moments) == any("head" in moment.cause for moment in moments)
        gathering = {moment.cause.split()[-1] for moment in moments if moment.gathers_bytes}
        # else what was gathered stays, but what comes ahead of the first forward
        assert gathering <= {"gather", "forward"} or layout.zero == 3


@pytest.mark.parametrize("sequence", [16, 32, 64])
@pytest.mark.parametrize("layers", [5, 6, 7, 8])
@pytest.mark.parametrize("text", ["dp8 zero2 mbs1 ac=full/2", "dp8 zero3 mbs1 ac=full/2", "dp8 zero2 mbs1 ac=full/3"])
def test_the_peak_is_at_any_recomputed_layer(text: str, layers: int, sequence: int) -> None:
    """The second backward of its kind is the fullest where gradients outweigh activations: the first follows the head,
    which leaves fewer gradients in flight."""
    model = Model(name="m", layers=layers, width=64, heads=4, kv_heads=4, head_dim=8, ffn=96, vocab=2)
    counts, layout = Counts(model, Job(sequence=sequence, global_batch=8)), Layout.parse(text)
    moments = list_live_bytes(counts, layout)
    assert count_rank_memory(counts, layout)[0].peak_bytes == max(moment.live_bytes for moment in moments)


def test_offloaded_activations_leave_those_of_two_layers_on_the_gpu() -> None:
    """What every layer keeps is on the host but for the layer that runs and the one on its way."""
    job = Job(sequence=8192, global_batch=16)  # a second micro-batch: activations and gradients at once
    model, layout = build_model("llama3-8b"), Layout(dp=8, zero=1)
    here, away = (
        count_rank_memory(Counts(model, item), layout)[0] for item in (job, job.replace(offload=("activations",)))
    )
    kept = Counts(model, job).profile(get_local_degrees(layout), get_kind(model, 0)).kept_bytes
    assert here.activations_bytes > model.layers * kept
    head = Counts(model, job).profile(get_local_degrees(layout), "head").kept_bytes
    assert away.activations_bytes == sum(sorted((kept, kept, head))[1:])
    assert here.peak_bytes - away.peak_bytes > (model.layers - 3) * kept


def test_offloaded_activations_of_a_pipeline_do_not_pile_up() -> None:
    model = build_model("llama3-8b")
    counts = Counts(model, Job(sequence=2048, global_batch=64, offload=("activations",)))
    peaks = [count_rank_memory(counts, Layout(pp=4, dp=2, schedule=name))[0].peak_bytes for name in ("gpipe", "1f1b")]
    assert abs(peaks[0] - peaks[1]) <= 2 * 2048 * model.width * 2  # but for messages on their way


# MooreThreads/SimuMax@4dcaae5:docs/b200/b200_release_v1.2_summary.json: Megatron-Core 23e00ed, Transformer Engine 2.11,
# MiB of max_memory_allocated on the ranks of each stage. Its "405B" has 16 key/value heads.
SIMUMAX = [
    ("llama3-70b", 12, 8, "dp4 pp2 zero1 mbs1", 4096, (68149.2, 64479.48)),
    ("llama3-70b", 12, 8, "dp2 tp4 zero1 mbs1", 4096, (40009.77,)),
    ("llama3-70b", 12, 8, "cp8 zero1 mbs1 cp=ulysses", 32768, (107014.15,)),
    ("llama3-405b", 4, 16, "dp4 pp2 zero1 mbs1", 4096, (88688.76, 89173.09)),
    ("llama3-405b", 4, 16, "tp2 cp4 zero1 mbs1 cp=ulysses", 32768, (89113.74,)),
]


@pytest.mark.parametrize(("name", "layers", "kv_heads", "text", "sequence", "measured"), SIMUMAX)
def test_published_peaks_of_megatron(
    name: str, layers: int, kv_heads: int, text: str, sequence: int, measured: tuple[float, ...]
) -> None:
    """To 0.3 %: with the unused gradients that Transformer Engine keeps, a tenth less without."""
    model = build_model(name).replace(layers=layers, kv_heads=kv_heads)
    job = Job(sequence=sequence, global_batch=16, overlap=(), vocab_multiple=128, merged_projections=True)
    layout = Layout.parse(text)
    ranks = count_rank_memory(Counts(model, job.replace(wgrad_accumulation="fused_dummy")), layout)
    assert [rank.peak_bytes / MIB for rank in ranks] == pytest.approx(measured, rel=0.003)


def test_dummy_gradients_are_one_tensor_per_weight_shape() -> None:
    model = build_model("llama3-8b")
    job = Job(sequence=1024, global_batch=8, merged_projections=True, wgrad_accumulation="fused")
    summed, kept = (
        count_rank_memory(Counts(model, job.replace(wgrad_accumulation=item)), Layout(dp=8, zero=1))[0].peak_bytes
        for item in ("fused", "fused_dummy")
    )
    D, F, kv = model.width, model.ffn, model.kv_heads * model.head_dim
    assert kept - summed == 2 * ((D + 2 * kv) * D + D * D + 2 * F * D + D * F)


def test_deferred_gradients_add_to_their_sums_and_buckets() -> None:
    """Sums of 4 bytes from the start; a backward ends with every gradient of 2 bytes, and buckets hold 2 more."""
    model = build_model("llama3-8b").replace(layers=4)
    layout, P = Layout(dp=2, zero=0), model.parameters
    apart, late, buckets = (
        count_rank_memory(Counts(model, Job(sequence=64, global_batch=2, wgrad_accumulation=item)), layout)[
            0
        ].passes_bytes
        for item in ("separate", "deferred", "deferred_buckets")
    )
    assert buckets - late == 2 * P
    assert late == pytest.approx((2 + 12 + 4 + 2) * P, rel=0.05)  # weights, the optimizer's, sums, gradients
    assert apart == pytest.approx((2 + 12 + 4) * P, rel=0.05)


def test_gradients_joined_for_the_update() -> None:
    """Each rank's half of them, in 2 bytes and in 4."""
    job = JOB.replace(flat_copies=("gradients",))
    apart, joined = (count_all_ranks(ZERO_TABLE, layout=Layout(dp=2, zero=1), job=item) for item in (JOB, job))
    assert (apart.peak_cause, joined.peak_cause) == ("optimizer", "optimizer")
    assert joined.peak_bytes - apart.peak_bytes == 2 * joined.updated_numel
    assert joined.peak_bytes == pytest.approx((2 + 2 + (12 + 2 + 4) / 2) * ZERO_TABLE.parameters, rel=0.001)


@pytest.mark.parametrize(
    ("loss", "per_logit"),
    [
        ("fused", 2),
        ("low_precision", 8),
        ("upcast", 6),
        ("upcast_copy", 8),
        ("upcast_separate", 10),
        ("upcast_compiled", 10),
        ("plain", 12),
    ],
)
def test_bytes_per_logit_at_the_fullest_moment_of_the_loss(loss: str, per_logit: int) -> None:
    """fused: logits; low_precision: they, their log-softmax and two gradients in 16 bits; upcast: fp32 and 16 bits;
    upcast_copy: fp32 twice; upcast_separate, upcast_compiled: fp32 twice and 16 bits; plain: log-softmax and two
    gradients in fp32."""
    model = build_model("llama3-8b").replace(layers=1)
    job = Job.read({"sequence": 4096, "global_batch": 8, "loss": loss}, origin="test")
    head = Counts(model, job).profile(get_local_degrees(Layout(dp=8)), "head")
    logits = 4096 * model.vocab
    streams = 3 * 4096 * model.width * 4  # the head's input, its norm and their gradients
    table = 2 * model.vocab * model.width  # the gradient of the head's weight
    peak = max(head.forward_peak_bytes, head.backward_peak_bytes)
    assert per_logit * logits <= peak <= per_logit * logits + streams + table + 2 * 4 * LOSS_CHUNK_ELEMENTS


def test_live_bytes_of_a_small_unit_equal_those_by_hand() -> None:
    """h = x·a keeps x, y = x + h keeps nothing."""
    first = matmul("first", "x", "h", rows=2, in_features=4, out_features=4, width=4)
    ops = [first, elementwise("sum", "add", ("x", "h"), "y", size=32)]
    entered = SimulatedUnit(UnitOperations(tuple(ops)), input_name="x", input_bytes=32, wgrad_element_bytes=4)
    profile = simulate_unit(entered, sums=GradientSums(1000))
    assert profile.kept_bytes == 32  # x alone: h is freed in the sum
    assert profile.forward_peak_bytes == 32 + 32 + 32
    # Gradient of y (also of h and, in part, of x) 32, x 32; then a's gradient 64 and the product into x 32; then x and
    # the product of y's gradient are summed into a third buffer; last the sums are made while a's gradient is held.
    assert profile.backward_peak_bytes == 32 + 1000 + 64
    assert simulate_unit(entered, sums=GradientSums()).backward_peak_bytes == 32 + 32 + 32 + 64


def test_bytes_per_step_are_those_of_the_formulas() -> None:
    P, n = ZERO_TABLE.parameters, 8
    job = Job(sequence=16, global_batch=64, precision=get_recipe("bf16-grad16"))

    def count_sent(text: str) -> dict[str, int]:
        result = sum_traffic(Counts(ZERO_TABLE, job), Layout.parse(text))
        assert [row.bytes for row in result if row.axis == "world"] == [2 * (n - 1) * 12 // n]
        return {row.collective: row.bytes for row in result if row.axis == "dp"}

    assert count_sent("dp8 zero0 mbs8") == {"all_reduce": 2 * (n - 1) * 2 * P // n}
    for zero in (1, 2):
        both = count_sent(f"dp8 zero{zero} mbs8")
        assert both["all_gather"] == both["reduce_scatter"] == (n - 1) * 2 * P // n
    whole = count_sent("dp8 zero3 mbs8")
    ends = ZERO_TABLE.vocab * ZERO_TABLE.width * 2 + ZERO_TABLE.width  # embedding, head and its norm: gathered once
    assert whole["all_gather"] == (n - 1) * 2 * (2 * P - ends) // n
    assert whole["reduce_scatter"] == (n - 1) * 2 * P // n


def test_gathers_of_zero_3_come_with_every_micro_batch() -> None:
    job = Job(sequence=16, global_batch=64)
    result = list_messages(Counts(ZERO_TABLE, job), Layout.parse("dp8 zero3 mbs2"))
    counts = dict.fromkeys((message.collective for message in result), 0)
    for message in result:
        counts[message.collective] += message.times
    assert counts == {"all_reduce": 1, "all_gather": 4 * (2 * 37 + 2), "reduce_scatter": 4 * 39}


@pytest.mark.parametrize("reduce", ["step", "micro_batch"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_optimizer_sees_the_reduced_gradients(zero: int, reduce: str) -> None:
    """After several micro-batches too: what is reduced is there once, however often it was reduced."""
    counts = Counts(build_model("llama3-8b"), Job(sequence=2048, global_batch=32, reduce=reduce, overlap=()))
    layout = Layout(dp=8, zero=zero)
    at_update = list_live_bytes(counts, layout)[-1]
    assert (at_update.cause, at_update.gradients_bytes) == (
        "optimizer",
        count_rank_memory(counts, layout)[0].gradients_bytes,
    )


def test_predicted_memory_does_not_depend_on_earlier_predictions() -> None:
    """Of four stages in a line or in a V, whose middle keeps no output for another rank, in either order."""
    model = Model(name="m", layers=8, width=64, heads=2, kv_heads=1, head_dim=32, ffn=128, vocab=300)
    job = JOB.replace(stage_outputs="retained", global_batch=8)
    layouts = [Layout.parse(f"pp2 v2 {name}") for name in ("interleaved", "zbv", "dualpipev")]
    alone = [count_rank_memory(Counts(model, job), layout) for layout in layouts]
    for order in permutations(range(3)):
        counts = Counts(model, job)
        assert {at: count_rank_memory(counts, layouts[at]) for at in order} == dict(enumerate(alone))
    zbv = alone[1][1]  # rank 1 holds stages 1 and 2
    assert zbv.peak_bytes == max(
        moment.live_bytes for moment in list_live_bytes(Counts(model, job), layouts[1], rank=1)
    )


@pytest.mark.parametrize("stack", ["fivefold", "megatron", "torchtitan", "deepspeed"])
@pytest.mark.parametrize("text", ["pp3 v2", "pp4 v3", "dp2 pp5 v2 zero3", "dp2 pp3 v4 zero2"])
def test_many_uneven_rounds_of_an_interleaved_schedule_need_no_table_of_all(
    text: str, stack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak of a schedule with two sizes of groups is that of a few groups of each."""
    model = build_model("llama3-8b")
    layout = Layout.parse(f"{text} interleaved mbs1 ac=selective")
    for remainder in range(1, layout.pp):
        micro_batches = (remainder + 6) * layout.pp + remainder
        job = Job(sequence=256, global_batch=layout.dp * micro_batches, stack=stack)
        if not is_legal(layout, model=model, job=job):
            continue
        few = count_rank_memory(Counts(model, job), layout)
        assert make_table(layout, job).micro_batches < micro_batches
        with monkeypatch.context() as patched:
            patched.setattr(peak, "_count_enough_micro_batches", lambda layout, job: layout.micro_batches(job))
            assert count_rank_memory(Counts(model, job), layout) == few
