"""LoRA and DoRA adapters as peft stores them: FOLDER/ adapter_config.json, adapter_model.safetensors.

    blocks.3.attention.q.lora_a = base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight   [rank, in]
    blocks.3.attention.q.lora_b = base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight   [out, rank]
    blocks.3.attention.q.lora_magnitude = base_model.model.….q_proj.lora_magnitude_vector          [out]
    embed.tokens.lora_a = base_model.model.model.embed_tokens.lora_embedding_A                      [rank, vocabulary]
    head.out.weight = base_model.model.lm_head.weight, if it is trained in full (``modules_to_save``)
    blocks.3.moe.experts.down_lora_a = base_model.model.model.layers.3.mlp.experts.lora_A.weight   [E · rank, in]

The rows of B and the magnitudes are in the order of the rows of W there. Those of experts are of the parameters in
which transformers stacks them (``target_parameters``); if both of a layer have adapters, those of gate and up are
named ``experts.base_layer``. Source: huggingface/peft@0.21.2: src/peft/utils/save_and_load.py,
src/peft/tuners/lora/config.py, and ParamWrapper in layer.py.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fivefold.adapter import ALL_LINEAR, END_TARGETS, LINEAR_TARGETS, SAVED, Adapter, SavedModule
from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.model.adapted import AdaptedLinear, map_linears, name_leader, resolve_linear
from fivefold.model.huggingface.families import FAMILIES
from fivefold.model.huggingface.peft import EXPERT_LAYERS, NAMED_AS_MLPS, WITHOUT_OUT_PROJ, compile_pattern, find_key
from fivefold.model.huggingface.read import find_text_model
from fivefold.model.huggingface.tensors import TensorPart, list_tensors, unwrap_name
from fivefold.model.spec import Model
from fivefold.model.weight import EXPERT_FACTORS
from fivefold.model.weights import list_targets, list_trained_weights, name_adapted, strip_block
from fivefold.text_files import read_file
from fivefold.trainer.build import Built
from fivefold.trainer.checkpoint import huggingface_import
from fivefold.trainer.checkpoint.checkpoint import run_on_all_ranks

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
FACTORS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "lora_magnitude": "lora_magnitude_vector"}
EMBEDDING_FACTORS = {"lora_a": "lora_embedding_A", "lora_b": "lora_embedding_B"}
# peft stores weights and biases of embedding and head next to their factors; they are the base's
BASE_TENSORS = (".base_layer.weight", ".base_layer.bias")
# the parameters of routed experts by target
EXPERT_PARAMETERS = {"experts.gate_up_proj": "gate_up_proj", "experts.down_proj": "down_proj"}
BY_ROWS = ("lora_b", "lora_magnitude")  # in the order of the rows of W
# PEFT keys that change what is computed, with the values that mean LoRA or DoRA. Other keys say how the adapter was
# drawn or trained, or for whom it is.
PLAIN_KEYS: dict[str, tuple[object, ...]] = {
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
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


class ExpertFactor(NamedTuple):
    """One of our factors of routed experts in peft's tensor of a parameter: A [E · rank, in] or B [out, rank · E]."""

    ours: str
    name: str
    part: TensorPart  # of the parameter
    experts: int

    @property
    def parameter(self) -> str:
        """Return the parameter as ``target_parameters`` names it: ``mlp.experts.down_proj``."""
        return self.part.name.split(".", 3)[3]

    def resolve(self, adapter: Adapter) -> Adapter:
        """Return the adapter with the rank and alpha of these experts."""
        shared = "down" if "down" in self.ours.rpartition(".")[2] else "gate_up"
        return adapter.resolve_target(f"experts.{shared}_proj")

    @property
    def is_a(self) -> bool:
        """Tell whether it is a factor A."""
        return self.ours.endswith("_lora_a")

    def shape(self, adapter: Adapter) -> tuple[int, ...]:
        """Return the shape of peft's tensor."""
        rows = self.experts * self.resolve(adapter).rank
        columns, in_features = self.part.shape[1:]
        out_features, in_features = (in_features, columns) if self.part.transposed else (columns, in_features)
        return (rows, in_features) if self.is_a else (out_features, rows)

    def read(self, tensor: Tensor) -> Tensor:
        """Return our factor [E, rank, in] or [E, out, rank]."""
        if self.is_a:
            return tensor.view(self.experts, -1, tensor.shape[1])
        return self._select_rows(tensor).permute(2, 0, 1)

    def write(self, tensor: Tensor, factor: Tensor) -> None:
        """Copy our factor into peft's tensor."""
        if self.is_a:
            tensor.copy_(factor.reshape(tensor.shape))
        elif self.part.rows is None:
            tensor.copy_(factor.permute(1, 2, 0).reshape(tensor.shape))
        else:
            tensor[torch.tensor(self.part.order())] = factor.permute(1, 2, 0).flatten(1)

    def _select_rows(self, tensor: Tensor) -> Tensor:
        rows = tensor if self.part.rows is None else tensor[torch.tensor(self.part.order())]
        return rows.view(len(rows), -1, self.experts)


