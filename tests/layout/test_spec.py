from __future__ import annotations

import re
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.schedule.pipeline_schedule import SCHEDULES
from fivefold.layout.spec import Layout
from fivefold.layout.stages import list_stage_layers
from fivefold.layout.validity import refuse
from fivefold.machine.catalog import with_ranks
from fivefold.machine.spec import Chip, Link, Machine
from fivefold.model.experts import MoE
from fivefold.model.indexer import Indexer
from fivefold.model.latent_attention import MLA
from fivefold.model.spec import Model
from fivefold.stack.spec import Stack, SupportedLayouts

MODEL = Model(name="m", layers=8, width=64, heads=12, kv_heads=4, head_dim=16, ffn=96, vocab=256)
EXPERTS = MODEL.replace(moe=MoE(experts=6, topk=2, ffn=40))
JOB = Job(sequence=64, global_batch=24)
CHIP = Chip(name="c", peak_flops={"bf16": 1e12}, memory_bytes=2**30, memory_bandwidth=1e11, source="none")
LINK = Link(name="l", span=8, bandwidth=1e9, latency_seconds=1e-6, source="none")
MACHINE = Machine(name="eight", chip=CHIP, ranks=8, ranks_per_node=8, links=(LINK,))

TOKENS = ["dp2", "ac=full@1", "zero1", "zero3/2", "tp4x2", "v2", "zbv", "pp3", "ep3", "nosp", "ac=", "1f1b"]
DEGREES = st.sampled_from([1, 2, 3, 4, 6, 8, 16])
every = settings(derandomize=True, deadline=None, max_examples=200)


