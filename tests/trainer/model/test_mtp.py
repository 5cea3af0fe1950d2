"""Multi-token prediction against a plain one in torch and against transformers' modules, with weights of its files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.experts import MoE
from fivefold.model.multi_token_prediction import MTP
from fivefold.model.spec import Model
from fivefold.model.weights import list_weights
from fivefold.trainer.build import build
from fivefold.trainer.checkpoint import checkpoint
from fivefold.trainer.checkpoint.huggingface_export import export, find
from fivefold.trainer.checkpoint.huggingface_import import HuggingFaceFolder, start
from fivefold.trainer.model.mtp import MTPTargets
from fivefold.trainer.model.transformer import Transformer
from tests.model.judged import silence_transformers
from tests.trainer.checkpoint.test_huggingface_import import LATENT, decoder, read_full

B, T, DEPTH = 2, 12, 2
MODEL = Model(
    name="m",
    layers=2,
    width=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=48,
    vocab=61,
    rope_theta=500.0,
    mtp=MTP(depth=DEPTH, coefficient=0.4),
)


def window(vocab: int) -> Tensor:
    """Tokens [B, T + 1 + depth] of a text: inputs, targets, and those further on."""
    return torch.randint(0, vocab, (B, T + 1 + DEPTH), generator=torch.Generator().manual_seed(3))


def shift(tokens: Tensor) -> list[Tensor]:
    return [tokens[:, at : at + T] for at in range(2 + DEPTH)]


def losses(ours: Transformer, tokens: Tensor) -> Tensor:
    inputs, targets, *further = shift(tokens)
    return ours(inputs, targets, scale=1 / (B * T), mtp_targets=MTPTargets((targets, *further[:-1]), tuple(further)))


def build_model_with_weights(model: Model) -> Transformer:
    ours, generator = Transformer(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in ours.named_parameters():
            spread = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * spread if "norm" in name else spread * weight.shape[-1] ** -0.5)
    return ours


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, MODEL.norm_epsilon)


def plain_block(x: Tensor, w: dict[str, Tensor], prefix: str) -> Tensor:
    """A pre-norm block with causal, rotated, grouped attention and SwiGLU, none of it ours."""
    N, K, H = MODEL.heads, MODEL.kv_heads, MODEL.head_dim
    angles = torch.outer(torch.arange(T), MODEL.rope_theta ** -(torch.arange(0, H, 2) / H)).repeat(1, 2)

    def rope(x: Tensor) -> Tensor:
        return x * angles.cos() + torch.cat((-x[..., H // 2 :], x[..., : H // 2]), -1) * angles.sin()

    h = norm(x, w[f"{prefix}norm1.weight"])
    q, k, v = ((h @ w[f"{prefix}attention.{name}.weight"].t()).view(B, T, -1, H).transpose(1, 2) for name in "qkv")
    a = F.scaled_dot_product_attention(
        rope(q), rope(k).repeat_interleave(N // K, 1), v.repeat_interleave(N // K, 1), is_causal=True
    )
    x = x + a.transpose(1, 2).reshape(B, T, N * H) @ w[f"{prefix}attention.out.weight"].t()
    h = norm(x, w[f"{prefix}norm2.weight"])
    gate, up = (h @ w[f"{prefix}mlp.{name}.weight"].t() for name in ("gate", "up"))
    return x + (F.silu(gate) * up) @ w[f"{prefix}mlp.down.weight"].t()


def compute_losses(w: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Losses of the next token and of those further on, each by its weight in their sum (arXiv:2412.19437 §2.2)."""
    inputs, *targets = shift(tokens)
    table, x, results = w["embed.tokens.weight"], w["embed.tokens.weight"][inputs], []
    for layer in range(MODEL.layers):
        x = plain_block(x, w, f"blocks.{layer}.")
    h = norm(x, w["head.norm.weight"])
    for depth, wanted in enumerate(targets):
        if depth:
            m = f"head.mtp.{depth - 1}."
            e = norm(table[targets[depth - 1]], w[f"{m}embed_norm.weight"])
            both = torch.cat((e, norm(h, w[f"{m}hidden_norm.weight"])), -1)
            h = norm(plain_block(both @ w[f"{m}project.weight"].t(), w, f"{m}block."), w[f"{m}norm.weight"])
        loss = F.cross_entropy((h @ w.get("head.out.weight", table).t()).flatten(0, 1), wanted.flatten())
        results.append(loss * (0.4 / DEPTH if depth else 1))
    return torch.stack(results)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_multi_token_prediction_losses_and_gradients_equal_a_plain_implementation(tied: bool, chunked: bool) -> None:
    ours = build_model_with_weights(MODEL.replace(tied_embeddings=tied))
    ours.head.chunked = chunked
    theirs = {name: weight.detach().clone().requires_grad_() for name, weight in ours.named_parameters()}
    result, wanted = losses(ours, window(MODEL.vocab)), compute_losses(theirs, window(MODEL.vocab))
    result.backward(torch.ones_like(result))
    wanted.sum().backward()
    torch.testing.assert_close(result.detach(), wanted.detach(), rtol=1e-5, atol=1e-6)  # chunked: only now
    for name, weight in ours.named_parameters():
        assert weight.grad is not None, name
        assert (weight.grad - theirs[name].grad).norm() <= 1e-5 * theirs[name].grad.norm(), name  # type: ignore


