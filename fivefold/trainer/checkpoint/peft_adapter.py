"""LoRA and DoRA adapters as peft stores them: FOLDER/ adapter_config.json, adapter_model.safetensors.

    blocks.3.attention.q.lora_a = base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight   [rank, in]
    blocks.3.attention.q.lora_b = base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight   [out, rank]
    blocks.3.attention.q.lora_magnitude = base_model.model.….q_proj.lora_magnitude_vector          [out]
    head.out.weight = base_model.model.lm_head.weight, if it is trained in full (``modules_to_save``)

The rows of B and the magnitudes are in the order of the rows of W there. Source: huggingface/peft@0.21.2:
src/peft/utils/save_and_load.py, src/peft/tuners/lora/config.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fivefold.adapter import SAVED, TARGETS, Adapter, SavedModule
from fivefold.job import Job
from fivefold.model.huggingface.peft import EXPERT_LAYERS, NAMED_AS_MLPS
from fivefold.model.huggingface.read import find_text_model
from fivefold.model.huggingface.tensors import TensorPart, list_tensors
from fivefold.model.spec import Model
from fivefold.model.weights import list_trained_weights
from fivefold.record import UserError, read_file
from fivefold.trainer.build import Built
from fivefold.trainer.checkpoint import huggingface_import
from fivefold.trainer.checkpoint.checkpoint import run_on_all_ranks

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
FACTORS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "lora_magnitude": "lora_magnitude_vector"}
BY_ROWS = ("lora_b", "lora_magnitude")  # in the order of the rows of W
# PEFT keys that change what is computed, with the values that mean LoRA or DoRA. Other keys say how the adapter was
# drawn or trained, or for whom it is.
PLAIN_KEYS: dict[str, tuple[object, ...]] = {
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "megatron_config": (None,),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False,),
    "arrow_config": (None,),
    "ensure_weight_tying": (False,),
    # the others change the base weights, to which the stored adapter is then relative
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}


@dataclass(frozen=True)
class AdapterFolder:
    """An opened PEFT adapter folder: the adapter, the base that its config names, and its tensors by name."""

    path: Path
    adapter: Adapter
    base: str
    tensors: Mapping[str, Tensor]
    saved: tuple[str, ...] = ()  # names of modules that are stored in full, as its config has them

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read the folder; raises ``UserError`` if it is damaged, or holds anything other than LoRA or DoRA."""
        config = read_file(path / CONFIG)
        if (kind := config.get("peft_type")) != "LORA":
            raise UserError(
                f"{path} holds an adapter of peft_type {kind}, and only LORA is read; train a LoRA, or merge it into "
                "its base with peft"
            )
        if parameters := config.get("target_parameters"):
            raise UserError(
                f"{path}: {CONFIG} has target_parameters={', '.join(sorted(parameters))}: adapters of routed experts "
                "or routers are not read; merge them into the base with peft's merge_and_unload, or train targets of "
                "attention alone"
            )
        for key, plain in PLAIN_KEYS.items():
            if key in config and config[key] not in plain:
                raise UserError(
                    f"{path}: {CONFIG} has {key}={config[key]!r}, which is not supported; only LoRA and DoRA are read"
                )
        try:
            tensors = load_file(path / WEIGHTS)
        except FileNotFoundError:
            raise UserError(f"{path / WEIGHTS}: no such file; only safetensors are read") from None
        except SafetensorError as error:
            raise UserError(f"{path / WEIGHTS} is damaged or incomplete ({error}); download it again") from None
        values = {
            "kind": "dora" if config.get("use_dora") else "lora",
            "rank": config.get("r", 8),
            "alpha": config.get("lora_alpha", 8),
            "dropout": config.get("lora_dropout", 0.0),
            "rank_stabilized": config.get("use_rslora", False),
        }
        adapter = Adapter.read(values, origin=str(path / CONFIG))
        saved = tuple(map(str, config.get("modules_to_save") or ()))
        return cls(path, adapter, str(config.get("base_model_name_or_path") or ""), tensors, saved)

    def read_factors(self, model: Model, *, family: str) -> tuple[Adapter, dict[str, Tensor]]:
        """Return the adapter with its targets, and its factors by our names, in the order of our rows.

        Raises ``UserError`` unless the tensors are the factors of the same linear layers in every block of ``model``,
        and modules that are trained in full.
        """
        saved = self._resolve_saved(model, family)
        every = dict(
            _list_tensor_names(
                model, family, Adapter(kind=self.adapter.kind, rank=self.adapter.rank, modules_to_save=saved)
            )
        )
        if unknown := sorted(self.tensors.keys() - {name for name, _ in every.values()}):
            raise UserError(
                f"{self.path} holds {len(unknown)} tensors that are not factors of the linear layers of "
                f"{model.name}, such as {unknown[0]}"
            )
        linears = {
            ours.rpartition(".")[0].split(".", 2)[2]
            for ours, (name, _) in every.items()
            if name in self.tensors and ours.startswith("blocks.")
        }
        targets = tuple(target for target, targeted in TARGETS.items() if not linears.isdisjoint(targeted))
        if not targets:
            raise UserError(
                f"{self.path}: {WEIGHTS} has no lora_A or lora_B of the supported layers ({', '.join(TARGETS)}); "
                "name a folder whose adapter targets these"
            )
        adapter = self.adapter.replace(targets=targets, modules_to_save=saved)
        factors: dict[str, Tensor] = {}
        for weight in list_trained_weights(model, adapter):
            name, part = every[weight.name]
            tensor = self.tensors.get(name)
            if tensor is None or tuple(tensor.shape) != weight.shape:
                state = "is missing" if tensor is None else f"is {list(tensor.shape)} instead of {list(weight.shape)}"
                raise UserError(f"{self.path}: {name} {state}; all blocks need factors of rank {adapter.rank}")
            factors[weight.name] = tensor[torch.tensor(part.order())] if weight.name.endswith(BY_ROWS) else tensor
        return adapter, factors

    def _resolve_saved(self, model: Model, family: str) -> tuple[SavedModule, ...]:
        """Return the modules that are stored in full; raise ``UserError`` for any but the embedding and the head."""
        modules = {
            _name_module(part): module
            for part in list_tensors(model, family=family)
            for module in SAVED
            if Adapter(modules_to_save=(module,)).is_saved(part.ours)
        }
        names = {name.rpartition(".")[2] for name in self.saved}
        if unknown := sorted(names - modules.keys()):
            raise UserError(
                f"{self.path}: {CONFIG} has modules_to_save={', '.join(unknown)}, and only {' and '.join(modules)} of "
                f"{model.name} are read; merge the adapter into its base with peft's merge_and_unload"
            )
        return tuple(modules[name] for name in sorted(names))