def divisors(number: int) -> st.SearchStrategy[int]:
    return st.sampled_from([d for d in range(1, number + 1) if number % d == 0])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    dp, tp, cp, pp = (draw(DEGREES) for _ in range(4))
    schedule = draw(st.sampled_from([s for s in SCHEDULES if s != "dualpipe" or pp % 2 == 0])) if pp > 1 else "1f1b"
    stages = {"interleaved": st.integers(2, 5), "zbv": st.just(2), "dualpipev": st.just(2)}.get(schedule, st.just(1))
    zero, etp = draw(st.integers(0, 3)), draw(divisors(tp))
    return Layout(
        dp=dp,
        tp=tp,
        tp_inner=draw(divisors(tp)),
        cp=cp,
        pp=pp,
        ep=draw(divisors(dp * cp * tp // etp)),
        etp=etp,
        v=draw(stages),
        zero=zero,
        shard_group=draw(st.none() | divisors(dp * cp)) if zero else None,
        schedule=schedule,
        mbs=draw(DEGREES),
        ac=draw(st.sampled_from(["none", "selective", "full"])),
        cp_kind=draw(st.sampled_from(["ring", "ulysses"])) if cp > 1 else "ring",
        sp=draw(st.booleans()) or tp == 1,
    )


@every
@given(layouts(), st.randoms(use_true_random=False))
def test_a_layout_is_parsed_from_its_text_in_any_order(layout: Layout, random: Any) -> None:
    text = str(layout)
    assert Layout.parse(text) == layout
    tokens = text.split()
    random.shuffle(tokens)
    assert str(Layout.parse(" ".join(tokens))) == text


def _list_spellings(token: str) -> list[str]:
    """Return the spellings of a printed token that mean the same."""
    named, degree = re.fullmatch(r"([a-z]*)(.*)", token).groups()
    spellings = [token]
    if named in ("dp", "tp", "cp", "pp", "ep", "etp", "v", "mbs", "zero") and degree[:1].isdecimal():
        spellings += [f"{named}={degree}", f"{named} {degree}"]
    if token == "zero0":
        spellings.append("ddp")
    if token.startswith("zero3"):
        spellings += [f"fsdp{token[5:]}", *([f"hsdp{token[5:]}"] if "/" in token else [])]
    if named == "zero":
        spellings.append(f"ZeRO-{degree}")
    if named == "v":
        spellings.append(f"vpp{degree}")
    return [*spellings, *map(str.upper, spellings)]


def _is_counted(token: str) -> bool:
    """Return whether a token is a word with its number, which people join to others: ``tp8/pp4``."""
    return re.fullmatch(r"([dtcp]p|e?tp|ep|v|vpp|mbs|zero-?)[= ]?\d+", token.lower()) is not None


@every
@given(layouts(), st.data())
def test_other_spellings_of_a_layout_print_in_canonical_form(layout: Layout, data: st.DataObject) -> None:
    tokens = data.draw(st.permutations([data.draw(st.sampled_from(_list_spellings(t))) for t in str(layout).split()]))
    text = tokens[0]
    for pair in pairwise(tokens):
        joints = ["/", "-", "x", " + "] if all(map(_is_counted, pair)) else []
        text += data.draw(st.sampled_from([" ", ",", ", ", *joints])) + pair[1]
    assert Layout.parse(text) == layout, text
    assert str(Layout.parse(text)) == str(layout)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("dp1", "dp1 zero0 mbs1"),
        ("dp8 fsdp", "dp8 zero3 mbs1"),
        ("dp16 hsdp/8", "dp16 zero3/8 mbs1"),
        ("dp16 fsdp/8", "dp16 zero3/8 mbs1"),
        ("ddp dp8", "dp8 zero0 mbs1"),
        ("dp=8,tp=2", "dp8 tp2 zero0 mbs1"),
        ("DP 8 TP 2 ZeRO 3", "dp8 tp2 zero3 mbs1"),
        ("dp8 ZeRO stage 3", "dp8 zero3 mbs1"),
        ("dp16, zero-stage=2/8, mbs 2", "dp16 zero2/8 mbs2"),
        ("ZeRO Stage-1 dp8", "dp8 zero1 mbs1"),
        ("zero_stage3/dp8", "dp8 zero3 mbs1"),
        ("tp8/pp4", "dp1 tp8 pp4 zero0 1f1b mbs1"),
        ("DP2-TP8xPP4 + CP2", "dp2 tp8 cp2 pp4 zero0 1f1b mbs1"),
        ("pp4 vpp5", "dp1 pp4 v5 zero0 interleaved mbs1"),
        ("TP 8 PP 4 VPP 5", "dp1 tp8 pp4 v5 zero0 interleaved mbs1"),
        ("tp8/pp4/vpp5/mbs2", "dp1 tp8 pp4 v5 zero0 interleaved mbs2"),
        ("TP=4/DP=8/ZeRO-3", "dp8 tp4 zero3 mbs1"),
        ("dp2xtp4x2xpp2 + fsdp", "dp2 tp4x2 pp2 zero3 1f1b mbs1"),
        ("zero3/4/dp8", "dp8 zero3/4 mbs1"),
        ("FSDP2/DP8 + TP2", "dp8 tp2 zero3 mbs1"),
        ("DP=8 FSDP", "dp8 zero3 mbs1"),
        ("dp16 ZeRO-3/8", "dp16 zero3/8 mbs1"),
        ("dp16 FSDP2", "dp16 zero3 mbs1"),
        ("tp=4x2, zero=1 mbs=2", "dp1 tp4x2 zero1 mbs2"),
        ("dp=2,cp=2,cp=ulysses", "dp2 cp2 zero0 mbs1 cp=ulysses"),
        ("ac=none dp2", "dp2 zero0 mbs1"),
        ("ac=selective mbs1 zero1 v2 pp4 tp8 dp16", "dp16 tp8 pp4 v2 zero1 interleaved mbs1 ac=selective"),
        ("tp4x2", "dp1 tp4x2 zero0 mbs1"),
        ("pp2 zbv", "dp1 pp2 v2 zero0 zbv mbs1"),
        ("pp4 dp8 zero3/4 ep2", "dp8 pp4 ep2 zero3/4 1f1b mbs1"),
        ("pp4 stages=3-3-3-2", "dp1 pp4 zero0 1f1b mbs1 stages=3x3-2"),
        ("pp16 stages=7-8x14-7", "dp1 pp16 zero0 1f1b mbs1 stages=7-8x14-7"),
        ("pp2 v2 stages=1-2-2-1", "dp1 pp2 v2 zero0 interleaved mbs1 stages=1-2-2-1"),
        ("pp4 ac=full@2", "dp1 pp4 zero0 1f1b mbs1 ac=full@2"),
        ("pp2 ac=norm+act+norm@1", "dp1 pp2 zero0 1f1b mbs1 ac=norm+act@1"),
        ("nosp tp2 cp2 cp=ulysses", "dp1 tp2 cp2 zero0 mbs1 cp=ulysses nosp"),
    ],
)
def test_layout_prints_in_one_order(text: str, canonical: str) -> None:
    assert str(Layout.parse(text)) == canonical


