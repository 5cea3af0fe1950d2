"""What one rank holds, keeps and computes, compared with closed forms and with the full model."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.local_weight import pad_vocab
from fivefold.layout.schedule import schedule
from fivefold.layout.schedule.pipeline_schedule import PIPELINE_SCHEDULES
from fivefold.layout.sharding import shard_weight
from fivefold.layout.spec import Layout
from fivefold.layout.stages import distribute_evenly, distribute_parts, list_stage_layers
from fivefold.layout.validity import refuse
from fivefold.model.catalog import build_model, list_names
from fivefold.model.experts import MoE
from fivefold.model.latent_attention import MLA
from fivefold.model.spec import Model
from fivefold.model.weights import Weight, list_block_weights, list_embedding_weights, list_head_weights, list_weights
from fivefold.planner.counts.counts import Counts, get_group_degrees
from fivefold.planner.counts.flops import work
from fivefold.planner.counts.operations.layer import Kind, get_kind
from fivefold.planner.counts.operations.local_shapes import get_local_degrees
from fivefold.planner.counts.update import list_stages
from tests.layout.live import count_live
from tests.selection import mark_share

GPT = Model(
    name="gpt",
    layers=2,
    width=128,
    heads=8,
    kv_heads=8,
    head_dim=16,
    ffn=512,
    vocab=1000,
    norm="layernorm",
    mlp="plain",
    activation="gelu",
    position="learned",
    dropout=0.1,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
)
LLAMA = Model(name="llama", layers=6, width=128, heads=8, kv_heads=2, head_dim=16, ffn=320, vocab=1003)
MIXTURE = LLAMA.replace(
    name="mixture",
    kv_heads=8,
    moe=MoE(experts=8, topk=2, ffn=64, shared_experts=1, dense_layers=2),
    mla=MLA(q_rank=48, kv_rank=32, nope_dim=16, rope_dim=8, v_dim=16),
)
WINDOWS = LLAMA.replace(name="windows", window=24, window_pattern=(True, False, True), tied_embeddings=True, layers=7)
SOME = settings(derandomize=True, deadline=None, max_examples=60)


# ---- activations kept: Korthikanti 2022, table 2


class Technique(NamedTuple):
    layout: str
    whole: int  # bytes per B·T·D that tp does not divide
    cut: int  # that it divides
    squares: int  # per N·T/D, divided by tp


KORTHIKANTI = {
    "none": Technique("", 0, 34, 5),
    "tp": Technique("nosp", 10, 24, 5),
    "tp + sp": Technique("", 0, 34, 5),
    "tp + selective": Technique("nosp ac=selective", 10, 24, 0),
    "tp + sp + selective": Technique("ac=selective", 0, 34, 0),
    "tp + full": Technique("nosp ac=full", 2, 0, 0),
    "tp + sp + full": Technique("ac=full", 0, 2, 0),
}


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("technique", KORTHIKANTI)
@settings(deadline=None, max_examples=10)
@given(B=st.integers(1, 3), T=st.integers(1, 6))
def test_a_layer_keeps_what_korthikanti_counts(technique: str, tp: int, B: int, T: int) -> None:
    """Equal to the byte but for two fp32 statistics per row and norm, where norms are not recomputed."""
    text, whole, cut, squares = KORTHIKANTI[technique]
    if (tp == 1) != (technique == "none"):
        return
    T, D, N = 8 * T, GPT.width, GPT.heads
    layout = Layout.parse(f"tp{tp} mbs{B} {text}")
    profile = Counts(GPT, Job(sequence=T, attention="unfused", vocab_multiple=8)).profile(
        get_local_degrees(layout), Kind(False, False)
    )
    rows = B * T // (tp if layout.sp else 1)
    statistics = 0 if layout.ac == "full" else 2 * 2 * 4 * rows
    formula = B * T * D * (whole + Fraction(cut, tp) + Fraction(squares * N * T, D * tp))
    assert profile.kept_bytes == formula + statistics


@pytest.mark.parametrize(
    ("layers", "width", "heads", "layout", "global_batch", "none", "selective"),
    [
        (48, 6144, 64, "tp8 mbs4", 4, 59.25, 9.5625),
        (96, 12288, 96, "tp8 pp8 v3", 64, 66.84375, 12.3515625),
        (128, 25600, 160, "tp8 pp64", 512, 131.25, 26.5625),
    ],
    ids=["22B", "175B", "1T"],
)
def test_activations_in_flight_equal_figure_1_of_korthikanti(
    layers: int, width: int, heads: int, layout: str, global_batch: int, none: float, selective: float
) -> None:
    """GiB on the first stage of Korthikanti 2022's models, as read by calculon-ai/calculon@caa4b11:
    calculon/llm/validation.py; the schedule's table says how many chunks of layers are alive at once.
    """
    model = GPT.replace(layers=layers, width=width, heads=heads, kv_heads=heads, head_dim=width // heads, ffn=4 * width)
    counts = Counts(model, Job(sequence=2048, global_batch=global_batch, attention="unfused"))
    for text, published in (("nosp", none), ("ac=selective", selective)):
        result = Layout.parse(f"{layout} {text}")
        table = schedule(result.schedule, pp=result.pp, v=result.v, micro_batches=result.micro_batches(counts.job))
        alive = max(passed.total() for passed, _ in count_live(table, rank=0))
        blocks = alive * layers // (result.pp * result.v)
        part = get_local_degrees(result)
        statistics = 2 * 2 * 4 * counts.get_local(part).stream_rows
        assert blocks * (counts.profile(part, Kind(False, False)).kept_bytes - statistics) == published * 2**30


def test_flash_attention_keeps_a_number_per_query_where_scores_were() -> None:
    B, T, D, N = 1, 64, GPT.width, GPT.heads
    kept = {
        kind: Counts(GPT, Job(sequence=T, attention=kind))
        .profile(get_local_degrees(Layout()), Kind(False, False))
        .kept_bytes
        for kind in ("flash", "unfused")
    }
    assert kept["unfused"] - kept["flash"] == 5 * N * T * T * B - 4 * B * T * N
    assert kept["flash"] == 34 * B * T * D + 16 * 2 * B * T // 2 + 4 * B * T * N


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_cp_divides_what_is_kept(kind: str, cp: int) -> None:
    """Ulysses keeps attention's output twice: by heads for attention itself, by tokens for the projection."""
    counts = Counts(GPT, Job(sequence=256))
    layout, block = Layout.parse(f"cp{cp} cp={kind}"), Kind(False, False)
    twice = 2 * 256 * GPT.width if kind == "ulysses" else 0
    whole = counts.profile(get_local_degrees(Layout()), block).kept_bytes
    assert counts.profile(get_local_degrees(layout), block).kept_bytes * cp == whole + twice


