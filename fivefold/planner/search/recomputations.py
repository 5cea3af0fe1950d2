"""The recomputations that a search tries: of what costs little, of the attention core, of MLPs, of every n-th layer."""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.model.spec import Model

RECOMPUTATIONS = ("none", "norm+act", "selective", "mlp", "full/4", "full/2", "full")
# Also of latent attention, whose heads are many times its latents. Source: DeepSeek-V3, arXiv:2412.19437 §3.2.3.
LATENT_ATTENTION = "norm+up+rope+act"


def list_recomputations(model: Model, among: Sequence[str] = RECOMPUTATIONS) -> list[str]:
    """Return the recomputations to try for a model: experts instead of MLPs, and what latent attention expands."""
    replacements = {"mlp": "moe"} if model.moe else {}
    choices = [replacements.get(ac, ac) for ac in among]
    if model.mla and "norm+act" in choices:
        choices.insert(choices.index("norm+act") + 1, LATENT_ATTENTION)
    return choices