def write(
    folder: Path, factors: Mapping[str, Tensor], *, model: Model, family: str, adapter: Adapter, base: str | None
) -> int:
    """Write the ``factors`` by our names into ``folder`` as peft does; return the number of tensors.

    Raises ``UserError`` for layers to which peft would not give the stored factors.
    """
    tensors: dict[str, Tensor] = {}
    modules: list[str] = []
    saved: list[str] = []
    for ours, (name, part) in _list_tensor_names(model, family, adapter):
        factor = factors[ours]
        if ours.endswith(BY_ROWS):
            rows = torch.empty_like(factor)
            rows[torch.tensor(part.order())] = factor
            factor = rows
        tensors[name] = factor.contiguous()
        (saved if adapter.is_saved(ours) else modules).append(_name_module(part))
    if family in NAMED_AS_MLPS and (as_experts := [name for name in EXPERT_LAYERS if name in modules]):
        raise UserError(
            f"model {model.name!r}: peft (0.21) takes {', '.join(as_experts)} of {family} as those of its routed "
            "experts, and would drop the adapters of other layers of these names; export with --merge, or train "
            "adapter.targets of attention alone"
        )
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": int(alpha) if (alpha := adapter.scale_numerator).is_integer() else alpha,
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.rank_stabilized,
        "use_dora": adapter.has_magnitudes,
        "target_modules": list(dict.fromkeys(modules)),
        "modules_to_save": list(dict.fromkeys(saved)) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return len(tensors)


