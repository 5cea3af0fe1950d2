"""An activation is read from a config, predicted, run dry and trained; its derivative is that of its value."""

import torch
from shared import JOB, check_dry_run, train

from fivefold.model.activations import ACTIVATIONS
from fivefold.model.huggingface.read import from_config
from fivefold.model.huggingface.write import to_config

config = {"model_type": "llama", "hidden_act": "quick_gelu", "hidden_size": 64, "intermediate_size": 96}
config |= {"num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 256, "max_position_embeddings": 64}
model = from_config(config, name="x")
assert to_config(model)["hidden_act"] == "quick_gelu"
check_dry_run(model, JOB)

activation = ACTIVATIONS["quick_gelu"]
x = torch.linspace(-6, 6, 240, dtype=torch.float64)
slope = (activation.value(x + 1e-6) - activation.value(x - 1e-6)) / 2e-6
torch.testing.assert_close(activation.derivative(x), slope, rtol=1e-6, atol=1e-6)

losses = train(model, JOB)
assert losses[-1] < losses[0], losses
