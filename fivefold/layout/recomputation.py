"""The groups of operations that ``ac=`` recomputes, by the names of the operations: for planner and trainer."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

_LINEARS = (  # linear layers of a token mixer before its core, and the clamps of their outputs
    r"(experts\.|compress\.)?(q|k|v|kv|qkv|a|b|x|y|z|down|gate|key|value|receptance|decay|project|router)"
    r"|(q|kv|gate|decay|out)_(down|up)|experts\.out|mask\.dt|clip\.[qkv]"
)


class OperationGroup(NamedTuple):
    """Operations that are recomputed together; an operation may be in several groups.

    ``pattern``: regular expression of their names. ``cheap``: the outputs are recomputed even if another operation
    saves them.
    """

    description: str
    pattern: str
    cheap: bool = False


GROUPS = {
    "norm": OperationGroup("norms", r"norm[12](_post)?|.*[._](?<!lora_)norm", cheap=True),
    "qkv": OperationGroup("QKV projections", rf"(attention|mixer)\.({_LINEARS})(\.lora_.*)?"),
    "up": OperationGroup("up-projections of latent attention", r"(attention|mixer)\..*_up", cheap=True),
    "rope": OperationGroup("rotary positions", r"rope\..*", cheap=True),
    "core": OperationGroup("the attention core", r"(attention|mixer)\.core.*"),
    "out": OperationGroup("output projections of attention", r"(attention|mixer)\.out(\.lora_.*)?"),
    "act": OperationGroup("activation functions", r"[^.]*\..*act", cheap=True),
    "mlp": OperationGroup("feed-forward layers", r"mlp\.(?!add|dropout|scale|stream|shortcut).*"),
    "moe": OperationGroup("experts", r"moe\.(?!add|shared).*"),
    "shared": OperationGroup("shared experts", r"moe\.shared.*"),
    "router": OperationGroup("routers", r"[^.]*\.router"),
}  # without sums, dropout and scales of the residual stream
RECOMPUTABLE = tuple(GROUPS)
CHEAP = frozenset(name for name, group in GROUPS.items() if group.cheap)
_INDEXER = re.compile(r"[^.]*\.indexer\.")  # its choice is kept


@cache
def list_groups(operation: str) -> frozenset[str]:
    """Return the groups that include an operation: ``{"mlp", "act"}`` for ``mlp.act``."""
    if _INDEXER.match(operation):
        return frozenset()
    return frozenset(name for name, group in GROUPS.items() if re.fullmatch(group.pattern, operation))