def test_names_and_shapes_equal_the_list_of_weights() -> None:
    for more in ({}, {"moe": MoE(experts=4, topk=2, ffn=16, dense_layers=1)}):
        model = MODEL.replace(**more)
        expected = {weight.name: weight.shape for weight in list_weights(model)}
        assert {name: tuple(weight.shape) for name, weight in Transformer(model).named_parameters()} == expected
        assert model.parameters == sum(weight.numel() for weight in Transformer(model).parameters())


# Against transformers, whose modules are meant for generation


CASE = {"model_type": "deepseek_v3", **LATENT, "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": DEPTH}


def build_theirs(case: dict[str, Any]) -> tuple[Any, Any]:
    """Their model and its modules of multi-token prediction, drawn wide."""
    keys = {key: value for key, value in case.items() if key != "model_type"}
    main: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(case["model_type"], **keys, attn_implementation="eager")
    ).eval()  # type: ignore[no-untyped-call]
    modules = MtpModel(main, DEPTH).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in (*main.named_parameters(), *modules.layers.named_parameters()):
            spread = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * spread if "norm" in name else spread * weight.shape[-1] ** -0.5)
    return main, modules


def save_as_published(main: Any, modules: Any, folder: Path) -> None:
    """As published: the modules' tensors under the layers after the last, with copies of embedding and head."""
    main.save_pretrained(folder, save_original_format=False)
    layers = main.config.num_hidden_layers
    tensors = {name: tensor.clone() for name, tensor in main.state_dict().items()}
    for name, tensor in modules.layers.state_dict().items():
        place, rest = name.split(".", 1)
        rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        tensors[f"model.layers.{layers + int(place)}.{rest}"] = tensor.clone()
    for place in range(DEPTH):
        tensors[f"model.layers.{layers + place}.embed_tokens.weight"] = main.get_input_embeddings().weight.clone()
        tensors[f"model.layers.{layers + place}.shared_head.head.weight"] = main.lm_head.weight.clone()
    save_file(tensors, folder / "model.safetensors")


def compute_their_losses(main: Any, modules: Any, tokens: Tensor) -> list[Tensor]:
    inputs, *targets = shift(tokens)
    h = main.model(inputs, use_cache=False).last_hidden_state
    mask = torch.full((T, T), float("-inf")).triu(1)[None, None]
    places = torch.arange(T)[None]
    results = [F.cross_entropy(main.lm_head(h).flatten(0, 1), targets[0].flatten())]
    for depth, layer in enumerate(modules.layers):
        e = main.get_input_embeddings()(targets[depth])
        turns = modules.rotary_emb(e, position_ids=places)
        h = layer(e, h, position_embeddings=turns, attention_mask=mask, position_ids=places, past_key_values=None)
        results.append(F.cross_entropy(main.lm_head(h).flatten(0, 1), targets[depth + 1].flatten()))
    return results