@dataclass(frozen=True)
class AdapterFolder:
    """An opened PEFT adapter folder: the adapter, the base that its config names, and its tensors by name."""

    path: Path
    adapter: Adapter
    base: str
    tensors: Mapping[str, Tensor]
    saved: tuple[str, ...] = ()  # names of modules that are stored in full, as its config has them
    ranks: Mapping[str, Any] = field(default_factory=dict)  # by pattern, as its config has them
    alphas: Mapping[str, Any] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()  # target_parameters, as its config has them

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read the folder; raises ``UserError`` if it is damaged, or holds anything other than LoRA or DoRA."""
        config = read_file(path / CONFIG)
        if (kind := config.get("peft_type")) != "LORA":
            raise UserError(
                f"{path} holds an adapter of peft_type {kind}, and only LORA is read; train a LoRA, or merge it into "
                "its base with peft"
            )
        parameters = tuple(map(str, config.get("target_parameters") or ()))
        if unknown := sorted(name for name in parameters if not name.endswith(tuple(EXPERT_PARAMETERS.values()))):
            raise UserError(
                f"{path}: {CONFIG} has target_parameters={', '.join(unknown)}, and only gate_up_proj and down_proj of "
                "routed experts are read; merge the adapter into the base with peft's merge_and_unload"
            )
        for key, plain in PLAIN_KEYS.items():
            if key in config and config[key] not in plain:
                raise UserError(
                    f"{path}: {CONFIG} has {key}={config[key]!r}, which is not supported; only LoRA and DoRA are read"
                )
        try:
            stored = load_file(path / WEIGHTS)
        except FileNotFoundError:
            raise UserError(f"{path / WEIGHTS}: no such file; only safetensors are read") from None
        except SafetensorError as error:
            raise UserError(f"{path / WEIGHTS} is damaged or incomplete ({error}); download it again") from None
        tensors = {f"{PREFIX}{unwrap_name(name.removeprefix(PREFIX))}": tensor for name, tensor in stored.items()}
        values = {
            "kind": "dora" if config.get("use_dora") else "lora",
            "rank": config.get("r", 8),
            "alpha": config.get("lora_alpha", 8),
            "dropout": config.get("lora_dropout", 0.0),
            "rank_stabilized": config.get("use_rslora", False),
        }
        adapter = Adapter.read(values, origin=str(path / CONFIG))
        saved = tuple(map(str, config.get("modules_to_save") or ()))
        base = str(config.get("base_model_name_or_path") or "")
        ranks, alphas = (_read_patterns(config, name, path=path) for name in ("rank_pattern", "alpha_pattern"))
        return cls(path, adapter, base, tensors, saved, ranks, alphas, parameters)

    def read_factors(self, model: Model, *, family: str) -> tuple[Adapter, dict[str, Tensor]]:
        """Return the adapter with its targets, and its factors by our names, in the order of our rows.

        Raises ``UserError`` unless the tensors are the factors of the same linear layers in every block of ``model``,
        and modules that are trained in full.
        """
        saved = self._resolve_saved(model, family)
        plain = Adapter(kind=self.adapter.kind, rank=self.adapter.rank, modules_to_save=saved)
        linears = map_linears(model)
        ends = (target for target in END_TARGETS if target not in saved)
        every = dict(_list_tensor_names(model, family, plain.replace(targets=(ALL_LINEAR, *ends))))
        expert_targets = tuple(
            target
            for target, name in EXPERT_PARAMETERS.items()
            if any(given.endswith(name) for given in self.parameters)
        )
        of_experts = dict(_list_expert_factors(model, family, expert_targets))
        names = {name for name, _ in every.values()} | {factor.name for factor in of_experts.values()}
        end_layers = {name.rpartition(".lora_")[0] for ours, (name, _) in every.items() if _is_end(ours)}
        names |= {f"{end}{suffix}" for end in end_layers for suffix in BASE_TENSORS}
        if unknown := sorted(self.tensors.keys() - names):
            raise UserError(
                f"{self.path} holds {len(unknown)} tensors that are not factors of the linear layers of "
                f"{model.name}, such as {unknown[0]}"
            )
        targets = tuple(
            {
                linears[strip_block(ours.rpartition(".")[0])].target: None
                for ours, (name, _) in every.items()
                if name in self.tensors and not plain.is_saved(ours)
            }
        )
        if not targets and not expert_targets:
            raise UserError(
                f"{self.path}: {WEIGHTS} has no lora_A or lora_B of the supported layers "
                f"({', '.join((*LINEAR_TARGETS, *END_TARGETS))}); "
                "name a folder whose adapter targets these"
            )
        adapter = self.adapter.replace(
            targets=(*targets, *expert_targets),
            modules_to_save=saved,
            rank_pattern=self._resolve_pattern("rank_pattern", self.ranks, every, of_experts, linears),
            alpha_pattern=self._resolve_pattern("alpha_pattern", self.alphas, every, of_experts, linears),
        )
        factors: dict[str, Tensor] = {}
        for weight in list_trained_weights(model, adapter):
            shape: tuple[int, ...] = weight.shape
            if (expert_factor := of_experts.get(weight.name)) is not None:
                name, shape = expert_factor.name, expert_factor.shape(adapter)
            else:
                name, part = every[weight.name]
                shape = (part.shape[0], *shape[1:]) if _is_by_rows(weight.name) else shape
            tensor = self.tensors.get(name)
            if tensor is None or tuple(tensor.shape) != shape:
                state = "is missing" if tensor is None else f"is {list(tensor.shape)} instead of {list(shape)}"
                raise UserError(f"{self.path}: {name} {state}; all blocks need factors of one rank")
            if expert_factor is not None:
                factors[weight.name] = expert_factor.read(tensor).contiguous()
                continue
            factors[weight.name] = tensor[torch.tensor(part.order())] if _is_by_rows(weight.name) else tensor
        return adapter, factors

    def _resolve_pattern(
        self,
        name: str,
        patterns: Mapping[str, Any],
        every: Mapping[str, tuple[str, TensorPart]],
        of_experts: Mapping[str, ExpertFactor],
        linears: Mapping[str, AdaptedLinear],
    ) -> dict[str, Any]:
        """Return the values of ``patterns`` by target; raise ``UserError`` if they differ between blocks.

        ``every`` and ``of_experts``: as ``_list_tensor_names`` and ``_list_expert_factors`` yield them.
        """
        by_target = dict[str, Any]()
        parts = {ours: part for ours, (stored, part) in every.items() if stored in self.tensors}
        for ours, part in (parts | {ours: factor.part for ours, factor in of_experts.items()}).items():
            if not ours.endswith("lora_a"):
                continue
            target = linears[strip_block(name_adapted(ours))].target
            key = find_key(patterns, part.name.removesuffix(".weight"))
            value = None if key is None else patterns[key]
            if by_target.setdefault(target, value) != value:
                raise UserError(
                    f"{self.path}: {CONFIG} sets {name} of {target} in only some blocks; only adapters "
                    "with the same rank and alpha in all blocks can be read"
                )
        return {target: value for target, value in by_target.items() if value is not None}

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
        if _is_by_rows(ours):
            rows = tensors.setdefault(name, torch.empty(part.shape[0], *factor.shape[1:]))
            rows[torch.tensor(part.order())] = factor
        else:
            tensors[name] = factor.contiguous()
        (saved if adapter.is_saved(ours) else modules).append(_name_module(part))
    parameters = [target for target in adapter.targets if target in EXPERT_PARAMETERS]
    of_experts = dict(_list_expert_factors(model, family, tuple(parameters)))
    for ours, expert_factor in of_experts.items():
        empty = torch.empty(expert_factor.shape(adapter))
        expert_factor.write(tensors.setdefault(expert_factor.name, empty), factors[ours])
    if family in NAMED_AS_MLPS and (as_experts := [name for name in EXPERT_LAYERS if name in modules]):
        raise UserError(
            f"model {model.name!r}: peft (0.21) takes {', '.join(as_experts)} of {family} as those of its routed "
            "experts, and would drop the adapters of other layers of these names; export with --merge, or train "
            "only adapter.targets of attention"
        )
    if family in WITHOUT_OUT_PROJ and "out_proj" in modules:
        others = ",".join(target for target in list_targets(model, adapter) if target != "out_proj")
        raise UserError(
            f"model {model.name!r}: peft (0.21) stops for an adapter of out_proj of {family}; export with --merge, or "
            f"train only adapter.targets={others}"
        )
    ranks, alphas = _list_patterns(adapter, model, family)
    for expert_factor in of_experts.values():
        of_layer = expert_factor.resolve(adapter)
        ranks |= {expert_factor.parameter: of_layer.rank} if of_layer.rank != adapter.rank else {}
        if of_layer.scale_numerator != adapter.scale_numerator:
            alphas[expert_factor.parameter] = _shorten_alpha(of_layer.scale_numerator)
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": _shorten_alpha(adapter.scale_numerator),
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.rank_stabilized,
        "use_dora": adapter.has_magnitudes,
        "target_modules": list(dict.fromkeys(modules)),
        "target_parameters": sorted({factor.parameter for factor in of_experts.values()}) or None,
        "modules_to_save": list(dict.fromkeys(saved)) or None,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return len(tensors)


def _list_patterns(adapter: Adapter, model: Model, family: str) -> tuple[dict[str, int], dict[str, float]]:
    """Return the ranks and alphas of layers that have their own, by the last name of a module.

    Raises ``UserError`` if layers of the same name have others.
    """
    ranks, alphas, resolved = dict[str, int](), dict[str, float](), dict[str, Adapter]()
    for ours, (_, part) in _list_tensor_names(model, family, adapter):
        if not ours.endswith(".lora_a"):
            continue
        of_layer = resolve_linear(model, adapter, strip_block(ours.removesuffix(".lora_a")))
        module = _name_module(part)
        if resolved.setdefault(module, of_layer) != of_layer:
            raise UserError(
                f"model {model.name!r}: layers of several kinds are named {module}, to which peft gives one rank and "
                "alpha; drop adapter.rank_pattern and alpha_pattern"
            )
        if of_layer.rank != adapter.rank:
            ranks[module] = of_layer.rank
        if of_layer.scale_numerator != adapter.scale_numerator:
            alphas[module] = _shorten_alpha(of_layer.scale_numerator)
    return ranks, alphas


def _shorten_alpha(alpha: float) -> float:
    """Return alpha as an integer if it is one."""
    return int(alpha) if alpha.is_integer() else alpha


def start(path: Path, *, base: Path, built: Built, model: Model, job: Job) -> None:
    """Load this rank's shards of the factors from the folder ``path``, over the weights of the folder ``base``.

    Every rank calls it; all raise the same ``UserError``.
    """
    run_on_all_ranks(lambda: _start(path, base=base, built=built, model=model, job=job), ranks=built.ranks)
    for unit in built.units:
        unit.on_optimizer_step()


@torch.no_grad()
def _start(path: Path, *, base: Path, built: Built, model: Model, job: Job) -> None:
    """Copy the rows of this rank from a PEFT adapter folder into its shards."""
    factors = open_as(path, base=base, model=model, job=job)
    for shard in built.shards:
        shard.weight.copy_(shard.select_rows(factors[shard.name]))


def open_as(path: Path, *, base: Path, model: Model, job: Job) -> dict[str, Tensor]:
    """Return the factors of the folder ``path``; raises ``UserError`` unless the job's adapter computes with them."""
    adapter = job.adapter
    if adapter is None:
        raise UserError(f"{path}: needs [job] adapter, such as 'lora:16'; `fivefold import {path}` writes a run file")
    stored, factors = AdapterFolder.open(path).read_factors(model, family=find_family(base))
    wanted = {weight.name for weight in list_trained_weights(model, adapter)}
    if set(factors) != wanted or _get_rank_and_scale(stored, model) != _get_rank_and_scale(adapter, model):
        raise UserError(
            f"{path} holds an adapter of {_describe(stored)}, and [job] adapter has {_describe(adapter)}; "
            f"`fivefold import {path}` writes a run file that fits it"
        )
    return factors


