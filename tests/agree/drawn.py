"""Random small models under random legal layouts, with jobs that fit both: what no list of cases would hold together.

    number 17 of seed 0 · dp2 tp2 pp2 zero1 …         the same for every run of a seed

Everything that the trainer runs in fp32 may be drawn: attention grouped or latent, experts of any kind, norms, kinds of
block and MLP, biases, norms of heads, odd head dims, tied tables, shaped logits, windows, sinks, temperatures, dropout;
any order of axes, uneven stages, shard groups, schedules, recomputation. ``FEATURES`` and ``AXES`` name those of which
every pair is drawn. Legal is what ``refuse`` and ``check_supported`` let pass.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, get_args

from fivefold.adapter import END_TARGETS, EXPERT_TARGETS, LINEAR_TARGETS, TARGETS, Adapter, SavedModule
from fivefold.base_format import FOUR_BIT_BASES, QUANTIZED_BASES
from fivefold.errors import UserError
from fivefold.job import Job, get_recipe
from fivefold.layout.names import DEFAULT_ORDER
from fivefold.layout.recomputation import RECOMPUTABLE
from fivefold.layout.schedule.pipeline_schedule import PIPELINE_SCHEDULES, SCHEDULES, ScheduleName
from fivefold.layout.spec import Layout
from fivefold.layout.stages import list_stage_layers
from fivefold.layout.validity import refuse
from fivefold.model.altup import AltUp
from fivefold.model.attention import Sliding
from fivefold.model.experts import MoE
from fivefold.model.factors import Multipliers, ResidualFactors, Temperature
from fivefold.model.hyper_connections import HyperConnections
from fivefold.model.indexer import Indexer
from fivefold.model.latent_attention import MLA
from fivefold.model.mixers import gated_delta_net
from fivefold.model.mixers.compressed_attention import CompressedAttention
from fivefold.model.mixers.gated_delta_net import GatedDeltaNet
from fivefold.model.mixers.kimi_delta import KimiDelta
from fivefold.model.mixers.kinds import Mixer, MixerName
from fivefold.model.mixers.lightning import Lightning
from fivefold.model.mixers.mamba import Mamba
from fivefold.model.mixers.mamba2 import Mamba2
from fivefold.model.mixers.rg_lru import RGLRU
from fivefold.model.mixers.rwkv import RWKV
from fivefold.model.mixers.short_conv import ShortConv
from fivefold.model.multi_token_prediction import MTP
from fivefold.model.per_layer_inputs import PerLayerInputs
from fivefold.model.rope import RopeScaling
from fivefold.model.spec import Model
from fivefold.model.weight import is_quantized
from fivefold.model.weights import list_targets, list_weights
from fivefold.record import Record
from fivefold.trainer.supported import check_supported
from fivefold.update import LearningRate, Optimizer

VOCAB = 251  # of the text of the parity proof
WORLDS = (2, 2, 3, 4, 4, 4, 4, 4, 6, 8)
CASES_PER_ADAPTER = 5  # every fifth case has an adapter, which few of the others could have
CASES_PER_FREEZE = 10  # every tenth case is drawn again until parts of it may be frozen
MAX_REDRAWS = 15


class Drawn(NamedTuple):
    """A model, a layout and a job that go together."""

    number: int
    model: Model
    layout: Layout
    job: Job

    def __str__(self) -> str:
        return f"{self.number} · {self.layout} · {describe_record(self.model)} · {describe_record(self.job)}"


def describe_record(record: Record) -> str:
    """The fields that were set, with their values."""
    words = []
    for field, value in record:
        if field in record.model_fields_set and value != type(record).model_fields[field].default and field != "name":
            words.append(f"{field}=({describe_record(value)})" if isinstance(value, Record) else f"{field}={value}")
    return " ".join(words)


def draw_cases(seed: int, *, first: int = 0, worlds: tuple[int, ...] = WORLDS) -> Iterator[Drawn]:
    """Endless from number ``first`` on; what case ``number`` is depends on the seed and its number alone."""
    for number in itertools.count(first):
        chance = random.Random(f"{seed} {number}")
        frame = _frame(chance, worlds)  # drawn once, lest what is seldom legal be seldom drawn
        adapted = number % CASES_PER_ADAPTER == 1
        if adapted:
            frame = _drop_what_adapters_exclude(frame)
        cases = filter(None, (_draw(chance, number, frame) for _ in itertools.repeat(None)))
        case = next(cases)
        if number % CASES_PER_FREEZE == 3:  # the first one if none may, as with some schedules
            few = itertools.islice(itertools.chain((case,), cases), MAX_REDRAWS)
            case = next((other for other in few if _may_freeze(other)), case)
        if adapted:
            case = _add_adapter(case, random.Random(f"{seed} {number} adapter"))
        else:
            case = _add_freeze(case, random.Random(f"{seed} {number} freeze"))
        case = _add_masked_loss(case, random.Random(f"{seed} {number} sft"))
        case = _add_preferences(case, random.Random(f"{seed} {number} dpo"))
        case = _offload_optimizer(case, random.Random(f"{seed} {number} offload"))
        yield _empty_ends(case, random.Random(f"{seed} {number} ends"))


# Features of models and of layouts with their jobs; a draw is wide if any two that can go together are drawn together.
FEATURES: Mapping[str, Callable[[Model], bool]] = {
    "sinks": lambda model: any(shape.sinks for shape in model.attention_shapes),
    "latent": lambda model: model.mla is not None,
    "latent, odd": lambda model: model.mla is not None and (model.mla.nope_dim + model.mla.rope_dim) % 2 == 1,
    "indexer": lambda model: model.mla is not None and model.mla.indexer is not None,
    "grouped": lambda model: model.kv_heads < model.heads,
    "windows": lambda model: model.window is not None and model.window_kind == "sliding",
    "chunks": lambda model: model.window is not None and model.window_kind == "chunks",
    "sliding base": lambda model: model.rope_theta_sliding is not None,
    "not all rotate": lambda model: not all(model.rope_pattern),
    "scaled rope": lambda model: model.rope_scaling is not None,
    "qk norm": lambda model: model.qk_norm in ("head", "heads"),
    "full qk norm": lambda model: model.qk_norm == "full",
    "unit qk norm": lambda model: model.qk_norm == "unit",
    "soft caps": lambda model: model.attention_softcap is not None,
    "capped logits": lambda model: model.logit_softcap is not None,
    "experts": lambda model: model.moe is not None,
    "biased experts": lambda model: model.moe is not None and model.moe.expert_bias,
    "clamped experts": lambda model: model.activation == "clamped_swiglu",
    "weighed inputs": lambda model: model.moe is not None and model.moe.router_weight_on == "inputs",
    "drawn experts": lambda model: model.draws_experts,
    "identity experts": lambda model: model.moe is not None and model.moe.identity_experts > 0,
    "latent experts": lambda model: model.moe is not None and model.moe.latent_width is not None,
    "bias after experts": lambda model: model.moe is not None and model.moe.output_bias,
    "experts of attention": lambda model: model.attention_experts,
    "shortcut": lambda model: model.moe is not None and model.moe.shortcut,
    "scaled latents": lambda model: model.mla is not None and model.mla.scaled != "none",
    "normed rotary key": lambda model: model.mla is not None and model.mla.key_norm,
    "gated queries": lambda model: model.mla is not None and model.mla.gates_queries,
    "gates of norms": lambda model: model.norm_gate_rank is not None,
    "sliding latents": lambda model: model.sliding_mla is not None,
    "compressed keys": lambda model: any("attention" in mixer for mixer in model.non_attention_mixers),
    "hashed experts": lambda model: model.moe is not None and model.moe.hashed_layers > 0,
    "hyper-connections": lambda model: model.hyper_connections is not None,
    "experts next to an mlp": lambda model: model.moe is not None and model.moe.joins_mlp,
    "masks from values": lambda model: model.dynamic_mask is not None,
    "factors of the stream": lambda model: model.residual_weights,
    "pattern of experts": lambda model: model.moe is not None and bool(model.moe.pattern),
    "mtp": lambda model: model.mtp is not None,
    "learned positions": lambda model: model.position == "learned",
    "no positions": lambda model: model.position == "none",
    "odd heads": lambda model: model.mla is None and model.head_dim % 2 == 1,
    "tied": lambda model: model.tied_embeddings,
    "qkv bias": lambda model: model.qkv_bias,
    "head bias": lambda model: model.head_bias,
    "temperature": lambda model: any(map(model.has_temperature, range(model.layers))),
    "layernorm": lambda model: model.norm == "layernorm",
    "parallel block": lambda model: model.block.startswith("parallel"),
    "post norm": lambda model: model.block in ("post", "sandwich"),
    "plain mlp": lambda model: model.mlp == "plain",
    "short convolution": lambda model: "short_conv" in model.non_attention_mixers,
    "gated delta net": lambda model: "gated_delta_net" in model.non_attention_mixers,
    "mamba": lambda model: "mamba" in model.non_attention_mixers,
    "mamba2": lambda model: "mamba2" in model.non_attention_mixers,
    "joined mamba2": lambda model: model.joins_mamba2,
    "differential": lambda model: model.differential,
    "rg lru": lambda model: "rg_lru" in model.non_attention_mixers,
    "kimi delta": lambda model: "kimi_delta" in model.non_attention_mixers,
    "rwkv": lambda model: "rwkv" in model.non_attention_mixers,
    "receptance": lambda model: model.mlp == "receptance",
    "lightning": lambda model: "lightning" in model.non_attention_mixers,
    "normed stream": lambda model: model.block == "norm_stream",
    "residual factors": lambda model: model.residual_factors is not None,
    "half layers": lambda model: bool(model.feed_forwards),
    "output gate": lambda model: model.output_gate,
    "norm after experts": lambda model: model.moe is not None and model.moe.post_norm,
    "offset positions": lambda model: model.position_offset > 0,
    "gated shared expert": lambda model: model.moe is not None and model.moe.shared_gate,
    "attention dropout": lambda model: model.dropout_rates.attention > 0,
    "dropout": lambda model: model.dropout > 0,
    "gate of heads": lambda model: model.gate_per_head,
    "gate bias": lambda model: model.gate_bias,
    "sums by depth": lambda model: model.residual_by_depth,
    "power of positions": lambda model: model.temperature is not None and model.temperature.form == "power",
    "gate by softplus": lambda model: model.gate_activation == "softplus",
    "xielu": lambda model: model.activation == "xielu",
    "value dims": lambda model: model.value_dim is not None,
    "scaled values": lambda model: model.value_scale != 1,
    "sliding geometry": lambda model: model.sliding is not None,
    "norms by mixer": lambda model: model.pre_norm_mixers,
    "negative eigenvalues": lambda model: bool(model.gated_delta_net and model.gated_delta_net.negative_eigenvalues),
    "sub-norms": lambda model: model.sub_norm,
    "normed values": lambda model: model.value_norm,
    "tied values": lambda model: any(shape.tied_values for shape in model.attention_shapes),
    "bias by distance": lambda model: model.position == "alibi",
    "sinusoidal positions": lambda model: model.position == "sinusoidal",
    "no first norm": lambda model: not model.first_norm,
    "bias of the last layer": lambda model: model.last_out_bias,
    "matrix before the head": lambda model: model.head_transform is not None,
    "embedding norm": lambda model: model.embedding_norm != "none",
    "shared keys": lambda model: model.shared_kv_layers > 0,
    "wide shared layers": lambda model: model.shared_kv_ffn is not None,
    "per-layer inputs": lambda model: model.per_layer_inputs is not None,
    "altup": lambda model: model.altup is not None,
    "sparse gates": lambda model: any(model.gate_sparsity),
}
AXES: Mapping[str, Callable[[Layout, Job], bool]] = {
    **{name: partial(lambda layout, _job, *, name: getattr(layout, name) > 1, name=name)
       for name in ("dp", "tp", "pp", "ep", "etp")},
    "ring": lambda layout, _: layout.cp > 1 and layout.cp_kind == "ring",
    "ulysses": lambda layout, _: layout.cp > 1 and layout.cp_kind == "ulysses",
    "nosp": lambda layout, _: not layout.sp,
    **{f"zero{stage}": partial(lambda layout, _job, *, stage: layout.zero == stage and layout.shards > 1, stage=stage)
       for stage in (1, 2, 3)},
    "shard groups": lambda layout, _: layout.shard_group is not None,
    "recomputed": lambda layout, _: layout.ac != "none",
    "split backward": lambda layout, _: layout.pp > 1 and layout.pipeline.splits_backward,
    "pairs of passes": lambda layout, _: layout.pp > 1 and layout.pipeline.pairs_passes,
    "v shaped": lambda layout, _: layout.pp > 1 and layout.pipeline.is_v_shaped,
    "ends alone": lambda layout, _: 0 in layout.stages,
    "interleaved": lambda layout, _: layout.pp > 1 and layout.pipeline.is_interleaved,
    "documents": lambda _, job: job.documents == "separate",
    "chunked loss": lambda _, job: job.stack.loss == "chunked",
    "unfused": lambda _, job: job.stack.attention == "unfused",
    "adapters": lambda _, job: job.adapter is not None,
    "adapters over few bits": lambda _, job: job.adapter is not None and job.adapter.base in QUANTIZED_BASES,
    "adapter dropout": lambda _, job: job.adapter is not None and job.adapter.dropout > 0,
    "modules to save": lambda _, job: job.adapter is not None and bool(job.adapter.modules_to_save),
    "adapted ends": lambda _, job: job.adapter is not None and bool(job.adapter.adapted_ends),
    "adapted experts": lambda _, job: job.adapter is not None and job.adapter.adapts_experts,
    "rank pattern": lambda _, job: job.adapter is not None and bool(job.adapter.rank_pattern),
    "freeze": lambda _, job: bool(job.freeze),
    "sft": lambda _, job: job.objective == "sft",
    "dpo": lambda _, job: job.objective == "dpo",
    "offloaded optimizer": lambda layout, job: "optimizer" in layout.list_offloaded(job),
}  # fmt: skip


def pairs_of(case: Drawn) -> set[tuple[str, str]]:
    """Return the pairs of features, and of a feature and an axis, that a case holds."""
    held = [name for name, has in FEATURES.items() if has(case.model)]
    axes = [name for name, has in AXES.items() if has(case.layout, case.job)]
    return {*itertools.combinations(held, 2), *itertools.product(held, axes)}


def select_covering(cases: Iterable[Drawn]) -> Iterator[Drawn]:
    """Yield of ``cases`` those that hold a pair which no case before holds."""
    met: set[tuple[str, str]] = set()
    for case in cases:
        pairs = pairs_of(case)
        if pairs - met:
            met |= pairs
            yield case


def _offload_optimizer(case: Drawn, chance: random.Random) -> Drawn:
    """Return some of the cases with the optimizer in host memory, where that is supported."""
    if chance.random() > 0.3:
        return case
    layout = case.layout.replace(offload=("optimizer",))
    try:
        refuse(layout, model=case.model, job=case.job)
        check_supported(layout, case.job, model=case.model)
    except UserError:
        return case
    return case._replace(layout=layout)


class Frame(NamedTuple):
    """What decides most about what is legal."""

    degrees: dict[str, int]
    schedule: ScheduleName
    v: int
    experts: bool
    latent: bool
    adapted: bool = False


def _frame(chance: random.Random, worlds: tuple[int, ...]) -> Frame:
    degrees = _degrees(chance, chance.choice(worlds))
    schedules = [name for name in SCHEDULES if name != "dualpipe" or degrees["pp"] % 2 == 0]
    schedule = chance.choice(schedules) if degrees["pp"] > 1 else "1f1b"
    v = 2 if PIPELINE_SCHEDULES[schedule].is_v_shaped else chance.choice((2, 3)) if schedule == "interleaved" else 1
    return Frame(degrees, schedule, v, experts=chance.random() < 0.5, latent=chance.random() < 0.25)


def _draw(chance: random.Random, number: int, frame: Frame) -> Drawn | None:
    """One draw; ``None`` if it is not legal."""
    try:
        model = _model(chance, frame)
        layout = _layout(chance, frame, model)
        job = _job(chance, layout).replace(adapter=Adapter() if frame.adapted else None)
        if frame.adapted:  # adapters are not modelled with the others, which most draws would have
            model = model.replace(**_draw_gate_fields(random.Random(f"{number} gates"), model))
            model = _with_adapted_mixers(random.Random(chance.random()), model, layout=layout)
        else:
            model = _with_other_mixers_and_heads(chance, number, model, layout=layout)
        model = model.replace(**_draw_shape_fields(random.Random(f"{number} shapes"), model, tp=layout.tp))
        model = model.replace(**_draw_position_fields(random.Random(f"{number} positions"), model))
        model = model.replace(**_draw_factor_fields(random.Random(f"{number} factors"), model))
        model = model.replace(**_draw_sum_fields(random.Random(f"{number} sums"), model))
        model = model.replace(**_draw_end_fields(random.Random(f"{number} ends"), model, adapted=frame.adapted))
        refuse(layout, model=model, job=job)
        check_supported(layout, job, model=model)
    except ValueError:  # a mistake, or an odd rotary dim
        return None
    model = _add_inputs_of_layers(random.Random(f"{number} inputs"), model, layout=layout, job=job)
    model = _add_pairs_of_heads(random.Random(f"{number} pairs"), model, layout=layout, job=job)
    model = _add_drawn_experts(random.Random(f"{number} routers"), model, layout=layout, job=job)
    model = _add_joined_experts(random.Random(f"{number} joined experts"), model, layout=layout, job=job)
    model, layout = _add_shortcut(random.Random(f"{number} shortcut"), model, layout=layout, job=job)
    model, job = _add_indexer(random.Random(f"{number} indexer"), model, layout=layout, job=job)
    model, job = _add_compressed_keys(random.Random(f"{number} compressed"), model, layout=layout, job=job)
    model = _add_hashed_experts(random.Random(f"{number} hashed"), model, layout=layout, job=job)
    model = _add_streams(random.Random(f"{number} streams"), model, layout=layout, job=job)
    model = _add_time_mixing(random.Random(f"{number} time mixing"), model, layout=layout, job=job)
    model = _add_limits(random.Random(f"{number} limits"), model, layout=layout, job=job)
    model = _add_masks_from_values(random.Random(f"{number} masks"), model, layout=layout, job=job)
    model = _add_depth_and_biases(random.Random(f"{number} depth"), model, layout=layout, job=job)
    model = _add_identity_experts(random.Random(f"{number} identity"), model, layout=layout, job=job)
    model = _add_scaled_latents(random.Random(f"{number} latents"), model, layout=layout, job=job)
    model = _add_latent_experts(random.Random(f"{number} latent experts"), model, layout=layout, job=job)
    model = _add_parts_of_latents(random.Random(f"{number} parts of latents"), model, layout=layout, job=job)
    model = _add_attention_experts(random.Random(f"{number} attention experts"), model, layout=layout, job=job)
    return Drawn(number, model, layout, job)


def _add_inputs_of_layers(chance: random.Random, model: Model, *, layout: Layout, job: Job) -> Model:
    """Return the model with keys that layers share, sparse gates, inputs of each layer and AltUp, where that is legal.

    Each is drawn for a share of the models, and left out if it is not legal with what the model has.
    """
    layers = model.layers
    numbers = chance.sample(range(1, layers), layers - 1)
    shared: list[dict[str, Any]] = [
        {"shared_kv_layers": number, "shared_kv_ffn": ffn}
        for ffn in (model.ffn + 5 * layout.tp, None)
        for number in numbers
    ]
    inputs: dict[str, Any] = {"per_layer_inputs": PerLayerInputs(width=chance.choice((3, 6)), vocab=VOCAB)}
    altup = inputs | {
        "altup": AltUp(streams=chance.choice((2, 3)), clip=chance.choice((0.05, None))),
        "laurel_rank": 4,
        "block": "sandwich",
        "pre_norm_mixers": False,
    }
    sparse = {"gate_sparsity": tuple(chance.choice((0.0, 0.3, 0.9)) for _ in range(layers))}
    of_layers = [altup, inputs] if chance.random() < 0.7 else [inputs, altup]
    for options, share in ((shared, 0.8), (of_layers, 0.5), ([sparse], 0.5)):  # keys are seldom legal to share
        if chance.random() < share:
            fitting = (_replace_if_legal(model, fields, layout=layout, job=job) for fields in options)
            model = next(filter(None, fitting), model)
    return model


def _add_pairs_of_heads(chance: random.Random, model: Model, *, layout: Layout, job: Job) -> Model:
    """Return some of the models with differential attention, without what it excludes, where that is legal."""
    fields: dict[str, Any] = {
        "differential": True,
        "heads": 2 * model.heads,
        "kv_heads": 2 * model.kv_heads,
        **dict.fromkeys(("output_gate", "gate_per_head", "attention_sinks"), False),
        **dict.fromkeys(("value_dim", "sliding", "attention_dropout"), None),
        "dropout": 0.0,
        "gate_activation": "sigmoid",
    }
    changed = _replace_if_legal(model, fields, layout=layout, job=job)
    return model if changed is None or chance.random() > 0.3 else changed


def _add_drawn_experts(chance: random.Random, model: Model, *, layout: Layout, job: Job) -> Model:
    """Return some of the models with experts that training draws, without what that excludes, where that is legal."""
    if model.moe is None or chance.random() > 0.3:
        return model
    excluded: dict[str, Any] = {"topk": 2, "normalized": False, "groups": 1, "topk_groups": 1}
    balance = chance.choice(("none", "aux"))
    moe = model.moe.replace(**excluded, balance=balance)
    moe = moe.replace(score="sparsemixer", jitter=chance.choice((0.05, 0.5, 2.0)))
    return _replace_if_legal(model, {"moe": moe}, layout=layout, job=job) or model


def _add_joined_experts(chance: random.Random, model: Model, *, layout: Layout, job: Job) -> Model:
    """Return some of the models with an MLP next to the experts, some of these with norms of their own, where legal."""
    moe = model.moe
    if moe is None or chance.random() > 0.4:
        return model
    joined = moe.replace(joins_mlp=True)
    others = {"shared_experts": 0, "shared_gate": False, "post_norm": False, "joined_norms": True}
    gelu: dict[str, Any] = {"activation": "gelu_tanh"} if chance.random() < 0.5 else {}
    normed = {"moe": joined.replace(**others), "block": "sandwich", "norm": "rmsnorm", "pre_norm_mixers": False}
    options = [normed | gelu, normed, {"moe": joined} | gelu, {"moe": joined}]
    fitting = (_replace_if_legal(model, fields, layout=layout, job=job)
               for fields in options[2 * (chance.random() < 0.4) :])  # fmt: skip
    return next(filter(None, fitting), model)


def _add_identity_experts(chance: random.Random, model: Model, *, layout: Layout, job: Job) -> Model:
    """Return some of the models with experts that give tokens back, without what that excludes, where that is legal."""
    if model.moe is None or chance.random() > 0.3:
        return model
    moe = model.moe.replace(groups=1, topk_groups=1, capacity=None, expert_bias=False)
    moe = _replace_if_valid(moe, {"identity_experts": chance.choice((1, 2, 5))})
    return model if moe is None else _replace_if_legal(model, {"moe": moe}, layout=layout, job=job) or model


def _add_latent_experts(chance: random.Random, model: Model, *, layout: Layout, job: Job) -> Model:
    """Return some of the models with experts of another width, between two projections, where that is legal."""
    if model.moe is None or chance.random() > 0.4:
        return model
    moe = _replace_if_valid(model.moe, {"latent_width": chance.choice((7, 20, 36))})
    return model if moe is None else _replace_if_legal(model, {"moe": moe}, layout=layout, job=job) or model


def _add_attention_experts(chance: random.Random, model: Model, *, layout: Layout, job: Job) -> Model:
    """Return some of the mixtures with a bias on what experts add, and with experts of attention, where legal."""
    if model.moe is None:
        return model
    moe = model.moe
    if chance.random() < 0.3:
        moe = _replace_if_valid(moe, {"output_bias": True}) or moe
        model = _replace_if_legal(model, {"moe": moe}, layout=layout, job=job) or model
    routed = {"capacity": None, "identity_experts": 0, "router_bias": False, "hashed_layers": 0, "joined_norms": False}
    scored = {"score": "softmax"} if moe.score == "sparsemixer" else {}
    plain = _replace_if_valid(moe, routed | scored | ({"balance": "aux"} if moe.balance == "free" else {}))
    if plain is None or chance.random() > 0.3:
        return model
    fields: dict[str, Any] = {
        "attention_experts": True,
        "moe": plain,
        "heads": model.kv_heads * plain.topk,
        **dict.fromkeys(("output_gate", "gate_bias", "gate_per_head", "attention_sinks", "qkv_bias"), False),
        **dict.fromkeys(("tied_values", "value_norm", "sub_norm", "last_out_bias", "differential"), False),
        **dict.fromkeys(("value_dim", "sliding", "qkv_clip", "multipliers", "temperature", "dynamic_mask"), None),
        "shared_kv_layers": 0,
        "shared_kv_ffn": None,
        "qk_norm": "none",
        "value_scale": 1.0,
        "gate_activation": "sigmoid",
    }
    return _replace_if_legal(model, fields, layout=layout, job=job) or model


def _add_shortcut(chance: random.Random, model: Model, *, layout: Layout, job: Job) -> tuple[Model, Layout]:
    """Return some models whose experts' output is added a layer later, with twice the layers, where that is legal."""
    if model.moe is None or chance.random() > 0.35:
        return model, layout
    moe = model.moe.replace(joined_norms=False, dense_layers=0, joins_mlp=True, pattern=(True, False))
    excluded: dict[str, Any] = {
        "block": "pre",
        **dict.fromkeys(("mtp", "hyper_connections", "per_layer_inputs", "altup", "laurel_rank", "shared_kv_ffn")),
        **dict.fromkeys(("mixers", "feed_forwards", "gate_sparsity"), ()),
        **dict.fromkeys(("short_conv", "gated_delta_net", "kimi_delta", "lightning", "rg_lru", "mamba", "mamba2")),
        **dict.fromkeys(("pre_norm_mixers", "joins_mamba2"), False),
        "multipliers": None,
        "shared_kv_layers": 0,
    }
    doubled = layout.replace(stages=tuple(2 * size for size in layout.stages))
    fields = {**excluded, "layers": 2 * model.layers, "moe": moe.replace(shortcut=True)}
    changed = _replace_if_legal(model, fields, layout=doubled, job=job)
    return (model, layout) if changed is None else (changed, doubled)


