"""Megatron's arguments -> model, layout and job.

dp = world / (tp·cp·pp); the distributed optimizer is ZeRO-1 over dp·cp, in num_distributed_optimizer_instances groups
"""

from __future__ import annotations

import re
from typing import Any

from fivefold.errors import UserError
from fivefold.interop.equivalence import divide_rates
from fivefold.interop.format import (
    RANKS_MISSING,
    Overrides,
    ParsedConfig,
    build_reading,
    compute_replicas,
    resolve_world,
)
from fivefold.interop.keys import Values
from fivefold.interop.megatron.keys import ACTIVATIONS
from fivefold.job import RECIPES, Recipe, get_recipe
from fivefold.layout.schedule.pipeline_schedule import get_1f1b_name
from fivefold.layout.spec import Layout
from fivefold.layout.stages import list_stage_layers
from fivefold.model import catalog
from fivefold.model.experts import MoE
from fivefold.model.huggingface.rope import compute_yarn_mscale
from fivefold.model.latent_attention import MLA
from fivefold.model.multi_token_prediction import MTP
from fivefold.model.published import CATALOG
from fivefold.model.spec import Model
from fivefold.results.reading import Reading
from fivefold.stack.catalog import STACKS
from fivefold.units import GIB

FSDP = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}

MODULES = {
    "core_attn": "core",
    "layernorm": "norm",
    "moe_act": "act",
    "mlp": "mlp",
    "moe": "moe",
    "mla_up_proj": "up+rope",
    "shared_experts": "shared",
}

FP8 = {"tensorwise": "fp8", "delayed": "fp8-delayed", "blockwise": "fp8-tiles", "mxfp8": "mxfp8"}

FUSED_LOSSES = {"native": "upcast_compiled", "te": "fused"}

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}

TOKENIZERS = {"GPT2BPETokenizer": 50_257, "BertWordPieceLowerCase": 30_522, "Llama2Tokenizer": 32_000}