def _get_rank_and_scale(adapter: Adapter, model: Model) -> dict[str, tuple[int, float]]:
    """Return the rank and the scale of each target, by its name."""
    resolved = {target: adapter.resolve_target(target) for target in list_targets(model, adapter)}
    return {target: (layer.rank, layer.scale) for target, layer in resolved.items()}


def find_family(base: Path) -> str:
    """Return the family by whose names peft stores adapters over the folder ``base``."""
    text = find_text_model(read_file(base / huggingface_import.CONFIG), name=str(base))
    if text.wrapped and not text.is_separable:
        raise UserError(f"{base}: PEFT adapters over the text model of a multimodal folder are not supported yet")
    return text.family.model_type


def _describe(adapter: Adapter) -> str:
    """Return what two adapters must have in common, in words."""
    targets = ", ".join(adapter.targets)
    saved = f", and modules_to_save {', '.join(adapter.modules_to_save)}" if adapter.modules_to_save else ""
    others = "".join(
        f", {name} {', '.join(pattern)}"
        for name, pattern in (("rank_pattern", adapter.rank_pattern), ("alpha_pattern", adapter.alpha_pattern))
        if pattern
    )
    return f"kind {adapter.kind}, rank {adapter.rank}, scale {adapter.scale:g} and targets {targets}{others}{saved}"


