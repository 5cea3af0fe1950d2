"""Random small models under random legal layouts, with jobs that fit both: what no list of cases would hold together.

    number 17 of seed 0 · dp2 tp2 pp2 zero1 …         the same for every run of a seed

Everything that the engine runs in fp32 may be drawn: attention grouped or latent, experts of any kind, norms, kinds of
block and MLP, biases, norms of heads, tied tables, shaped logits, windows, sinks, dropout; any order of axes, uneven
stages, shard groups, schedules, recomputation. Legal is what ``refuse`` and ``check_supported`` let pass.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from fivefold.job import Job, recipe
from fivefold.layout.legal import refuse
from fivefold.layout.names import DEFAULT_ORDER, SCHEDULES, V_SHAPED, ScheduleName
from fivefold.layout.spec import RECOMPUTABLE, Layout
from fivefold.model.shape import MLA, MTP, MoE
from fivefold.model.spec import Model
from fivefold.record import Record
from fivefold.train.supported import check_supported
from fivefold.update import LearningRate, Optimizer

VOCAB = 251  # of the text of the parity proof
WORLDS = (2, 2, 3, 4, 4, 4, 4, 4, 6, 8)


class Drawn(NamedTuple):
    """A model, a layout and a job that go together."""

    number: int
    model: Model
    layout: Layout
    job: Job

    def __str__(self) -> str:
        return f"{self.number} · {self.layout} · {said(self.model)} · {said(self.job)}"


def said(record: Record) -> str:
    """The fields that were set, with their values."""
    words = []
    for field, value in record:
        if field in record.model_fields_set and value != type(record).model_fields[field].default and field != "name":
            words.append(f"{field}=({said(value)})" if isinstance(value, Record) else f"{field}={value}")
    return " ".join(words)


def drawn(seed: int, *, worlds: tuple[int, ...] = WORLDS) -> Iterator[Drawn]:
    """Endless; what case ``number`` is depends on the seed and its number alone."""
    for number in itertools.count():
        chance = random.Random(f"{seed} {number}")
        frame = _frame(chance, worlds)  # drawn once, lest what is seldom legal be seldom drawn
        yield next(filter(None, (_draw(chance, number, frame) for _ in itertools.repeat(None))))


class Frame(NamedTuple):
    """What decides most about what is legal."""

    degrees: dict[str, int]
    schedule: ScheduleName
    v: int
    experts: bool
    latent: bool


def _frame(chance: random.Random, worlds: tuple[int, ...]) -> Frame:
    degrees = _degrees(chance, chance.choice(worlds))
    schedules = [name for name in SCHEDULES if name != "dualpipe" or degrees["pp"] % 2 == 0]
    schedule = chance.choice(schedules) if degrees["pp"] > 1 else "1f1b"
    v = 2 if schedule in V_SHAPED else chance.choice((2, 3)) if schedule == "interleaved" else 1
    return Frame(degrees, schedule, v, experts=chance.random() < 0.5, latent=chance.random() < 0.25)


def _draw(chance: random.Random, number: int, frame: Frame) -> Drawn | None:
    """One draw; ``None`` if it is not legal."""
    try:
        model = _model(chance, frame)
        layout = _layout(chance, frame, model)
        job = _job(chance, layout)
        model = model.replace(mtp=chance.choice((None,) * 5 + (MTP(), MTP(depth=2, coefficient=1.0))))
        refuse(layout, model=model, job=job)
        check_supported(layout, job, model=model)
    except ValueError:  # a mistake, or an odd rotary dim
        return None
    return Drawn(number, model, layout, job)


def _degrees(chance: random.Random, world: int) -> dict[str, int]:
    """dp · tp · cp · pp = ``world``, in any way."""
    found = dict.fromkeys(("dp", "tp", "cp", "pp"), 1)
    for prime in (2, 3):
        while world % prime == 0:
            found[chance.choice(tuple(found))] *= prime
            world //= prime
    return found


def _divisor(chance: random.Random, number: int) -> int:
    return chance.choice([size for size in range(1, number + 1) if number % size == 0])


def _model(chance: random.Random, frame: Frame) -> Model:
    pick, tp = chance.choice, frame.degrees["tp"]
    heads = tp * frame.degrees["cp"] * pick((1, 2, 3)) if pick((True, False)) else tp * pick((2, 3, 4))
    fields: dict[str, Any] = {
        "layers": max(2, frame.degrees["pp"] * frame.v) + pick((0, 1, 2)), "width": pick((36, 44, 52)),
        "heads": heads, "head_dim": pick((6, 8, 10)), "kv_heads": heads if frame.latent else _divisor(chance, heads),
        "ffn": tp * pick((9, 16, 21)), "rope_theta": pick((500.0, 10_000.0)), "rope_fraction": pick((1.0, 1.0, 0.5)),
        "tied_embeddings": pick((True, False, False)), "qkv_bias": pick((True, False)), "out_bias": pick((True, False)),
        "mlp_bias": pick((True, False)), "head_bias": pick((True, False, False)),
        "qk_norm": pick(("none", "none", "head", "full", "heads", "unit")), "attention_scale": pick((None, None, 0.2)),
    }  # fmt: skip
    if frame.latent:
        mla = MLA(q_rank=pick((None, 22)), kv_rank=14, nope_dim=6, rope_dim=4, v_dim=pick((6, 8)))
        fields |= {"mla": mla, "qk_norm": "none", "qkv_bias": False, "out_bias": False, "rope_fraction": 1.0}
    model = Model(name="drawn", vocab=VOCAB, moe=_moe(chance) if frame.experts else None, **fields)
    model = model.replace(**_of_blocks(random.Random(chance.random()), experts=frame.experts, latent=frame.latent))
    return model.replace(**_of_scores(random.Random(chance.random()), model, latent=frame.latent))


def _of_scores(chance: random.Random, model: Model, *, latent: bool) -> dict[str, Any]:
    """Which keys a query sees and how, in every second model; dropout in every fourth, all three rates apart."""
    rates = ("dropout", "attention_dropout", "embedding_dropout")
    fields: dict[str, Any] = {rate: chance.choice((0.0, 0.1, 0.3)) for rate in rates if chance.random() < 0.25}
    if latent or chance.random() < 0.5:
        return fields
    patterns = ((), (True, False), (False, True, True))
    if chance.random() < 0.7:
        fields |= {
            "window": chance.choice((3, 7, 12, 200)), "window_pattern": chance.choice(patterns),
            "window_kind": chance.choice(("sliding", "sliding", "chunks")),
        }  # fmt: skip
        if model.position == "rope":
            fields |= {"rope_theta_sliding": chance.choice((None, 50.0))}
    if model.position == "rope":
        fields |= {"rope_pattern": chance.choice((*patterns, ()))}
    return fields | {
        "attention_softcap": chance.choice((None, None, 0.5)), "attention_sinks": chance.choice((False, False, True)),
    }  # fmt: skip


def _of_blocks(chance: random.Random, *, experts: bool, latent: bool) -> dict[str, Any]:
    """Norms, kind of block, MLP, positions, embedding and logits; each unlike Llama's in every third model."""

    def rare(*values: Any) -> Any:
        return values[0] if chance.random() < 0.65 else chance.choice(values[1:])

    return {
        "norm": rare("rmsnorm", "layernorm"), "norm_bias": rare(True, False), "norm_plus_one": rare(False, True),
        "block": rare("pre", "post", "sandwich", "parallel", "parallel_shared"), "residual_scale": rare(1.0, 0.22),
        "mlp": "gated" if experts else rare("gated", "plain"),
        "activation": "silu" if experts else rare("silu", "gelu", "gelu_tanh", "relu2"),
        "position": rare("rope", "learned", "none") if not latent else "rope", "positions": 64,
        "embedding_scale": rare(1.0, 6.0), "logit_scale": rare(1.0, 0.25), "logit_softcap": rare(None, 2.0),
    }  # fmt: skip