SIZES = ("num_layers", "hidden_size", "num_attention_heads")
STAGE_KEYS = (  # which Megatron does not take together with pipeline_model_parallel_layout
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def to_job(config: ParsedConfig, overrides: Overrides) -> Reading:
    """Return model, layout and job."""
    document, values = config.document, config.values
    check_same(values)
    model, missing = read_model(values, overrides._replace(model=config.model))
    ranks = resolve_world(document, overrides)
    if model is None:
        return build_reading(config, {}, model=None, ranks=None, missing=missing)
    fields = {path: value for path, value in values.fields().items() if not path.startswith("model.")}
    fields |= {**read_stack(values, model), **read_learning_rate(values), "job.precision": read_precision(values)}
    fields["job.stack.name"] = "megatron-deepspeed" if values["deepspeed"] else config.stack
    fields["job.documents"] = "separate" if values["reset_attention_mask"] else "joined"
    fields["job.offload"] = ("optimizer",) if values["optimizer_cpu_offload"] else ()
    fields |= config.fields
    fields["job.optimizer.betas"] = (values["adam_beta1"], values["adam_beta2"])
    if missing_arguments := [name for name in ("seq_length", "micro_batch_size") if values[name] is None]:
        missing += (
            *(f"--{name.replace('_', '-')}" for name in missing_arguments),
            *(() if ranks else (RANKS_MISSING,)),
        )
        return build_reading(config, {}, model=model, ranks=None, missing=missing)
    if ranks is not None:
        tp, cp, pp = (values.to_int(f"{axis}_parallel_size") for axis in ("tensor_model", "context", "pipeline_model"))
        dp = compute_replicas(ranks, tp * cp * pp, of="tp·cp·pp", origin=values.origin)
        assert dp is not None
        fields |= read_degrees(values, model, dp=dp) | read_batch(values, dp=dp) | read_pipeline(values, model, pp=pp)
        fields["layout.ac"] = read_recomputation(values, model, fields)
        _name_dataloader_mask(values)
    missing += () if ranks else (RANKS_MISSING,)
    return build_reading(config, fields, model=model, ranks=ranks, missing=missing)


def _name_dataloader_mask(values: Values) -> None:
    """Name the attention mask of a batch as not counted, if it has 1 GiB or more.

    Megatron-LM's data loader makes it, and the first and last pipeline rank hold it on the GPU for the forward of a
    micro-batch, one byte a pair of tokens (NVIDIA/Megatron-LM@d98e8a6: megatron/core/utils.py,
    get_batch_on_this_tp_rank). Kernels of causal attention do not read it. Megatron-Bridge makes none.
    """
    key = "no_create_attention_mask_in_dataloader"
    mask_bytes = values.to_int("micro_batch_size") * values.to_int("seq_length") ** 2
    has_mask = not any(values.given.get(name) for name in (key, "sft", "dataloader_inter_document_masking"))
    if values.software == "megatron" and has_mask and mask_bytes >= GIB:
        values.approximate(
            key,
            f"is not set: the first and last pipeline rank then hold a mask of {mask_bytes / GIB:.3g} GiB, not "
            "counted; set it, as kernels of causal attention do not read the mask",
        )


def check_same(values: Values) -> None:
    """Mark duplicate arguments whose value differs from that of the argument they repeat."""
    for duplicate, name in {"encoder_num_layers": "num_layers", "encoder_seq_length": "seq_length"}.items():
        if values[duplicate] not in (None, values[name]):
            values.mark_not_modelled(duplicate, f"is not {name}={values[name]}, which is counted")
    learned = values["position_embedding_type"] == "learned_absolute"
    if values["no_position_embedding"] and learned and not values["use_rotary_position_embeddings"]:
        values.mark_not_modelled("no_position_embedding", "no positions: write --position-embedding-type none")


def read_vocabulary(values: Values, overrides: Overrides) -> int | None:
    """Return the vocabulary size from the arguments, the user, or a known tokenizer."""
    vocab = values["vocab_size"] or overrides.vocab or values["padded_vocab_size"] or values["pad_vocab_size_to"]
    if vocab:
        return int(vocab) if isinstance(vocab, int) else None
    tokenizer = str(values["tokenizer_model"] or "").rstrip("/")
    if tokenizer:
        name = tokenizer.rpartition("/")[2].lower()
        for key, entry in CATALOG.items():
            if name and entry.source.lower().endswith("/" + name):
                return catalog.build_model(key).vocab
    return TOKENIZERS.get(str(values["tokenizer_type"]))


def read_model(values: Values, overrides: Overrides) -> tuple[Model | None, tuple[str, ...]]:
    """Return the model, or the facts that are missing."""
    if overrides.model:
        _mark_differences(values, overrides.model)
        return overrides.model, ()
    if missing_arguments := [name for name in SIZES if values[name] is None]:
        return None, (
            f"the model: {', '.join('--' + name.replace('_', '-') for name in missing_arguments)}; or add --model NAME",
        )
    vocab = read_vocabulary(values, overrides)
    if vocab is None:
        return None, (
            "the vocabulary, which its tokenizer has: add --vocab-size 128256 to it "
            "(or to read and write --vocab 128256)",
        )
    layers, width, heads = (values.to_int(name) for name in SIZES)
    fields = {path.partition(".")[2]: value for path, value in values.fields().items() if path.startswith("model.")}
    groups = values.to_int("num_query_groups") if values["group_query_attention"] else heads
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
        "name": f"megatron-{layers}x{width}",
        "vocab": vocab,
        "ffn": ffn,
        "kv_heads": groups,
        "head_dim": values["kv_channels"] or width // heads,
        "mlp": "gated" if gated else "plain",
        "activation": "silu" if gated else next((name for key, name in ACTIVATIONS.items() if values[key]), "gelu"),
        "qkv_bias": biased or bool(values["add_qkv_bias"]),
        "out_bias": biased,
        "mlp_bias": biased,
        "mla": (mla := _read_latent_attention(values)),
        **(_read_yarn(values, mla) if mla else {}),
        "moe": _read_experts(values, ffn, layers),
        "mtp": _read_mtp(values),
    }
    fields["positions"] = fields.get("positions") or values["seq_length"] or 4096
    return Model.read(fields, origin=values.origin), ()


def _mark_differences(values: Values, model: Model) -> None:
    """Mark the sizes that differ from those of ``model``."""
    sizes = {
        "num_layers": model.layers,
        "hidden_size": model.width,
        "num_attention_heads": model.heads,
        "num_experts": model.moe.experts if model.moe else None,
    }
    for name, size in sizes.items():
        if values.is_set(name) and values[name] != size:
            values.approximate(
                name, f"is {size} in {model.name}, which was taken; a config.json of your own says other sizes"
            )


