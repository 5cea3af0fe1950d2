"""Megatron's arguments -> model, layout and job.

dp = world / (tp·cp·pp); the distributed optimizer is ZeRO-1 over dp·cp, in num_distributed_optimizer_instances groups
"""

from __future__ import annotations

import re
from typing import Any

from fivefold.interop.equivalence import divide_rates
from fivefold.interop.format import RANKS_MISSING, Asked, ParsedConfig, build_reading, replicas, world
from fivefold.interop.keys import Values
from fivefold.interop.megatron.keys import ACTIVATIONS
from fivefold.job import Recipe, recipe
from fivefold.layout.schedule.pipeline_schedule import usual_schedule
from fivefold.layout.spec import Layout
from fivefold.layout.stages import stage_layers
from fivefold.model import catalog
from fivefold.model.shape import MLA, MTP, MoE
from fivefold.model.spec import Model
from fivefold.record import Mistake
from fivefold.results.reading import Reading

FSDP = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}

MODULES = {
    "core_attn": "core", "layernorm": "norm", "moe_act": "act", "mlp": "mlp", "moe": "moe", "mla_up_proj": "up+rope",
    "shared_experts": "shared",
}  # fmt: skip

FP8 = {"tensorwise": "fp8", "delayed": "fp8", "blockwise": "fp8-tiles", "mxfp8": "mxfp8"}

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}

TOKENIZERS = {"GPT2BPETokenizer": 50_257, "BertWordPieceLowerCase": 30_522, "Llama2Tokenizer": 32_000}

SIZES = ("num_layers", "hidden_size", "num_attention_heads")


def to_job(config: ParsedConfig, asked: Asked) -> Reading:
    """Return model, layout and job."""
    document, values = config.document, config.values
    check_same(values)
    model, missing = read_model(values, asked._replace(model=config.model))
    ranks = world(document, asked)
    if model is None:
        return build_reading(config, {}, model=None, ranks=None, missing=missing)
    fields = {path: value for path, value in values.fields().items() if not path.startswith("model.")}
    fields |= {**stack(values, model), **rate(values), "job.precision": precision(values)}
    fields["job.stack.name"] = "megatron-deepspeed" if values["deepspeed"] else config.stack
    fields["job.documents"] = "apart" if values["reset_attention_mask"] else "joined"
    fields["job.offload"] = ("optimizer",) if values["optimizer_cpu_offload"] else ()
    fields |= config.fields
    fields["job.optimizer.betas"] = (values["adam_beta1"], values["adam_beta2"])
    if lacking := [name for name in ("seq_length", "micro_batch_size") if values[name] is None]:
        missing += (*(f"--{name.replace('_', '-')}" for name in lacking), *(() if ranks else (RANKS_MISSING,)))
        return build_reading(config, {}, model=model, ranks=None, missing=missing)
    if ranks is not None:
        tp, cp, pp = (values.whole(f"{axis}_parallel_size") for axis in ("tensor_model", "context", "pipeline_model"))
        dp = replicas(ranks, tp * cp * pp, of="tp·cp·pp", origin=values.origin)
        assert dp is not None
        fields |= degrees(values, model, dp=dp) | batch(values, dp=dp) | pipeline(values, model, pp=pp)
        fields["layout.ac"] = recomputed(values, model, fields)
    missing += () if ranks else (RANKS_MISSING,)
    return build_reading(config, fields, model=model, ranks=ranks, missing=missing)


def check_same(values: Values) -> None:
    """Mark arguments that say again what another says, where they say it otherwise."""
    for again, name in {"encoder_num_layers": "num_layers", "encoder_seq_length": "seq_length"}.items():
        if values[again] not in (None, values[name]):
            values.doubt(again, f"is not {name}={values[name]}, which is counted")
    learned = values["position_embedding_type"] == "learned_absolute"
    if values["no_position_embedding"] and learned and not values["use_rotary_position_embeddings"]:
        values.doubt("no_position_embedding", "no positions: write --position-embedding-type none")