def _moe(chance: random.Random) -> MoE:
    pick = chance.choice
    groups = pick((1, 1, 1, 2))
    moe = MoE(
        experts=pick((4, 6, 8)), topk=pick((1, 2, 3)) if groups == 1 else 2, ffn=pick((12, 14, 16)),
        shared_experts=pick((0, 1, 2)), shared_ffn=pick((None, 24)), dense_layers=pick((0, 0, 1, 2)),
        score=pick(("softmax", "sigmoid")), balance=pick(("none", "aux", "free")), aux_coefficient=0.1,
        capacity=pick((None,) * 5 + (1.0,)), normalized=pick((True, False)), scaling=pick((1.0, 2.5)), groups=groups,
        router_bias=pick((True, False, False)), expert_bias=pick((True, False, False)),
    )  # fmt: skip
    # a single weight that is normalised is 1, and the router's gradient nothing but rounding
    return moe.replace(normalized=False) if moe.topk == 1 else moe


def _layout(chance: random.Random, frame: Frame, model: Model) -> Layout:
    pick = chance.choice
    dp, tp, cp, pp = frame.degrees.values()
    etp = _divisor(chance, tp) if model.moe else 1
    zero = pick((0, 1, 2, 3))
    groups = "+".join(sorted(chance.sample(RECOMPUTABLE, pick((1, 2, 3)))))
    ac = pick(("none", "none", "selective", "full", "full/2", groups))
    if pp > 1 and frame.schedule != "dualpipe" and ac != "none":
        ac += pick(("", f"@{pick(range(1, pp))}"))
    return Layout(
        **frame.degrees, v=frame.v, schedule=frame.schedule, etp=etp,
        ep=_divisor(chance, dp * cp * tp // etp) if model.moe else 1,
        zero=zero, shard_group=pick((None, _divisor(chance, dp * cp))) if zero else None,
        mbs=pick((1, 1, 2, 3)), ac=ac,
        stages=_parts(chance, model.layers, pp * frame.v) if pp > 1 and pick((True, False)) else (),
        order=pick((DEFAULT_ORDER, tuple(chance.sample(DEFAULT_ORDER, 4)))),
        cp_kind=pick(("ring", "ulysses")) if cp > 1 else "ring", sp=tp == 1 or pick((True, True, False)),
    )  # fmt: skip


def _parts(chance: random.Random, layers: int, stages: int) -> tuple[int, ...]:
    """As many layers on each of the stages as chance has it, at least one."""
    cuts = [0, *sorted(chance.sample(range(1, layers), stages - 1)), layers]
    return tuple(end - start for start, end in itertools.pairwise(cuts))


def _job(chance: random.Random, layout: Layout) -> Job:
    pick = chance.choice
    fewest = layout.pipeline.min_rounds * layout.pp
    micro_batches = fewest + pick((0, 1, 2)) if fewest else pick((1, 2, 3, 5))
    if layout.schedule == "dualpipe":
        micro_batches += micro_batches % 2
    kind = pick(("adamw",) * 6 + ("sgd", "adamw", "adafactor"))  # Muon multiplies in bf16: no update is equal to 1e-5
    sequence = layout.tp * 2 * layout.cp * pick((3, 4)) if pick((True, False)) else pick((24, 30, 36))
    return Job(
        sequence=sequence, global_batch=micro_batches * layout.dp * layout.mbs, precision=recipe("fp32"),
        documents=pick(("joined", "apart")), loss=pick(("fused", "chunked")), vocab_multiple=pick((1, 1, 4)),
        reduce=pick(("micro_batch", "micro_batch", "step")), reshard=pick(("forward", "forward", "backward")),
        attention=pick(("flash", "flash", "flash", "unfused")),
        pairs=layout.schedule.startswith("dualpipe") and pick((True, False)), steps=5, seed=chance.randrange(1000),
        optimizer=Optimizer(kind=kind, clip=pick((0.5, 0.0)), epsilon=1e-5),
        learning_rate=LearningRate(kind="constant", peak=3e-4),
    )  # fmt: skip