def _read_latent_attention(values: Values) -> MLA | None:
    """Return the sizes of latent attention (MLA), or None if the config does not use it."""
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


def _read_yarn(values: Values, mla: MLA) -> dict[str, Any]:
    """Return YaRN's scaling of latent attention, which also sharpens the scores (multi_latent_attention.py)."""
    factor, mscale, all_dims = (values.number(name) for name in ("rotary_scaling_factor", "mscale", "mscale_all_dim"))
    if factor is None or factor <= 1:
        return {}
    sharper = compute_yarn_mscale(factor, weight=all_dims or 0.0)
    scaling = {
        "kind": "yarn",
        "factor": factor,
        "original_positions": values["original_max_position_embeddings"],
        "beta_fast": values["beta_fast"],
        "beta_slow": values["beta_slow"],
        "mscale": mscale,
        "mscale_all_dims": all_dims,
    }
    return {
        "attention_scale": sharper**2 / (mla.nope_dim + mla.rope_dim) ** 0.5,
        "rope_scaling": scaling | {"attention_factor": compute_yarn_mscale(factor, weight=mscale or 0.0) / sharper},
    }


def _read_mtp(values: Values) -> MTP | None:
    depth = values.optional("mtp_num_layers")
    fields = {"depth": depth, "coefficient": values["mtp_loss_scaling_factor"]}
    return MTP.read(fields, origin=values.origin) if depth else None


def _read_experts(values: Values, ffn: int, layers: int) -> MoE | None:
    """Return the experts that Megatron's keys describe; None for a dense model."""
    experts = values["num_experts"]
    if not experts:
        return None
    score = values["moe_router_score_function"]
    kind = values["moe_router_load_balancing_type"]
    shared = values["moe_shared_expert_intermediate_size"]
    fields: dict[str, Any] = {
        "experts": experts,
        "topk": values["moe_router_topk"],
        "ffn": values["moe_ffn_hidden_size"] or ffn,
        "shared_experts": 1 if shared else 0,
        "shared_ffn": shared or None,
        "latent_width": values["moe_latent_size"] or None,
        "dense_layers": count_dense_layers(values["moe_layer_freq"], layers, origin=values.origin),
        "score": score,
        "balance": "free" if values["moe_router_enable_expert_bias"] else "none" if kind == "none" else "aux",
        "aux_coefficient": values["moe_aux_loss_coeff"],
        "capacity": values["moe_expert_capacity_factor"],
        "normalized": score == "sigmoid" or not values["moe_router_pre_softmax"],
        "scaling": values["moe_router_topk_scaling_factor"] or 1.0,
        "groups": values["moe_router_num_groups"] or 1,
        "topk_groups": values["moe_router_group_topk"] or 1,
    }
    return MoE.read(fields, origin=values.origin)


PATTERN = re.compile(r"\(?\s*(?:\[0\]\s*\*\s*(\d+)\s*\+\s*)?\[1\]\s*\*\s*(\d+)\s*\)?")


def count_dense_layers(value: Any, layers: int, *, origin: str) -> int:
    """Return how many layers at the start have no experts, from ``1`` or ``([0]*3+[1]*58)``."""
    text = str(value)
    if text == "1":
        return 0
    flags = None
    if match := PATTERN.fullmatch(text):
        flags = [0] * int(match[1] or 0) + [1] * int(match[2])
    elif isinstance(value, list) or re.fullmatch(r"\[[01, ]*\]", text):
        flags = [int(digit) for digit in re.findall(r"[01]", text)]
    if flags is None or len(flags) != layers or flags != sorted(flags):
        raise UserError(
            f"{origin}: moe_layer_freq {text!r}: give {layers} flags, with the dense layers (0) before those with "
            "experts (1)"
        )
    return flags.count(0)