def _add_scaled_latents(chance: random.Random, model: Model, *, layout: Layout, job: Job) -> Model:
    """Return some latent models with factors on their latents or queries, where that is legal."""
    if model.mla is None or chance.random() < 0.5:
        return model
    mla = model.mla.replace(q_rank=model.mla.q_rank or 22, scaled="latents")
    if mla.indexer is None:
        mla = mla.replace(scaled=chance.choice(("latents", "queries")))
    return _replace_if_legal(model, {"mla": mla}, layout=layout, job=job) or model


def _add_parts_of_latents(chance: random.Random, model: Model, *, layout: Layout, job: Job) -> Model:
    """Return some models with gates of norms; some latent ones with a norm of the rotary key, queries made with gates,
    or other latents in sliding layers; each where legal.
    """
    if chance.random() < 0.3:
        model = _replace_if_legal(model, {"norm_gate_rank": 3}, layout=layout, job=job) or model
    if model.mla is None:
        return model
    if chance.random() < 0.4:
        gated = model.mla.replace(q_rank=model.mla.q_rank or 22, scaled="none").replace(gates_queries=True)
        fields: dict[str, Any] = {"mla": gated, "output_gate": True, "gate_per_head": False}
        model = _replace_if_legal(model, fields, layout=layout, job=job) or model
    if chance.random() < 0.5:
        model = _replace_if_legal(model, {"mla": model.mla.replace(key_norm=True)}, layout=layout, job=job) or model
    if chance.random() < 0.5 or model.mla is None:
        return model
    sizes = {"kv_rank": 10, "nope_dim": chance.choice((3, 4)), "rope_dim": chance.choice((2, 4)), "v_dim": 5}
    latent = model.mla.replace(**sizes, indexer=None, q_rank=None if model.mla.q_rank is None else 15)
    fields = {
        "sliding_mla": latent,
        "sliding": Sliding(heads=chance.choice((1, 2)) * model.heads),
        "window": chance.choice((3, 7)),
        "window_pattern": chance.choice(((False, True), (False, True, True))),
        "window_kind": "sliding",
        "rope_theta_sliding": 50.0 if model.position == "rope" else None,
    }
    return _replace_if_legal(model, fields, layout=layout, job=job) or model


