"""Read a command line as its launcher does: which words are run, on how many ranks.

torchrun --nnodes 4 --nproc_per_node 8 pretrain_gpt.py --num-layers 32 …   → pretrain_gpt.py --num-layers 32 …, 32 ranks
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

PYTHON = re.compile(r"(.*/)?python[\d.]*")
MODULES = ("torch.distributed.launch", "torch.distributed.run", "torch.distributed.torchrun", "deepspeed")
PER_NODE = ("nproc_per_node", "num_gpus", "gpus_per_node", "ntasks_per_node", "nproc-per-node")
NODE_COUNT_OPTIONS = ("nnodes", "num_nodes", "num_machines")
TOTAL_RANKS_OPTIONS = ("num_processes",)
FLAGS = ("standalone", "module", "no_python", "multi_gpu", "use_fsdp", "use_deepspeed", "master_port_auto", "rdzv_auto")


class Launch(NamedTuple):
    """The words of the program that is started, the launcher's options, and the variables that are set for it."""

    words: tuple[str, ...]
    options: Mapping[str, str]
    environment: Mapping[str, str] = {}

    def ranks(self, nodes: int | None = None, per_node: int | None = None) -> int | None:
        """Return the number of ranks; ``nodes`` and ``per_node`` are Slurm's, for a launcher that names neither."""
        numbers = {name: int(text) for name, text in self.options.items() if text.isdecimal() and int(text) > 0}
        total_ranks = next((numbers[name] for name in TOTAL_RANKS_OPTIONS if name in numbers), None)
        if total_ranks:
            return total_ranks
        ranks_per_node = next(
            (numbers[name.replace("-", "_")] for name in PER_NODE if name.replace("-", "_") in numbers), per_node
        )
        node_count = next((numbers[name] for name in NODE_COUNT_OPTIONS if name in numbers), nodes)
        if ranks_per_node is None or (
            node_count is None and self.options.keys() & {"nnodes", "num_nodes", "num_machines"}
        ):
            return None
        return ranks_per_node * (node_count or 1)


def strip_launchers(words: Sequence[str]) -> Launch:
    """Remove the launchers from the front of a command line, one after another."""
    rest, options, environment = list(words), dict[str, str](), dict[str, str]()
    while rest:
        name = rest[0].rpartition("/")[2]
        if assignment := re.fullmatch(r"(\w+)=(.*)", rest[0]):
            environment[assignment[1]] = assignment[2]
            rest = rest[1:]
        elif name in ("nohup", "exec", "time", "env"):
            rest = rest[1:]
        elif PYTHON.fullmatch(rest[0]):
            rest = _read_options(rest[1:], {}, stop_at_module=True)
        elif name in ("torchrun", "deepspeed", "srun", "mpirun", "sbatch") or rest[0] in MODULES:
            rest = _read_options(rest[1:], options)
        elif (name, *rest[1:2]) in (("accelerate", "launch"), ("tune", "run")):
            rest = _read_options(rest[2:], options)
        else:
            break
    return Launch(tuple(rest), options, environment)


def _read_options(words: list[str], options: dict[str, str], *, stop_at_module: bool = False) -> list[str]:
    """Read options up to the first word that is not one; return that word and the rest."""
    position = 0
    while position < len(words) and words[position].startswith("-"):
        word = words[position]
        if word == "-m":
            if stop_at_module:
                return words[position + 1 :]
            position += 1
            continue
        name, equals, value = word.lstrip("-").partition("=")
        name = {"N": "nnodes", "n": "ntasks", "g": "nproc_per_node"}.get(name, name).replace("-", "_")
        if equals:
            options[name] = value
            position += 1
        elif name in FLAGS or stop_at_module or position + 1 >= len(words) or words[position + 1].startswith("-"):
            options.setdefault(name, "")
            position += 1
        else:
            options[name] = words[position + 1]
            position += 2
    return words[position:]


def parse_keys(words: Sequence[str]) -> dict[str, object]:
    """Return options as keys: ``--tp-size 8 --swiglu`` → ``{"tp-size": "8", "swiglu": True}``.

    Several words after a key are a list; a word that begins with - and a digit is a value.
    """
    values: dict[str, object] = {}
    key = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            key, equals, value = word[2:].partition("=")
            values[key] = value if equals else True
        elif key:
            previous = values[key]
            values[key] = (
                word if previous is True else [*(previous if isinstance(previous, list) else [previous]), word]
            )
    return values
