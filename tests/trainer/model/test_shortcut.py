"""LongCat-Flash against transformers: experts that give tokens back, and whose output is added one layer later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from fivefold.model.huggingface.tensors import list_tensors
from fivefold.trainer.checkpoint.huggingface_import import HuggingFaceFolder
from tests.model.judged import reference, silence_transformers
from tests.model.mutations import FAMILIES
from tests.trainer.checkpoint.test_huggingface_import import decoder

CONFIG = FAMILIES["longcat_flash"]
TOKENS = torch.randint(1, CONFIG["vocab_size"], (3, 25), generator=torch.Generator().manual_seed(3))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed", [{}, {"zero_expert_num": 5, "moe_topk": 3, "attention_bias": True}, {"zero_expert_num": 0}], ids=str
)
def test_logits_and_gradients_are_those_of_transformers(changed: dict[str, Any], tmp_path: Path) -> None:
    with silence_transformers():
        theirs = reference("longcat_flash", CONFIG | changed)
        theirs.save_pretrained(tmp_path)
    folder = HuggingFaceFolder.open(tmp_path)
    ours: Any = decoder(folder)
    wanted = theirs(TOKENS[:, :-1]).logits
    torch.testing.assert_close(ours(TOKENS[:, :-1]), wanted, rtol=1e-5, atol=1e-5)
    ours(TOKENS[:, :-1], TOKENS[:, 1:], scale=1 / TOKENS[:, 1:].numel()).backward()
    cross_entropy(wanted.flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    gradients = {name: weight.grad for name, weight in theirs.named_parameters()}
    norm = max(float(gradient.norm()) for gradient in gradients.values() if gradient is not None)
    parts = {part.ours: part for part in list_tensors(ours.model, family="longcat_flash", stacked=True)}
    experts = ours.model.moe.experts
    for name, weight in ours.named_parameters():
        part = parts[name]
        gradient = gradients[part.name]
        if part.experts:  # transformers has weights of experts that give tokens back, which it does not use
            assert not gradient[experts:].any()
            gradient = gradient[:experts].flatten(0, 1)
        gradient = gradient.index_select(part.dim, torch.tensor(list(part.order())))
        gradient = gradient.unflatten(0, (part.experts, -1)) if part.experts else gradient
        gradient = (gradient.mT if part.transposed else gradient).reshape(weight.shape)
        assert (weight.grad - gradient).norm() <= 1.5e-5 * max(float(gradient.norm()), 1e-2 * norm), name
