"""Messages of a step against the formulas of Megatron-LM, ZeRO, ring attention, Ulysses and pipelines, exactly."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.job import Job, get_recipe
from fivefold.layout.mesh import group
from fivefold.layout.schedule import schedule
from fivefold.layout.schedule.pipeline_schedule import PIPELINE_SCHEDULES, SCHEDULES, ScheduleName
from fivefold.layout.sharding import shard_weight
from fivefold.layout.spec import Layout
from fivefold.model.experts import MoE
from fivefold.model.latent_attention import MLA
from fivefold.model.spec import Model
from fivefold.model.weights import list_weights
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.traffic import RepeatedMessage, list_first_stages, list_messages, sum_traffic
from fivefold.step import count_sent_bytes

L, D, K, H, V, T = 4, 128, 8, 16, 1024, 64
DENSE = Model(name="dense", layers=L, width=D, heads=K, kv_heads=K, head_dim=H, ffn=256, vocab=V)
EXPERTS = DENSE.replace(moe=MoE(experts=8, topk=2, ffn=64))
JOB = Job(sequence=T, global_batch=16)


def count_messages(text: str, *, axis: str, model: Model = DENSE, job: Job = JOB) -> Counter[tuple[str, int]]:
    """How often a rank takes part in each collective, by its payload in bytes; all stages on one rank."""
    layout = Layout.parse(text)
    chunks = tuple(range(layout.pp * layout.v))
    result: Counter[tuple[str, int]] = Counter()
    for message in list_messages(Counts(model, job), layout, chunks=chunks):
        if message.axis == axis:
            result[message.collective, message.payload] += message.times
    return result


# ---- tensor parallelism

# Each rank has seen its rows alone: two norms a layer and the last, summed once a step in fp32.
NORMS = Counter({("all_reduce", 2 * D * 4): L, ("all_reduce", D * 4): 1})


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("cp", [1, 2])
def test_sequence_parallelism_gathers_and_scatters_twice_per_layer_in_forward_and_backward(tp: int, cp: int) -> None:
    """Freed weights are gathered again; the embedding scatters, the head gathers; the loss sends 3 numbers a token."""
    B, m = 2, 4
    stream = B * T // cp * D * 2
    forward, backward, again = 2 * L + 1, 2 * L + 1, 2 * L + 1  # gathers: backward, of what the forward scattered
    expected = (
        Counter(
            {
                ("all_gather", stream): m * (forward + backward + again),
                ("reduce_scatter", stream): m * ((2 * L + 1) + (2 * L + 1)),
                ("all_reduce", B * T // cp * 4): m * 3,
            }
        )
        + NORMS
    )
    assert count_messages(f"dp2 tp{tp} cp{cp} mbs{B}", axis="tp") == expected


@pytest.mark.parametrize("tp", [2, 4])
def test_without_sequence_parallelism_a_layer_sends_two_all_reduces_in_forward_and_backward(tp: int) -> None:
    stream = 2 * T * D * 2
    assert count_messages(f"tp{tp} mbs2 nosp", axis="tp") == {
        ("all_reduce", stream): 8 * (2 * L + 1 + 2 * L + 1),  # the embedding forward, the head backward
        ("all_reduce", 2 * T * 4): 8 * 3,
    }


@pytest.mark.parametrize("tp", [2, 4])
def test_sequence_parallelism_sends_as_much_as_all_reduces_except_repeated_gathers(tp: int) -> None:
    """An all-reduce is a reduce-scatter and a gather (Korthikanti 2022, §4.2.2)."""

    def count_sent(text: str) -> int:
        rows = sum_traffic(Counts(DENSE, JOB), Layout.parse(text))
        return sum(row.bytes for row in rows if row.axis == "tp")

    again = 8 * (2 * L + 1) * count_sent_bytes("all_gather", payload=2 * T * D * 2, ranks=tp)
    norms = sum(n * count_sent_bytes("all_reduce", payload=size, ranks=tp) for (_, size), n in NORMS.items())
    assert count_sent(f"tp{tp} mbs2") == count_sent(f"tp{tp} mbs2 nosp") + again + norms


def test_recomputed_layers_send_the_messages_of_their_forward_twice() -> None:
    """But for the last sum over ranks, of which the backward asks nothing, and what was gathered again is gathered."""
    stream = T * D * 2
    for stops, sums in ((True, 1), (False, 2)):
        job = JOB.replace(early_stop=stops)
        plain, full = (count_messages(f"tp2 {ac}", axis="tp", job=job) for ac in ("", "ac=full"))
        assert full["reduce_scatter", stream] - plain["reduce_scatter", stream] == 16 * sums * L
        assert full["all_gather", stream] == plain["all_gather", stream]
    assert count_messages("tp2 ac=selective", axis="tp") == plain
    hop = "p2p", T // 2 * K * 2 * H * 2
    assert count_messages("cp2 ac=selective", axis="cp")[hop] - count_messages("cp2", axis="cp")[hop] == 16 * L


@pytest.mark.parametrize("text", ["tp4", "tp4 nosp", "dp2 tp4 zero1"])
def test_gradients_of_replicated_weights_are_summed_over_tensor_ranks(text: str) -> None:
    """Norms of single heads and copied key heads always; other replicated weights under sequence parallelism only."""
    model = DENSE.replace(kv_heads=2, qk_norm="head", qkv_bias=True, out_bias=True, mlp_bias=True, norm="layernorm")
    layout = Layout.parse(text)
    shards = layout.shards
    whole = 2 * 2 * D + 2 * D if layout.sp else 0  # norms; biases of what is added up over ranks
    norms, keys = 2 * 2 * H, 2 * (H * D + H)
    expected = Counter({("all_reduce", 4 * (whole + norms) // shards): L, ("all_reduce", 4 * keys // shards): L})
    expected += Counter({("all_reduce", 4 * 2 * D // shards): 1} if layout.sp else {})
    expected += Counter({("all_reduce", T * 4): 3 * layout.micro_batches(JOB)})  # of the loss
    result = count_messages(text, axis="tp", model=model)
    del result["all_reduce", T * D * 2]  # the stream
    assert Counter({key: n for key, n in result.items() if key[0] == "all_reduce"}) == expected
    kv = [m for m in list_messages(Counts(model, JOB), layout) if m.payload == 4 * keys // shards]
    assert {message.ranks for message in kv} == {2}


@pytest.mark.parametrize(("text", "said_back"), [("tp2", "reduce_scatter"), ("tp2 nosp", "all_reduce")])
def test_latent_attention_sends_its_shared_rotary_key(text: str, said_back: str) -> None:
    model = DENSE.replace(mla=MLA(q_rank=None, kv_rank=24, nope_dim=16, rope_dim=6, v_dim=16))
    result = count_messages(text, axis="tp", model=model)
    key = T * 6 * 2
    assert result[said_back, key] == 16 * L
    assert result["all_gather", key] == (16 * L if said_back == "reduce_scatter" else 0)


# ---- context and expert parallelism


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("tp", [1, 2])
def test_ring_attention_sends_keys_and_values_and_in_the_backward_their_gradients_too(cp: int, tp: int) -> None:
    own = 2 * T // cp * K // tp * H * 2 * 2
    assert count_messages(f"cp{cp} tp{tp} mbs2", axis="cp") == {("p2p", own): 3 * 8 * L * (cp - 1)}


@pytest.mark.parametrize("cp", [2, 4])
def test_ulysses_exchanges_q_k_v_and_output_in_forward_and_backward(cp: int) -> None:
    model = DENSE.replace(kv_heads=4)
    wide, narrow = 2 * T // cp * 8 * H * 2, 2 * T // cp * 4 * H * 2
    assert count_messages(f"cp{cp} cp=ulysses mbs2", axis="cp", model=model) == {
        ("all_to_all", wide): 8 * L * 2 * 2,
        ("all_to_all", narrow): 8 * L * 2 * 2,
    }


def test_ulysses_repeats_key_heads_that_cp_does_not_divide() -> None:
    wide = 2 * T // 4 * 8 * H * 2
    for heads, sent in ((1, 4), (2, 4), (4, 4), (8, 8)):
        result = count_messages("cp4 cp=ulysses mbs2", axis="cp", model=DENSE.replace(kv_heads=heads))
        expected = Counter({("all_to_all", wide): 8 * L * 2 * 2})
        assert result == expected + Counter({("all_to_all", wide * sent // 8): 8 * L * 2 * 2})


@pytest.mark.parametrize("ep", [2, 4, 8])
@pytest.mark.parametrize("tp", [1, 2])
def test_every_token_is_sent_to_topk_experts_and_back_in_each_direction(ep: int, tp: int) -> None:
    routed = 2 * T // tp * D * 2 * 2  # B·T·D elements, topk times
    assert count_messages(f"dp8 tp{tp} ep{ep} mbs2", axis="ep", model=EXPERTS) == {
        ("all_to_all", routed): 1 * L * 4,
        ("all_to_all", routed // D * 2): 1 * L * 2,  # their weights, in fp32
        ("all_to_all", 8 * 8): 1 * L,  # how many will come to each expert
    }


def test_rows_are_dispatched_in_fp8_with_tile_scales_and_combined_in_bf16() -> None:
    """DeepSeek-V3 §3.3: dispatch in fp8, combine in bf16; backward the gradients of what combine sent are dispatched.

    Of D = 7168 a row is 7168 bytes and 56 scales of 4, of 14 336 in bf16.
    """
    model = EXPERTS.replace(width=7168)
    job, copies, layers = JOB.replace(precision=get_recipe("fp8-tiles-wire")), T * 2, L
    rows = Counter(
        {
            ("all_to_all", 7168 * copies): 2,
            ("all_to_all", 224 * copies): 2,
            ("all_to_all", 14_336 * copies): 2,
            ("all_to_all", 4 * copies): 2,
            ("all_to_all", 8 * 8): 1,
        }
    )
    micro = 16 // 4
    assert count_messages("dp4 ep4 mbs1", axis="ep", model=model, job=job) == {
        key: n * layers * micro for key, n in rows.items()
    }
    again = count_messages("dp4 ep4 mbs1 ac=full", axis="ep", model=model, job=job)
    assert again["all_to_all", 7168 * copies] == again["all_to_all", 224 * copies] == 3 * layers * micro
    assert again["all_to_all", 14_336 * copies] == 2 * layers * micro  # home is not asked for again


def test_recomputed_experts_are_dispatched_again_and_their_counts_only_with_the_full_layer() -> None:
    """Their outputs are not combined back a second time."""
    routed, numbers = T * D * 2 * 2, ("all_to_all", 8 * 8)
    for ac, again, told in (("", 0, 1), ("ac=moe", 1, 1), ("ac=full", 1, 2)):
        result = count_messages(f"dp2 ep2 {ac}", axis="ep", model=EXPERTS)
        assert result["all_to_all", routed] == 8 * L * (4 + again)
        assert result["all_to_all", routed // D * 2] == 8 * L * (2 + again)
        assert result[numbers] == 8 * L * told


def test_the_balance_loss_sums_counts_of_sequences_over_the_ranks_that_hold_their_rows() -> None:
    counted = ("all_reduce", 8 * 2 * 8)
    for text, axis, times in (("tp2 mbs2", "tp", 8), ("tp2 cp2 mbs2", "cp", 8), ("dp2 mbs2", "dp", 0)):
        assert count_messages(text, axis=axis, model=EXPERTS)[counted] == times * L
    free = EXPERTS.replace(moe=MoE(experts=8, topk=2, ffn=64, balance="free"))
    assert count_messages("tp2 mbs2", axis="tp", model=free)[counted] == 0
    load = [
        message for message in list_messages(Counts(free, JOB), Layout.parse("dp2 tp2")) if message.group == "stage"
    ]
    assert [(message.times, message.payload, message.ranks) for message in load] == [(1, 8 * 8 * L, 4)]


def test_an_expert_cut_over_etp_gathers_its_tokens_and_scatters_its_sums() -> None:
    routed = T // 2 * D * 2 * 2
    assert count_messages("dp2 tp2 ep2 etp2", axis="etp", model=EXPERTS) == {
        ("all_gather", 2 * routed): 8 * L * 2,
        ("reduce_scatter", 2 * routed): 8 * L * 2,
        ("all_gather", 2 * routed // D * 2): 8 * L,
        ("reduce_scatter", 2 * routed // D * 2): 8 * L,
        ("all_gather", 2 * 8 * 8): 8 * L,
    }


def test_sent_bytes_of_collectives_follow_the_published_formulas() -> None:
    for ranks in (2, 4, 8):
        b = 2**20
        assert ranks * count_sent_bytes("all_reduce", payload=b, ranks=ranks) == 2 * (ranks - 1) * b
        for collective in ("all_gather", "reduce_scatter", "all_to_all"):
            assert ranks * count_sent_bytes(collective, payload=b, ranks=ranks) == (ranks - 1) * b


# ---- pipelines


def boundary_messages(name: ScheduleName, *, pp: int, v: int, m: int) -> list[int]:
    """Per rank, by walking the schedule's paths: a send for every neighbour stage on another rank."""
    sends = [0] * pp
    for path in schedule(name, pp=pp, v=v, micro_batches=m).paths:
        for stage, rank in enumerate(path):
            for neighbour in (stage - 1, stage + 1):
                if 0 <= neighbour < len(path) and path[neighbour] != rank:
                    sends[rank] += 1
    return sends


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 4])
def test_messages_between_stages_are_those_of_the_schedule(name: ScheduleName, pp: int) -> None:
    v = 2 if PIPELINE_SCHEDULES[name].stages_per_rank != 1 else 1
    layout = Layout(pp=pp, v=v, schedule=name, mbs=2)
    job, model = JOB.replace(global_batch=32), DENSE.replace(layers=8)
    m = layout.micro_batches(job)
    table = schedule(name, pp=pp, v=v, micro_batches=m)
    assert list_first_stages(layout) == table.rank_stages[0]
    counted = [
        sum(
            message.times
            for message in list_messages(Counts(model, job), layout, chunks=held)
            if (message.axis, message.collective, message.payload) == ("pp", "p2p", 2 * T * D * 2)
        )
        for held in table.rank_stages
    ]
    assert counted == boundary_messages(name, pp=pp, v=v, m=m)