# ---- weights


def draw_legal(draw: st.DrawFn, model: Model, *, global_batch: int = 32, sequence: int = 64, sp: bool = True) -> Layout:
    """Any legal layout of a model; what is illegal is not tried again."""
    degree = st.sampled_from([1, 2, 4, 8])
    pp = draw(st.sampled_from([n for n in (1, 2, 3, 4) if n <= model.layers]))
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zb1p", "zbv", "dualpipev"])) if pp > 1 else "1f1b"
    v = 2 if PIPELINE_SCHEDULES[schedule].is_v_shaped else draw(st.integers(2, 3)) if schedule == "interleaved" else 1
    assume(pp * v <= model.layers)
    sharded_weights = sorted(draw(st.sets(st.integers(1, model.layers - 1), min_size=pp * v - 1, max_size=pp * v - 1)))
    uneven = tuple(
        after - before for before, after in zip((0, *sharded_weights), (*sharded_weights, model.layers), strict=True)
    )
    cp = draw(st.sampled_from([1] if model.mixers else [1, 2]))  # mixers are not cut by tp and cp
    fields = {
        "dp": draw(degree),
        "tp": 1 if model.mixers else draw(degree),
        "cp": cp,
        "pp": pp,
        "v": v,
        "schedule": schedule,
        "cp_kind": draw(st.sampled_from(["ring", "ulysses"])) if cp > 1 else "ring",
        "stages": uneven if draw(st.booleans()) else (),
        "zero": draw(st.integers(0, 3)),
        "mbs": draw(st.sampled_from([1, 2])),
        "ac": draw(st.sampled_from(["none", "selective", "full", "full/2", "norm+act"])),
    }
    if pp > 1 and fields["ac"] != "none" and draw(st.booleans()):
        fields["ac"] = f"{fields['ac']}@{draw(st.integers(1, pp - 1))}"
    if model.moe:
        fields |= {"ep": draw(degree), "etp": draw(st.sampled_from([1, 2]))}
    if fields["tp"] > 1 and not sp:
        fields["sp"] = draw(st.booleans())
    try:
        layout = Layout.read(fields, origin="drawn")
        refuse(layout, model=model, job=Job(sequence=sequence, global_batch=global_batch))
    except UserError:
        assume(False)
    return layout