def _add_indexer(chance: random.Random, model: Model, *, layout: Layout, job: Job) -> tuple[Model, Job]:
    """Return some latent models with an indexer of keys in some layers, without what that excludes, where legal."""
    if model.mla is None or chance.random() > 0.35:
        return model, job
    flash = job.replace(attention="flash") if job.stack.attention == "unfused" else job
    excluded: dict[str, Any] = {
        **dict.fromkeys(("window", "attention_softcap", "temperature", "rope_theta_sliding")),
        **dict.fromkeys(("window_pattern", "rope_pattern"), ()),
        **dict.fromkeys(("attention_dropout", "dropout"), 0.0),
        "position": "rope",
        "window_kind": "sliding",
    }
    indexer = Indexer(heads=chance.choice((2, 5)), head_dim=chance.choice((4, 7)), topk=chance.choice((3, 7, 100)))
    patterns: tuple[tuple[bool, ...], ...] = ((True, False), (True, True, False), ())
    for pattern in patterns[chance.randrange(3) :]:  # stages may begin with layers that choose no keys
        mla = model.mla.replace(q_rank=model.mla.q_rank or 22, indexer=indexer.replace(pattern=pattern))
        if changed := _replace_if_legal(model, {**excluded, "mla": mla}, layout=layout, job=flash):
            return changed, flash
    return model, job