def vocabulary(values: Values, asked: Asked) -> int | None:
    """Of the arguments, of what the user says, or of a tokenizer that is known."""
    said = values["vocab_size"] or asked.vocab or values["padded_vocab_size"] or values["pad_vocab_size_to"]
    if said:
        return int(said) if isinstance(said, int) else None
    tokenizer = str(values["tokenizer_model"] or "").rstrip("/")
    if tokenizer:
        name = tokenizer.rpartition("/")[2].lower()
        for key, entry in catalog.CATALOG.items():
            if name and entry.source.lower().endswith("/" + name):
                return catalog.named(key).vocab
    return TOKENIZERS.get(str(values["tokenizer_type"]))


def read_model(values: Values, asked: Asked) -> tuple[Model | None, tuple[str, ...]]:
    """The model, or what is missing."""
    if asked.model:
        _compared(values, asked.model)
        return asked.model, ()
    if lacking := [name for name in SIZES if values[name] is None]:
        return None, (
            f"the model: {', '.join('--' + name.replace('_', '-') for name in lacking)}; or say --model NAME",
        )
    vocab = vocabulary(values, asked)
    if vocab is None:
        return None, ("the vocabulary, which its tokenizer has: say --vocab 128256",)
    layers, width, heads = (values.whole(name) for name in SIZES)
    fields = {path.partition(".")[2]: value for path, value in values.fields().items() if path.startswith("model.")}
    groups = values.whole("num_query_groups") if values["group_query_attention"] else heads
    gated = bool(values["swiglu"])
    ffn = values["ffn_hidden_size"] or (int(4 * width * 2 / 3) // 64 * 64 if gated else 4 * width)
    biased = not values["disable_bias_linear"]
    if values["use_rotary_position_embeddings"]:
        fields["position"] = "rope"
    if fields.get("attention_dropout") == fields.get("dropout"):
        fields.pop("attention_dropout", None)
    if values["multi_latent_attention"] and fields.pop("qk_norm", "none") == "none":
        values.approximate(
            "qk_layernorm", "is not set: Megatron then leaves out the norms of the latents, counted here"
        )
    fields |= {
        "name": f"megatron-{layers}x{width}", "vocab": vocab, "ffn": ffn, "kv_heads": groups,
        "head_dim": values["kv_channels"] or width // heads,
        "mlp": "gated" if gated else "plain",
        "activation": "silu" if gated else next((name for key, name in ACTIVATIONS.items() if values[key]), "gelu"),
        "qkv_bias": biased or bool(values["add_qkv_bias"]), "out_bias": biased, "mlp_bias": biased,
        "mla": _latent(values), "moe": _experts(values, ffn, layers), "mtp": _further(values),
    }  # fmt: skip
    fields["positions"] = fields.get("positions") or values["seq_length"] or 4096
    return Model.read(fields, origin=values.origin), ()


def _compared(values: Values, model: Model) -> None:
    """Name the sizes that are said otherwise than ``model`` has them."""
    sizes = {
        "num_layers": model.layers, "hidden_size": model.width, "num_attention_heads": model.heads,
        "num_experts": model.moe.experts if model.moe else None,
    }  # fmt: skip
    for name, size in sizes.items():
        if values.says(name) and values[name] != size:
            values.approximate(
                name, f"is {size} in {model.name}, which was taken; a config.json of your own says other sizes"
            )


def _latent(values: Values) -> MLA | None:
    if not values["multi_latent_attention"]:
        return None
    names = {
        "kv_rank": "kv_lora_rank",
        "nope_dim": "qk_head_dim",
        "rope_dim": "qk_pos_emb_head_dim",
        "v_dim": "v_head_dim",
    }
    sizes: dict[str, Any] = {field: values[name] for field, name in names.items()}
    return MLA.read(sizes | {"q_rank": values["q_lora_rank"]}, origin=values.origin)


def _further(values: Values) -> MTP | None:
    depth = values.optional("mtp_num_layers")
    return MTP(depth=depth, coefficient=values["mtp_loss_scaling_factor"]) if depth else None


def _experts(values: Values, ffn: int, layers: int) -> MoE | None:
    experts = values["num_experts"]
    if not experts:
        return None
    score, kind = values["moe_router_score_function"], values["moe_router_load_balancing_type"]
    shared = values["moe_shared_expert_intermediate_size"]
    fields: dict[str, Any] = {
        "experts": experts, "topk": values["moe_router_topk"], "ffn": values["moe_ffn_hidden_size"] or ffn,
        "shared_experts": 1 if shared else 0, "shared_ffn": shared or None,
        "dense_layers": dense_layers(values["moe_layer_freq"], layers, origin=values.origin), "score": score,
        "balance": "free" if values["moe_router_enable_expert_bias"] else "none" if kind == "none" else "aux",
        "aux_coefficient": values["moe_aux_loss_coeff"], "capacity": values["moe_expert_capacity_factor"],
        "normalized": score == "sigmoid" or not values["moe_router_pre_softmax"],
        "scaling": values["moe_router_topk_scaling_factor"] or 1.0,
        "groups": values["moe_router_num_groups"] or 1, "topk_groups": values["moe_router_group_topk"] or 1,
    }  # fmt: skip
    return MoE.read(fields, origin=values.origin)


PATTERN = re.compile(r"\(?\s*(?:\[0\]\s*\*\s*(\d+)\s*\+\s*)?\[1\]\s*\*\s*(\d+)\s*\)?")


def dense_layers(said: Any, layers: int, *, origin: str) -> int:
    """How many layers at the start have no experts, of ``1`` or ``([0]*3+[1]*58)``."""
    text = str(said)
    if text == "1":
        return 0
    flags = None
    if found := PATTERN.fullmatch(text):
        flags = [0] * int(found[1] or 0) + [1] * int(found[2])
    elif isinstance(said, list) or re.fullmatch(r"\[[01, ]*\]", text):
        flags = [int(digit) for digit in re.findall(r"[01]", text)]
    if flags is None or len(flags) != layers or flags != sorted(flags):
        raise Mistake(
            f"{origin}: moe_layer_freq {text!r}: only dense layers first and then experts are counted, all {layers}"
        )
    return flags.count(0)


def degrees(values: Values, model: Model, *, dp: int) -> dict[str, Any]:
    """dp, ZeRO, sequence and expert parallelism, and the order of the ranks."""
    tp, cp = values.whole("tensor_model_parallel_size"), values.whole("context_parallel_size")
    zero = 1 if values["use_distributed_optimizer"] else 0
    if values["deepspeed"]:  # DeepSpeed's BF16_Optimizer shards masters and moments at stage 0 as well
        zero = max(values.whole("zero_stage", least=0), 1 if values["bf16"] else 0)
    if values["use_megatron_fsdp"]:
        zero = FSDP.get(str(values["data_parallel_sharding_strategy"]), 0)
    found: dict[str, Any] = {
        "layout.dp": dp,
        "layout.zero": zero,
        "layout.sp": tp == 1 or bool(values["sequence_parallel"]),
    }
    instances = values.whole("num_distributed_optimizer_instances")
    if zero and instances > 1:
        if dp * cp % instances:
            raise Mistake(
                f"{values.origin}: num_distributed_optimizer_instances={instances} do not divide dp·cp={dp * cp}"
            )
        found["layout.shard_group"] = dp * cp // instances
    if model.moe:
        found["layout.etp"] = values["expert_tensor_parallel_size"] or tp
    if values["use_tp_pp_dp_mapping"]:
        found["layout.order"] = ("tp", "cp", "pp", "dp")
    kind = values["cp_comm_type"]
    if kind not in ("p2p", "a2a"):
        values.doubt("cp_comm_type", "is neither p2p nor a2a; read as p2p, a ring")
    if cp > 1 and kind == "a2a":
        found["layout.cp_kind"] = "ulysses"
    return found


def batch(values: Values, *, dp: int) -> dict[str, Any]:
    """Micro-batch, global batch, its ramp, and the steps."""
    mbs = values.whole("micro_batch_size")
    whole = values.optional("global_batch_size") or mbs * dp
    found: dict[str, Any] = {"job.global_batch": whole}
    if ramp := values["rampup_batch_size"]:
        words = [
            str(each).replace("_", "")
            for each in (ramp if isinstance(ramp, list) else str(ramp).strip("[]").replace(",", " ").split())
        ]
        numbers = [int(word) for word in words if word.isdecimal() and len(word) < 15]
        if len(numbers) != 3 or len(words) != 3:
            raise Mistake(f"{values.origin}: rampup_batch_size is three numbers (first, step, samples), not {ramp!r}")
        found["job.ramp"] = {"first": numbers[0], "step": numbers[1], "samples": numbers[2]}
    steps = values.optional("train_iters") or (values.optional("train_samples") or 0) // max(1, whole)
    return found | ({"job.steps": steps} if steps else {})


def pipeline(values: Values, model: Model, *, pp: int) -> dict[str, Any]:
    """Virtual stages, and the layers of each stage where they are not as spread evenly."""
    if pp == 1:
        return {}
    v, sizes = _stages(values, model.layers, pp)
    if sum(sizes) != model.layers or min(sizes) < 1:
        raise Mistake(
            f"{values.origin}: stages of {'-'.join(map(str, sizes))} layers are not {model.layers}, one or more each"
        )
    found: dict[str, Any] = {"layout.v": v, "layout.schedule": usual_schedule(v)}
    plain = Layout.read({"pp": pp, "v": v, "schedule": found["layout.schedule"]}, origin=values.origin)
    usual = tuple(map(len, stage_layers(model.layers, plain)))
    return found if sizes == usual else found | {"layout.stages": sizes}


def _stages(values: Values, layers: int, pp: int) -> tuple[int, tuple[int, ...]]:
    text = values["pipeline_model_parallel_layout"]
    if text:
        sizes = spelled(str(text), origin=values.origin)
        if len(sizes) % pp:
            raise Mistake(f"{values.origin}: pipeline_model_parallel_layout has {len(sizes)} stages for pp={pp}")
        if min(sizes) < 1:
            values.doubt("pipeline_model_parallel_layout", "stages without a layer; read as spread evenly over all")
            v = len(sizes) // pp
            plain = Layout(pp=pp, v=v, schedule=usual_schedule(v))
            sizes = tuple(map(len, stage_layers(layers, plain)))
        return len(sizes) // pp, sizes
    each, v = values["num_layers_per_virtual_pipeline_stage"], values["num_virtual_stages_per_pipeline_rank"] or 1
    first, last = values["decoder_first_pipeline_num_layers"], values["decoder_last_pipeline_num_layers"]
    counted = values["pp_partition_method"] == "type:transformer|embedding"  # Megatron-DeepSpeed: both ends as a layer
    ends = (
        counted or bool(values["account_for_embedding_in_pipeline_split"]),
        counted or bool(values["account_for_loss_in_pipeline_split"]),
    )
    ranks = [0] * pp
    if first or last:
        middle, left = pp - bool(first) - bool(last), layers - (first or 0) - (last or 0)
        if middle < 1 or left % middle:
            raise Mistake(
                f"{values.origin}: {left} layers do not spread over the {middle} pipeline ranks between the ends"
            )
        ranks = [left // middle] * pp
        ranks[0], ranks[-1] = first or ranks[0], last or ranks[-1]
    else:
        if (layers + sum(ends)) % pp:
            raise Mistake(
                f"{values.origin}: num_layers={layers} does not spread over pp={pp}; Megatron needs "
                "decoder_first_pipeline_num_layers, or --account-for-… for what is left"
            )
        ranks = [(layers + sum(ends)) // pp] * pp
    if each:
        if ranks[0] % each:
            raise Mistake(
                f"{values.origin}: {ranks[0]} layers of a rank are not a multiple of {each} per virtual stage"
            )
        v = ranks[0] // each
    if any(rank % v for rank in ranks):
        raise Mistake(f"{values.origin}: {ranks} layers of the ranks do not spread over {v} virtual stages each")
    spread = [ranks[stage % pp] // v for stage in range(pp * v)]
    spread[0] -= ends[0]
    spread[-1] -= ends[1]
    return v, tuple(spread)


def spelled(text: str, *, origin: str) -> tuple[int, ...]:
    """Layers of each stage of ``Et*3|(tt|)*29m|L``: E embedding, t layer, m multi-token prediction, L loss."""
    flat = text.replace(" ", "").replace(",", "").strip("'\"")
    for _ in range(100):
        wider = re.sub(r"\(([^()]*)\)\*(\d{1,3})", lambda match: match[1] * int(match[2]), flat)
        wider = re.sub(r"([tmEL|])\*(\d{1,3})", lambda match: match[1] * int(match[2]), wider)
        if wider == flat:
            break
        flat = wider
    if not re.fullmatch(r"[tmEL|]+", flat) or len(flat) > 100_000:
        raise Mistake(f"{origin}: pipeline_model_parallel_layout {text!r} is not of E, t, m, L and |")
    return tuple(stage.count("t") for stage in flat.split("|"))


def recomputed(values: Values, model: Model, layout: dict[str, Any]) -> str:
    """``ac`` of a layout."""
    old = "full" if values["checkpoint_activations"] else "selective" if values["recompute_activations"] else None
    kind = values["recompute_granularity"] or old
    if kind == "selective":
        said = values["recompute_modules"]
        names = said if isinstance(said, list) else str(said).replace(",", " ").split()
        if unknown := [name for name in names if name not in MODULES]:
            values.doubt("recompute_modules", f"{', '.join(unknown)}: not known here, not counted")
        groups = [MODULES[name] for name in names if name in MODULES]
        return "selective" if groups == ["core"] else "+".join(groups) or "none"
    if kind != "full":
        return "none"
    many, method = values["recompute_num_layers"] or 1, values["recompute_method"]
    stages = layout.get("layout.stages") or (-(-model.layers // (layout["layout.pp"] * layout.get("layout.v", 1))),)
    if method == "block" and many < max(stages):
        values.doubt("recompute_num_layers", f"recomputes {many} of each stage's layers; read as ac=full, all of them")
    if method == "uniform" and many > 1:
        values.doubt(
            "recompute_num_layers", f"keeps the input of every {many}th layer alone; read as ac=full, of every one"
        )
    return "full"


def precision(values: Values) -> Recipe:
    """Weights, sums of gradients, masters and moments."""
    if not (values["bf16"] or values["fp16"]):
        return recipe("fp32")
    found = recipe("fp16" if values["fp16"] else "bf16")
    if values["fp16"] and values["accumulate_allreduce_grads_in_fp32"]:
        found = found.replace(name="fp16-grad32", accumulated_bytes=4)
    if values["fp4_format"]:
        found = recipe("nvfp4")
    elif values["fp8_format"]:
        said = str(values["fp8_recipe"])
        if said not in FP8:
            values.doubt("fp8_recipe", "is not among the recipes here; read as tensorwise")
        found = recipe(FP8.get(said, "fp8"))
        if values["fp8_param_gather"]:
            gathers = "fp8" if found.scaling in ("tensorwise", "tiles") else "weights"
            if gathers == "weights":
                values.doubt("fp8_param_gather", "is counted for scales by tensor and by tiles alone")
            else:
                found = found.replace(name=f"{found.name}-param", weights_bytes=1, gathers="fp8")
    if values["grad_reduce_in_bf16"]:
        found = found.reduced(in_fp32=False)
    return _aware(values, found)


def _aware(values: Values, found: Recipe) -> Recipe:
    """The recipe with the optimizer's states in other widths, which the precision-aware optimizer allows."""
    if not values["use_precision_aware_optimizer"]:
        return found
    names = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    grads, masters, first, second = (BYTES.get(str(values[name]), 4) for name in names)
    changed = {"master_bytes": masters, "moments_bytes": (first, second)}
    changed |= {"accumulated_bytes": grads if grads > found.gradients_bytes else 0}
    half = {"half": "fp16"} if "fp16" in [str(values[name]) for name in names[1:]] else {}
    new = found.replace(**changed, **half)
    return new if new == found else new.replace(name=f"{found.name}-aware")


def stack(values: Values, model: Model) -> dict[str, Any]:
    """What of the stack the arguments say."""
    overlap = ["dp"] if values["overlap_grad_reduce"] else []
    overlap += ["cp"] if values["no_overlap_p2p_communication"] else ["cp", "pp"]
    overlap += ["tp"] if values["tp_comm_overlap"] else []
    pairs = bool(values["overlap_moe_expert_parallel_comm"])
    overlap += ["ep"] if pairs else []
    dispatcher = str(values["moe_token_dispatcher_type"])
    if model.moe and dispatcher not in ("alltoall", "flex"):
        values.doubt("moe_token_dispatcher_type", "every rank gathers every token; counted as alltoall")
    if model.moe and not values["moe_grouped_gemm"]:
        values.doubt("moe_grouped_gemm", "experts one after another; counted as one grouped matmul")
    local = values["transformer_impl"] == "local"
    fused = bool(values["use_flash_attn"]) if local else values["attention_backend"] not in ("unfused", "local")
    graphs = values["enable_cuda_graph"] or values["external_cuda_graph"] or values["cuda_graph_impl"] != "none"
    said = str(values["cuda_graph_scope"])
    scope = "full" if "full" in said else "partial" if "attn" in said or "preprocess" in said else "router"
    late = {True: "late", False: "summed" if local else "placeholders"}[bool(values["no_gradient_accumulation_fusion"])]
    return {
        "job.stack.name": "megatron-core", "job.stack.overlap": tuple(overlap), "job.stack.pairs": pairs,
        "job.stack.dispatcher": "fused" if dispatcher == "flex" or values["moe_enable_deepep"] else "all_to_all",
        "job.stack.attention": "flash" if fused else "unfused", "job.stack.weight_gradients": late,
        "job.stack.weights": "ahead" if values["overlap_param_gather"] else "at_once",
        "job.stack.graphs": scope if graphs else "none",
        "job.stack.reduce_in_fp32": not values["grad_reduce_in_bf16"],
    }  # fmt: skip


def rate(values: Values) -> dict[str, Any]:
    """The learning rate's schedule."""
    style = str(values["lr_decay_style"])
    kind = {"WSD": "wsd", "cosine": "cosine", "linear": "wsd"}.get(style, "constant")
    found: dict[str, Any] = {"job.learning_rate.kind": kind}
    peak, least = values["lr"], values.number("min_lr") or 0.0
    if isinstance(peak, float) and peak > 0:
        found["job.learning_rate.floor"] = divide_rates(least, peak)
    if decay := values.optional("lr_wsd_decay_iters"):
        found["job.learning_rate.decay_steps"] = decay
    warmup, steps = values.optional("lr_warmup_iters") or 0, values.optional("train_iters")
    if style == "linear" and steps:  # from the end of the warm-up to that of the run
        found["job.learning_rate.decay_steps"] = max(1, steps - warmup)
    return found | {"job.learning_rate.warmup_steps": min(warmup, steps) if steps else warmup}
