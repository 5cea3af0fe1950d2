"""Names for TrainingArguments of Axolotl, LLaMA-Factory and ms-swift, and the keys that only they have.

Sources: axolotl 0.19.0 axolotl/utils/schemas/config.py, training.py and fsdp.py; llamafactory 0.9.5
llamafactory/hparams/model_args.py, data_args.py and finetuning_args.py; ms-swift 4.6.0 swift/arguments and
swift/trainers/arguments.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fivefold.interop.huggingface import adapters, data, effects, freeze, harmless
from fivefold.interop.keys import Table, ignored_keys, part, unmodelled_key

SEQUENCE = ("max_length", "max_seq_length", "block_size", "sequence_len", "cutoff_len", "model_max_length")


class Dialect(NamedTuple):
    """A trainer whose YAML has other names for TrainingArguments; ``signs``: keys by which it is recognized."""

    name: str
    version: str
    signs: frozenset[str]
    names: Mapping[str, str]  # the dialect's key → the key of TrainingArguments
    words: Mapping[tuple[str, Any], tuple[str, Any]]  # (key, value) → (key, value) of TrainingArguments
    defaults: Mapping[str, Any]
    table: Table
    implied_values: Mapping[str, Any] = {}  # the dialect's defaults that are said for it

    def find_name(self, argument: str) -> str:
        """Return the dialect's name of a key of TrainingArguments; the first of several."""
        return next((name for name, known in self.names.items() if known == argument), argument)


AXOLOTL = Dialect(
    name="axolotl",
    version="0.19.0",
    signs=frozenset({"base_model", "micro_batch_size", "sequence_len", "datasets"}),
    names={
        "base_model": "model_name_or_path",
        "micro_batch_size": "per_device_train_batch_size",
        "sequence_len": "max_length",
        "optimizer": "optim",
        "lr_scheduler": "lr_scheduler_type",
        "adam_beta1": "adam_beta1",
        "adam_beta2": "adam_beta2",
        "adam_beta_1": "adam_beta1",
        "adam_beta_2": "adam_beta2",
        "sample_packing": "padding_free",
        "tensor_parallel_size": "accelerate.parallelism_config.parallelism_config_tp_size",
        "context_parallel_size": "accelerate.parallelism_config.parallelism_config_cp_size",
        "dp_shard_size": "accelerate.parallelism_config.parallelism_config_dp_shard_size",
        "dp_replicate_size": "accelerate.parallelism_config.parallelism_config_dp_replicate_size",
        **{
            name: f"axolotl.{name}"  # of TrainingArguments, and unknown to Axolotl
            for name in (
                "lr_scheduler_type",
                "max_length",
                "model_name_or_path",
                "optim",
                "padding_free",
                "per_device_train_batch_size",
            )
        },
    },
    words={
        ("bf16", "auto"): ("bf16", True),
        ("bf16", "true"): ("bf16", True),
        ("bf16", "full"): ("bf16", True),
        ("bf16", None): ("bf16", False),  # an empty key turns it off
        ("flash_attention", True): ("attn_implementation", "flash_attention_2"),
        ("sdp_attention", True): ("attn_implementation", "sdpa"),
        ("flex_attention", True): ("attn_implementation", "flex_attention"),
        ("eager_attention", True): ("attn_implementation", "eager"),
        ("liger_fused_linear_cross_entropy", True): ("use_liger_kernel", True),
    },
    # bf16 is "auto" by default: on for GPUs that support it (utils/schemas/config.py); lr_scheduler: training.py
    defaults={
        "per_device_train_batch_size": 1,
        "max_length": 512,
        "optim": "adamw_torch_fused",
        "bf16": True,
        "lr_scheduler_type": "cosine",
    },
    table={
        "gradient_accumulation_steps": part("job.global_batch: micro-batches of a step", 1),
        "fsdp_version": part(
            "the stack: FSDP of this version; default: 1 where fsdp_config is given, else no FSDP", None
        ),  # off
        "fp8": unmodelled_key("fp8 matmuls", None),
        "expert_parallel_size": unmodelled_key("experts over several ranks: counted as on each", 1),
        "experts_implementation": unmodelled_key("the kernels of experts: counted as grouped matmuls", "grouped_mm"),
        "chunked_cross_entropy": unmodelled_key("the loss in chunks", False),
        "tiled_mlp": unmodelled_key("an MLP in tiles of the sequence", False),
        "batch_size": unmodelled_key("a batch said twice", None),
        "base_model_config": part("model, where its config is not that of base_model", None),
        "cosine_min_lr_ratio": part("job.learning_rate.floor", None),
        "warmup_steps": part("job.learning_rate.warmup_steps; default: 3 % of the steps, at most 100", None),
        "lisa_n_layers": unmodelled_key("some layers are frozen", None),
        "gradient_checkpointing": part("layout.ac", False),
        "sparse_attention": unmodelled_key("another attention", None),
        "pad_to_sequence_len": part("job.documents: sequences are filled", None),
        **effects.AXOLOTL,
        **ignored_keys(*harmless.AXOLOTL.split()),
        **adapters.TABLES["axolotl"],
        **freeze.TABLES["axolotl"],
        **data.TABLES["axolotl"],
    },
)

