"""The optimizer and the schedule of the learning rate that a trainer on transformers, or DeepSpeed, is told."""

from __future__ import annotations

from typing import Any

from fivefold.interop.equivalence import divide_rates
from fivefold.interop.keys import Values

OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw": "adamw", "adam": "adamw",
    "adamw_apex_fused": "adamw", "adamw_anyprecision": "adamw", "adamw_torch_xla": "adamw", "adamw_8bit": "adamw8bit",
    "adamw_bnb_8bit": "adamw8bit", "paged_adamw_8bit": "adamw8bit", "adamw_torch_8bit": "adamw8bit",
    "adafactor": "adafactor", "sgd": "sgd",
    "muon": "muon", "adamw_bnb_8bit_paged": "adamw8bit",
}  # fmt: skip


def read_optimizer(values: Values, kind: str) -> dict[str, Any]:
    """Return the optimizer, its offload and the learning rate's schedule as fields of a job."""
    ds = "deepspeed.optimizer."
    own = kind == "deepspeed" and values[f"{ds}type"] is not None
    said = str(values[f"{ds}type"] if own else values["optim"]).lower().rpartition(".")[2]
    if said not in OPTIMIZERS:
        values.doubt(f"{ds}type" if own else "optim", "is not among the optimizers here; read as adamw")
    betas = (values["adam_beta1"], values["adam_beta2"])
    found: dict[str, Any] = {"job.optimizer.kind": OPTIMIZERS.get(said, "adamw")}
    if own:
        betas = tuple(values[f"{ds}params.betas"] or betas)
        named = {
            "lr": "job.learning_rate.peak",
            "eps": "job.optimizer.epsilon",
            "weight_decay": "job.optimizer.weight_decay",
        }
        found |= {
            path: values[f"{ds}params.{name}"]
            for name, path in named.items()
            if values[f"{ds}params.{name}"] is not None
        }
    clip = values["deepspeed.gradient_clipping"] if kind == "deepspeed" else None
    if clip is None and kind == "deepspeed":
        clip = values["accelerate.deepspeed_config.gradient_clipping"]
    found |= {"job.optimizer.clip": clip} if isinstance(clip, float | int) else {}
    offload = (values["deepspeed.zero_optimization.offload_optimizer.device"] not in ("none", None)
               or values["accelerate.deepspeed_config.offload_optimizer_device"] not in ("none", None)
               or bool(values["deepspeed.zero_optimization.cpu_offload"]))  # fmt: skip
    return found | {
        "job.optimizer.betas": betas,
        "job.offload": ("optimizer",) if kind == "deepspeed" and offload else (),
        **read_rate(values),
    }


def read_rate(values: Values) -> dict[str, Any]:
    """The learning rate's schedule; a decay to the end of the run, from where the warm-up ends, unless it says when."""
    warmup = values["warmup_steps"] if isinstance(values["warmup_steps"], int) else 0
    steps = values["max_steps"] if isinstance(values["max_steps"], int) and values["max_steps"] > 0 else 1000
    said, more = str(values["lr_scheduler_type"]), "lr_scheduler_kwargs."
    floor = values.number(f"{more}min_lr_rate") or values.number(f"{more}min_lr_ratio") or 0.0
    if (least := values.number(f"{more}min_lr")) and values["learning_rate"]:
        floor = divide_rates(least, values["learning_rate"])
    if said.startswith("constant"):
        kind: dict[str, Any] = {"kind": "constant", "floor": 1.0}
    elif said.startswith("cosine"):
        kind = {"kind": "cosine", "floor": floor}
    else:
        decay = values.optional(f"{more}num_decay_steps") or max(1, steps - warmup)
        kind = {"kind": "wsd", "floor": floor, "decay_steps": decay}
    kind["warmup_steps"] = min(warmup, steps)
    return {f"job.learning_rate.{name}": value for name, value in kind.items()}