def start(path: Path, *, base: Path, built: Built, model: Model, job: Job) -> None:
    """Load this rank's shards of the factors from the folder ``path``, over the weights of the folder ``base``.

    Every rank calls it; all raise the same ``UserError``.
    """
    run_on_all_ranks(lambda: _start(path, base=base, built=built, model=model, job=job), ranks=built.ranks)
    for unit in built.units:
        unit.on_optimizer_step()


@torch.no_grad()
def _start(path: Path, *, base: Path, built: Built, model: Model, job: Job) -> None:
    factors = open_as(path, base=base, model=model, job=job)
    for shard in built.shards:
        shard.weight.copy_(shard.rows_of(factors[shard.name]))


def open_as(path: Path, *, base: Path, model: Model, job: Job) -> dict[str, Tensor]:
    """Return the factors of the folder ``path``; raises ``UserError`` unless the job's adapter computes with them."""
    adapter = job.adapter
    if adapter is None:
        raise UserError(f"{path}: needs [job] adapter, such as 'lora:16'; `fivefold import {path}` writes a run file")
    stored, factors = AdapterFolder.open(path).read_factors(model, family=find_family(base))
    wanted = {weight.name for weight in list_trained_weights(model, adapter)}
    if (stored.rank, stored.scale, set(factors)) != (adapter.rank, adapter.scale, wanted):
        raise UserError(
            f"{path} holds an adapter of {_describe(stored)}, and [job] adapter has {_describe(adapter)}; "
            f"`fivefold import {path}` writes a run file that fits it"
        )
    return factors


def find_family(base: Path) -> str:
    """Return the family by whose names peft stores adapters over the folder ``base``."""
    text = find_text_model(read_file(base / huggingface_import.CONFIG), name=str(base))
    if text.wrapped:
        raise UserError(f"{base}: PEFT adapters over the text model of a multimodal folder are not supported yet")
    return text.family.model_type


def _describe(adapter: Adapter) -> str:
    """Return what two adapters must have in common, in words."""
    targets = ", ".join(adapter.targets)
    saved = f", and modules_to_save {', '.join(adapter.modules_to_save)}" if adapter.modules_to_save else ""
    return f"kind {adapter.kind}, rank {adapter.rank}, scale {adapter.scale:g} and targets {targets}{saved}"


def _name_module(part: TensorPart) -> str:
    """Return the name by which peft's config has the module of a tensor: ``q_proj`` or ``lm_head``."""
    return part.name.rpartition(".")[0].rpartition(".")[2]


def _list_tensor_names(model: Model, family: str, adapter: Adapter) -> Iterator[tuple[str, tuple[str, TensorPart]]]:
    """Yield our name of each trained weight, its tensor in a PEFT adapter folder, and the part of the base's weight.

    Raises ``UserError`` for a layer that ``family`` stores fused with others or transposed.
    """
    every = {part.ours: part for part in list_tensors(model, family=family)}
    for weight in list_trained_weights(model, adapter):
        linear, _, factor = weight.name.rpartition(".")
        part = every[weight.name if adapter.is_saved(weight.name) else f"{linear}.weight"]
        if part.transposed or part.rows not in (None, part.shape[part.dim]):
            raise UserError(
                f"model {model.name!r}: {family} stores {linear} fused with others or transposed; PEFT adapters on "
                "such weights are not supported"
            )
        stored = part.name if weight.name == part.ours else f"{part.name.removesuffix('weight')}{FACTORS[factor]}"
        yield weight.name, (f"{PREFIX}{stored}", part)