def read_degrees(values: Values, model: Model, *, dp: int) -> dict[str, Any]:
    """Return dp, ZeRO, sequence and expert parallelism, and the order of the ranks."""
    tp = values.to_int("tensor_model_parallel_size")
    cp = values.to_int("context_parallel_size")
    zero = 1 if values["use_distributed_optimizer"] else 0
    if values["deepspeed"]:  # DeepSpeed's BF16_Optimizer shards master weights and moments at stage 0 too
        zero = max(values.to_int("zero_stage", least=0), 1 if values["bf16"] else 0)
    if values["use_megatron_fsdp"]:
        zero = FSDP.get(str(values["data_parallel_sharding_strategy"]), 0)
    fields: dict[str, Any] = {
        "layout.dp": dp,
        "layout.zero": zero,
        "layout.sp": tp == 1 or bool(values["sequence_parallel"]),
    }
    instances = values.to_int("num_distributed_optimizer_instances")
    if zero and instances > 1:
        if dp * cp % instances:
            raise UserError(
                f"{values.origin}: num_distributed_optimizer_instances={instances} do not divide dp·cp={dp * cp}; use "
                "a divisor of it"
            )
        fields["layout.shard_group"] = dp * cp // instances
    if model.moe:
        fields["layout.etp"] = values["expert_tensor_parallel_size"] or tp
    if values["use_tp_pp_dp_mapping"]:
        fields["layout.order"] = ("tp", "cp", "pp", "dp")
    kind = values["cp_comm_type"]
    if kind not in ("p2p", "a2a"):
        values.mark_not_modelled("cp_comm_type", "is neither p2p nor a2a; read as p2p, a ring")
    if cp > 1 and kind == "a2a":
        fields["layout.cp_kind"] = "ulysses"
    return fields


def read_batch(values: Values, *, dp: int) -> dict[str, Any]:
    """Return micro-batch, global batch, its ramp, and the steps."""
    mbs = values.to_int("micro_batch_size")
    global_batch = values.optional("global_batch_size") or mbs * dp
    fields: dict[str, Any] = {"job.global_batch": global_batch}
    if ramp := values["rampup_batch_size"]:
        words = [
            str(element).replace("_", "")
            for element in (ramp if isinstance(ramp, list) else str(ramp).strip("[]").replace(",", " ").split())
        ]
        numbers = [int(word) for word in words if word.isdecimal() and len(word) < 15]
        if len(numbers) != 3 or len(words) != 3:
            raise UserError(
                f"{values.origin}: rampup_batch_size is {ramp!r}; give three numbers (first, step, samples)"
            )
        fields["job.ramp"] = {"first": numbers[0], "step": numbers[1], "samples": numbers[2]}
    steps = values.optional("train_iters") or (values.optional("train_samples") or 0) // max(1, global_batch)
    return fields | ({"job.steps": steps} if steps else {})


def read_pipeline(values: Values, model: Model, *, pp: int) -> dict[str, Any]:
    """Return virtual stages, and the layers of each stage unless they are evenly divided."""
    if pp == 1:
        return {}
    v, sizes = _read_stages(values, model, pp)
    if sum(sizes) != model.layers or min(sizes) < 0 or 0 in sizes[1:-1]:
        raise UserError(
            f"{values.origin}: stages of {'-'.join(map(str, sizes))} layers must have {model.layers} in all, and one "
            "or more each but for the first and the last; change the sizes"
        )
    fields: dict[str, Any] = {"layout.v": v, "layout.schedule": get_1f1b_name(v)}
    even_layout = Layout.read({"pp": pp, "v": v, "schedule": fields["layout.schedule"]}, origin=values.origin)
    even_sizes = tuple(map(len, list_stage_layers(model, even_layout)))
    return fields if sizes == even_sizes else fields | {"layout.stages": sizes}


