"""A family that does not exist."""

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.family import Family, Supported
from fivefold.model.huggingface.mapping import build_model
from fivefold.model.huggingface.rope import read_rope

FAKE = Family(
    model_type="fake",
    architecture="FakeForCausalLM",
    keys=decoder.KEYS | {"d_model": "hidden_size"},
    defaults={"intermediate_size": 300, "num_hidden_layers": 3, "hidden_act": "gelu"},
    supported={"use_memory": Supported((False,), "a memory of earlier sequences")},
    to_model=lambda config: build_model(config, **read_rope(config), block="post", norm_plus_one=True),
    write=lambda model: {"use_memory": False},
    tensors=decoder.TENSORS | {"blocks": "fake.layers.{}", "norm1": "ln_attention", "norm2": "ln_mlp"},
)