def _add_masks_from_values(chance: random.Random, model: Model, *, layout: Layout, job: Job) -> Model:
    """Return some of the models with trained factors of the stream, and with masks that values make, where legal."""
    if chance.random() < 0.15:
        model = _replace_if_legal(model, {"residual_weights": True}, layout=layout, job=job) or model
    fields: dict[str, Any] = {
        "dynamic_mask": chance.choice((3, 9, 100)),
        **dict.fromkeys(("output_gate", "gate_per_head", "attention_sinks", "differential"), False),
        **dict.fromkeys(("value_dim", "sliding", "qkv_clip", "attention_softcap"), None),
        "gate_activation": "sigmoid",
        "attention_dropout": 0.0,
        "shared_kv_layers": 0,
        "shared_kv_ffn": None,
    }
    changed = _replace_if_legal(model, fields, layout=layout, job=job)
    return model if changed is None or chance.random() > 0.3 else changed


def _add_depth_and_biases(chance: random.Random, model: Model, *, layout: Layout, job: Job) -> Model:
    """Return some models with sums of the stream by depth, a bias on gates, or powers of positions, where legal."""
    depth: dict[str, Any] = {
        "residual_by_depth": True,
        "residual_scale": 1.0,
        **dict.fromkeys(("residual_factors", "mtp")),
    }
    options: list[tuple[float, dict[str, Any]]] = [(0.25, depth), (0.5, {"gate_bias": True})]
    if model.temperature is not None:
        options.append((0.8, {"temperature": model.temperature.replace(form="power")}))
    for share, fields in options:
        if chance.random() < share:
            model = _replace_if_legal(model, fields, layout=layout, job=job) or model
    return model


