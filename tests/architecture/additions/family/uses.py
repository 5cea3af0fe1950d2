"""A family is read, written, predicted, searched, run dry and named by its tensors."""

from shared import JOB, LAYOUT, NODE, check_dry_run, search_few

from fivefold.errors import UserError
from fivefold.model.huggingface.read import describe_remark, from_config
from fivefold.model.huggingface.tensors import list_tensors
from fivefold.model.huggingface.write import find_difference, to_config
from fivefold.planner.predict import predict

config = {"model_type": "fake", "d_model": 96, "num_attention_heads": 6, "vocab_size": 512}
model = from_config(config, name="x")
assert (model.layers, model.width, model.block, model.activation) == (3, 96, "post", "gelu")
assert model.parameters == 3 * (4 * 96 * 96 + 3 * 96 * 300 + 2 * 96) + 2 * 512 * 96 + 96
assert from_config({**config, "architectures": ["FakeForCausalLM"]}, name="x") == model

assert (
    describe_remark(config | {"n_group": 4}, name="x")
    == "x: keys without effect, as in transformers' FakeForCausalLM: n_group=4"
)
try:
    from_config({**config, "use_memory": True}, name="x")
except UserError as error:
    message = str(error)
else:
    raise AssertionError("a key that cannot be represented was read")
assert "use_memory=True needs a memory of earlier sequences" in message

written = to_config(model)
assert (written["architectures"], written["d_model"], written["use_memory"]) == (["FakeForCausalLM"], 96, False)
assert find_difference(from_config(written, name="x"), model) is None

tensors = {part.name: part.shape for part in list_tensors(model, family="fake")}
assert tensors["fake.layers.2.ln_mlp.weight"] == (96,)
assert tensors["fake.layers.0.mlp.up_proj.weight"] == (300, 96)
assert len(tensors) == 3 * 9 + 3

assert predict(model=model, machine=NODE, layout=LAYOUT, job=JOB).work.parameters == model.parameters
assert search_few(model=model, machine=NODE, job=JOB).best
check_dry_run(model, JOB)
