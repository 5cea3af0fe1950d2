"""Text by memory against reading all of it again for every token, and against transformers' ``generate``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fivefold.errors import UserError
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.experts import MoE
from fivefold.model.latent_attention import MLA
from fivefold.model.mixers.gated_delta_net import GatedDeltaNet
from fivefold.model.mixers.kimi_delta import KimiDelta
from fivefold.model.mixers.lightning import Lightning
from fivefold.model.mixers.mamba import Mamba
from fivefold.model.mixers.mamba2 import Mamba2
from fivefold.model.mixers.rg_lru import RGLRU
from fivefold.model.mixers.short_conv import ShortConv
from fivefold.model.spec import Model
from fivefold.model.weights import Weight, list_weights
from fivefold.trainer.build import build, draw_initial_weight
from fivefold.trainer.checkpoint import checkpoint
from fivefold.trainer.checkpoint.full_weights import build_decoder
from fivefold.trainer.checkpoint.huggingface_export import export
from fivefold.trainer.data.tokenizer import ByteTokenizer
from fivefold.trainer.generate.decode import SamplingParams, enable_kv_cache, generate
from fivefold.trainer.generate.sample import generate_samples, sample
from fivefold.trainer.generate.source import WeightSource
from fivefold.trainer.model.transformer import Transformer
from tests.selection import mark_share

PLAIN = {"width": 48, "heads": 6, "kv_heads": 2, "head_dim": 8, "ffn": 80, "vocab": 131, "positions": 64}
EXPERTS = MoE(experts=8, topk=2, ffn=24)
LATENT = PLAIN | {"kv_heads": 6, "head_dim": 12}
MODELS = [
    Model(name="grouped", layers=3, tied_embeddings=True, rope_theta=1e3, **PLAIN),
    Model(name="normed", layers=2, qk_norm="head", qkv_bias=True, rope_fraction=0.5, attention_scale=0.2, **PLAIN),
    Model(name="experts", layers=2, moe=EXPERTS, qk_norm="full", **PLAIN),
    Model(name="latent", layers=2, mla=MLA(q_rank=None, kv_rank=20, nope_dim=8, rope_dim=4, v_dim=6), **LATENT),
    Model(
        name="deepseek", layers=3, mla=MLA(q_rank=12, kv_rank=20, nope_dim=8, rope_dim=4, v_dim=6),
        moe=EXPERTS.replace(shared_experts=2, dense_layers=1, score="sigmoid", balance="free", groups=4, topk_groups=2,
                            scaling=2.5), **LATENT,
    ),
    Model(name="learned", layers=2, position="learned", norm="layernorm", mlp="plain", activation="gelu_tanh",
          block="parallel", mlp_bias=True, **PLAIN),
    Model(name="sandwich", layers=2, block="sandwich", norm_plus_one=True, activation="gelu_tanh", embedding_scale=7.0,
          logit_softcap=3.0, residual_scale=0.7, **PLAIN),
    Model(
        name="windows", layers=4, window=5, window_pattern=(True, False, True), attention_sinks=True,
        attention_scale=0.2, rope_pattern=(True, True, True, False), rope_theta_sliding=30.0, **PLAIN,
    ),
    Model(name="softcap", layers=2, window=7, window_pattern=(True, False), attention_softcap=0.5, **PLAIN),
    Model(name="latent, sinks", layers=2, attention_sinks=True,
          mla=MLA(q_rank=None, kv_rank=20, nope_dim=8, rope_dim=4, v_dim=6), **LATENT),
    Model(name="shortcut", layers=2, moe=EXPERTS.replace(joins_mlp=True, shortcut=True, pattern=(True, False)),
          **PLAIN),
    Model(name="halves", layers=4, mixers=("attention", "none"), feed_forwards=(False, True), **PLAIN),
]  # fmt: skip
SCANS = [
    Model(name="short_conv", layers=2, mixers=("short_conv", "attention"), short_conv=ShortConv(), **PLAIN),
    Model(
        name="gated_delta_net", layers=2, mixers=("gated_delta_net", "attention"),
        gated_delta_net=GatedDeltaNet(key_heads=2, value_heads=4, key_dim=6, value_dim=5), **PLAIN,
    ),
    Model(name="kimi_delta", layers=2, mixers=("kimi_delta", "attention"), kimi_delta=KimiDelta(heads=4, dim=5, rank=3),
          **PLAIN),
    Model(name="lightning", layers=2, mixers=("lightning", "attention"), lightning=Lightning(heads=4, dim=5, chunk=16),
          **PLAIN),
    Model(name="mamba", layers=2, mixers=("mamba",), mamba=Mamba(inner=20, state=6, rank=3), **PLAIN),
    Model(
        name="mamba2", layers=3, mixers=("mamba2", "none", "attention"), feed_forwards=(False, True, True),
        mamba2=Mamba2(heads=4, head_dim=5, state=6, groups=2, chunk=16), **PLAIN,
    ),
    Model(name="rg_lru", layers=2, mixers=("rg_lru", "attention"), rg_lru=RGLRU(inner=12, blocks=2), **PLAIN),
]  # fmt: skip
PROMPTS = [[5, 9, 77, 3], [12], [8, 8, 1, 2, 3, 4, 5, 6, 7], [130, 0, 64]]
GREEDY = SamplingParams(temperature=0)


named = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)


def draw_weights(model: Model, seed: int = 0) -> dict[str, Tensor]:
    """Weights so wide that the likeliest token is not the same every time."""
    return {weight.name: _spread(weight, model=model, seed=seed) for weight in list_weights(model)}


def _spread(weight: Weight, *, model: Model, seed: int) -> Tensor:
    if weight.name.endswith("sinks"):
        return torch.linspace(-1, 1, weight.numel)
    return draw_initial_weight(weight, model=model, seed=seed) * 4


def build_plain(model: Model) -> Transformer:
    module = build_decoder(draw_weights(model) | biases(model), model=model)
    assert isinstance(module, Transformer)
    return module


def biases(model: Model) -> dict[str, Tensor]:
    layers = [layer for layer in range(model.layers) if model.is_moe(layer)]
    return {f"blocks.{layer}.moe.bias": torch.linspace(-0.1, 0.1, 8).roll(layer) for layer in layers}


def reread(module: Transformer, prompt: list[int], *, tokens: int, window: int) -> list[int]:
    """The rule written out: everything since the window began is read again for each token."""
    text, first = list(prompt), 0
    for _ in range(tokens):
        if len(text) - first > window:
            first = len(text) - window // 2
        text.append(int(module(torch.tensor([text[first:]]))[0, -1].argmax()))
    return text[len(prompt) :]


def generate_tokens(module: Transformer, prompts: list[list[int]], **changes: object) -> list[list[int]]:
    values = {"tokens": 14, "window": 64, "vocab": 131, "ends": frozenset[int](), "sampling": GREEDY} | changes
    steps = list(generate(module, prompts, **values))  # type: ignore[arg-type]
    return [[step[number] for step in steps if step[number] is not None] for number in range(len(prompts))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "window"),
    mark_share(9, [(model, window) for model in MODELS + SCANS for window in (64, 8)]),
    ids=lambda value: getattr(value, "name", value),
)
def test_kv_cache_changes_no_token(model: Model, window: int) -> None:
    module = build_plain(model)
    wanted = [reread(module, prompt, tokens=14, window=window) for prompt in PROMPTS]
    assert len(set(map(tuple, wanted))) == len(PROMPTS)
    assert min(len(set(text)) for text in wanted) > 1
    for prompt, text in zip(PROMPTS, wanted, strict=True):
        assert generate_tokens(module, [prompt], window=window) == [text]
    if window == 64:  # a batch begins its windows together
        assert generate_tokens(module, PROMPTS) == wanted
    assert [reread(module, prompt, tokens=14, window=window) for prompt in PROMPTS] == wanted  # the module is as before


@named
def test_logits_are_those_of_the_whole_text(model: Model) -> None:
    module = build_plain(model)
    tokens = torch.randint(0, 131, (3, 24), generator=torch.Generator().manual_seed(3))
    whole = module(tokens)
    with torch.no_grad(), enable_kv_cache(module, tokens=24) as reader:
        results = [
            reader.read(tokens[:, :10].tolist()),
            *(reader.read(tokens[:, [at]].tolist()) for at in range(10, 24)),
        ]
    assert (torch.stack(results, 1) - whole[:, 9:]).abs().max() <= 1e-5 * whole.abs().max()


@pytest.mark.parametrize("model", SCANS, ids=lambda model: model.name)
def test_layers_without_a_cache_recompute_the_full_text(model: Model) -> None:
    module = build_plain(model)
    (text,) = generate_tokens(module, [PROMPTS[0]], tokens=6, window=8)
    assert text == reread(module, PROMPTS[0], tokens=6, window=8)
    assert len(set(text)) > 1


def test_generation_drops_no_tokens() -> None:
    free = MODELS[2]
    tight = build_plain(free.replace(moe=EXPERTS.replace(capacity=0.5)))
    assert generate_tokens(tight, [PROMPTS[2]]) == generate_tokens(build_plain(free), [PROMPTS[2]])
    tokens = torch.tensor(PROMPTS[2:3])
    assert not torch.equal(tight(tokens), build_plain(free)(tokens))  # as in training again


@pytest.mark.parametrize("model", MODELS[:1] + MODELS[3:4], ids=lambda model: model.name)
def test_kv_cache_has_the_stated_size(model: Model) -> None:
    with torch.no_grad(), enable_kv_cache(build_plain(model), tokens=16) as reader:
        reader.read([[1, 2, 3]])
        kept = [sum(part.shape[2] * part.shape[3] for part in layer.parts) for layer in reader.kept]
    item = 2 * model.kv_heads * model.head_dim if model.mla is None else model.mla.kv_rank + model.mla.rope_dim
    assert kept == [item] * model.layers


@pytest.mark.long  # exports have the logits of transformers, and a cache changes no token
@pytest.mark.parametrize("model", mark_share(2, [MODELS[4], MODELS[0]]), ids=lambda model: model.name)
def test_transformers_generates_the_same(model: Model, tmp_path: Path, forked) -> None:
    layout = Layout.parse("tp2 ep2 zero1 mbs1" if model.moe else "dp2 zero3 mbs1")
    forked(2, save, tmp_path, model, layout)
    done = export(
        WeightSource.find(tmp_path).path, tmp_path / "out", dtype="fp32", file_bytes=10**9, report=ignore_progress
    )
    assert done.files == 1
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    for place in (tmp_path, tmp_path / "out"):
        source = WeightSource.find(place)
        ours = source.decoder(dtype="fp32")
        for prompt in PROMPTS:
            their_ids = theirs.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                max_new_tokens=14,
                min_new_tokens=14,
                do_sample=False,
                pad_token_id=0,
            )[0]
            assert generate_tokens(ours, [prompt]) == [their_ids[len(prompt) :].tolist()]


def test_end_tokens_are_read_from_a_hugging_face_folder(tmp_path: Path, forked) -> None:
    model = MODELS[0].replace(vocab=256)
    forked(1, save, tmp_path / "run", model, Layout.parse("dp1 mbs1"))
    export(
        WeightSource.find(tmp_path / "run").path,
        tmp_path / "out",
        dtype="fp32",
        file_bytes=10**9,
        report=ignore_progress,
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    for stated, ends in ((None, {0}), (7, {0, 7}), ([7, 9], {0, 7, 9})):
        (tmp_path / "out" / "config.json").write_text(json.dumps(config | {"eos_token_id": stated}))
        source = WeightSource.find(tmp_path / "out")
        assert source.get_end_tokens(source.tokenizer(Path("bytes"))) == ends
        assert source.window == 64
    assert WeightSource.find(tmp_path / "run").window == 32


def ignore_progress(_what: str, _done: int, _of: int) -> None:
    """No progress bar."""


def save(folder: Path, model: Model, layout: Layout) -> None:
    """A checkpoint of the drawn weights, cut by ``layout``."""
    job, wide = Job(sequence=32, global_batch=4, precision=get_recipe("fp32")), draw_weights(model)
    built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))
    for shard in built.shards:
        shard.weight.data.copy_(shard.select_rows(wide[shard.name]))
    for layer, moe in built.moe_layers.items():
        moe.bias.copy_(biases(model)[f"blocks.{layer}.moe.bias"])
    progress = checkpoint.RunProgress(step=0, samples=0, tokens=0)
    checkpoint.save(folder / "checkpoints", built=built, progress=progress, model=model, layout=layout, job=job)


def test_generation_stops_at_an_end_token() -> None:
    module = build_plain(MODELS[0])
    (text,) = generate_tokens(module, [PROMPTS[0]])
    end = text[6]
    assert generate_tokens(module, [PROMPTS[0]], ends=frozenset([end])) == [text[: text.index(end) + 1]]


DRAWS = 1500


@pytest.mark.slow
def test_sampled_tokens_follow_the_probabilities_after_top_k_and_top_p() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()

    def shares(**sampling: float) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        draws = [SamplingParams(**sampling).draw(logits, generator) for _ in range(DRAWS)]  # type: ignore[arg-type]
        return torch.tensor(draws).bincount(minlength=4) / DRAWS

    error = 4 * 0.5 / DRAWS**0.5  # four standard deviations of a share
    assert (shares(temperature=1) - torch.tensor([0.5, 0.3, 0.15, 0.05])).abs().max() < error
    assert (shares(temperature=1, top_p=0.7) - torch.tensor([0.625, 0.375, 0, 0])).abs().max() < error
    squared = torch.tensor([0.25, 0.09, 0.0225, 0.0025])
    assert (shares(temperature=0.5) - squared / squared.sum()).abs().max() < error
    assert shares(temperature=1, top_p=0.01).tolist() == shares(temperature=0).tolist() == [1, 0, 0, 0]


def test_prompts_in_a_batch_are_independent() -> None:
    module, sampling = build_plain(MODELS[0]), SamplingParams(seed=5)
    both = generate_tokens(module, [PROMPTS[0], PROMPTS[2]], sampling=sampling)
    assert generate_tokens(module, [PROMPTS[0]], sampling=sampling) == both[:1]
    assert generate_tokens(module, [PROMPTS[2]], sampling=SamplingParams(seed=6)) == both[1:]


def test_streamed_text_comes_in_complete_characters() -> None:
    model = MODELS[0].replace(vocab=300)
    module, heard = build_plain(model), {0: "", 1: ""}

    def on_text(number: int, piece: str) -> None:
        heard[number] += piece

    result = generate_samples(
        module,
        ByteTokenizer(),
        ["é", ""],
        tokens=30,
        window=64,
        sampling=SamplingParams(temperature=2, seed=3),
        on_text=on_text,
    )
    assert [one.text for one in result] == list(heard.values())
    assert max(one.tokens for one in result) <= 30
    text = sample(module, ByteTokenizer(), prompt="def ", tokens=12, window=8, seed=0)
    assert text.startswith("def ")
    assert len(text) > 4


def test_a_source_without_weights_or_tokenizer_is_rejected(tmp_path: Path, forked) -> None:
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        WeightSource.find(tmp_path)
    forked(1, save, tmp_path, MODELS[0], Layout.parse("dp1 mbs1"))
    source = WeightSource.find(tmp_path)
    with pytest.raises(UserError, match=r"data holds no tokenizer.json; name one with --tokenizer"):
        source.tokenizer()
    with pytest.raises(UserError, match=r"bytes has 256 tokens, but grouped only vocab=131"):
        source.tokenizer(Path("bytes"))