def _read_stages(values: Values, model: Model, pp: int) -> tuple[int, tuple[int, ...]]:
    """Return the virtual stages of each rank, and the layers of each stage if they are not equal."""
    text = values["pipeline_model_parallel_layout"]
    if text:
        return _read_stage_layout(values, str(text), model, pp)
    per_stage = values["num_layers_per_virtual_pipeline_stage"]
    v = values["num_virtual_stages_per_pipeline_rank"] or 1
    # Megatron-DeepSpeed counts embedding and head as layers
    counts_both_ends = values["pp_partition_method"] == "type:transformer|embedding"
    ends = (
        counts_both_ends or bool(values["account_for_embedding_in_pipeline_split"]),
        counts_both_ends or bool(values["account_for_loss_in_pipeline_split"]),
    )
    sizes_of_ranks = _divide_over_ranks(values, model.layers, pp, extra_layers=sum(ends))
    if per_stage:
        if sizes_of_ranks[0] % per_stage:
            raise UserError(
                f"{values.origin}: {sizes_of_ranks[0]} layers of a rank are not a multiple of "
                f"{per_stage} per virtual stage; change one"
            )
        v = sizes_of_ranks[0] // per_stage
    if any(layers_of_rank % v for layers_of_rank in sizes_of_ranks):
        raise UserError(
            f"{values.origin}: {sizes_of_ranks} layers of the ranks cannot be divided by {v} virtual stages each; "
            "change one"
        )
    stage_sizes = [sizes_of_ranks[stage % pp] // v for stage in range(pp * v)]
    stage_sizes[0] -= ends[0]
    stage_sizes[-1] -= ends[1]
    return v, tuple(stage_sizes)


def _read_stage_layout(values: Values, text: str, model: Model, pp: int) -> tuple[int, tuple[int, ...]]:
    """Return the same from ``pipeline_model_parallel_layout``, which names the layers of each stage."""
    if other := next((key for key in STAGE_KEYS if values[key]), None):  # TransformerConfig.__post_init__
        raise UserError(f"{values.origin}: pipeline_model_parallel_layout and {other} both set stages; remove one")
    sizes = parse_stages(text, origin=values.origin)
    v = len(sizes) // pp
    if len(sizes) % pp:
        raise UserError(
            f"{values.origin}: pipeline_model_parallel_layout has {len(sizes)} stages, which is not a multiple of "
            f"pp={pp}; change one"
        )
    if 0 in sizes[1:-1]:
        values.mark_not_modelled(
            "pipeline_model_parallel_layout",
            "stages without a layer between the first and the last; read as spread evenly over all",
        )
        even_layout = Layout(pp=pp, v=v, schedule=get_1f1b_name(v))
        sizes = tuple(map(len, list_stage_layers(model, even_layout)))
    return v, sizes


def _divide_over_ranks(values: Values, layers: int, pp: int, *, extra_layers: int) -> list[int]:
    """Return the layers of each pipeline rank; ``extra_layers``: the ends that count as a layer."""
    first, last = values["decoder_first_pipeline_num_layers"], values["decoder_last_pipeline_num_layers"]
    if not first and not last:
        if (layers + extra_layers) % pp:
            raise UserError(
                f"{values.origin}: num_layers={layers} is not divisible by pp={pp}; give "
                "decoder_first_pipeline_num_layers, or account_for_embedding_in_pipeline_split"
            )
        return [(layers + extra_layers) // pp] * pp
    middle_ranks = pp - bool(first) - bool(last)
    rest = layers - (first or 0) - (last or 0)
    if middle_ranks < 1 or rest % middle_ranks:
        raise UserError(
            f"{values.origin}: {rest} layers cannot be divided evenly over the {middle_ranks} pipeline ranks "
            "between the ends; change the first or last number"
        )
    sizes = [rest // middle_ranks] * pp
    sizes[0], sizes[-1] = first or sizes[0], last or sizes[-1]
    return sizes


def parse_stages(text: str, *, origin: str) -> tuple[int, ...]:
    """Return the layers of each stage of ``Et*3|(tt|)*29m|L``.

    E: embedding, t: layer, m: multi-token prediction, L: loss.
    """
    expanded = text.replace(" ", "").replace(",", "").strip("'\"")
    for _ in range(100):
        next_expanded = re.sub(r"\(([^()]*)\)\*(\d{1,3})", lambda match: match[1] * int(match[2]), expanded)
        next_expanded = re.sub(r"([tmEL|])\*(\d{1,3})", lambda match: match[1] * int(match[2]), next_expanded)
        if next_expanded == expanded:
            break
        expanded = next_expanded
    if not re.fullmatch(r"[tmEL|]+", expanded) or len(expanded) > 100_000:
        raise UserError(
            f"{origin}: pipeline_model_parallel_layout {text!r} may have only the letters E, t, m and L, and |; "
            "write for "
            "example Et*3|t*4L"
        )
    return tuple(stage.count("t") for stage in expanded.split("|"))


def read_recomputation(values: Values, model: Model, layout: dict[str, Any]) -> str:
    """Return ``ac`` of a layout."""
    kind = values["recompute_granularity"] or ("full" if values["checkpoint_activations"] else None)
    if values["recompute_activations"]:
        kind = "selective"  # whatever recompute_granularity says (megatron/training/arguments.py)
    if kind == "selective":
        modules = values["recompute_modules"]
        names = modules if isinstance(modules, list) else str(modules).replace(",", " ").split()
        if unknown := [name for name in names if name not in MODULES]:
            values.mark_not_modelled("recompute_modules", f"{', '.join(unknown)}: not known here, not counted")
        groups = [MODULES[name] for name in names if name in MODULES]
        return "selective" if groups == ["core"] else "+".join(groups) or "none"
    if kind != "full":
        return "none"
    layer_count = values.optional("recompute_num_layers") or 1
    method = values["recompute_method"]
    stages = layout.get("layout.stages") or (-(-model.layers // (layout["layout.pp"] * layout.get("layout.v", 1))),)
    if method == "block" and layer_count < max(stages):
        values.mark_not_modelled(
            "recompute_num_layers", f"recomputes {layer_count} of each stage's layers; read as ac=full, all of them"
        )
    if method == "uniform" and layer_count > 1:
        values.mark_not_modelled(
            "recompute_num_layers",
            f"keeps the input of every {layer_count}th layer only; read as ac=full, which keeps that of every layer",
        )
    return "full"


def read_precision(values: Values) -> Recipe:
    """Return the recipe: weights, gradient accumulation buffers, master weights and moments."""
    if not (values["bf16"] or values["fp16"]):
        return get_recipe("fp32")
    for one, other in (("bf16", "fp16"), ("fp4_format", "fp8_format")):  # megatron/training/arguments.py
        if values[one] and values[other]:
            raise UserError(f"{values.origin}: {one} and {other} are both enabled; keep one")
    if values["fp16"] and (values["fp4_format"] or values["fp8_format"]):
        values.mark_not_modelled("fp16", "fp8 or fp4 matmuls over weights held in fp16; counted as held in bf16")
    precision_recipe = get_recipe("fp16" if values["fp16"] else "bf16")
    if values["fp16"] and values["accumulate_allreduce_grads_in_fp32"]:
        precision_recipe = precision_recipe.replace(name="fp16-grad32", accumulated_bytes=4)
    if values["fp4_format"]:
        precision_recipe = get_recipe("nvfp4")
    elif values["fp8_format"]:
        fp8_recipe = str(values["fp8_recipe"])
        if fp8_recipe not in FP8:
            values.mark_not_modelled("fp8_recipe", "is not among the recipes here; read as tensorwise")
        precision_recipe = get_recipe(FP8.get(fp8_recipe, "fp8"))
        if values["fp8_param_gather"]:
            if (held_in_fp8 := RECIPES.get(f"{precision_recipe.name}-param")) is None:
                values.mark_not_modelled("fp8_param_gather", "is counted only for scales by tensor and by tiles")
            else:
                precision_recipe = held_in_fp8
    if values["grad_reduce_in_bf16"]:
        precision_recipe = precision_recipe.with_reduce_dtype(in_fp32=False)
    return _apply_state_dtypes(values, precision_recipe)


def _apply_state_dtypes(values: Values, base_recipe: Recipe) -> Recipe:
    """Return the recipe with other data types of the optimizer's states.

    The precision-aware optimizer allows them.
    """
    if not values["use_precision_aware_optimizer"]:
        return base_recipe
    names = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    grads, masters, first, second = (BYTES.get(str(values[name]), 4) for name in names)
    byte_sizes = {"master_bytes": masters, "moments_bytes": (first, second)}
    byte_sizes |= {"accumulated_bytes": grads if grads > base_recipe.gradients_bytes else 0}
    half_type = {"half": "fp16"} if "fp16" in [str(values[name]) for name in names[1:]] else {}
    aware_recipe = base_recipe.replace(**byte_sizes, **half_type)
    return aware_recipe if aware_recipe == base_recipe else aware_recipe.replace(name=f"{base_recipe.name}-aware")


def overlaps_tensor_parallelism(values: Values) -> bool:
    """Return whether messages of tensor parallelism overlap with matmuls, which needs sequence parallelism.

    Megatron-LM ends without it (megatron/training/arguments.py), and Transformer Engine overlaps nothing then
    (transformer_engine/pytorch/module/linear.py: ``ub_overlap_ag_fprop``, ``ub_overlap_rs_fprop``).
    """
    if not values["tp_comm_overlap"] or values.to_int("tensor_model_parallel_size") == 1:
        return False
    if not values["sequence_parallel"] and values.software == "megatron":
        raise UserError(
            f"{values.origin}: Megatron-LM ends with tp_comm_overlap without sequence_parallel; add --sequence-parallel"
        )
    return bool(values["sequence_parallel"])


def read_stack(values: Values, model: Model) -> dict[str, Any]:
    """Return the facts of the stack that the arguments set."""
    overlap = ["dp"] if values["overlap_grad_reduce"] else []
    overlap += ["cp"] if values["no_overlap_p2p_communication"] else ["cp", "pp"]
    overlap += ["tp"] if overlaps_tensor_parallelism(values) else []
    pairs = bool(values["overlap_moe_expert_parallel_comm"])
    overlap += ["ep"] if pairs else []
    dispatcher = str(values["moe_token_dispatcher_type"])
    if model.moe and dispatcher not in ("alltoall", "flex"):
        values.mark_not_modelled("moe_token_dispatcher_type", "every rank gathers every token; counted as alltoall")
    if model.moe and not values["moe_grouped_gemm"]:
        values.mark_not_modelled("moe_grouped_gemm", "experts one after another; counted as one grouped matmul")
    local = values["transformer_impl"] == "local"
    fused = bool(values["use_flash_attn"]) if local else values["attention_backend"] not in ("unfused", "local")
    graphs = values["enable_cuda_graph"] or values["external_cuda_graph"] or values["cuda_graph_impl"] != "none"
    scope_text = str(values["cuda_graph_scope"])
    scope = (
        "full"
        if "full" in scope_text
        else "partial"
        if "attn" in scope_text or "preprocess" in scope_text
        else "router"
    )
    wgrad_accumulation = {True: "deferred", False: "fused" if local else "fused_dummy"}[
        bool(values["no_gradient_accumulation_fusion"])
    ]
    bucket_size = values.optional("ddp_bucket_size")
    return {
        "job.stack.name": "megatron-core",
        "job.stack.overlap": tuple(overlap),
        "job.stack.pairs": pairs,
        "job.stack.dispatcher": "fused" if dispatcher == "flex" or values["moe_enable_deepep"] else "all_to_all",
        "job.stack.loss": read_loss(values),
        "job.stack.attention": "flash" if fused else "unfused",
        "job.stack.wgrad_accumulation": wgrad_accumulation,
        "job.stack.param_all_gather": "overlapped" if values["overlap_param_gather"] else "before_forward",
        "job.stack.cuda_graphs": scope if graphs else "none",
        "job.stack.reduce_in_fp32": not values["grad_reduce_in_bf16"],
        "job.stack.ddp_bucket_size": (bucket_size, 0) if bucket_size else STACKS["megatron-core"].ddp_bucket_size,
    }


def read_loss(values: Values) -> str:
    """Return the kind of cross entropy. A fusion is PyTorch's compiled functions, or Transformer Engine's kernel.

    The kernel writes the gradient over the logits, the compiled functions to a copy of their softmax:
    NVIDIA/Megatron-LM@core_v0.16.1:megatron/core/fusions/fused_cross_entropy.py,
    NVIDIA/TransformerEngine@02965d2:transformer_engine/pytorch/triton/cross_entropy.py.
    """
    if not values["cross_entropy_loss_fusion"]:
        return "upcast"
    kernel = str(values["cross_entropy_fusion_impl"])
    if kernel not in FUSED_LOSSES:
        raise UserError(f"{values.origin}: cross_entropy_fusion_impl is {kernel!r}; Megatron has native and te")
    return FUSED_LOSSES[kernel]


def read_learning_rate(values: Values) -> dict[str, Any]:
    """Return the learning rate's schedule."""
    style = str(values["lr_decay_style"])
    kind = {"WSD": "wsd", "cosine": "cosine", "linear": "wsd"}.get(style, "constant")
    fields: dict[str, Any] = {"job.learning_rate.kind": kind}
    peak, min_rate = values.number("lr") or 0.0, values.number("min_lr") or 0.0
    if peak > 0:
        fields["job.learning_rate.floor"] = divide_rates(min_rate, peak)
    if decay := values.optional("lr_wsd_decay_iters"):
        fields["job.learning_rate.decay_steps"] = decay
    warmup = values.optional("lr_warmup_iters") or 0
    steps = values.optional("train_iters")
    if style == "linear" and steps:  # from the end of the warm-up to the end of the run
        fields["job.learning_rate.decay_steps"] = max(1, steps - warmup)
    return fields | {"job.learning_rate.warmup_steps": min(warmup, steps) if steps else warmup}
