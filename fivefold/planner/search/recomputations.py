"""The recomputations that a search tries: of what costs little, of the attention core, of MLPs, of every n-th layer."""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.model.spec import Model
from fivefold.stack.spec import SupportedLayouts

RECOMPUTATIONS = ("none", "norm+act", "selective", "mlp", "full/4", "full/2", "full")
# Also of latent attention, whose heads are many times its latents. Source: DeepSeek-V3, arXiv:2412.19437 §3.2.3.
LATENT_ATTENTION = "norm+up+rope+act"


def list_recomputations(model: Model, software: SupportedLayouts, among: Sequence[str] = RECOMPUTATIONS) -> list[str]:
    """Return the recomputations to try for a model: experts instead of MLPs, and what latent attention expands.

    Next to ``norm+act`` come the groups that the ``software`` recomputes together.
    """
    replacements = {"mlp": "moe"} if model.moe else {}
    choices = [replacements.get(ac, ac) for ac in among]
    if "norm+act" in choices:
        cheap = [LATENT_ATTENTION] if model.mla else []
        after = choices.index("norm+act") + 1
        choices[after:after] = [*cheap, *software.list_joint_recomputes()]
    return choices