@st.composite
def layouts_of(draw: st.DrawFn, models: list[str]) -> tuple[Model, Layout]:
    model = build_model(draw(st.sampled_from(models)))
    return model, draw_legal(draw, model, sp=False)


def copies(weight: Weight, *, model: Model, tp: int) -> Fraction:
    """How many of a dense weight one replica holds in all, by the rules of tensor parallelism; vocabulary padded."""
    name = weight.name.split(".", 2)[2] if weight.name.startswith("blocks.") else weight.name
    name = re.sub(r"^head\.mtp\.\d+\.(block\.)?", "", name)  # a multi-token module is a block with a projection
    if name.startswith(("embed.tokens", "head.out")):
        padded = -(-model.vocab // tp) * tp
        return Fraction(padded, model.vocab)
    if name.startswith(("attention.k.", "attention.v.")) or (model.qk_norm in ("full", "heads") and "k_norm" in name):
        return Fraction(max(tp, model.kv_heads), model.kv_heads)
    if model.qk_norm in ("full", "heads") and "q_norm" in name:
        return Fraction(1)
    latent = model.mla is not None and name.startswith(("attention.q_down", "attention.kv_down"))
    added_once = name.endswith(("attention.out.bias", "down.bias"))
    whole = (
        latent or added_once or weight.kind in ("norm", "router") or name.startswith(("embed.positions", "project."))
    )
    return Fraction(tp if whole else 1)


def count_replica_elements(model: Model, layout: Layout) -> int:
    """Elements on all ranks that together hold the model once, from what each of them says it holds."""
    vocab = pad_vocab(model, Job(), tp=layout.tp)
    total = 0
    stages = list_stage_layers(model, layout)
    for index, layers in enumerate(stages):
        held = [weight for layer in layers for weight in list_block_weights(model, layer)]
        held += list(list_embedding_weights(model)) if index == 0 else []
        held += list(list_head_weights(model)) if index == len(stages) - 1 else []
        for weight in held:
            mine = shard_weight(weight, model=model, layout=layout, vocab=vocab).numel
            total += mine * (layout.ep * layout.etp if weight.kind.startswith("expert") else layout.tp)
    return total


@SOME
@given(layouts_of(list_names()))
@example((build_model("llama3-8b"), Layout(tp=16)))  # 8 key heads are held twice
def test_the_ranks_of_a_replica_hold_the_model_and_the_known_copies(pair: tuple[Model, Layout]) -> None:
    model, layout = pair
    expected = sum(
        # a bias of an expert's down-projection is added once, and so is full on every rank of etp
        weight.numel * (layout.etp if weight.name.endswith("experts.down_bias") else 1)
        if weight.kind.startswith("expert")
        else weight.numel * copies(weight, model=model, tp=layout.tp)
        for weight in list_weights(model)
    )
    assert count_replica_elements(model, layout) == expected


@pytest.mark.parametrize("name", mark_share(8, list_names()))
@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data())
def test_a_rank_makes_gradients_of_the_weights_that_it_holds(name: str, data: st.DataObject) -> None:
    model = build_model(name)
    layout = draw_legal(data.draw, model, sp=False)
    job = Job(sequence=64, wgrad_accumulation="separate")
    counts, vocab = Counts(model, job), pad_vocab(model, job, tp=layout.tp)
    table = vocab // layout.tp * model.width
    lists = {"embed": list_embedding_weights(model), "head": list_head_weights(model)}
    lists |= {kind: list_block_weights(model, layer) for kind, layer in counts.example.items()}
    for unit, held in lists.items():
        local = [shard_weight(weight, model=model, layout=layout, vocab=vocab) for weight in held]
        mine = sum(weight.numel for weight in local)
        if unit == "head":  # further uses of tables: a tied one, and both of each further token predicted
            mine += (model.tied_embeddings + 2 * model.mtp_depth) * table
        ops = counts.unit(get_local_degrees(layout), unit).ops
        assert sum(op.parameters for op in ops) == mine, unit
        # an indexer runs without gradients; AltUp's router and its norm are used twice
        indexers = sum(weight.numel for weight in local if ".indexer." in weight.name)
        again = sum(weight.numel for weight in local if weight.name in ("altup.router.weight", "altup.norm.weight"))
        assert sum(sum(op.wgrad_numels) + op.bias_wgrad_numel for op in ops) == mine - indexers + again, unit