LLAMAFACTORY = Dialect(
    name="llamafactory",
    version="0.9.5",
    signs=frozenset({"finetuning_type", "cutoff_len", "stage", "template"}),
    names={
        "cutoff_len": "max_length",
        "max_length": "generation.max_length",
        "flash_attn": "attn_implementation",
        "attn": "attn_implementation",
        "enable_liger_kernel": "use_liger_kernel",
    },
    words={
        ("attn_implementation", "fa2"): ("attn_implementation", "flash_attention_2"),
        ("attn_implementation", "fa3"): ("attn_implementation", "flash_attention_3"),
        ("attn_implementation", "disabled"): ("attn_implementation", "eager"),
        ("attn_implementation", "auto"): ("attn_implementation", "sdpa"),
        ("neat_packing", True): ("padding_free", True),
        ("disable_gradient_checkpointing", True): ("gradient_checkpointing", False),
    },
    # llamafactory/model/model_utils/checkpointing.py: on unless disable_gradient_checkpointing
    # hparams/finetuning_args.py: adapters, unless finetuning_type says otherwise
    defaults={"max_length": 2048, "gradient_checkpointing": True},
    implied_values={"finetuning_type": "lora"},
    table={
        "stage": part(data.OBJECTIVE, "sft"),
        "use_galore": unmodelled_key("another optimizer", False),
        "use_apollo": unmodelled_key("another optimizer", False),
        "use_badam": unmodelled_key("another optimizer", False),
        "use_muon": unmodelled_key("another optimizer", False),
        "use_unsloth": unmodelled_key("other kernels", False),
        "use_v1_kernels": unmodelled_key("other kernels", False),
        "mixture_of_depths": unmodelled_key("another model", None),
        "freeze_vision_tower": unmodelled_key("images", True),
        "fp8": unmodelled_key("fp8 matmuls", False),
        "cp_size": unmodelled_key("a sequence over several ranks", 1),
        **effects.LLAMAFACTORY,
        **ignored_keys(*harmless.LLAMAFACTORY.split(), "generation.max_length"),
        **adapters.TABLES["llamafactory"],
        **freeze.TABLES["llamafactory"],
        **data.TABLES["llamafactory"],
    },
)

SWIFT = Dialect(
    name="ms-swift",
    version="4.6.0",
    signs=frozenset(
        {
            "model",
            "tuner_type",
            "train_type",
            "attn_impl",
            "split_dataset_ratio",
            "quant_method",
            "rlhf_type",
            "freeze_vit",
            "loss_scale",
            "packing_length",
            "load_from_cache_file",
        }
    ),
    names={
        "model": "model_name_or_path",
        "tuner_type": "tuner_type",
        "train_type": "tuner_type",  # of 3.x
        "attn_impl": "attn_implementation",
        "sequence_parallel_size": "sequence_parallel_degree",
        "zero_hpz_partition_size": "deepspeed.zero_optimization.zero_hpz_partition_size",
        "deepspeed_autotp_size": "deepspeed.tensor_parallel.autotp_size",
        "model_name_or_path": "ms-swift.model_name_or_path",  # of TrainingArguments, and unknown to ms-swift
        "attn_implementation": "ms-swift.attn_implementation",
    },
    words={("attn_implementation", "flash_attn"): ("attn_implementation", "flash_attention_2")},
    defaults={
        "per_device_train_batch_size": 1,
        "gradient_checkpointing": True,
        "lr_scheduler_type": "cosine",
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "packing_strategy": "binpack",
        "loss_type": None,
    },
    implied_values={"tuner_type": "lora"},
    table={
        "torch_dtype": part("job.precision: the type in which weights are loaded; default: that of the model", None),
        "gradient_accumulation_steps": part("job.global_batch; default: as many as make a batch of 16", 1),
        "packing_length": part("job.sequence, where samples are packed", None),
        **effects.SWIFT,
        **ignored_keys(*harmless.SWIFT.split()),
        **adapters.TABLES["ms-swift"],
        **data.TABLES["ms-swift"],
    },
)

DIALECTS = (AXOLOTL, LLAMAFACTORY, SWIFT)