def test_a_message_between_stages_is_the_activation_or_the_share_of_a_rank() -> None:
    stream = T * D * 2
    for text, job, size in (
        ("pp2", JOB, stream),
        ("pp2 tp2", JOB, stream // 2),
        ("pp2 cp2", JOB, stream // 2),
        ("pp2 tp2 nosp", JOB, stream),
        ("pp2 tp2 nosp", JOB.replace(scatter_gather_tensors=True), stream // 2),
    ):
        assert count_messages(text, axis="pp", job=job) == {("p2p", size): 2 * 16}


@pytest.mark.parametrize(("text", "sent"), [("pp2", 1), ("pp4", 1), ("pp2 zbv", 0), ("pp2 interleaved v2", 1)])
def test_gradients_of_a_tied_embedding_on_two_ranks_are_summed(text: str, sent: int) -> None:
    tied = DENSE.replace(tied_embeddings=True)
    layout = Layout.parse(f"{text} tp2")
    result = list_messages(Counts(tied, JOB), layout, chunks=list_first_stages(layout))
    tables = [message for message in result if (message.axis, message.collective) == ("pp", "all_reduce")]
    assert [(message.payload, message.ranks) for message in tables] == [(V // 2 * D * 4, 2)] * sent


@pytest.mark.parametrize("zero", [0, 1])
def test_dualpipe_reduces_the_stages_held_by_two_ranks(zero: int) -> None:
    """And of a tied table each rank has one, for both ends."""
    tied = DENSE.replace(tied_embeddings=True)
    layout = Layout.parse(f"dp2 pp2 dualpipe zero{zero}")
    result = list_messages(Counts(tied, JOB), layout, chunks=list_first_stages(layout))
    twins = [message for message in result if (message.axis, message.collective) == ("pp", "all_reduce")]
    assert sum(message.times for message in twins) == L + 2
    assert sum(message.times * message.payload for message in twins) == 4 * tied.parameters // layout.shards


def test_gradients_of_a_tied_embedding_are_summed_by_shards() -> None:
    layout = Layout.parse("dp4 pp2 zero1")
    result = list_messages(Counts(DENSE.replace(tied_embeddings=True), JOB), layout)
    assert [message.payload for message in result if message.axis == "pp" and message.collective == "all_reduce"] == [
        V * D
    ]


@pytest.mark.parametrize("text", ["dp2", "tp2", "cp2", "pp2", "dp2 tp2 pp2"])
def test_one_all_reduce_of_norm_loss_and_stop_flag_ends_a_step(text: str) -> None:
    assert count_messages(text, axis="world") == {("all_reduce", 12): 1}


@given(layers=st.integers(4, 9), pp=st.sampled_from([1, 2, 4]), tp=st.sampled_from([1, 2]))
@settings(deadline=None, max_examples=20)
def test_messages_of_a_layer_do_not_depend_on_its_rank(layers: int, pp: int, tp: int) -> None:
    """All stages together: the messages of tp do not depend on the cuts between them."""
    model = DENSE.replace(layers=layers)
    assert count_messages(f"tp{tp} pp{pp}", axis="tp", model=model) == count_messages(f"tp{tp}", axis="tp", model=model)


# ---- data parallelism


def local_elements(model: Model, layout: Layout) -> tuple[int, int]:
    """Dense and expert elements of one rank."""
    local = [shard_weight(weight, model=model, layout=layout, vocab=V) for weight in list_weights(model)]
    experts = sum(weight.numel for weight in local if weight.kind.startswith("expert"))
    return sum(weight.numel for weight in local) - experts, experts


def sum_by_group(text: str, *, model: Model = DENSE, job: Job = JOB) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Of dp: (messages, payload of all of them together, ranks) by collective and group."""
    result: dict[tuple[str, str], tuple[int, int, int]] = {}
    for message in list_messages(Counts(model, job), Layout.parse(text)):
        if message.axis == "dp":
            times, payload, _ = result.get((message.collective, message.group), (0, 0, 0))
            total = payload + message.times * message.payload
            result[message.collective, message.group] = times + message.times, total, message.ranks
    return result


@pytest.mark.parametrize("axes", ["dp4", "dp2 cp2", "cp4", "dp4 tp2"])
@pytest.mark.parametrize("name", ["bf16", "bf16-grad16", "fp32"])
@pytest.mark.parametrize("reduce", ["step", "micro_batch"])
def test_zero_stages_reduce_gradients_and_gather_weights_as_often_as_they_need(
    axes: str, name: str, reduce: str
) -> None:
    precision = get_recipe(name)
    job = JOB.replace(precision=precision, reduce=reduce)
    layout = Layout.parse(axes)
    P = local_elements(DENSE, layout)[0]
    units, m, ends = L + 2, layout.micro_batches(job), 2 * V // layout.tp * D + D
    g, w = precision.summed_bytes * P, precision.weights_bytes
    assert sum_by_group(f"{axes} zero0", job=job) == {("all_reduce", "replica"): (units, g, 4)}
    often = m if reduce == "micro_batch" else 1
    for zero, times in ((1, 1), (2, often)):
        assert sum_by_group(f"{axes} zero{zero}", job=job) == {
            ("all_gather", "shard"): (units, w * P, 4),
            ("reduce_scatter", "shard"): (times * units, times * g, 4),
        }
    assert sum_by_group(f"{axes} zero3", job=job) == {
        ("all_gather", "shard"): (m * (2 * L + 2), m * w * (2 * P - ends), 4),  # embedding and head once
        ("reduce_scatter", "shard"): (often * units, often * g, 4),
    }


@pytest.mark.parametrize(("precision", "scales"), [("fp8-wire", 7 * L), ("fp8-tiles-wire", (4 + 3 * 2) * L)])
def test_fp8_matrices_are_gathered_in_one_byte_with_one_message_for_their_scales(precision: str, scales: int) -> None:
    """Of each layer q, k, v and out of 128 x 128, gate, up and down of 128 x 256 or 256 x 128, and two norms."""
    result = count_messages("dp8 zero3 mbs1", axis="dp", job=JOB.replace(precision=get_recipe(precision)))
    block = 4 * D * D + 3 * D * 256 + 2 * 2 * D
    assert result["all_gather", block] == 2 * 2 * L
    assert result["all_gather", 2 * V * D] == 2  # the embedding, as it is
    assert result["all_reduce", 4 * scales] == 1
    assert sum(times for (kind, _), times in result.items() if kind == "all_reduce") == 1
    assert not count_messages("mbs1", axis="dp", job=JOB.replace(precision=get_recipe(precision)))


def test_zero_3_sends_half_as_much_again_as_zero_2() -> None:
    """ZeRO §7.2.2: 3·P elements for 2·P, in one recipe width and with one micro-batch, embedding and head apart."""
    deep = DENSE.replace(layers=400, vocab=64)
    job = Job(sequence=T, global_batch=4, precision=get_recipe("bf16-grad16"))
    sent = {
        zero: sum(row.bytes for row in sum_traffic(Counts(deep, job), Layout(dp=4, zero=zero))) for zero in range(4)
    }
    assert sent[0] == pytest.approx(sent[1], rel=1e-6)
    assert sent[1] == sent[2]
    assert sent[3] / sent[2] == pytest.approx(1.5, rel=1e-3)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("shards", [2, 4])
def test_gradients_are_reduced_within_shard_groups_and_then_between_them(zero: int, shards: int) -> None:
    P = local_elements(DENSE, Layout(dp=8))[0]
    result = sum_by_group(f"dp8 zero{zero}/{shards}", job=JOB.replace(reduce="step"))
    assert result["reduce_scatter", "shard"] == (L + 2, 4 * P, shards)
    assert result["all_reduce", "replica"] == (L + 2, 4 * P // shards, 8 // shards)
    assert result["all_gather", "shard"][2] == shards
    total = sum(
        count_sent_bytes(collective, payload=payload, ranks=ranks)
        for (collective, _), (_, payload, ranks) in result.items()
        if collective != "all_gather"
    )
    gathered = 4 * P // shards * (shards - 1)
    assert total == gathered + count_sent_bytes("all_reduce", payload=4 * P // shards, ranks=8 // shards)


@pytest.mark.parametrize("zero", [2, 3])
def test_reductions_per_micro_batch_are_counted_per_micro_batch(zero: int) -> None:
    once, item = (sum_by_group(f"dp4 zero{zero}", job=JOB.replace(reduce=when)) for when in ("step", "micro_batch"))
    assert item["reduce_scatter", "shard"][0] == 4 * once["reduce_scatter", "shard"][0]
    assert item["all_gather", "shard"] == once["all_gather", "shard"]
    # between groups of shards only what is summed up
    once, item = (sum_by_group(f"dp4 zero{zero}/2", job=JOB.replace(reduce=when)) for when in ("step", "micro_batch"))
    assert item["reduce_scatter", "shard"][0] == 4 * once["reduce_scatter", "shard"][0]
    assert item["all_reduce", "replica"] == once["all_reduce", "replica"]


def test_weights_that_stay_from_forward_to_backward_are_gathered_once_a_micro_batch() -> None:
    again, once = (sum_by_group("dp4 zero3", job=JOB.replace(reshard=after)) for after in ("forward", "backward"))
    assert (again["all_gather", "shard"][0], once["all_gather", "shard"][0]) == (4 * (2 * L + 2), 4 * (L + 2))
    assert again["reduce_scatter", "shard"] == once["reduce_scatter", "shard"]


def test_a_tied_table_whose_two_ends_are_stages_of_one_rank_is_reduced_once() -> None:
    """Other passes lie between its two gradients; without a pipeline both come in every backward."""
    tied = DENSE.replace(tied_embeddings=True)
    table = V * D * 4
    result = {
        text: sum(
            message.times
            for message in list_messages(Counts(tied, JOB), Layout.parse(text), chunks=chunks)
            if (message.collective, message.payload) == ("reduce_scatter", table)
        )
        for text, chunks in (("dp2 zero2", (0,)), ("dp2 pp2 v2 zbv zero2", (0, 3)), ("dp2 pp2 zero2", (0,)))
    }
    assert result == {"dp2 zero2": 8, "dp2 pp2 v2 zbv zero2": 1, "dp2 pp2 zero2": 8}


@pytest.mark.parametrize(
    ("text", "replicas"), [("dp8 ep2", 4), ("dp8 ep8", 1), ("dp4 tp2 ep4", 2), ("dp4 tp2 etp2", 4)]
)
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_gradients_of_experts_are_reduced_among_ranks_with_the_same_experts(
    text: str, replicas: int, zero: int
) -> None:
    layout = Layout.parse(f"{text} zero{zero}")
    assert layout.expert_replicas == replicas
    result = sum_by_group(f"{text} zero{zero}", model=EXPERTS, job=JOB.replace(reduce="step"))
    dense, experts = local_elements(EXPERTS, layout)
    reduced, dense_group, group_name = (
        ("all_reduce", "replica", "expert_replica") if zero == 0 else ("reduce_scatter", "shard", "expert_shard")
    )
    assert result[reduced, dense_group] == (L + 2, 4 * dense, layout.dp)
    assert result.get((reduced, group_name)) == ((L, 4 * experts, replicas) if replicas > 1 else None)


def test_expert_shard_groups_are_cut_as_the_dense_ones() -> None:
    """Shards of half of dp: half of the ranks that hold the same experts; the rest are replicas."""
    layout = Layout.parse("dp8 ep2 zero1/4")
    assert (layout.expert_shards, layout.expert_replicas) == (2, 4)
    experts = local_elements(EXPERTS, layout)[1]
    result = sum_by_group("dp8 ep2 zero1/4", model=EXPERTS)
    assert result["reduce_scatter", "expert_shard"] == (L, 4 * experts, 2)
    assert result["all_reduce", "expert_replica"] == (L, 4 * experts // 2, 2)


@given(st.data())
@settings(deadline=None, max_examples=60, derandomize=True)
def test_a_message_involves_every_rank_of_its_group(data: st.DataObject) -> None:
    powers = st.sampled_from([1, 2, 4])
    dp, tp, cp, ep, zero = (data.draw(powers) for _ in range(5))
    layout = Layout(dp=dp, tp=tp, cp=cp, ep=min(ep, dp * cp * tp), zero=min(zero, 3), pp=2)
    for message in list_messages(Counts(EXPERTS, JOB), layout):
        assert isinstance(message, RepeatedMessage)
        assert message.times > 0
        assert message.ranks > 1
        if message.axis != "pp":
            assert group(layout, message.group).ranks == message.ranks