# ---- FLOPs


def count_issued_flops(model: Model, layout: Layout, job: Job) -> tuple[int, int, int]:
    """Over all ranks and micro-batches: three times forward with the full square, causal, and what is executed: with
    recomputation, and of a window what it shows.
    """
    counts, full, causal, hardware = Counts(model, job), 0, 0, 0
    for stage in counts.stage_work(layout):
        for run, times in stage:
            for op in counts.unit(get_group_degrees(get_local_degrees(layout), run), run.name).ops:
                full += 3 * times * op.flops
                causal += 3 * times * op.causal_flops
                hardware += (4 if op.recomputed else 3) * times * (op.windowed_flops or op.flops * layout.cp)
    replicas = layout.dp * layout.tp * layout.micro_batches(job)
    return full * replicas * layout.cp, causal * replicas * layout.cp, hardware * replicas


def copied_flops(model: Model, layout: Layout, job: Job) -> int:
    """What key heads fewer than tp and a padded vocabulary add, forward and backward."""
    tokens, tp = job.tokens_per_step, layout.tp
    padding = pad_vocab(model, job, tp=tp) - model.vocab
    total = 6 * tokens * model.width * padding
    if model.mla is None and tp > model.kv_heads:
        total += 6 * tokens * model.layers * 2 * model.width * model.head_dim * (tp - model.kv_heads)
    return total


@SOME
@given(st.data())
@pytest.mark.parametrize("model", [LLAMA, MIXTURE, WINDOWS, GPT], ids=lambda model: model.name)
def test_flops_of_all_ranks_add_up_to_those_of_the_model(model: Model, data: st.DataObject) -> None:
    layout = draw_legal(data.draw, model)
    job = Job(sequence=64, global_batch=32, linears="separate")  # our own ring pads heads
    full, causal, _ = count_issued_flops(model, layout, job)
    done, added = work(model, layout=layout, job=job), copied_flops(model, layout, job)
    assert full == done.model_flops_non_causal + added
    # each rank of cp rounds its share of the pairs up
    assert 0 <= causal - added - done.model_flops_causal < 3 * model.layers * layout.cp * layout.tp * job.global_batch


@SOME
@given(st.data())
@pytest.mark.parametrize("model", [LLAMA, MIXTURE, WINDOWS], ids=lambda model: model.name)
def test_recomputed_flops_of_all_ranks_add_up_to_the_hardware_flops(model: Model, data: st.DataObject) -> None:
    """Without copies and rings as much as one process does, and that is what their lists say."""
    model = model.replace(vocab=1024)
    layout = draw_legal(data.draw, model)
    assume(layout.tp <= model.kv_heads and (layout.cp == 1 or layout.cp_kind == "ulysses"))
    job = Job(sequence=64, global_batch=32)
    hardware = work(model, layout=layout, job=job).hardware_flops
    assert hardware == count_issued_flops(model, layout, job)[2]
    stages = {name: getattr(layout, name) for name in ("pp", "v", "schedule", "stages")} if "@" in layout.ac else {}
    assert hardware == work(model, layout=Layout(ac=layout.ac, **stages), job=job).hardware_flops


@pytest.mark.parametrize("cp", [2, 4])
def test_ring_attention_computes_half_of_the_square(cp: int) -> None:
    job = Job(sequence=64, global_batch=2)
    attention = 3 * 4 * job.sequence * LLAMA.heads * LLAMA.head_dim * job.tokens_per_step * LLAMA.layers
    one, ring = (work(LLAMA, layout=Layout(cp=n), job=job).hardware_flops for n in (1, cp))
    assert one - ring == attention * (cp - 1) // cp // 2