def _add_compressed_keys(chance: random.Random, model: Model, *, layout: Layout, job: Job) -> tuple[Model, Job]:
    """Return some models with layers that attend to a window and to compressed keys, where legal."""
    if chance.random() > 0.3:
        return model, job
    net = CompressedAttention(
        heads=6,
        head_dim=8,
        rope_dim=chance.choice((4, 8)),
        q_rank=10,
        window=chance.choice((1, 5, 100)),
        out_groups=chance.choice((1, 2, 3)),
        out_rank=7,
        rope_theta=chance.choice((10_000.0, 500.0)),
    )
    indexer = Indexer(heads=chance.choice((1, 3)), head_dim=8, topk=chance.choice((2, 100)))
    nets: dict[str, CompressedAttention] = {
        "shared_key_attention": net,
        "heavily_compressed_attention": net.replace(rate=chance.choice((3, 5)), rope_theta=300.0),
        "compressed_sparse_attention": net.replace(rate=chance.choice((1, 2)), overlaps=True, indexer=indexer),
    }
    pattern = chance.sample((*nets, "attention"), chance.randint(1, 3))[: model.layers]
    kinds = [kind for kind in get_args(MixerName) if kind in type(model).model_fields]
    excluded: dict[str, Any] = {
        **dict.fromkeys(("multipliers", "sliding", "shared_kv_ffn")),
        "joins_mamba2": False,
        "shared_kv_layers": 0,
    }
    fitting = job.replace(documents="joined")
    fitting = fitting.replace(attention="flash") if job.stack.attention == "unfused" else fitting
    fewest: dict[str, Any] = {"mtp": None, "pre_norm_mixers": False}
    for mixers, fields in (((*pattern, *model.mixers)[: model.layers], {}), (pattern, {}), (pattern, fewest)):
        given = {kind: nets.get(kind) or getattr(model, kind) if kind in mixers else None for kind in kinds}
        fields = {**excluded, **given, **fields, "mixers": tuple(mixers)}
        changed = _replace_if_legal(model, fields, layout=layout, job=fitting)
        if changed is not None:
            return changed, fitting
    return model, job


def _add_hashed_experts(chance: random.Random, model: Model, *, layout: Layout, job: Job) -> Model:
    """Return some models of experts in whose first layers token ids name the experts, where legal."""
    if model.moe is None or model.draws_experts or chance.random() > 0.3:
        return model
    moe = model.moe.replace(hashed_layers=chance.randint(1, model.layers), balance=chance.choice(("free", "none")))
    return _replace_if_legal(model, {"moe": moe}, layout=layout, job=job) or model


def _add_streams(chance: random.Random, model: Model, *, layout: Layout, job: Job) -> Model:
    """Return some models with hyper-connections of several streams, without what these exclude, where legal."""
    if chance.random() > 0.25:
        return model
    hyper = HyperConnections(
        streams=chance.choice((1, 2, 3)), mixes=chance.random() < 0.6, iterations=chance.choice((1, 3))
    )
    excluded: dict[str, Any] = {
        "block": "pre",
        "first_norm": True,
        "residual_scale": 1.0,
        "residual_weights": False,
        "dropout": 0.0,
        **dict.fromkeys(("residual_factors", "embedding_dropout", "mtp")),
    }
    return _replace_if_legal(model, {**excluded, "hyper_connections": hyper}, layout=layout, job=job) or model


def _add_time_mixing(chance: random.Random, model: Model, *, layout: Layout, job: Job) -> Model:
    """Return some models with the time mixing of RWKV-4, some of these with its feed-forward, where legal."""
    if layout.tp * layout.cp > 1 or chance.random() > 0.22:
        return model
    others = [kind for kind in get_args(MixerName) if kind in type(model).model_fields]
    fields: dict[str, Any] = {
        **dict.fromkeys((*others, "multipliers", "sliding", "shared_kv_ffn")),
        **dict.fromkeys(("joins_mamba2", "pre_norm_mixers"), False),
        "shared_kv_layers": 0,
        "mixers": chance.choice((("rwkv",), ("rwkv", "attention"))),
        "rwkv": RWKV(inner=chance.choice((20, 33))),
    }
    kept = {kind: getattr(model, kind) for kind in model.non_attention_mixers[: model.layers - 1]}
    joined = {**fields, "mixers": ("rwkv", *kept), **kept}
    receptance = {"mixers": ("rwkv",), "mlp": "receptance", "activation": "relu2", "moe": None, "mlp_bias": False}
    options = [fields | receptance, fields] if chance.random() < 0.6 else [joined, fields]
    fitting = (_replace_if_legal(model, option, layout=layout, job=job) for option in options)
    return next(filter(None, fitting), model)


def _add_limits(chance: random.Random, model: Model, *, layout: Layout, job: Job) -> Model:
    """Return some models with limits of gate and up, and some of their routers with scores √softplus, where legal."""
    if chance.random() > 0.25:
        return model
    moe = model.moe
    if moe is not None:
        moe = moe.replace(clamp=0.02)
        moe = moe.replace(score="sqrtsoftplus") if moe.score == "sigmoid" else moe
    return _replace_if_legal(model, {"mlp_clamp": 0.02, "moe": moe}, layout=layout, job=job) or model


def _replace_if_valid(moe: MoE, fields: dict[str, Any]) -> MoE | None:
    try:
        return moe.replace(**fields)
    except ValueError:
        return None


def _replace_if_legal(model: Model, fields: dict[str, Any], *, layout: Layout, job: Job) -> Model | None:
    try:
        changed = model.replace(**fields)
    except ValueError:
        return None
    return changed if _is_supported(layout, job, model=changed) else None


def _with_adapted_mixers(chance: random.Random, model: Model, *, layout: Layout) -> Model:
    """Return most of the models with mixers that may have adapters, and some with queries and gates in one layer."""
    if model.output_gate and chance.random() < 0.5:
        model = model.replace(gate_in_query=True)
    if (layout.cp > 1 and layout.cp_kind != "ulysses") or chance.random() < 0.25:
        return model
    fields = _draw_mixer_fields(chance, model, tp=layout.tp, cp=layout.cp, adapted=True)
    if (net := fields.get("gated_delta_net")) is not None:
        fused = chance.choice(tuple(gated_delta_net.MODULES))
        fields["gated_delta_net"] = net.replace(fused_projections=fused)
    model = model.replace(**fields)
    return model.replace(**_draw_half_layers(chance, model))


def _with_other_mixers_and_heads(chance: random.Random, number: int, model: Model, *, layout: Layout) -> Model:
    """Return the model with multi-token prediction, mixers other than attention, gates, or layers of one half."""
    model = model.replace(mtp=chance.choice((None,) * 5 + (MTP(), MTP(depth=2, coefficient=1.0))))
    keeps_tokens = layout.cp == 1 or layout.cp_kind == "ulysses"
    if keeps_tokens and chance.random() < (0.7 if layout.tp == layout.cp == 1 else 0.25):
        model = model.replace(**_draw_mixer_fields(chance, model, tp=layout.tp, cp=layout.cp))
    model = model.replace(**_draw_gate_fields(random.Random(f"{number} gates"), model))
    model = model.replace(**_draw_half_layers(random.Random(f"{number} halves"), model))
    model = model.replace(**_draw_delta_fields(random.Random(f"{number} delta"), model))
    joined = _draw_joined_fields(random.Random(f"{number} joined"), model, shards=layout.tp * layout.cp)
    return model.replace(**joined) if keeps_tokens else model


def _drop_what_adapters_exclude(frame: Frame) -> Frame:
    """Return the frame without schedules that adapters are not modelled with."""
    pipeline = PIPELINE_SCHEDULES[frame.schedule]
    if pipeline.splits_backward or pipeline.enters_both_ends:
        frame = frame._replace(schedule="1f1b", v=1)
    return frame._replace(adapted=True)


def _is_supported_with(adapter: Adapter, case: Drawn) -> bool:
    return _is_supported(case.layout, case.job.replace(adapter=adapter), model=case.model)


def _align_to_blocks(case: Drawn) -> Drawn:
    """Return the case with matrices that tp cuts between blocks of 64 elements, and of 128 x 128, if that is legal."""
    model, tp = case.model, case.layout.tp
    fields: dict[str, Any] = {"width": 128, "head_dim": 128, "value_dim": None, "ffn": 128 * tp}
    if model.moe is not None:
        ffn = 128 * case.layout.etp if case.layout.etp > 1 else model.moe.ffn
        fields["moe"] = model.moe.replace(ffn=ffn, **({"shared_ffn": 128 * tp} if model.moe.shared_experts else {}))
    changed = _replace_if_legal(model, fields, layout=case.layout, job=case.job)
    return case if changed is None else case._replace(model=changed)


