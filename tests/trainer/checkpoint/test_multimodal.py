"""The text model of a multimodal folder that transformers wrote: its logits, and what is left out of the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from fivefold.errors import UserError
from fivefold.model.huggingface.read import from_config
from fivefold.model.huggingface.write import find_difference, to_config
from fivefold.trainer.checkpoint.huggingface_import import HuggingFaceFolder
from tests.model.judged import silence_transformers
from tests.model.mutations import FAMILIES, PLAIN
from tests.trainer.checkpoint.test_huggingface_import import change, decoder

SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
PIXTRAL = SIGLIP | {"model_type": "pixtral", "head_dim": 8}
LLAMA4 = SIGLIP | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
QWEN = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 48,
    "fullatt_block_indexes": [0],
    "patch_size": 4,
}
QWEN3 = {key: value for key, value in QWEN.items() if key != "fullatt_block_indexes"} | {
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
CLIP = SIGLIP | {"model_type": "clip_vision_model", "projection_dim": 16}
MROPE = {"type": "mrope", "mrope_section": [1, 1, 2]}
BESIDE = {"image_token_id": 129, "video_token_id": 128, "vision_start_token_id": 127, "vision_end_token_id": 126}
SHAPE = {key: value for key, value in PLAIN.items() if key not in ("head_dim", "tie_word_embeddings")}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3", {"text_config": FAMILIES["gemma3_text"], "vision_config": SIGLIP, "mm_tokens_per_image": 4}),
    "llama4": ("llama4", {"text_config": FAMILIES["llama4_text"], "vision_config": LLAMA4}),
    "mistral3": (
        "mistral3",
        {
            "text_config": {"model_type": "mistral", **PLAIN, "sliding_window": None, "rms_norm_eps": 1e-5},
            "vision_config": PIXTRAL, "tie_word_embeddings": False,
        },
    ),
    "qwen2.5-vl": (
        "qwen2_5_vl",
        {"text_config": SHAPE | {"num_key_value_heads": 3, "rope_scaling": MROPE},
         "vision_config": QWEN, **BESIDE},
    ),
    "qwen3-vl": (
        "qwen3_vl",
        {"text_config": {key: value for key, value in PLAIN.items() if key != "tie_word_embeddings"},
         "vision_config": QWEN3, "tie_word_embeddings": False, **BESIDE},
    ),
    "llava": ("llava", {"text_config": {"model_type": "llama", **PLAIN}, "vision_config": CLIP}),
    "llava around qwen3": ("llava", {"text_config": {"model_type": "qwen3", **PLAIN}, "vision_config": CLIP}),
    "idefics3": (
        "idefics3",
        {"text_config": {"model_type": "llama", "pad_token_id": 0, **PLAIN}, "vision_config": SIGLIP,
         "pad_token_id": 0, "image_token_id": 129},
    ),
}  # fmt: skip
BESIDE_TEXT = ("vis", "projector", "connector")  # in names of the tensors of towers and projectors
TOKENS = torch.randint(1, 120, (3, 25), generator=torch.Generator().manual_seed(3))


def build_wrapped(kind: str, keys: dict[str, Any]) -> Any:
    """Their multimodal model, all of it drawn wide enough that every part matters."""
    with silence_transformers():
        config = AutoConfig.for_model(kind, **keys, attn_implementation="eager")
        theirs = AutoModelForImageTextToText.from_config(config).eval()  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            spread = torch.randn(weight.shape, generator=generator)
            plain = float(kind != "gemma3")  # whose weights of norms are the factors minus one
            weight.copy_(plain + 0.3 * spread if "norm" in name else spread * weight.shape[-1] ** -0.5)
    return theirs


@pytest.mark.parametrize("original", [True, False], ids=["names of files", "names in memory"])
@pytest.mark.parametrize("name", CASES)
def test_the_text_model_of_a_multimodal_folder_has_the_logits_of_transformers(
    name: str, original: bool, tmp_path: Path
) -> None:
    kind, keys = CASES[name]
    theirs = build_wrapped(kind, keys)
    theirs.save_pretrained(tmp_path, save_original_format=original)
    folder = HuggingFaceFolder.open(tmp_path)
    others = [weight for name, weight in theirs.named_parameters() if any(part in name for part in BESIDE_TEXT)]
    assert len(folder.ignored) == len(others) > 0
    assert folder.model.parameters == theirs.num_parameters() - sum(weight.numel() for weight in others)
    with torch.no_grad(), silence_transformers():
        wanted = theirs(input_ids=TOKENS, use_cache=False).logits
        assert torch.allclose(decoder(folder)(TOKENS), wanted, atol=1e-5, rtol=1e-5)
    assert find_difference(from_config(to_config(folder.model), name="x"), folder.model) is None


def test_text_keys_next_to_vision_keys_are_read() -> None:
    """As in the published files of Qwen2.5-VL."""
    kind, keys = CASES["qwen2.5-vl"]
    flat = {"model_type": kind, **keys["text_config"], "vision_config": QWEN, **BESIDE, "tie_word_embeddings": True}
    text = {**keys["text_config"], "tie_word_embeddings": True}
    nested = {"model_type": kind, "text_config": text, "vision_config": QWEN}
    model = from_config(flat, name="x")
    assert model == from_config(nested, name="x")
    assert (model.tied_embeddings, model.qkv_bias, model.rope_scaling) == (True, True, None)


def test_a_tied_head_may_be_stored_only_as_the_embedding(tmp_path: Path) -> None:
    kind, keys = CASES["mistral3"]
    build_wrapped(kind, keys).save_pretrained(tmp_path)
    change(tmp_path, tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"lm_head.weight differs from the embedding, though its config.json ties them"):
        HuggingFaceFolder.open(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head, table = (next(name for name in tensors if name.endswith(end)) for end in ("lm_head.weight", "tokens.weight"))
    save_file(tensors | {head: tensors[table].clone()}, file)
    assert HuggingFaceFolder.open(tmp_path).model.tied_embeddings


def test_another_text_model_is_rejected() -> None:
    config = {"model_type": "mistral3", "text_config": {"model_type": "llama", **PLAIN}}
    with pytest.raises(
        UserError,
        match=r"^x: the text model 'llama' is not supported; .* Mistral3ForConditionalGeneration may be mistral",
    ):
        from_config(config, name="x")