@pytest.mark.parametrize("layout", ["dp1", "tp2", "cp2", "cp2 cp=ulysses", "dp2 pp2"])
def test_window_executes_its_visible_pairs(layout: str) -> None:
    """Five of seven layers slide: query q sees q + 1 keys, or 24; where none slides a layer executes the square."""
    job, wide = Job(sequence=64, global_batch=4), WINDOWS.replace(window=None, window_pattern=())
    hidden = 64**2 - sum(min(query + 1, 24) for query in range(64))
    spared = 3 * 4 * 5 * WINDOWS.heads * WINDOWS.head_dim * hidden * job.global_batch
    if layout == "cp2":  # of which a ring executes three quarters
        spared -= 3 * 4 * 5 * WINDOWS.heads * WINDOWS.head_dim * 64**2 * job.global_batch // 4
    slides, squares = (work(m, layout=Layout.parse(layout), job=job).hardware_flops for m in (WINDOWS, wide))
    assert squares - slides == spared


def test_recomputed_flops_equal_those_by_hand() -> None:
    """Full: a forward of the layers, but of ours not the last product, of which the backward asks nothing; of every
    second of 7 layers, 4 of them; selective: a third of their attention.
    """
    job, model = Job(sequence=64, global_batch=2), LLAMA.replace(layers=7)
    head = 6 * job.tokens_per_step * model.width * model.vocab
    plain = work(model, layout=Layout(), job=job).hardware_flops
    layer = (plain - head) // 7 // 3  # forward
    attention = 4 * job.sequence * model.heads * model.head_dim * job.tokens_per_step
    down = 2 * job.tokens_per_step * model.width * model.ffn
    for ac, times, last in (("full", 7, down), ("full/2", 4, down), ("selective", 7, 0)):
        again = times * (attention if ac == "selective" else layer)
        for stops in (False, True):
            done = work(model, layout=Layout(ac=ac), job=job.replace(early_stop=stops)).hardware_flops
            assert done == plain + again - stops * times * last


def test_a_loss_in_chunks_makes_no_product_twice() -> None:
    job = Job(sequence=64, global_batch=2)
    for layout in (Layout(), Layout(tp=4), Layout(tp=4, sp=False), Layout(pp=2)):
        assert work(LLAMA, layout=layout, job=job.replace(loss="chunked")) == work(LLAMA, layout=layout, job=job)


# ---- stages


@SOME
@given(st.data())
def test_stages_hold_every_layer_once_and_embedding_and_head_at_the_ends(data: st.DataObject) -> None:
    model = data.draw(st.sampled_from([LLAMA, MIXTURE, WINDOWS]))
    layout = draw_legal(data.draw, model)
    counts, last = Counts(model, Job(sequence=64)), layout.pp * layout.v - 1
    held = list_stages(layout)[: layout.recompute_ranks]
    again = {stage for stages in held for stage in stages} if layout.ac != "none" else set()
    layers = list_stage_layers(model, layout)
    assert [layer for stage in layers for layer in stage] == list(range(model.layers))
    assert all(layers)
    sizes = [len(stage) for stage in layers]
    assert tuple(sizes) == layout.stages or max(sizes) - min(sizes) <= 1
    for index, (runs, tally) in enumerate(
        zip(counts.list_stage_groups(layout), counts.stage_work(layout), strict=True)
    ):
        ends = [name for at, name in ((0, "embed"), (last, "head")) if at == index]
        assert [run.name for run in runs if isinstance(run.name, str)] == ends
        assert [run.name for run, _ in tally if isinstance(run.name, str)] == ends
        blocks = [run for run in runs if not isinstance(run.name, str)]
        walked = [layer for run in blocks for layer in range(run.first, run.first + run.times)]
        assert walked == list(layers[index])
        assert sum(times for run, times in tally if not isinstance(run.name, str)) == len(walked)
        for run, times in tally:
            if not isinstance(run.name, str):
                equal_layers = [layer for layer in walked if get_kind(model, layer) == run.name]
                chosen = [layer for layer in equal_layers if index in again and layer % layout.recompute_every == 0]
                assert times == (len(chosen) if run.recomputed else len(equal_layers) - len(chosen))


def test_the_first_and_last_stage_get_an_extra_layer_last() -> None:
    assert distribute_evenly(10, 4) == (2, 3, 3, 2)
    assert distribute_evenly(11, 4) == (3, 3, 3, 2)
    assert distribute_parts((2,) * 6, 4) == (2, 4, 4, 2)