def _read_patterns(config: Mapping[str, Any], name: str, *, path: Path) -> dict[str, Any]:
    """Return a table of patterns of a config; raise ``UserError`` for one that is not read."""
    patterns = config.get(name) or {}
    if not isinstance(patterns, Mapping) or (unread := [key for key in patterns if compile_pattern(key) is None]):
        shown = unread[0] if isinstance(patterns, Mapping) else patterns
        raise UserError(f"{path}: {CONFIG} has {name}={shown!r}, a pattern that is not read; name modules, as q_proj")
    return dict(patterns)


def _is_end(ours: str) -> bool:
    """Tell whether a weight is a factor of the embedding or the head."""
    return ours.startswith(("embed.tokens.lora_", "head.out.lora_"))


def _is_by_rows(ours: str) -> bool:
    """Tell whether the rows of a factor are those of its weight."""
    return ours.endswith(BY_ROWS) and not ours.startswith("embed.tokens.")


def _name_module(part: TensorPart) -> str:
    """Return the name by which peft's config has the module of a tensor: ``q_proj`` or ``lm_head``."""
    return part.name.rpartition(".")[0].rpartition(".")[2]


def _list_expert_factors(model: Model, family: str, targets: tuple[str, ...]) -> Iterator[tuple[str, ExpertFactor]]:
    """Yield our names of the factors of routed experts with ``targets``, and where peft stores them.

    Raises ``UserError`` for a family whose experts transformers does not stack in two parameters.
    """
    adapter = Adapter(targets=targets or ("q_proj",))
    factors = [weight for weight in list_trained_weights(model, adapter) if weight.name.endswith(EXPERT_FACTORS)]
    parts = {part.ours: part for part in list_tensors(model, family=family, stacked=True)} if factors else {}
    for weight in factors:
        path, _, name = weight.name.rpartition(".")
        matrix = "gate" if name == "gate_up_lora_a" else name.partition("_lora_")[0]
        part = parts[f"{path}.{matrix}"]
        if not part.name.endswith(tuple(EXPERT_PARAMETERS.values())) or len(part.shape) != 3:
            raise UserError(
                f"model {model.name!r}: {family} stores experts as {part.name}; PEFT adapters on these are not "
                "supported; export with --merge"
            )
        stem = part.name.rpartition(".")[0]
        is_inner = part.name.endswith("gate_up_proj") and len(targets) == 2
        factor = "lora_A" if name.endswith("_lora_a") else "lora_B"
        stored = f"{PREFIX}{stem}{'.base_layer' if is_inner else ''}.{factor}.weight"
        yield weight.name, ExpertFactor(weight.name, stored, part, weight.shape[0])