def _add_adapter(case: Drawn, chance: random.Random) -> Drawn:
    """Return the case with an adapter; drawn apart, so that the case is the same without it."""
    linears = tuple(target for target in TARGETS if target != "g_proj" or case.model.output_gate)
    if case.model.non_attention_mixers:
        linears = tuple(target for target in list_targets(case.model, Adapter()) if target in LINEAR_TARGETS)
    targets = chance.choice((("all-linear",), tuple(chance.sample(linears, min(len(linears), chance.randint(1, 4))))))
    adapter = Adapter(rank=chance.randint(1, 5), targets=targets, rank_stabilized=chance.random() < 0.3)
    adapter = adapter.replace(dropout=chance.choice((0.0, 0.0, 0.25)))
    if not adapter.dropout and chance.random() < 0.5:
        adapter = adapter.replace(kind="dora")
    if chance.random() < 0.4:
        among = linears if targets == ("all-linear",) else targets
        ranks, alphas = ({chance.choice(among): chance.randint(1, 7)} for _ in range(2))
        adapter = adapter.replace(rank_pattern=ranks, alpha_pattern=alphas)
    experts = tuple(chance.sample(tuple(EXPERT_TARGETS), chance.randint(1, 2)))
    of_experts = adapter.replace(targets=(*targets, *experts))
    if chance.random() < 0.7 and _is_supported_with(of_experts, case):
        adapter = of_experts
    base = QUANTIZED_BASES[case.number % len(QUANTIZED_BASES)]
    quantized = adapter.replace(base=base, double_quantization=base not in FOUR_BIT_BASES or case.number % 2 == 0)
    if chance.random() < 0.5:
        case = case if _is_supported_with(quantized, case) else _align_to_blocks(case)
        bases = (quantized, adapter.replace(base="int8", double_quantization=True))
        adapter = next((choice for choice in bases if _is_supported_with(choice, case)), adapter)
    if adapter.base in QUANTIZED_BASES and case.number % 3 == 0:
        case = _keep_in_16_bits(case, adapter)
    both: tuple[SavedModule, ...] = ("embed_tokens", "lm_head")
    saved = adapter.replace(modules_to_save=chance.choice(((), (), both[:1], both[1:], both)))
    if _is_supported_with(saved, case):
        adapter = saved
    ends = tuple(chance.sample(tuple(END_TARGETS), chance.randint(1, 2)))
    of_ends = adapter.replace(targets=(*adapter.targets, *ends))
    if _is_supported_with(of_ends, case):
        adapter = of_ends
    return case._replace(job=case.job.replace(adapter=adapter)) if _is_supported_with(adapter, case) else case


def _keep_in_16_bits(case: Drawn, adapter: Adapter) -> Drawn:
    """Return the case with a model whose repository keeps a fifth of the matrices in 16 bits, each of another block."""
    quantized = [
        weight.module
        for weight in list_weights(case.model)
        if is_quantized(weight, adapter.base_format) and weight.name.startswith("blocks.")
    ]
    kept = tuple(module for number, module in enumerate(quantized) if (number + case.number) % 5 == 0)
    stored = {"quantization": adapter.base, "double_quantization": adapter.double_quantization}
    return case._replace(model=case.model.replace(**stored, unquantized=kept))


def _may_freeze(case: Drawn) -> bool:
    return _is_supported(case.layout, case.job.replace(freeze=("embed_tokens",)), model=case.model)


def _add_freeze(case: Drawn, chance: random.Random) -> Drawn:
    """Return four of five cases with frozen parts, if that is legal; drawn apart, as adapters are."""
    layers = case.model.layers
    low, high = sorted(chance.choices(range(layers + 1), k=2))
    modules = chance.sample(("attention", "mlp", "norms", "q_proj", "k_proj", "down_proj"), 2)
    if case.model.moe is not None:
        modules.append(chance.choice(("router", "experts")))
    parts = [f"layers[:{high}]", f"layers[{low}:{layers}]", *(f"layers[{low}:].{module}" for module in modules)]
    chosen = chance.sample((*parts, "embed_tokens", "norm", "lm_head"), chance.randint(1, 3))
    job = case.job.replace(freeze=chosen)
    is_chosen = chance.random() < 0.8 and _is_supported(case.layout, job, model=case.model)
    return case._replace(job=job) if is_chosen else case


def _add_masked_loss(case: Drawn, chance: random.Random) -> Drawn:
    """Every third case with a loss on some of the targets, if that is legal."""
    job = case.job.replace(objective="sft")
    return (
        case._replace(job=job) if chance.random() < 0.33 and _is_supported(case.layout, job, model=case.model) else case
    )


def _add_preferences(case: Drawn, chance: random.Random) -> Drawn:
    """Every sixth case with a loss on pairs of sequences, if that is legal."""
    batch = 2 * case.job.global_batch
    job = case.job.replace(objective="dpo", loss="fused", pairs=False, global_batch=batch)
    model, layout = case.model.replace(mtp=None), case.layout.replace(mbs=2 * case.layout.mbs)
    if chance.random() > 0.16 or not _is_supported(layout, job, model=model):
        return case
    return case._replace(model=model, layout=layout, job=job)


def _empty_ends(case: Drawn, chance: random.Random) -> Drawn:
    """Return a pipeline whose first or last stage, or both, have no layers, as the next ones take them, if legal."""
    layout, ends = case.layout, chance.choice(((), (), (0,), (-1,), (0, -1)))
    sizes = [len(stage) for stage in list_stage_layers(case.model, layout)]
    if len(sizes) < 3 or not ends:
        return case
    for end in ends:
        sizes[1 if end == 0 else -2] += sizes[end]
        sizes[end] = 0
    layout = layout.replace(stages=tuple(sizes))
    return case._replace(layout=layout) if _is_supported(layout, case.job, model=case.model) else case


def _is_supported(layout: Layout, job: Job, *, model: Model) -> bool:
    try:
        refuse(layout, model=model, job=job)
        check_supported(layout, job, model=model)
    except ValueError:
        return False
    return True


def _degrees(chance: random.Random, world: int) -> dict[str, int]:
    """dp · tp · cp · pp = ``world``, in any way."""
    result = dict.fromkeys(("dp", "tp", "cp", "pp"), 1)
    for prime in (2, 3):
        while world % prime == 0:
            result[chance.choice(tuple(result))] *= prime
            world //= prime
    return result


def _divisor(chance: random.Random, number: int) -> int:
    return chance.choice([size for size in range(1, number + 1) if number % size == 0])


def _model(chance: random.Random, frame: Frame) -> Model:
    pick, tp = chance.choice, frame.degrees["tp"]
    heads = tp * frame.degrees["cp"] * pick((1, 2, 3)) if pick((True, False)) else tp * pick((2, 3, 4))
    fields: dict[str, Any] = {
        "layers": max(2, frame.degrees["pp"] * frame.v) + pick((0, 1, 2)),
        "width": pick((36, 44, 52)),
        "heads": heads,
        "kv_heads": heads if frame.latent else _divisor(chance, heads),
        "ffn": tp * pick((9, 16, 21)),
        "rope_theta": pick((500.0, 10_000.0)),
        "rope_fraction": pick((1.0, 1.0, 0.5)),
        "tied_embeddings": pick((True, False, False)),
        "qkv_bias": pick((True, False)),
        "out_bias": pick((True, False)),
        "mlp_bias": pick((True, False)),
        "head_bias": pick((True, False, False)),
        "qk_norm": pick(("none", "none", "head", "full", "heads", "unit")),
        "attention_scale": pick((None, None, 0.2)),
    }
    fields |= _draw_block_fields(random.Random(chance.random()), frame)
    turns = fields["position"] == "rope"
    fields["head_dim"] = pick((6, 8, 10) if turns else (5, 6, 7, 10))  # odd where nothing is rotated
    if frame.latent:
        mla = MLA(q_rank=pick((None, 22)), kv_rank=14, nope_dim=pick((5, 6)), rope_dim=4, v_dim=pick((6, 7, 8)))
        fields |= {"mla": mla, "qk_norm": "none", "rope_fraction": 1.0}
    if turns and pick((True, False, False, False)):
        fields |= {"rope_scaling": RopeScaling(kind="linear", factor=2.0)}
    if frame.experts:
        fields |= {"moe": _moe(chance)}
        if not fields["moe"].shared_experts and pick((True, False, False)):
            moe = fields["moe"].replace(dense_layers=0, router_weight_on="outputs", expert_bias=pick((True, False)))
            fields |= {"moe": moe, "activation": "clamped_swiglu"}
    fields |= _draw_score_fields(random.Random(chance.random()), turns=turns, latent=frame.latent)
    return Model(name="drawn", vocab=VOCAB, **fields)


