"""Classes of code in repositories of the Hub that compute the model of a family of transformers under other keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fivefold.errors import UserError
from fivefold.model.huggingface.family import Supported


class RemoteClass(NamedTuple):
    """A class of remote code: the class of transformers with the same model, and how its keys differ."""

    architecture: str
    # Maps its keys to those of the family of ``architecture``. Keys with the same name in both are not listed.
    keys: Mapping[str, str]
    # Its keys that the family does not have, of which only some values are the family's model.
    supported: Mapping[str, Supported]
    # Maps its keys that say the same as another of its keys to that key.
    same: Mapping[str, str]


# inclusionAI/Ling-1T and Ring-1T:modeling_bailing_moe_v2.py: DeepSeek-V3's experts, grouped-query attention with norms
# of queries and keys, of which a part of each head rotates.
_BAILING_MOE_V2 = RemoteClass(
    "Glm4MoeForCausalLM",
    keys={
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "use_qkv_bias": "attention_bias",
    },
    supported={
        "use_bias": Supported((False,), "biases of the projections after attention and of the MLPs"),
        "use_rmsnorm": Supported((True,), "a LayerNorm"),
        "score_function": Supported(("sigmoid",), "a router without sigmoid scores"),
        "moe_router_enable_expert_bias": Supported((True,), "a router without a bias for balance"),
        "router_dtype": Supported(("fp32",), "a router that computes in another dtype"),
        "embedding_dropout": Supported((0,), "dropout of the embedding"),
        "output_dropout": Supported((0,), "dropout of each branch"),
    },
    same={"moe_shared_expert_intermediate_size": "moe_intermediate_size"},
)
REMOTE_CLASSES: Mapping[str, RemoteClass] = {"BailingMoeV2ForCausalLM": _BAILING_MOE_V2}


def translate_remote_config(config: dict[str, Any], *, name: str) -> dict[str, Any]:
    """Return a config of remote code with the class and keys of the family that has its model; others as they are.

    A value that changes the model into one that the family does not have is a ``UserError``.
    """
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        return config
    remote = REMOTE_CLASSES.get(str(architectures[0]))
    if remote is None:
        return config
    for key, supported in remote.supported.items():
        if key in config and config[key] not in supported.values:
            raise UserError(
                f"{name}: {key}={config[key]!r} needs {supported.operation}, which is not supported; "
                f"remove it or give {key}={supported.values[0]!r}"
            )
    for key, other in remote.same.items():
        if key in config and config[key] != config.get(other):
            raise UserError(
                f"{name}: {key}={config[key]!r} differs from {other}={config.get(other)!r}; give both the same value"
            )
    kept = {key: value for key, value in config.items() if key not in remote.supported and key not in remote.same}
    return {**{remote.keys.get(key, key): value for key, value in kept.items()}, "architectures": [remote.architecture]}
