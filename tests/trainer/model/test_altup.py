"""AltUp in training, with its clipped weights, against transformers' module: values and gradients."""

from __future__ import annotations

import torch
from transformers.models.gemma3n import Gemma3nTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextAltUp

from fivefold.model.altup import AltUp
from fivefold.model.per_layer_inputs import PerLayerInputs
from fivefold.model.spec import Model
from fivefold.trainer.model.altup import AltUpLayer, match_magnitudes

ROWS, STREAMS, WIDTH, CLIP = 6, 3, 16, 0.3
MODEL = Model(
    name="altup", layers=1, width=WIDTH, heads=2, kv_heads=2, head_dim=8, ffn=24, vocab=50, block="sandwich",
    per_layer_inputs=PerLayerInputs(width=4, vocab=50), altup=AltUp(streams=STREAMS, clip=CLIP), laurel_rank=3,
)  # fmt: skip
CONFIG = Gemma3nTextConfig(
    hidden_size=WIDTH, altup_num_inputs=STREAMS, altup_coef_clip=CLIP, rms_norm_eps=MODEL.norm_epsilon
)
PARTS = {
    "scale": "correct_output_scale",
    "correct.weight": "correction_coefs.weight",
    "predict.weight": "prediction_coefs.weight",
    "router.weight": "modality_router.weight",
    "norm.weight": "router_norm.weight",
}


def test_values_and_gradients_with_clipped_weights_are_those_of_transformers() -> None:
    torch.manual_seed(0)
    ours, theirs = AltUpLayer(MODEL), Gemma3nTextAltUp(CONFIG).train()
    their_weights = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, other in PARTS.items():
            their_weights[other].copy_(torch.randn_like(their_weights[other]))
            ours.get_parameter(name).copy_(their_weights[other])
    x = torch.randn(ROWS, STREAMS, WIDTH, requires_grad=True)
    y = torch.randn(ROWS, WIDTH, requires_grad=True)
    of_ours, of_theirs = ((x.detach().requires_grad_(), y.detach().requires_grad_()) for _ in range(2))
    predicted, first = ours.predict_parts(of_ours[0])
    corrected = ours.correct_parts(predicted, first, first + of_ours[1])
    mine = (corrected, ours.read_first(corrected))
    parts = theirs.predict(of_theirs[0].movedim(1, 0)[:, None])
    made = theirs.correct(parts, parts[0] + of_theirs[1])
    wanted = (made[:, 0].movedim(0, 1), theirs.scale_corrected_output(made[0].clone())[0])
    for outputs in (mine, wanted):
        sum(output.square().sum() for output in outputs).backward()  # type: ignore[union-attr]
    gradients = [(a.grad, b.grad) for a, b in zip(of_ours, of_theirs, strict=True)]
    gradients += [(ours.get_parameter(name).grad, their_weights[other].grad) for name, other in PARTS.items()]
    for value, expected in (*zip(mine, wanted, strict=True), *gradients):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-4)


def test_gradients_of_equal_magnitudes_are_those_of_autograd() -> None:
    torch.manual_seed(1)
    parts = [torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(STREAMS)]
    assert torch.autograd.gradcheck(match_magnitudes, tuple(parts))
    sizes = match_magnitudes(*parts).square().mean(-1)
    torch.testing.assert_close(sizes, sizes[:, :1].expand_as(sizes))