def _draw_score_fields(chance: random.Random, *, turns: bool, latent: bool) -> dict[str, Any]:
    """Which keys a query sees and how, in every second model; dropout in every fourth, all three rates apart."""
    rates = ("dropout", "attention_dropout", "embedding_dropout")
    fields: dict[str, Any] = {rate: chance.choice((0.0, 0.1, 0.3)) for rate in rates if chance.random() < 0.25}
    if chance.random() < 0.5:
        return fields
    patterns = ((), (True, False), (False, True, True))
    if chance.random() < 0.7:
        fields |= {
            "window": chance.choice((3, 7, 12, 200)),
            "window_pattern": chance.choice(patterns),
            "window_kind": chance.choice(("sliding", "sliding", "chunks")),
        }
        if turns:
            fields |= {"rope_theta_sliding": chance.choice((None, 50.0))}
    if turns and not latent:
        fields |= {"rope_pattern": chance.choice((*patterns, ()))}
    if not latent and (not turns or fields["rope_pattern"]):
        fields |= {"temperature": chance.choice((None, Temperature(scale=0.5, floor=4)))}
    return fields | {
        "attention_softcap": chance.choice((None, None, 0.5)),
        "attention_sinks": chance.choice((False, False, True)),
    }


def _draw_block_fields(chance: random.Random, frame: Frame) -> dict[str, Any]:
    """Norms, kind of block, MLP, positions, embedding and logits; each unlike Llama's in every third model."""

    def choose_rarely(*values: Any) -> Any:
        return values[0] if chance.random() < 0.65 else chance.choice(values[1:])

    return {
        "norm": choose_rarely("rmsnorm", "layernorm"),
        "norm_bias": choose_rarely(True, False),
        "norm_plus_one": choose_rarely(False, True),
        "block": choose_rarely("pre", "post", "sandwich", "parallel", "parallel_shared"),
        "residual_scale": choose_rarely(1.0, 0.22),
        "mlp": "gated" if frame.experts else choose_rarely("gated", "plain"),
        "activation": "silu" if frame.experts else choose_rarely("silu", "gelu", "gelu_tanh", "relu", "relu2"),
        "position": choose_rarely("rope", "none") if frame.latent else choose_rarely("rope", "learned", "none"),
        "positions": 64,
        "embedding_scale": choose_rarely(1.0, 6.0),
        "logit_scale": choose_rarely(1.0, 0.25),
        "logit_softcap": choose_rarely(None, 2.0),
    }


def _draw_mixer_fields(
    chance: random.Random, model: Model, *, tp: int, cp: int, adapted: bool = False
) -> dict[str, Any]:
    """Another token mixer than attention in some layers or in all, of which tp·cp divides heads, groups or channels.

    ``adapted``: one whose layers may have adapters.
    """
    shards = tp * cp
    taps, groups, has_bias = chance.choice((1, 3, 4)), chance.choice((1, 2)), chance.random() < 0.5
    norm, norms = chance.choice(("after_gate", "before_gate", "none")), chance.choice(("none", "unit", "weighted"))
    mixers: dict[str, Mixer] = {
        "short_conv": ShortConv(taps=taps, bias=has_bias),
        "gated_delta_net": GatedDeltaNet(
            key_heads=shards * groups, value_heads=shards * groups * 2, key_dim=6, value_dim=5, taps=taps
        ),
        "kimi_delta": KimiDelta(
            heads=4 * shards, dim=5, taps=taps, rank=3 if has_bias else None, lower_bound=-5.0 if groups == 2 else None
        ),
        "lightning": Lightning(heads=shards * groups * 2, dim=5, chunk=16),
        "rg_lru": RGLRU(inner=12 * shards, blocks=shards * groups, taps=taps),
        "mamba": Mamba(
            inner=20 * shards,
            state=6,
            rank=3,
            taps=taps,
            conv_bias=has_bias,
            bias=has_bias,
            norms=norms,
            norm_epsilon=1e-2,
        ),
        "mamba2": Mamba2(
            heads=4 * shards,
            head_dim=5,
            state=6,
            groups=shards * groups,
            taps=taps,
            chunk=16,
            conv_bias=has_bias,
            bias=has_bias,
            norm=norm,
        ),
    }
    kinds = [
        kind
        for kind in sorted(mixers)
        if (tp == 1 or mixers[kind].get_sharded_units(model.width))
        and (cp == 1 or mixers[kind].context_parallel != "none")
        and (mixers[kind].targets or not adapted)
    ]
    kind, other = chance.sample(kinds, 2)
    patterns = (
        (kind,),
        (kind, "attention"),
        ("attention", kind),
        (kind, other, "attention"),
        ("attention", kind, other),
    )
    pattern = chance.choice(patterns)
    used = {name: net for name, net in mixers.items() if name in pattern[: model.layers]}
    # a small epsilon enlarges the rounding of small outputs of the scan
    return {"mixers": pattern, **used} | ({} if set(used) == {"short_conv"} else {"norm_epsilon": 1e-4})


def _draw_joined_fields(chance: random.Random, model: Model, *, shards: int) -> dict[str, Any]:
    """Return a Mamba-2 next to attention, with factors on their tensors, in some of the models that may have it."""
    if model.mixers or model.mla is not None or model.block != "pre" or chance.random() < 0.1:
        return {}
    norm, groups = chance.choice(("after_gate", "before_gate", "none")), shards * chance.choice((1, 2))
    net = Mamba2(heads=4 * shards, head_dim=5, state=6, groups=groups, taps=3, chunk=16, norm=norm)
    names = chance.sample(("attention_in", "attention_out", "key", "mixer_in", "mixer_out", "gate", "down"), 4)
    factors = Multipliers(**{name: chance.choice((0.7, 1.3)) for name in names})
    parts = chance.choice(((), (0.5, 1.0, 1.5, 2.0, 0.8)))
    multipliers = chance.choice((None, factors, factors.replace(mixer_parts=parts)))
    return {"joins_mamba2": True, "mamba2": net, "multipliers": multipliers, "norm_epsilon": 1e-4}


def _draw_half_layers(chance: random.Random, model: Model) -> dict[str, Any]:
    """Return layers of one branch, and experts without a gate, each in some of the models that may have them."""
    fields: dict[str, Any] = {}
    if chance.random() < 0.4 and not model.block.startswith("parallel"):
        mixers, feeds_first = model.mixers or ("attention",), chance.random() < 0.5
        alternating = [kind for mixer in mixers for kind in (("none", mixer) if feeds_first else (mixer, "none"))]
        fields = {"feed_forwards": (feeds_first, not feeds_first)}
        fields |= chance.choice(({"mixers": tuple(alternating)}, {}))
    moe = model.moe
    if (
        moe
        and model.mlp == "gated"
        and model.activation == "silu"
        and moe.router_weight_on == "outputs"
        and chance.random() < 0.2
    ):
        fields |= {"mlp": "plain", "activation": chance.choice(("relu2", "gelu"))}
    routed = model.replace(**fields)
    return fields if moe is None or any(map(routed.is_moe, range(routed.layers))) else {}


def _draw_delta_fields(chance: random.Random, model: Model) -> dict[str, Any]:
    """Return norms of other mixers than attention before them in a post-norm model, and β up to 2."""
    fields: dict[str, Any] = {}
    if model.block == "pre" and model.non_attention_mixers and model.moe is None and chance.random() < 0.5:
        fields |= {"block": "post"}
    if (fields.get("block") or model.block) == "post" and model.non_attention_mixers:
        fields |= {"pre_norm_mixers": chance.random() < 0.9}
    if (net := model.gated_delta_net) is not None and chance.random() < 0.9:
        fields |= {"gated_delta_net": net.replace(negative_eigenvalues=True, norm_epsilon=1e-4)}
    return fields


