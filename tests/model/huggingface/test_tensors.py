"""Names and shapes of full published models, and the order of rotary rows."""

from __future__ import annotations

import pytest

from fivefold.errors import UserError
from fivefold.model.catalog import build_model
from fivefold.model.huggingface.tensors import TensorPart, list_tensors

# Tensors in the index of the published files; of DeepSeek-V3 layers x (attention + norms) + dense + experts + 3, as its
# files also hold scales and one more layer.
PUBLISHED = {
    "llama3-8b": ("llama", 291),
    "qwen3-8b": ("qwen3", 399),
    "mixtral-8x7b": ("mixtral", 995),
    "qwen3-30b-a3b": ("qwen3_moe", 18_867),
    "deepseek-v3": ("deepseek_v3", 61 * 9 + 3 * 3 + 58 * (256 * 3 + 3 + 2) + 3),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_tensor_count_equals_the_published_one(name: str) -> None:
    family, tensors = PUBLISHED[name]
    model = build_model(name)
    result = list(list_tensors(model, family=family))
    assert len({part.name for part in result}) == len(result) == tensors
    biases = sum(part.numel for part in result if part.ours.endswith(".moe.bias"))
    assert sum(part.numel for part in result) == model.parameters + biases
    assert biases == (58 * 256 if family == "deepseek_v3" else 0)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_stacked_experts_hold_the_same_elements(family: str) -> None:
    model = build_model({"mixtral": "mixtral-8x7b", "qwen3_moe": "qwen3-30b-a3b", "deepseek_v3": "deepseek-v3"}[family])
    single, stacked = (list(list_tensors(model, family=family, stacked=form)) for form in (False, True))
    whole = {part.name: part.numel for part in stacked}
    assert sum(whole.values()) == sum(part.numel for part in single)
    gate, up = (next(part for part in stacked if part.ours.endswith(f".experts.{half}")) for half in ("gate", "up"))
    assert (gate.name, gate.shape) == (up.name, up.shape)
    assert model.moe is not None
    assert (gate.first, up.first) == (0, model.moe.ffn)


def test_rotary_pairs_are_adjacent_in_the_file() -> None:
    part = TensorPart(
        "q", (12, 5), "attention.q.weight", head=(6, 2, 4)
    )  # two heads: two rows stand still, two pairs turn
    assert part.order() == [0, 1, 2, 4, 3, 5, 6, 7, 8, 10, 9, 11]
    turned = {part.name for part in list_tensors(build_model("deepseek-v3"), family="deepseek_v3") if part.head}
    assert turned == {
        f"model.layers.{layer}.self_attn.{which}.weight"
        for layer in range(61)
        for which in ("q_b_proj", "kv_a_proj_with_mqa")
    }
    assert not any(
        part.head for part in list_tensors(build_model("deepseek-v3"), family="deepseek_v3", interleaved=False)
    )


def test_a_family_without_tensor_names_is_rejected() -> None:
    with pytest.raises(UserError, match=r"unknown family of weights 'zamba'"):
        list(list_tensors(build_model("gpt-oss-20b"), family="zamba"))


def test_parts_of_a_fused_tensor_have_the_expected_rows() -> None:
    alone = TensorPart("a", (4, 3), "w")
    after = TensorPart("a", (9, 3), "w", first=4, rows=3, run=3, stride=3)
    in_turn = TensorPart("a", (8, 3), "w", first=1, rows=4, run=1, stride=2)
    by_heads = TensorPart("a", (12, 3), "w", first=2, rows=4, run=2, stride=6)
    assert [list(part.order()) for part in (alone, after, in_turn, by_heads)] == [
        [0, 1, 2, 3],
        [4, 5, 6],
        [1, 3, 5, 7],
        [2, 3, 8, 9],
    ]
    assert [part.is_plain_copy for part in (alone, after, in_turn, by_heads)] == [True, False, False, False]
