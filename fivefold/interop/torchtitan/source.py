"""A torchtitan 0.3 config as Python source."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fivefold.interop.keys import Table
from fivefold.interop.render import commented
from fivefold.model.spec import Model

CLASSES = {
    "training": "TrainingConfig",
    "parallelism": "ParallelismConfig",
    "lr_scheduler": "LRSchedulersContainer.Config",
    "compile": "CompileConfig",
    "debug": "DebugConfig",
}
IMPORTS = """from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.{family} import model_registry
from torchtitan.trainer import Trainer"""
CUSTOM = """from dataclasses import replace

from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.llama3 import (
    _EMBEDDING_INIT, _NORM_INIT, Llama3Model, _build_llama3_layers, _output_linear_init,
)
"""


def python_file(
    values: Mapping[str, Any], table: Table, *, model: Model, flavor: tuple[str, str], sizes: Mapping[str, Any] | None,
    about: Sequence[str],
) -> str:  # fmt: skip
    """The file; ``sizes``: of a Llama that is no flavor."""
    spec = _spec(values, flavor)
    loss = "CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec))"
    if values["loss"] == "ChunkedLossWrapper":
        loss = f"ChunkedLossWrapper.Config(loss_fn={loss})"
    adam = {name: values[f"optimizer.{name}"] for name in ("lr", "betas", "eps", "weight_decay")}
    ac = f"{values['activation_checkpoint']}.Config()" if values["activation_checkpoint"] else "None"
    lines = [
        '"""' + about[0], "", *about[1:], '"""', "",
        *(CUSTOM.splitlines() if sizes else []),
        *(["from torchtitan.components.quantization import Float8LinearConverter"] if "Float8" in spec else []),
        *IMPORTS.format(family=flavor[0]).splitlines(),
        "", "",
        "def config() -> Trainer.Config:",
        f"    model_spec = {_custom(spec, sizes) if sizes else spec}",
        "    return Trainer.Config(",
        "        model_spec=model_spec,",
        '        hf_assets_path="./assets/hf/tokenizer",  # the tokenizer\'s folder: put yours',
        '        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),  # what is read: put yours',
        f"        loss={loss},",
        f"        optimizer=default_adamw({', '.join(f'{name}={value!r}' for name, value in adam.items())}),",
        f"        activation_checkpoint={ac},  # layout.ac",
    ]  # fmt: skip
    for group, kind in CLASSES.items():
        lines.append(f"        {group}={kind}(")
        for key, value in values.items():
            if key.startswith(f"{group}.") and value is not None:
                lines.append(commented(f"            {key.partition('.')[2]}={value!r},", table[key].means))
        lines.append("        ),")
    return "\n".join([*lines, "    )"]) + "\n"


def _spec(values: Mapping[str, Any], flavor: tuple[str, str]) -> str:
    backend = values["model_spec.attn_backend"] or "flex"
    converters = f", converters=[{values['model_spec.converters']}]" if values["model_spec.converters"] else ""
    return f"model_registry({json.dumps(flavor[1])}, attn_backend={json.dumps(backend)}{converters})"


def _custom(spec: str, sizes: Mapping[str, Any]) -> str:
    """The 8B's spec with a Llama of other sizes in it."""
    width, vocab, heads = sizes["width"], sizes["vocab"], sizes["heads"]
    backend = spec.partition("attn_backend=")[2].partition(",")[0].rstrip(")")
    return f"""replace(
        {spec},
        model=Llama3Model.Config(
            dim={width},
            vocab_size={vocab},
            enable_weight_tying={sizes["tied_embeddings"]},
            tok_embeddings=Embedding.Config(
                num_embeddings={vocab}, embedding_dim={width}, param_init=_EMBEDDING_INIT
            ),
            norm=RMSNorm.Config(normalized_shape={width}, param_init=_NORM_INIT),
            lm_head=Linear.Config(in_features={width}, out_features={vocab}, param_init=_output_linear_init({width})),
            layers=_build_llama3_layers(
                n_layers={sizes["layers"]},
                dim={width},
                n_heads={heads},
                n_kv_heads={sizes["kv_heads"]},
                hidden_dim={sizes["ffn"]},
                rope=ComplexRoPE.Config(
                    dim={width // heads}, max_seq_len=131072, theta={sizes["rope_theta"]!r}, scaling="llama"
                ),
                attn_backend={backend},
            ),
        ),
    )"""