def _draw_gate_fields(chance: random.Random, model: Model) -> dict[str, Any]:
    """Return gates, norms after experts and offsets of positions, each in some of the models that may have it."""
    fields: dict[str, Any] = {"output_gate": model.mla is None and chance.random() < 0.5}
    if model.moe is not None and model.moe.shared_experts:
        fields |= {"moe": model.moe.replace(shared_gate=chance.random() < 0.5)}
    if model.moe is not None and model.block not in ("post", "sandwich"):
        fields |= {"moe": fields.get("moe", model.moe).replace(post_norm=chance.random() < 0.3)}
    return fields


def _draw_factor_fields(chance: random.Random, model: Model) -> dict[str, Any]:
    """Return a stream that norms make, and factors on stream and branches, each in some of the models."""
    fields: dict[str, Any] = {}
    if model.block == "pre" and not model.joins_mamba2 and chance.random() < 0.15:
        fields |= {"block": "norm_stream"}
    if model.residual_scale == 1 and chance.random() < (0.5 if fields else 0.1):
        pairs = ((1.0, 1.0), (1.5, 1.0), (1.0, 0.7), (0.8, 1.2))
        fields |= {"residual_factors": ResidualFactors(**{name: chance.choice(pairs) for name in
                   ("attention", "mixer", "feed_forward")})}  # fmt: skip
    return fields


def _draw_sum_fields(chance: random.Random, model: Model) -> dict[str, Any]:
    """Return norms of the sums of the stream, no norm before the head, and gates on latent attention."""
    fields: dict[str, Any] = {"final_norm": chance.random() < 0.9}
    norms_experts = model.moe is not None and model.moe.post_norm
    sums = model.block in ("pre", "post") and not (model.pre_norm_mixers or norms_experts or model.joins_mamba2)
    if sums and chance.random() < 0.2:
        fields |= {"block": "post_sum"}
    if model.mla is not None and chance.random() < 0.5:
        fields |= {"output_gate": True, "gate_per_head": chance.random() < 0.5}
    return fields


def _draw_end_fields(chance: random.Random, model: Model, *, adapted: bool) -> dict[str, Any]:
    """Return sinusoidal positions, no first norm, a bias in the last layer alone, and a matrix before the head.

    Adapters are not modelled with that matrix, which is drawn by the number of a case alone: all its draws would have
    it, and none would be legal.
    """
    fields: dict[str, Any] = {}
    if model.position in ("learned", "none") and model.mla is None and chance.random() < 0.4:
        fields |= {"position": "sinusoidal", "sinusoid_endpoint": chance.random() < 0.5}
    if model.block in ("pre", "sandwich"):
        fields |= {"first_norm": chance.random() < 0.8}
    if not model.out_bias and model.mla is None:
        fields |= {"last_out_bias": chance.random() < 0.3}
    if model.mtp is None and not adapted and chance.random() < 0.15:
        activation = chance.choice(("gelu", "relu", "silu"))
        fields |= {"head_transform": activation, "head_transform_bias": chance.random() < 0.5}
    return fields


def _draw_shape_fields(chance: random.Random, model: Model, *, tp: int) -> dict[str, Any]:
    """Return values of other dims than keys, factors on values, xIELU, and sliding layers with their own geometry."""
    own = {"activation": "xielu"} if model.moe is None and model.mlp == "plain" and chance.random() < 0.5 else {}
    if model.mla is not None:
        return own
    fields: dict[str, Any] = {**own, "value_scale": chance.choice((1.0, 1.0, 1.0, 0.7))}
    if model.output_gate:
        fields |= {"gate_per_head": chance.random() < 0.5, "gate_activation": chance.choice(("sigmoid", "softplus"))}
    if chance.random() < 0.3:
        fields |= {"value_dim": chance.choice((4, 5, 12))}
    if any(map(model.has_window, range(model.layers))) and chance.random() < 0.6:
        kv_heads = tp * chance.choice((1, 2))
        fields["sliding"] = Sliding(
            kv_heads=kv_heads,
            heads=kv_heads * chance.choice((1, 2, 3)),
            head_dim=chance.choice((None, 4, 12)),
            value_dim=chance.choice((None, 6)),
            rope_fraction=chance.choice((None, 0.5)) if model.position == "rope" else None,
            sinks=chance.choice((None, True, False)),
        )
        if model.position == "rope":
            fields |= {"rope_theta_sliding": 50.0}
    if model.moe is None and model.norm_weight and chance.random() < 0.3:
        fields |= {"sub_norm": True}
    if chance.random() < 0.5:
        fields |= {"value_norm": True, "tied_values": "value_dim" not in fields and chance.random() < 0.7}
        if (own := fields.get("sliding")) and fields["tied_values"]:
            fields["sliding"] = own.replace(tied_values=own.value_dim is None and chance.choice((None, False)))
    return fields


def _draw_position_fields(chance: random.Random, model: Model) -> dict[str, Any]:
    """Return norms on the embedding, a bias by distance in some models without positions, and offset positions."""
    fields: dict[str, Any] = {"embedding_norm": chance.choice(("none", "none", "none", "unit", "weighted", "weighted"))}
    if model.position == "none" and chance.random() < 0.6:
        fields |= {"position": "alibi", "attention_softcap": None}
    if model.position == "learned":
        fields |= {"position_offset": chance.choice((0, 2))}
    return fields


def _moe(chance: random.Random) -> MoE:
    pick = chance.choice
    groups = pick((1, 1, 1, 2))
    moe = MoE(
        experts=pick((4, 6, 8)),
        topk=pick((1, 2, 3)) if groups == 1 else 2,
        ffn=pick((12, 14, 16)),
        shared_experts=pick((0, 1, 2)),
        shared_ffn=pick((None, 24)),
        dense_layers=pick((0, 0, 1, 2)),
        score=pick(("softmax", "sigmoid")),
        balance=pick(("none", "aux", "free")),
        aux_coefficient=0.1,
        capacity=pick((None,) * 5 + (1.0,)),
        normalized=pick((True, False)),
        scaling=pick((1.0, 2.5)),
        groups=groups,
        router_bias=pick((True, False, False)),
        expert_bias=pick((True, False, False)),
        pattern=pick(((), (), (True, False))),
    )
    if not moe.expert_bias and pick((True, False, False, False)):
        moe = moe.replace(router_weight_on="inputs")
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
        **frame.degrees,
        v=frame.v,
        schedule=frame.schedule,
        etp=etp,
        ep=_divisor(chance, dp * cp * tp // etp) if model.moe else 1,
        zero=zero,
        shard_group=pick((None, _divisor(chance, dp * cp))) if zero else None,
        mbs=pick((1, 1, 2, 3)),
        ac=ac,
        stages=_parts(chance, model.layers, pp * frame.v) if pp > 1 and pick((True, False)) else (),
        order=pick((DEFAULT_ORDER, tuple(chance.sample(DEFAULT_ORDER, 4)))),
        cp_kind=pick(("ring", "ulysses")) if cp > 1 else "ring",
        sp=tp == 1 or pick((True, True, False)),
    )


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
        sequence=sequence,
        global_batch=micro_batches * layout.dp * layout.mbs,
        precision=get_recipe("fp32"),
        documents=pick(("joined", "separate")),
        loss=pick(("fused", "chunked")),
        vocab_multiple=pick((1, 1, 4)),
        reduce=pick(("micro_batch", "micro_batch", "step")),
        reshard=pick(("forward", "forward", "backward")),
        attention=pick(("flash", "flash", "flash", "unfused")),
        pairs=layout.schedule.startswith("dualpipe") and pick((True, False)),
        steps=5,
        seed=chance.randrange(1000),
        optimizer=Optimizer(kind=kind, clip=pick((0.5, 0.0)), epsilon=1e-5),
        learning_rate=LearningRate(kind="constant", peak=3e-4),
    )