def _list_tensor_names(model: Model, family: str, adapter: Adapter) -> Iterator[tuple[str, tuple[str, TensorPart]]]:
    """Yield our name of each trained weight, its tensor in a PEFT adapter folder, and the part of the base's weight.

    Raises ``UserError`` for a layer that ``family`` stores fused with others or transposed.
    """
    every = {part.ours: part for part in list_tensors(model, family=family)}
    adapted = [
        weight.name for weight in list_trained_weights(model, adapter) if not weight.name.endswith(EXPERT_FACTORS)
    ]
    # the rows of each tensor that layers with one factor A have: all of them, if peft has one adapter for the tensor
    rows = Counter[tuple[str, str]]()
    for name in adapted:
        linear, _, factor = name.rpartition(".")
        if factor == "lora_b" and linear != "embed.tokens":
            part = every[f"{linear}.weight"]
            rows[part.name, name_leader(model, linear)] += part.shape[part.dim] if part.rows is None else part.rows
    for name in adapted:
        linear, _, factor = name.rpartition(".")
        part = every[name if adapter.is_saved(name) else f"{linear}.weight"]
        is_fused = rows.get((part.name, name_leader(model, linear)), part.shape[part.dim]) != part.shape[part.dim]
        if part.transposed or is_fused:
            raise UserError(
                f"model {model.name!r}: {family} stores {linear} fused with others or transposed; PEFT adapters on "
                "such weights are not supported"
            )
        names = EMBEDDING_FACTORS if linear == "embed.tokens" else FACTORS
        stored = part.name if name == part.ours else f"{part.name.removesuffix('weight')}{names[factor]}"
        for published, in_memory in FAMILIES[family].modules.items():
            stored = stored.replace(published, in_memory)
        yield name, (f"{PREFIX}{stored}", part)