def test_derived_sizes_of_a_layout() -> None:
    layout = Layout.parse("dp4 cp2 tp4x2 pp2 zero2/4 mbs3")
    assert (layout.tp, layout.world, layout.shards) == (8, 4 * 2 * 8 * 2, 4)
    assert layout.micro_batches(Job(global_batch=24)) == 2
    assert Layout.parse("dp4 cp2 zero1").shards == 8
    assert Layout.parse("dp4 cp2 zero0").shards == 1


def check_one_line(caught: pytest.ExceptionInfo[UserError]) -> str:
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 250
    return text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "layout '' is empty; write for example 'dp8 zero1', or dp1"),
        (" ", "is empty"),
        ("fsdp8", "the number of data-parallel ranks is that of dp; write 'dp8 fsdp'"),
        ("dp2 micro_batch=4", "unknown layout token 'micro_batch=4'; did you mean mbs4?"),
        ("dp2 gradient_checkpointing", "did you mean ac=full, ac=selective or ac=norm+act?"),
        ("dp2 thousand", "unknown layout token 'thousand'; write a number of tokens as one word: --tokens 15k"),
        ("tp2 sp nosp", "'nosp' sets sp a second time; keep one"),
        ("dp2 trillion", "unknown layout token 'trillion'; write a number of tokens as one word: --tokens 15T"),
        ("dq2", "unknown layout token 'dq2'; did you mean dp2"),
        ("ac=ful", "write ac=none, selective, full"),
        ("1f2b pp2", "did you mean 1f1b"),
        ("x" * 10_000, "known:"),
        ("dp0", "'dp0': each number must be from 1 to 9999999"),
        ("dp" + "9" * 5000, "each number must be from 1 to 9999999"),
        ("tp4x0", "each number must be from 1 to"),
        ("zero4", "ZeRO has stages 0 to 3"),
        ("zero" + "1" * 5000, "ZeRO has stages 0 to 3"),
        ("dp2 dp4", "'dp4' sets dp a second time"),
        ("dp2 dp=4", "'dp=4' sets dp a second time"),
        ("dp2 fsdp zero1", "'zero1' sets zero a second time"),
        ("dp16 hsdp", "needs the number of ranks that share one copy of the states; write hsdp/8"),
        ("dp8 ddp/4", "zero0/4 shards nothing"),
        ("dp=x", "unknown layout token 'dp=x'; did you mean"),
        ("--tp 8 --pp=2 zero1", "layout '--tp 8 --pp=2 zero1' has options of a command; write 'tp8 pp2 zero1'"),
        ("dp8 precision=fp8", "layout token 'precision=fp8' is not part of a layout; give the option --precision fp8"),
        ("mbs1 QLoRA", "layout token 'qlora' is not part of a layout; give the option --adapter qlora:16"),
        (
            "tp8 sequence parallel",
            "unknown layout token 'sequence'; tp has sequence parallelism by default: leave it out",
        ),
        ("tp8 --sequence-parallel", "tp has sequence parallelism by default"),
        ("dp2 lora:64", "layout token 'lora:64' is not part of a layout; give the option --adapter lora:64"),
        ("tp2 tp4x2", "'tp4x2' sets tp a second time"),
        ("dp8 zero1/3", "dp·cp=8 is not divisible by the shard group 3; try zero1/2"),
        ("dp8 zero0/4", "zero0/4 shards nothing"),
        ("tp4 etp3", "etp=3 does not divide tp=4; try etp2"),
        ("pp2 stages=1x9999999", "no model has layers for 9999999 stages"),
        ("pp2 stages=2x1", "stages=2 lists 1 stages, but pp·v=2"),
        ("pp2 stages=2x", "'2x' is not a number of layers; write stages=7-8x14-7"),
        ("pp4 stages=2-0-2-1", "stages=2-0-2-1: each stage but the first and the last needs a layer; move one there"),
        ("pp2 stages=0-0", "each stage but the first and the last needs a layer"),
        ("dp4 ep3", "ep=3 does not divide dp·cp·tp/etp=4; try ep2"),
        ("v2", "interleaved v2 needs a pipeline; add pp2"),
        ("gpipe", "gpipe v1 needs a pipeline"),
        ("pp2 zbv v3", "write v2, not v3"),
        ("pp2 interleaved", "interleaved needs virtual stages; write v2"),
        ("pp2 gpipe v2", "drop v2 or write interleaved"),
        ("pp3 dualpipe", "dualpipe needs an even pp, not 3; try pp4"),
        ("pp2 ac=full@2", "recomputes on 2 of pp=2 pipeline ranks; use 1 to pp-1 of them, or ac=full"),
        ("pp2 dualpipe ac=full@1", "dualpipe has each stage on two ranks; use ac=full"),
        ("pp2 ac=none@1", "unknown recomputation 'ac=none@1'"),
        ("cp=ulysses", "add cp2 or more"),
        ("nosp", "add tp2 or more"),
    ],
)
def test_unparsable_layout_is_a_one_line_error(text: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        Layout.parse(text)
    shown = str(caught.value)
    assert "\n" not in shown
    assert words in shown


@every
@given(st.text(max_size=40) | st.lists(st.sampled_from(TOKENS)).map(" ".join))
def test_any_text_is_a_layout_or_a_one_line_error(text: str) -> None:
    try:
        layout = Layout.parse(text)
    except UserError as mistake:
        refusal = str(mistake)
    else:
        refusal = ""
        assert Layout.parse(str(layout)) == layout
    assert "\n" not in refusal


def test_an_inner_degree_that_does_not_divide_tp_is_an_error() -> None:
    with pytest.raises(ValidationError, match=r"tp=4 is not divisible by its inner degree 3; try tp2x2"):
        Layout(tp=4, tp_inner=3)


REFUSALS = [
    ("dp4 tp3", {}, "needs 12 ranks, but eight has 8"),
    ("dp7 mbs2", {}, "global batch 24 is not divisible by dp·mbs=7·2=14; try gbs 28 or dp8 mbs1"),
    ("dp5", {"machine": None}, "global batch 24 is not divisible by dp·mbs=5·1=5; try gbs 20 or gbs 25"),
    ("dp2 mbs5", {}, "global batch 24 is not divisible by dp·mbs=2·5=10; try gbs 30 or mbs4"),
    ("tp8", {"machine": with_ranks(MACHINE, 12)}, "heads=12 is not divisible by tp=8; try tp4 or tp12"),
    ("tp8", {"machine": with_ranks(MACHINE, 8)}, "heads=12 is not divisible by tp=8; try tp4"),
    ("tp4", {"model": MODEL.replace(ffn=90)}, "ffn=90 is not divisible by tp=4; try tp2"),
    ("tp6", {}, "kv_heads=4 and tp=6: one must divide the other; try tp4"),
    ("dp4 ep4", {"model": EXPERTS}, "experts=6 is not divisible by ep=4; try ep2"),
    ("tp3 etp3", {"model": EXPERTS.replace(kv_heads=3)}, "expert ffn=40 is not divisible by etp=3; try etp1"),
    ("dp2 ep2", {}, "ep=2 needs a model with experts, and m has none; use ep1"),
    ("cp4", {"job": JOB.replace(sequence=60)}, "sequence 60 is not divisible by 8 (cp=4, ring); try seq 56 or seq 64"),
    ("cp8 cp=ulysses", {}, "heads/tp=12 is not divisible by cp=8; try cp6"),
    ("tp2 cp4 cp=ulysses", {"model": MODEL.replace(heads=8)}, ""),
    ("tp4 cp2 cp=ulysses", {"job": JOB}, "heads/tp=3 is not divisible by cp=2; try cp=ring"),
    ("pp4 v3", {}, "pp·v=12 stages are more than layers=8, embedding and head; try pp2 or v2"),
    ("pp4 v2 mbs12", {}, "interleaved needs 4 micro-batches or more, but the batch gives 2; try gbs 48 or mbs6"),
    ("pp4 dualpipev mbs4", {}, "but the batch gives 6; try gbs 32 or mbs3"),
    (
        "pp2 dualpipe mbs8",
        {},
        "dualpipe sends half of the micro-batches from each end, but 3 is odd; try gbs 32 or mbs6",
    ),
    ("tp4", {"job": JOB.replace(sequence=3)}, "=3: 3 rows are not divisible by tp=4; try nosp or tp1"),
    ("tp4", {"job": JOB.replace(sequence=3), "model": EXPERTS}, "3 rows are not divisible by tp=4; try tp"),
    ("tp2 cp2 cp=ulysses", {"job": JOB.replace(sequence=6)}, "6/2: 3 rows are not divisible by tp=2; try nosp or tp1"),
    ("tp2 cp2 cp=ulysses mbs2", {"job": JOB.replace(sequence=6)}, ""),
    ("tp4 nosp", {"job": JOB.replace(sequence=3)}, ""),
    ("tp2 nosp", {"model": EXPERTS}, "each of tp=2 ranks would send the same tokens to the experts; drop nosp"),
    ("dp2 cp2 tp2 order=cp-tp-dp-pp", {}, "dp and cp must be neighbours; try order="),
    ("dp2 tp2 pp2 order=dp-pp-tp-cp", {}, ""),
    ("dp2 tp2 pp2 order=dp-pp-tp-cp", {"model": EXPERTS}, "tp, dp and cp must be neighbours; try order="),
    ("dp2 tp2 pp2 etp2 order=dp-pp-tp-cp", {"model": EXPERTS}, ""),
    ("dp2 tp4 etp2 order=dp-cp-tp-pp", {"model": EXPERTS}, "must be neighbours, tp first; try order="),
    ("dp2 tp2 pp2 zero3 mbs2", {}, ""),
]


@pytest.mark.parametrize(
    "text", ["dp2 cp2 pp2 order=tp-cp-pp-dp", "dp2 cp2 pp2 order=tp-pp-cp-dp", "dp2 pp2 order=pp-dp-tp-cp"]
)
def test_orders_that_a_message_proposes_are_valid(text: str) -> None:
    """Megatron-Core runs two orders, of which one separates dp and cp: each message proposes only what is valid."""
    job = JOB.replace(stack="megatron-core", global_batch=16)
    nouns = {"model": MODEL, "job": job, "machine": MACHINE}
    with pytest.raises(UserError) as caught:
        refuse(Layout.parse(text), **nouns)
    message = check_one_line(caught)
    _, _, fix = message.partition("; ")
    proposed = re.findall("order=[a-z-]+", fix)
    assert proposed or "without order=" in fix
    for order in (*proposed, ""):
        refuse(Layout.parse(f"{text.rpartition(' ')[0]} {order}"), **nouns)


@pytest.mark.parametrize(("text", "changes", "words"), REFUSALS)
def test_layout_invalid_for_model_job_or_machine_is_an_error(text: str, changes: dict[str, Any], words: str) -> None:
    nouns = {"model": MODEL, "job": JOB, "machine": MACHINE} | changes
    if not words:
        refuse(Layout.parse(text), **nouns)
        return
    with pytest.raises(UserError) as caught:
        refuse(Layout.parse(text), **nouns)
    assert words in check_one_line(caught)


def test_a_fix_needs_no_more_ranks_than_there_are() -> None:
    with pytest.raises(UserError, match=r"heads=12 is not divisible by tp=8; try tp4$"):
        refuse(Layout.parse("tp8"), model=MODEL, job=JOB, machine=MACHINE)


@every
@given(
    layouts(),
    st.sampled_from([MODEL, EXPERTS, MODEL.replace(ffn=90), MODEL.replace(heads=8, kv_heads=8)]),
    st.integers(1, 40),
    st.integers(1, 100),
)
def test_the_proposed_fix_is_valid(layout: Layout, model: Model, batch: int, sequence: int) -> None:
    """Whatever ``try …`` proposes is never refused again with the words that proposed it."""
    job = Job(sequence=sequence, global_batch=batch)
    refusal = reason(layout, model, job)
    assert "\n" not in refusal
    assume("; try " in refusal)
    for mend in refusal.split("; try ")[1].split(" or "):
        words = mend.split()
        if mend.startswith("order="):
            again = reason(layout.replace(order=tuple(mend[6:].split("-"))), model, job)
        elif words[0] in ("gbs", "seq"):
            job_mended = job.replace(**{{"gbs": "global_batch", "seq": "sequence"}[words[0]]: int(words[1])})
            again = reason(layout, model, job_mended)
        else:
            changes = dict(change(word) for word in words)
            if "tp" in changes:
                changes |= {"tp_inner": 1, "sp": True, "etp": 1, "ep": 1}
            if "dp" in changes or "cp" in changes:
                changes |= {"ep": 1, "shard_group": None}
            again = reason(layout.replace(**changes), model, job)
        assert cause(again) != cause(refusal), f"{refusal!r} proposes {mend!r}, which gives {again!r}"


def change(word: str) -> tuple[str, int | str | bool]:
    if word in ("cp=ring", "nosp"):
        return ("cp_kind", "ring") if word == "cp=ring" else ("sp", False)
    match = re.fullmatch(r"([a-z]+)(\d+)", word)
    assert match is not None, word
    return match[1], int(match[2])


def reason(layout: Layout, model: Model, job: Job) -> str:
    try:
        refuse(layout, model=model, job=job)
    except UserError as mistake:
        return str(mistake)
    return ""


def cause(refusal: str) -> str:
    """Return an error message without the layout and its numbers; kv_heads, heads and ffn have one fix."""
    text = re.sub(r"\d+", "#", refusal.partition("': ")[2].partition(";")[0])
    return "tp" if re.match(r"(heads|ffn|kv_heads)=", text) else text


def test_a_pipeline_does_not_cut_a_pair_of_layers() -> None:
    """The second layer of a pair adds what the experts of the first return (LongCat-Flash)."""
    moe = MoE(experts=4, topk=1, ffn=16, joins_mlp=True, shortcut=True, pattern=(True, False))
    model, job = MODEL.replace(layers=12, moe=moe), JOB.replace(global_batch=64)
    layout = Layout.parse("pp4 stages=2-4x2-2")
    refuse(layout, model=model, job=job)
    assert list_stage_layers(model, Layout.parse("pp4")) == list_stage_layers(model, layout)
    assert [len(stage) for stage in list_stage_layers(model, Layout.parse("pp8"))] == [0, *[2] * 6, 0]
    with pytest.raises(
        UserError,
        match=r"layer 3 of m, which adds what the experts of layer 2 return; "
        "begin it with layer 2 or 4, or leave stages= out",
    ):
        refuse(Layout.parse("pp4 stages=3x4"), model=model, job=job)
    with pytest.raises(
        UserError, match="pp·v=12 stages are more than layers=12 in 6 parts, embedding and head; try pp2 or v2"
    ):
        refuse(Layout.parse("pp4 v3"), model=model, job=job)


LATENT = MLA(q_rank=12, kv_rank=20, nope_dim=8, rope_dim=4, v_dim=6)
SHARED = MODEL.replace(layers=12, shared_kv_layers=5, window=7, window_pattern=(True, True, False))
CHOSEN = MODEL.replace(
    layers=14,
    kv_heads=12,
    mla=LATENT.replace(indexer=Indexer(heads=3, head_dim=8, topk=5, pattern=(True, True, False, False, True))),
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "parts", "pp4", "stages", "says"),
    [
        (SHARED, (1,) * 5 + (7,), (2, 1, 2, 7), "6-6", "layer 6 of m, but layer 8 attends to the keys and values of "
         "layer 5; begin it with layer 5, or leave"),
        (CHOSEN, (1, 3, 1, 1, 3, 1, 1, 3), (4, 2, 5, 3), "3-7-4", "layer 3 of m, which attends to the keys that "
         "layer 1 chose; begin it with layer 1 or 4, or leave"),
    ],
    ids=["shared keys", "chosen keys"],
)  # fmt: skip
def test_layers_that_read_the_keys_of_earlier_layers_are_in_one_stage_with_them(
    model: Model, parts: tuple[int, ...], pp4: tuple[int, ...], stages: str, says: str
) -> None:
    assert model.stage_parts == parts
    starts = {0, *accumulate(parts)}
    for pp in range(1, len(parts) + 3):
        sizes = tuple(map(len, list_stage_layers(model, Layout(pp=pp))))
        assert sum(sizes) == model.layers
        assert starts.issuperset(accumulate(sizes))
        assert pp > len(parts) or all(sizes)
        refuse(Layout(pp=pp, mbs=1), model=model, job=JOB.replace(global_batch=64))
    assert tuple(map(len, list_stage_layers(model, Layout(pp=4)))) == pp4
    pp = stages.count("-") + 1
    with pytest.raises(UserError, match=f"stages={stages}: a stage begins with {says}"):
        refuse(Layout.parse(f"pp{pp} stages={stages}"), model=model, job=JOB)


