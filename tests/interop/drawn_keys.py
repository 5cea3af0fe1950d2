"""Random third-party configs: a base config of each format, with keys added from the software's own list.

``own_keys/NAME.txt`` holds the lists, taken from the packages that their first lines name. A drawn config is read, and
each key that was added must be in exactly one list of the reading; a key with an effect must make the answer an error.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fivefold.errors import UserError
from fivefold.interop.format import Overrides
from fivefold.interop.read import read
from fivefold.requests.configs import check_keys
from fivefold.results.reading import ParsedKey, Reading

HERE = Path(__file__).parent / "own_keys"
VALUES = (True, 2, 3, 0.25, "on", "other", [1, 2], 0, -1, 10**30, "", ["x"], "full", "selective", "1,2")
Written = Callable[[Mapping[str, Any], Path], list[str]]


class Software(NamedTuple):
    """How a config with more keys is written (its words for ``read``), and by what name a reading shows a key."""

    write: Written
    shown: Callable[[str], str] = lambda key: key.rpartition(".")[2]


def list_software_keys(name: str) -> list[str]:
    """Return the software's own list."""
    lines = (HERE / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def nest(base: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested tables with dotted keys put into them."""
    result: dict[str, Any] = json.loads(json.dumps(base))
    for path, value in deepcopy({**keys}).items():
        *parents, last = path.split(".")
        within = result
        for parent in parents:
            if not isinstance(within.get(parent), dict):
                within[parent] = {}
            within = within[parent]
        within[last] = value
    return result


def put_yaml(path: Path, values: Mapping[str, Any]) -> list[str]:
    """Write a YAML file."""
    path.write_text(yaml.safe_dump(dict(values)), encoding="utf-8")
    return [str(path)]


AXOLOTL = {
    "base_model": "meta-llama/Llama-3.1-8B",
    "datasets": [{"path": "d"}],
    "sequence_len": 4096,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "optimizer": "adamw_torch_fused",
    "bf16": True,
    "learning_rate": 2e-5,
}
LLAMAFACTORY = {
    "model_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct", "stage": "sft", "finetuning_type": "full",
    "bf16": True, "template": "llama3", "cutoff_len": 2048, "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 2,
}  # fmt: skip
SWIFT = {
    "model": "Qwen/Qwen3-8B", "tuner_type": "full", "dataset": ["data.jsonl"], "max_length": 2048,
    "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "torch_dtype": "bfloat16", "deepspeed": "zero2",
}  # fmt: skip
TRAINER = {
    "model_name_or_path": "meta-llama/Meta-Llama-3-8B",
    "per_device_train_batch_size": 1,
    "learning_rate": 1e-5,
    "gradient_accumulation_steps": 4,
    "bf16": True,
    "max_length": 4096,
}
ACCELERATE = {
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
}
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}
MEGATRON = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "micro_batch_size": 1,
    "global_batch_size": 16,
    "seq_length": 4096,
    "max_position_embeddings": 4096,
    "vocab_size": 32000,
    "bf16": True,
}
BRIDGE = {
    "_target_": "megatron.bridge.training.config.ConfigContainer",
    "model": {
        "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider", "num_layers": 32, "hidden_size": 4096,
        "num_attention_heads": 32, "seq_length": 4096, "vocab_size": 32000, "bf16": True,
    },
    "train": {"micro_batch_size": 1, "global_batch_size": 16}, "optimizer": {"lr": 1e-4}, "ddp": {},
}  # fmt: skip
NEMO_CALLBACKS = "nemo.lightning.pytorch.callbacks"
NEMO = {
    "_target_": "nemo.collections.llm.api.pretrain",
    "_partial_": True,
    "model": {
        "_target_": "nemo.collections.llm.gpt.model.base.GPTModel",
        "config": {
            "_target_": "nemo.collections.llm.gpt.model.base.GPTConfig", "num_layers": 32, "hidden_size": 4096,
            "num_attention_heads": 32, "vocab_size": 32000,
        },
    },
    "trainer": {
        "_target_": "nemo.lightning.pytorch.trainer.Trainer",
        "plugins": {
            "_target_": "nemo.lightning.pytorch.plugins.mixed_precision.MegatronMixedPrecision",
            "precision": "bf16-mixed",
        },
        "strategy": {
            "_target_": "nemo.lightning.pytorch.strategies.megatron_strategy.MegatronStrategy",
            "ddp": {
                "_target_": "megatron.core.distributed.distributed_data_parallel_config.DistributedDataParallelConfig",
            },
        },
    },
    "data": {
        "_target_": "nemo.collections.llm.gpt.data.mock.MockDataModule", "micro_batch_size": 1,
        "global_batch_size": 16, "seq_length": 4096,
    },
    "optim": {
        "_target_": "nemo.lightning.pytorch.optim.megatron.MegatronOptimizerModule",
        "config": {"_target_": "megatron.core.optimizer.optimizer_config.OptimizerConfig", "lr": 1e-4},
        "lr_scheduler": {"_target_": "nemo.lightning.pytorch.optim.lr_scheduler.CosineAnnealingScheduler"},
    },
}  # fmt: skip
TORCHTITAN = {"model": {"name": "llama3", "flavor": "8B"}, "training": {"seq_len": 4096}, "parallelism": {}}
NANOTRON = {
    "general": {"project": "p", "run": "r", "seed": 42}, "parallelism": {"dp": 8, "tp": 1, "pp": 1},
    "model": {
        "model_config": {
            "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
            "intermediate_size": 8192, "vocab_size": 32000, "max_position_embeddings": 2048, "is_llama_config": True,
        }
    },
    "tokens": {"sequence_length": 2048, "micro_batch_size": 1, "batch_accumulation_per_replica": 2, "train_steps": 10},
}  # fmt: skip
TORCHTUNE = {
    "recipe": "full_finetune_distributed",
    "model": {"_component_": "torchtune.models.llama3_1.llama3_1_8b"},
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "max_seq_len": 2048},
    "dataset": {"_component_": "torchtune.datasets.alpaca_dataset", "packed": True},
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 2e-5},
    "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
    "batch_size": 2, "gradient_accumulation_steps": 2, "dtype": "bf16",
}  # fmt: skip
CLASSES = {  # of torchtitan 0.3, whose fields are under a group
    "activation_checkpoint": "SelectiveAC.Config",
    "loss": "ChunkedLossWrapper.Config",
    "optimizer": "OptimizersContainer.Config",
}
PYTHON = """from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer
def config() -> Trainer.Config:
    return Trainer.Config(model_spec=model_registry("8B"), {rest})
"""


def trainer(keys: Mapping[str, Any], folder: Path) -> list[str]:
    """Write TrainingArguments."""
    return put_yaml(folder / "train.yaml", nest(TRAINER, keys))


def trl(keys: Mapping[str, Any], folder: Path) -> list[str]:
    """Write a config of TRL, and the line that starts it."""
    return ["trl", "sft", "--config", *put_yaml(folder / "sft.yaml", nest(TRAINER, keys))]


def accelerate(keys: Mapping[str, Any], folder: Path) -> list[str]:
    """Write accelerate's YAML, and the launch line that names it."""
    put_yaml(folder / "train.yaml", TRAINER)
    short = {key.removeprefix("accelerate."): value for key, value in keys.items()}
    put_yaml(folder / "accelerate.yaml", nest(ACCELERATE, short))
    names = [str(folder / name) for name in ("accelerate.yaml", "train.yaml")]
    return ["accelerate", "launch", "--config_file", names[0], "train.py", names[1]]


def deepspeed(keys: Mapping[str, Any], folder: Path) -> list[str]:
    """Write DeepSpeed's JSON, and TrainingArguments that name it."""
    short = {key.removeprefix("deepspeed."): value for key, value in keys.items()}
    (folder / "ds.json").write_text(json.dumps(nest(DEEPSPEED, short)), encoding="utf-8")
    small = {key: value for key, value in TRAINER.items() if key != "gradient_accumulation_steps"}
    return put_yaml(folder / "train.yaml", small | {"gradient_accumulation_steps": 2, "deepspeed": "ds.json"})


def toml(keys: Mapping[str, Any], folder: Path) -> list[str]:
    """Write torchtitan's TOML."""
    values = nest(TORCHTITAN, keys)
    lines: list[str] = []

    def table(name: str, fields: Mapping[str, Any]) -> None:
        lines.append(f"[{name}]")
        inner = {key: value for key, value in fields.items() if isinstance(value, dict)}
        lines.extend(f"{key} = {json.dumps(value)}" for key, value in fields.items() if key not in inner)
        for key, value in inner.items():
            table(f"{name}.{key}", value)

    for name, fields in values.items():
        table(name, fields)
    (folder / "train.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [str(folder / "train.toml")]


def python(keys: Mapping[str, Any], folder: Path) -> list[str]:
    """Write a Python config of torchtitan 0.3."""
    groups: dict[str, list[str]] = {}
    for key, value in keys.items():
        group, _, name = key.rpartition(".")
        groups.setdefault(group, []).append(f"{name}={value!r}")
    parts = groups.pop("", [])
    for group, said in groups.items():
        parts.append(f"{group}={CLASSES.get(group, f'{group.title()}Config')}({', '.join(said)})")
    (folder / "config.py").write_text(PYTHON.replace("{rest}", ", ".join(parts)), encoding="utf-8")
    return [str(folder / "config.py")]


def flags(keys: Mapping[str, Any], folder: Path) -> list[str]:
    """Write a shell script that starts Megatron-LM."""
    words = ["torchrun", "--nproc_per_node", "8", "pretrain_gpt.py"]
    for key, value in {**MEGATRON, **keys}.items():
        words += [f"--{key.replace('_', '-')}"]
        words += [] if value is True else [str(item) for item in (value if isinstance(value, list) else [value])]
    (folder / "train.sh").write_text(" ".join(words) + "\n", encoding="utf-8")
    return [str(folder / "train.sh")]


def section(keys: Mapping[str, Any], folder: Path) -> list[str]:
    """Write Megatron-Bridge's YAML; a section of its own as a table."""
    given = {key if "." in key else f"{key}.x": value for key, value in keys.items()}
    return put_yaml(folder / "run_config.yaml", nest(BRIDGE, given))


def recipe(keys: Mapping[str, Any], folder: Path) -> list[str]:
    """Write a saved recipe of NeMo 2, whose callbacks are a list of tables."""
    plain = {key: value for key, value in keys.items() if not key.startswith("callbacks.")}
    values, callbacks = nest(NEMO, plain), dict[str, dict[str, Any]]()
    for key in keys.keys() - plain.keys():
        _, name, field = key.split(".")
        callbacks.setdefault(name, {"_target_": f"{NEMO_CALLBACKS}.{name}"})[field] = keys[key]
    if callbacks:
        values["trainer"]["callbacks"] = list(callbacks.values())
    return put_yaml(folder / "recipe.yaml", values)


def write_plain(base: Mapping[str, Any]) -> Written:
    """Return how a YAML over ``base`` is written."""
    return lambda keys, folder: put_yaml(folder / "train.yaml", nest(base, keys))


SOFTWARE = {
    "axolotl": Software(write_plain(AXOLOTL)),
    "llamafactory": Software(write_plain(LLAMAFACTORY)),
    "ms-swift": Software(write_plain(SWIFT)),
    "trainer": Software(trainer),
    "trl": Software(trl),
    "accelerate": Software(accelerate),
    "deepspeed": Software(deepspeed),
    "megatron": Software(flags),
    "bridge": Software(section),
    "nemo": Software(recipe),
    "torchtitan-0.2": Software(toml),
    "torchtitan": Software(python),
    "nanotron": Software(write_plain(NANOTRON)),
    "torchtune": Software(write_plain(TORCHTUNE)),
}


def draw_keys(name: str, some: random.Random, count: int) -> dict[str, Any]:
    """Return ``count`` keys of a software's own list with random values."""
    drawn = some.sample(list_software_keys(name), count)
    tables = {key for key in drawn if any(other.startswith(f"{key}.") for other in drawn)}
    return {key: some.choice(VALUES) for key in drawn if key not in tables}


def read_with(name: str, keys: Mapping[str, Any], folder: Path) -> Reading:
    """Write the software's base config with more keys, and read it."""
    return read(SOFTWARE[name].write(keys, folder), Overrides(ranks=8))


def find_fault(name: str, keys: Mapping[str, Any], folder: Path) -> str | None:
    """Return what is wrong with the reading of a drawn config; None if it is an error of one line, or all is said."""
    try:
        reading = read_with(name, keys, folder)
    except UserError as mistake:
        return f"several lines: {mistake}" if "\n" in str(mistake) else None
    if reading.missing:
        return None
    said = [item.key for kind in list_keys(reading) for item in kind]
    if doubled := {key for key in said if said.count(key) > 1}:
        return f"{', '.join(doubled)}: in several lists of the reading"
    for key, value in keys.items():
        if not list_translated_names(key) & set(said):
            return f"{key}={value!r} is in no list of the reading"
    if not reading.not_understood:
        return None
    try:
        check_keys(reading)
    except UserError as mistake:
        named = all(said.key in str(mistake) for said in reading.not_understood)
        return None if named and "--ignore" in str(mistake) else f"the error does not name all keys: {mistake}"
    return "keys with an effect are no error"


def list_keys(reading: Reading) -> tuple[tuple[ParsedKey, ...], ...]:
    """Return the four lists, in one of which each key of a config must be."""
    return (reading.understood, reading.approximated, reading.not_understood, reading.harmless)


def list_translated_names(key: str) -> set[str]:
    """Return the names under which readings show a key of a config."""
    from fivefold.interop.huggingface.dialects import DIALECTS
    from fivefold.interop.huggingface.parse import _normalize_argument
    from fivefold.interop.megatron.keys import ALIAS, NEGATED
    from fivefold.interop.megatron_bridge.keys import NAMES, NEGATED_KEYS, OVERLAP_CALLBACK
    from fivefold.interop.megatron_bridge.nemo import NAMES as NEMO_NAMES

    last = key.rpartition(".")[2]
    is_callback = key.startswith("callbacks.") and OVERLAP_CALLBACK not in key  # its name is shown, not its fields
    names = {
        key,
        last,
        f"optimizer.optimizer_factory.{last}",
        _normalize_argument(key),
        f"accelerate.fsdp_config.fsdp_{last}",
        f"accelerate.fsdp_config.{last}",
        f"deepspeed.zero_optimization.stage3_{last}",
    }
    names |= {"callbacks"} if is_callback else set()
    for dialect in DIALECTS:
        names |= {dialect.names[name] for name in (key,) if name in dialect.names}
        names |= {name for (theirs, _), (name, _) in dialect.words.items() if theirs == key}
        names |= {name for (theirs, _), (name, _) in dialect.words.items() if theirs in names}
    for table in (ALIAS, NEGATED, NAMES, NEGATED_KEYS, NEMO_NAMES):
        names |= {table[name] for name in tuple(names) if name in table}
    return names