def test_multi_token_prediction_losses_and_gradients_are_those_of_transformers(tmp_path: Path) -> None:
    with silence_transformers():
        main, modules = build_theirs(CASE)
        save_as_published(main, modules, tmp_path)
    folder = HuggingFaceFolder.open(tmp_path)
    assert folder.model.mtp == MTP(depth=DEPTH)
    assert len(folder.ignored) == 2 * DEPTH
    ours, tokens = decoder(folder), window(131)
    result, wanted = losses(ours, tokens), compute_their_losses(main, modules, tokens)
    weight = 0.3 / DEPTH
    by_weight = [wanted[0], *(weight * item for item in wanted[1:])]
    torch.testing.assert_close(result, torch.stack(by_weight), rtol=1e-5, atol=1e-6)
    result.backward(torch.ones_like(result))
    sum(by_weight).backward()  # type: ignore[union-attr]
    pairs = {
        "embed.tokens.weight": main.get_input_embeddings().weight,
        "head.out.weight": main.lm_head.weight,
        "head.mtp.1.project.weight": modules.layers[1].eh_proj.weight,
        "head.mtp.0.hidden_norm.weight": modules.layers[0].hnorm.weight,
        "head.mtp.0.norm.weight": modules.layers[0].post_norm.weight,
        "head.mtp.0.block.moe.router.weight": modules.layers[0].mtp_block.mlp.gate.weight,
        "head.mtp.1.block.moe.experts.down": modules.layers[1].mtp_block.mlp.experts.down_proj,
        "head.mtp.1.block.attention.out.weight": modules.layers[1].mtp_block.self_attn.o_proj.weight,
        "blocks.0.mlp.down.weight": main.model.layers[0].mlp.down_proj.weight,
    }
    for name, weight in pairs.items():
        mine = ours.get_parameter(name).grad
        assert (mine - weight.grad).norm() <= 1e-5 * weight.grad.norm(), name


def test_a_folder_without_the_modules_holds_none_and_a_model_without_takes_none(tmp_path: Path) -> None:
    """transformers writes the key and none of the tensors."""
    with silence_transformers():
        main, modules = build_theirs(CASE)
        main.save_pretrained(tmp_path / "plain")
        save_as_published(main, modules, tmp_path / "whole")
    whole, bare = HuggingFaceFolder.open(tmp_path / "whole"), HuggingFaceFolder.open(tmp_path / "plain")
    assert (whole.model.mtp_depth, bare.model.mtp_depth) == (DEPTH, 0)
    assert not any(
        "mtp" in name for name in HuggingFaceFolder.open(tmp_path / "plain", model=whole.model).parts
    )  # drawn anew
    assert len(HuggingFaceFolder.open(tmp_path / "whole", model=bare.model).ignored) > 2 * DEPTH


def save_imported(directory: Path, folder: Path) -> None:
    """A checkpoint of no steps, with the weights of ``folder``, under a layout that cuts them."""
    model, layout = HuggingFaceFolder.open(folder).model, Layout.parse("pp2 ep1 zero1 mbs1")
    job = Job(sequence=16, global_batch=2, precision=get_recipe("fp32"))
    built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))
    start(folder, built=built, model=model)
    progress = checkpoint.RunProgress(step=0, samples=0, tokens=0)
    checkpoint.save(directory, built=built, progress=progress, model=model, layout=layout, job=job)


def test_a_round_trip_is_bitwise_equal(forked: Callable[..., Any], tmp_path: Path) -> None:
    with silence_transformers():
        save_as_published(*build_theirs(CASE), tmp_path / "in")
    forked(2, save_imported, tmp_path / "checkpoints", tmp_path / "in")
    export(find(tmp_path), tmp_path / "out", dtype="fp32", file_bytes=10**9, report=lambda *_: None)
    first, second = HuggingFaceFolder.open(tmp_path / "in"), HuggingFaceFolder.open(tmp_path / "out")
    assert second.model.replace(name="", source="") == first.model.replace(name="", source="")
    wanted, result = read_full(first), read_full(second)
    assert wanted.keys() == result.keys()
    assert all(torch.equal(result[name], tensor) for name, tensor in wanted.items())
    assert second.ignored == first.ignored  # the copies of embedding and head
    for name in second.ignored:
        ours = "embed.tokens.weight" if "embed" in name else "head.out.weight"
        assert torch.equal(second.tensors[name][:], result[ours]), name