def test_embedding_and_head_may_be_stages_of_their_own() -> None:
    """As in Llama 3 405B, arXiv:2407.21783 §3.3.2; with one stage less, the embedding's has a layer."""
    model, job = MODEL.replace(layers=126), JOB.replace(global_batch=2048)
    layout = Layout.parse("dp16 pp16 v8 interleaved")
    refuse(layout, model=model, job=job, machine=with_ranks(MACHINE, 256))
    sizes = [len(stage) for stage in list_stage_layers(model, layout)]
    assert sizes == [0, *[1] * 126, 0]
    assert Layout.parse("dp16 pp16 v8 stages=0-1x126-0").stages == tuple(sizes)
    assert [len(stage) for stage in list_stage_layers(model.replace(layers=127), layout)] == [*[1] * 127, 0]
    job = job.replace(stack=Stack(name="mine", runs=SupportedLayouts(uneven_stages=False)))
    with pytest.raises(UserError, match="pp·v=128 stages are more than layers=126; try pp8 or v7"):
        refuse(layout, model=model, job=job, machine=with_ranks(MACHINE, 256))


def test_fewer_stages_are_advised_that_divide_the_ranks() -> None:
    model, job = MODEL.replace(layers=125), JOB.replace(global_batch=2048)
    with pytest.raises(UserError) as caught:
        refuse(Layout.parse("dp16 pp16 v8 interleaved"), model=model, job=job, machine=with_ranks(MACHINE, 256))
    line = check_one_line(caught)
    assert "pp·v=128 stages are more than layers=125, embedding and head; try pp8 or v7" in line
    for text in ("dp32 pp8 v8 interleaved", "dp16 pp16 v7 interleaved"):
        refuse(Layout.parse(text), model=model, job=job, machine=with_ranks(MACHINE, 256))


def test_a_layout_of_legal_fields_equals_the_validated_one() -> None:
    fields = {"dp": 4, "tp": 2, "pp": 2, "zero": 1, "shard_group": 2, "ac": "selective"}
    layout, validated = Layout.construct_legal(**fields), Layout(**fields)
    assert (layout, hash(layout), str(layout)) == (validated, hash(validated), str(validated))
    assert layout.model_dump() == validated.model_dump()
    assert (layout.world, layout.replace(mbs=2)) == (16, validated.replace(mbs=2))
