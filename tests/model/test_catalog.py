"""The catalog's counts against published ones, and every way a user may name a model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from fivefold.errors import UsageWarning, UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine import catalog as machines
from fivefold.model.catalog import build_model, find_repository, list_names, locate_model, resolve
from fivefold.model.huggingface.families import FAMILIES, WRAPPERS
from fivefold.model.huggingface.write import find_difference
from fivefold.model.published import CATALOG
from fivefold.planner.predict import predict
from tests.selection import mark_share

# Exact where the publisher's files give the weights (Hugging Face's safetensors metadata or the model card).
# DeepSeek-V3's 671 026 419 200 there hold 58 balancing biases of 256, which are no trained weights; so do GLM-4.5's.
# Gemma 3's 12B and 27B, whose files hold a vision tower too: n_params of the text model in llama.cpp.
PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2-7b": 7_615_616_512,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma2-9b": 9_241_705_984,
    "phi3-mini": 3_821_079_552,
    "gpt2": 124_439_808,
    "gpt-neox-20b": 20_554_567_680,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200 - 58 * 256,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    "gemma3-12b": 11_766_034_176,
    "gemma3-27b": 27_009_346_304,
    "olmo2-1b": 1_484_916_736,
    "olmo2-13b": 13_716_198_400,
    "codellama-7b": 6_738_546_688,
    "codellama-13b": 13_016_028_160,
    "codellama-34b": 33_743_970_304,
    "mistral-small-24b": 23_572_403_200,
    "lfm2-350m": 354_483_968,
    "lfm2-700m": 742_489_344,
    "qwen3-coder-480b-a35b": 480_154_875_392,
    "glm4.5-air": 106_852_251_264 - 45 * 128,
    "glm4.5": 352_797_829_024 - 89 * 160,
    "seed-oss-36b": 36_151_104_512,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "tinyllama-1.1b": 1_100_048_384,
    "yi-6b": 6_061_035_520,
    "yi-1.5-9b": 8_829_407_232,
    "yi-34b": 34_388_917_248,
    "deepseek-llm-7b": 6_910_365_696,
    "deepseek-coder-6.7b": 6_740_512_768,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-large-123b": 122_610_069_504,
    "mixtral-8x22b": 140_620_634_112,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma2-2b": 2_614_341_888,
    "gemma2-27b": 27_227_128_320,
    "phi2": 2_779_683_840,
    "phi4": 14_659_507_200,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "pythia-1.4b": 1_414_647_808,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-j-6b": 6_050_882_784,
    "bloom-7b1": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "mpt-7b": 6_649_286_656,
    "opt-1.3b": 1_315_758_080,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "olmo3-7b": 7_298_011_136,
    "olmo3-32b": 32_233_522_176,
    "olmoe-1b-7b": 6_919_161_856,
    "apertus-8b": 8_053_338_176,
    "command-r-35b": 34_980_831_232,
    "command-a-111b": 111_057_580_032,
    "dbrx-132b": 131_596_523_520,
    "glm4-9b": 9_400_279_040,
    "hunyuan-a13b": 80_393_183_232,
    "qwen3-coder-30b-a3b": 30_532_122_624,
    "qwen2.5-math-1.5b": 1_777_088_000,
    "qwen2.5-math-7b": 7_615_616_512,
    "minimax-text-01": 456_089_655_296,
    "starcoder2-3b": 3_030_371_328,  # TransformerLensOrg/TransformerLens@4cd36aa, architecture_gaps.json
    "nanochat-d20": 560_988_160,  # model card of sdobson/nanochat
    "nanochat-d32": 1_879_048_192,  # karpathy/nanochat, discussion 8
    "recurrentgemma-2b": 2_682_862_080,  # as starcoder2-3b's
    "stablelm-3b": 2_795_443_200,  # Stability-AI/StableLM@93eea08:README.md
    "aya-expanse-8b": 8_028_033_024,  # floschne/gimmick@be2d16b:src/gimmick/models/__init__.py
}

# By memory, so not published: no source that can be named gives them. Public files whose repository is not known have
# the same numbers, except where a comment says that none was found.
RECALLED = {
    "starcoder2-7b": 7_173_923_840,  # none found
    "starcoder2-15b": 15_957_889_024,  # none found
    "starcoder-15b": 15_517_456_384,
    "codellama-70b": 68_976_910_336,  # none found
    "smollm-135m": 134_515_008,
    "smollm-360m": 361_821_120,
    "smollm-1.7b": 1_711_376_384,
    "mamba-2.8b": 2_768_345_600,
    "phi4-mini": 3_836_021_760,
    "command-r-plus-104b": 103_810_674_688,  # none found
    "codestral-22b": 22_247_282_688,
    "solar-10.7b": 10_731_524_096,
    "deepseek-coder-33b": 33_342_991_360,
    "granite4.0-h-small": 32_207_337_984,
    "aya-expanse-32b": 32_296_476_672,  # 32.296 billion in open-llm-leaderboard/requests
    "chatglm3-6b": 6_243_584_000,
}

# With the vision tower and its projector, by the safetensors metadata of the repository.
WITH_TOWERS = {
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen3-vl-4b": 4_437_815_808,
    "qwen3-vl-8b": 8_767_123_696,
    "qwen3-vl-32b": 33_357_390_064,
    "qwen3-vl-30b-a3b": 31_070_754_032,
    "qwen3-vl-235b-a22b": 235_670_022_896,
    "gemma3-4b": 4_300_079_472,
    "gemma3-12b": 12_187_325_040,
    "gemma3-27b": 27_432_406_640,
    "mistral-small-3.1-24b": 24_011_361_280,  # keras-team/keras-hub@961f8f7, mistral3_presets.py
}

# (total, active) in billions, as named in the papers and model cards, to the digits given there.
ROUNDED = {
    "gpt3-175b": (174.6, 174.6),
    "nemotron4-15b": (15.6, 15.6),
    "nemotron4-340b": (341.0, 341.0),
    "olmo2-7b": (7.3, 7.3),
    "olmo2-32b": (32.2, 32.2),
    "gemma3-4b": (3.88, 3.88),
    "mixtral-8x7b": (46.7, 12.9),
    "qwen3-30b-a3b": (30.5, 3.35),
    "qwen3-235b-a22b": (235, 22),
    "deepseek-v2": (236, 21),
    "deepseek-v3": (671, 37.5),
    "kimi-k2": (1026, 33),
    "a.x-k1-519b": (519, 33),
    "qwen1.5-moe-14b-a2.7b": (14.3, 2.7),
    "gpt-oss-120b": (116.8, 5.7),
    "qwen3-coder-480b-a35b": (480, 35),
    "llama4-scout": (107.8, 17.2),  # the text model of 109 billion parameters
    "mistral-small-4": (119, 6.6),
    "hy3-295b-a21b": (295, 21),
    "mellum2-12b-a2.5b": (12.15, 2.44),
    "deepseek-llm-67b": (67.4, 67.4),
    "falcon-180b": (178.6, 178.6),
    "mpt-30b": (29.96, 29.96),
    "opt-66b": (65.7, 65.7),
    "opt-175b": (174.6, 174.6),
    "granite3.3-8b": (8.17, 8.17),
    "apertus-70b": (70.6, 70.6),
    "glm4-32b": (32.57, 32.57),
    "llama4-maverick": (400.7, 17.2),  # the text model of 402 billion parameters
    "mixtral-8x22b": (140.6, 39.1),
    "dbrx-132b": (131.6, 36.5),
    "olmoe-1b-7b": (6.92, 1.28),
    "hunyuan-a13b": (80.4, 12.75),  # 13 billion in its report
    "minimax-text-01": (456, 48.4),  # 45.9 in arXiv:2501.08313, without 2.46 of embedding and head
    # As llama.cpp counts them, without vision tower and multi-token prediction
    "qwen3.5-0.8b": (0.75239, 0.75239),
    "qwen3.5-4b": (4.21, 4.21),
    "qwen3.5-9b": (8.95, 8.95),
    "qwen3.5-27b": (26.90, 26.90),
    "qwen3.5-35b-a3b": (34.66, 3.45),
    "qwen3.5-122b-a10b": (122.11, 9.8),
    "kimi-k2.5": (1026, 33),
    "moonlight-16b-a3b": (15.29 + 0.67, 2.24 + 0.67),  # its model card, and embedding and head
    "nemotron-nano-9b-v2": (8.89, 8.89),
    "nemotron-nano-12b-v2": (12.31, 12.31),
    "nemotron-h-8b": (8.1, 8.1),
    "nemotron-h-56b": (56.3, 56.3),
    "nemotron3-super-120b-a12b": (120.6, 12.7),  # its report
    "nemotron3-ultra-550b-a55b": (550, 55),  # in its name
    "granite4.0-h-tiny": (6.94, 1.465),
    "granite4.0-h-small": (32.2, 8.8),
    "gemma4-26b-a4b": (25.2, 3.8),
    "gemma4-31b": (30.7, 30.7),
    "recurrentgemma-9b": (8.6, 8.6),
    "cerebras-gpt-6.7b": (6.66, 6.66),
    "cerebras-gpt-13b": (12.85, 12.85),
    "mamba2-2.7b": (2.7, 2.7),
    "internlm2-7b": (7.74, 7.74),
    "internlm2-20b": (19.86, 19.86),
    "falcon3-1b": (1.67, 1.67),
    "falcon3-3b": (3.23, 3.23),
    "falcon3-7b": (7.46, 7.46),
    "falcon3-10b": (10.3, 10.3),
    "exaone4-32b": (32.0, 32.0),
    "jamba-1.5-large": (398, 94),
    "qwen2-57b-a14b": (57.4, 14.2),
    "minicpm3-4b": (4.07, 4.07),
    "longcat-flash-560b-a27b": (560, 27.95),  # on average 27 of its 18.6 to 31.3, as some of its 12 experts are none
    "dots1": (142.5, 14.0),  # 142 is cut, not rounded: the middle of 142 to 143
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_catalog_models_have_the_published_parameters(name: str) -> None:
    assert build_model(name).parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", RECALLED)
def test_catalog_models_have_the_recalled_parameters(name: str) -> None:
    assert build_model(name).parameters == RECALLED[name]


@pytest.mark.parametrize("name", WITH_TOWERS)
def test_catalog_models_with_vision_towers_have_the_published_parameters(name: str) -> None:
    model, layout = build_model(name), Layout.parse("dp8 zero3 mbs1 ac=full")
    assert model.vision is not None
    job = Job(sequence=4096, global_batch=8, images=1, image_tokens=None if model.vision.patches else 1024)
    step = predict(model=model, machine=machines.resolve("h100:8", local=Path("/nowhere")), layout=layout, job=job)
    assert step.work.parameters == WITH_TOWERS[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_catalog_models_have_about_the_published_total_and_active_parameters(name: str) -> None:
    total, active = ROUNDED[name]
    assert build_model(name).parameters / 1e9 == pytest.approx(total, rel=0.005)
    assert build_model(name).active_parameters / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(
    ("name", "encoders", "published"),
    [("gemma4-e2b", 0.15 + 0.3, 5.1), ("gemma4-e4b", 0.15 + 0.3, 8.0), ("gemma3n-e4b", 0.30 + 0.68, 7.85)],
)
def test_models_for_devices_have_the_published_size_with_their_encoders_of_images_and_sound(
    name: str, encoders: float, published: float
) -> None:
    model = build_model(name)
    shared = 2 * model.kv_heads * model.head_dim * model.width * model.shared_kv_layers  # unused, and in the files
    assert (model.parameters + shared) / 1e9 + encoders == pytest.approx(published, abs=0.06)


def test_deepseek_v3_with_its_module_of_multi_token_prediction() -> None:
    """671B, and 11.5B of the module; 685B with its copies of embedding and head, 0.9B each (the README_WEIGHTS.md and
    the model card of deepseek-ai/DeepSeek-V3). Active per token: 2.4B more, of which the output projection is shared.
    """
    plain, whole = build_model("deepseek-v3"), build_model("deepseek-v3-mtp")
    more = whole.parameters - plain.parameters
    assert more / 1e9 == pytest.approx(11.5, abs=0.15)
    assert (whole.parameters + 2 * whole.vocab * whole.width) / 1e9 == pytest.approx(685, abs=0.6)
    active = whole.active_parameters - plain.active_parameters
    assert (active + 2 * whole.vocab * whole.width) / 1e9 == pytest.approx(2.4, abs=0.15)


@pytest.mark.parametrize("name", mark_share(5, list_names()))
def test_every_model_is_predicted(name: str) -> None:
    model, layout = build_model(name), Layout.parse("dp8 zero3 mbs1 ac=full")
    job = Job(sequence=min(2048, model.positions), global_batch=64)
    step = predict(model=model, machine=machines.resolve("h100:8", local=Path("/nowhere")), layout=layout, job=job)
    assert step.work.parameters == model.parameters
    assert 0 < step.mfu.causal < 0.9


def test_every_name_builds_with_its_source() -> None:
    assert len(list_names()) >= 70
    for name in list_names():
        model = build_model(name)
        assert model.name == name
        assert model.source


def test_a_source_contains_the_repository_and_where_else_its_keys_are_written() -> None:
    assert build_model("lfm2-700m").source == "Hugging Face config.json of LiquidAI/LFM2-700M"
    assert build_model("olmo2-1b").source == (
        "Hugging Face config.json of allenai/OLMo-2-0425-1B; as written in "
        "allenai/OLMo@59a53e3:configs/official-0425/OLMo2-1B-stage1.yaml"
    )


def test_nano_and_tiny_have_their_stated_sizes() -> None:
    assert (build_model("nano").parameters, build_model("nano").head_dim, build_model("nano").vocab) == (
        125_248,
        16,
        256,
    )
    assert (build_model("tiny").parameters, build_model("tiny").head_dim, build_model("tiny").vocab) == (
        4_852_992,
        32,
        256,
    )


def test_resolve_reads_a_hugging_face_config(tmp_path: Path) -> None:
    folder = tmp_path / "my-qwen"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CATALOG["qwen3-0.6b"].config))
    for text in (str(folder), str(folder / "config.json")):
        assert resolve(text).name == "my-qwen"
        assert resolve(text).parameters == build_model("qwen3-0.6b").parameters


def test_resolve_reads_our_own_fields(tmp_path: Path) -> None:
    fields = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 176, "vocab": 256}
    toml = tmp_path / "small.toml"
    toml.write_text("\n".join(f"{key} = {value}" for key, value in fields.items()))
    dumped = tmp_path / "dumped.json"
    dumped.write_text(build_model("deepseek-v3").model_dump_json())
    assert resolve(str(toml)).name == "small"
    assert resolve(str(toml)).parameters == build_model("nano").parameters
    assert resolve(str(dumped)) == build_model("deepseek-v3")


def test_resolve_prefers_the_catalog() -> None:
    assert resolve("gpt2") == build_model("gpt2")


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("a.json", None, "no such file"),
        ("a.json", "{", "not valid JSON"),
        ("a.json", "[1]", "holds a list"),
        ("a.toml", "layers = ", "not valid TOML"),
        (
            "a.json",
            build_model("nano").model_dump_json()[:-1] + ', "width_": 3}',
            "unknown key 'width_'; did you mean 'width'?",
        ),
        ("a.toml", "layers = 2", "width"),
        ("a.json", '{"model_type": "llama", "hidden_size": "wide"}', "a: hidden_size must be"),
        (
            "a.json",
            '{"architectures": ["Zamba2ForCausalLM"]}',
            "architecture 'Zamba2ForCausalLM' is not supported: its state-space layers",
        ),
        (
            "a.json",
            '{"model_type": "olmo9"}',
            f"architecture 'olmo9' is not one of the {len(FAMILIES) + len(WRAPPERS)} supported ones; "
            "did you mean olmo? `fivefold models --families` lists all; or describe the model as in "
            "examples/models/mixture.toml",
        ),
        (
            "a.json",
            '{"architectures": ["FoobarForCausalLM"]}',
            "architecture 'FoobarForCausalLM' is not one of the "
            f"{len(FAMILIES) + len(WRAPPERS)} supported ones; `fivefold models --families` lists all",
        ),
        ("a.yaml", "layers: 2", "a model file ends in .json or .toml"),
        ("folder/", None, "no such file"),
    ],
)
def test_unreadable_model_files_are_one_line_errors(tmp_path: Path, file: str, text: str | None, says: str) -> None:
    path = tmp_path / file
    if file.endswith("/"):
        path.mkdir()
    elif text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as refusal:
        resolve(str(path))
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lama3-8b", "unknown model 'lama3-8b'; did you mean llama3-8b"),
        ("Qwen3-9B", "did you mean"),
        ("Mixtral", "did you mean mixtral-8x7b or mixtral-8x22b?"),
        ("glm", "did you mean glm4.5, glm4-9b or glm4-32b?"),
        ("deepseek-r1-distill-llama", "mean deepseek-r1-distill-llama-8b or deepseek-r1-distill-llama-70b?"),
        ("llama3", "llama3.3-70b or 4 others?"),
        ("vicuna-14b", "did you mean vicuna-13b-v1.5 or vicuna-7b-v1.5?"),
        ("baichuan2-13b", "`fivefold models` lists all; or name the folder of its config.json"),
        ("zzz", "unknown model 'zzz'; `fivefold models` lists all"),
        ("", "unknown model ''"),
    ],
)
def test_an_unknown_model_name_is_a_one_line_error(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refusal:
        resolve(text)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("beginning", "name"),
    [
        ("smollm3", "smollm3-3b"), ("tinyllama", "tinyllama-1.1b"), ("gpt3", "gpt3-175b"), ("GPT-3", "gpt3-175b"),
        ("nemotron-3-nano", "nemotron3-nano-30b-a3b"), ("kimi-linear-48b", "kimi-linear-48b-a3b"),
        ("ernie-4.5-21b", "ernie4.5-21b-a3b"), ("command-a", "command-a-111b"),
        ("mimo-v2-flash", "mimo-v2-flash-309b-a15b"), ("qwen3-coder-480b", "qwen3-coder-480b-a35b"),
        ("vicuna-13b", "vicuna-13b-v1.5"), ("Kimi Linear", "kimi-linear-48b-a3b"),
    ],
)  # fmt: skip
def test_the_beginning_of_one_name_is_that_model(beginning: str, name: str) -> None:
    with pytest.warns(UsageWarning, match=f"^'{beginning}' is taken as {name}, the only model whose name begins so$"):
        assert resolve(beginning) == resolve(name)


def test_the_beginning_of_names_of_one_size_is_the_first_of_them() -> None:
    says = r"'qwen3-235b' is taken as qwen3-235b-a22b \(qwen3-235b-a22b-2507 has the same size\)"
    with pytest.warns(UsageWarning, match=says):
        assert resolve("qwen3-235b") == build_model("qwen3-235b-a22b")
    says = r"'minimax-m1' is taken as minimax-m1-80k \(minimax-m1-40k has the same size\)"
    with pytest.warns(UsageWarning, match=says):
        assert resolve("minimax-m1") == resolve("minimax-m1-80k")


# Names of repositories on the Hugging Face hub, each with the catalog's model of its generation, or None: unknown.
REPOSITORIES = """
    meta-llama/Llama-2-7b-hf llama2-7b
    NousResearch/Llama-2-7b-chat-hf llama2-7b
    meta-llama/Meta-Llama-3-8B llama3-8b
    meta-llama/Meta-Llama-3-8B-Instruct llama3-8b
    meta-llama/Meta-Llama-3-70B-Instruct llama3-70b
    meta-llama/Llama-3.1-8B llama3.1-8b
    meta-llama/Meta-Llama-3.1-8B llama3.1-8b
    NousResearch/Meta-Llama-3.1-8B-Instruct llama3.1-8b
    meta-llama/Llama-3.1-8B-Instruct llama3.1-8b
    meta-llama/Llama-3.1-70B-Instruct llama3.1-70b
    meta-llama/Llama-3.1-405B llama3-405b
    meta-llama/Llama-3.1-405B-Instruct llama3-405b
    meta-llama/Llama-3.2-1B-Instruct llama3.2-1b
    meta-llama/Llama-3.2-3B llama3.2-3b
    meta-llama/Llama-3.3-70B-Instruct llama3.3-70b
    meta-llama/Llama-4-Maverick-17B-128E llama4-maverick
    Qwen/Qwen1.5-7B None
    Qwen/Qwen2-7B qwen2-7b
    Qwen/Qwen2-7B-Instruct qwen2-7b
    Qwen/Qwen2-0.5B None
    Qwen/Qwen2.5-0.5B-Instruct qwen2.5-0.5b
    Qwen/Qwen2.5-7B qwen2.5-7b
    Qwen/Qwen2.5-7B-Instruct qwen2.5-7b
    Qwen/Qwen2.5-Coder-7B-Instruct qwen2.5-7b
    Qwen/Qwen2.5-Math-7B qwen2.5-math-7b
    Qwen/Qwen2.5-32B-Instruct qwen2.5-32b
    Qwen/Qwen2.5-VL-7B-Instruct qwen2.5-vl-7b
    Qwen/Qwen3-4B qwen3-4b
    Qwen/Qwen3-4B-Instruct-2507 qwen3-4b-2507
    Qwen/Qwen3-4B-Thinking-2507 qwen3-4b-2507
    Qwen/Qwen3-8B qwen3-8b
    Qwen/Qwen3-8B-Base qwen3-8b
    Qwen/Qwen3-30B-A3B qwen3-30b-a3b
    Qwen/Qwen3-30B-A3B-Instruct-2507 qwen3-30b-a3b-2507
    Qwen/Qwen3-Coder-30B-A3B-Instruct qwen3-coder-30b-a3b
    Qwen/Qwen3-235B-A22B-Thinking-2507 qwen3-235b-a22b-2507
    Qwen/Qwen3-VL-8B-Thinking qwen3-vl-8b
    Qwen/Qwen3-Next-80B-A3B-Thinking qwen3-next-80b-a3b
    mistralai/Mistral-7B-v0.1 mistral-7b
    mistralai/Mistral-7B-v0.3 mistral-7b-v0.3
    mistralai/Mistral-7B-Instruct-v0.2 None
    mistralai/Mistral-Nemo-Base-2407 mistral-nemo-12b
    mistralai/Mistral-Small-24B-Instruct-2501 mistral-small-24b
    mistralai/Mistral-Small-3.1-24B-Base-2503 mistral-small-3.1-24b
    mistralai/Mixtral-8x7B-v0.1 mixtral-8x7b
    mistralai/Mixtral-8x22B-v0.1 mixtral-8x22b
    google/gemma-7b gemma-7b
    google/gemma-2-9b-it gemma2-9b
    google/gemma-2-27b gemma2-27b
    google/gemma-3-4b-it gemma3-4b
    google/gemma-3-27b-it gemma3-27b
    google/gemma-3n-E4B None
    deepseek-ai/deepseek-moe-16b-base None
    deepseek-ai/DeepSeek-V2-Chat deepseek-v2
    deepseek-ai/DeepSeek-V2-Lite deepseek-v2-lite
    deepseek-ai/DeepSeek-V2.5 None
    deepseek-ai/DeepSeek-Coder-V2-Lite-Base None
    deepseek-ai/DeepSeek-V3 deepseek-v3
    deepseek-ai/DeepSeek-V3-Base deepseek-v3
    deepseek-ai/DeepSeek-R1-Distill-Llama-8B llama3.1-8b
    deepseek-ai/DeepSeek-R1-Distill-Qwen-7B qwen2.5-math-7b
    deepseek-ai/DeepSeek-V3.2-Exp deepseek-v3.2
    microsoft/phi-2 phi2
    microsoft/Phi-3-mini-4k-instruct phi3-mini
    microsoft/Phi-3-mini-128k-instruct None
    microsoft/Phi-3.5-mini-instruct None
    microsoft/phi-4 phi4
    moonshotai/Kimi-K2-Instruct kimi-k2
    moonshotai/Kimi-K2-Thinking kimi-k2.5
    moonshotai/Kimi-K2-Instruct-0905 None
    zai-org/GLM-4.5-Air glm4.5-air
    zai-org/GLM-4.6 glm4.5
    allenai/OLMo-2-1124-7B-Instruct olmo2-7b
    allenai/OLMo-7B None
    openai/gpt-oss-20b gpt-oss-20b
    HuggingFaceTB/SmolLM3-3B smollm3-3b
    HuggingFaceTB/SmolLM2-1.7B smollm2-1.7b
"""


@pytest.mark.parametrize("line", REPOSITORIES.strip().splitlines(), ids=lambda line: line.split()[0])
def test_a_repository_is_never_read_as_another_generation(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    repository, name = line.split()
    if name == "None":
        with pytest.raises(UserError, match="unknown model"):
            resolve(repository)
        return
    named, published = resolve(repository), build_model(name)
    assert named.replace(repository="", name=name, positions=published.positions) == published
    assert (named.repository or CATALOG[name].repository or "").lower() == repository.lower()
    assert locate_model(repository, named_in=tmp_path / "run.toml") == repository


@pytest.mark.parametrize(
    ("spoken", "name"),
    [
        ("Llama 3 8B", "llama3-8b"), ("gemma 3 27b", "gemma3-27b"), ("GPT-3 175B", "gpt3-175b"), ("glm 4.5", "glm4.5"),
        ("Llama 3.1 8B", "llama3.1-8b"), ("Llama 3.1 405B", "llama-3.1-405b"),
        ("Llama 3.1 405B Instruct", "llama-3.1-405b-instruct"), ("Qwen 2.5 7B Instruct", "qwen2.5-7b-instruct"),
        ("Meta Llama 3 8B", "meta-llama-3-8b"), ("DeepSeek R1", "deepseek-r1"),
    ],
)  # fmt: skip
def test_a_model_may_be_named_with_spaces(spoken: str, name: str) -> None:
    assert resolve(spoken) == resolve(name)


@pytest.mark.parametrize(
    ("spelled", "name", "repository"),
    [
        ("llama-3.1-8b", "llama3.1-8b", ""),
        ("llama3.1-405b", "llama3-405b", ""),
        ("llama3.1-8b-instruct", "llama3.1-8b", "meta-llama/Llama-3.1-8B-Instruct"),
        ("llama-3.3-70b-instruct", "llama3.3-70b", ""),
        ("qwen2.5-7b-instruct", "qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct"),
        ("gemma-2-9b", "gemma2-9b", ""),
        ("deepseek-ai/DeepSeek-R1", "deepseek-r1", "deepseek-ai/DeepSeek-R1"),
        ("deepseek-v3.1", "deepseek-v3.1", ""),
    ],
)
def test_a_version_in_a_model_name_is_kept(spelled: str, name: str, repository: str) -> None:
    model = resolve(spelled)
    assert (model.name, model.repository) == (name, repository)


@pytest.mark.parametrize(
    ("repository", "name", "quantization"),
    [
        ("unsloth/Meta-Llama-3.1-8B-bnb-4bit", "llama3.1-8b", "nf4"),
        ("unsloth/Llama-3.2-3B-Instruct-unsloth-bnb-4bit", "llama3.2-3b", "nf4"),
        ("unsloth/DeepSeek-R1-Distill-Llama-8B-bnb-4bit", "deepseek-r1-distill-llama-8b", "nf4"),
        ("hugging-quants/Meta-Llama-3.1-405B-BNB-NF4-BF16", "llama3-405b", "nf4"),
        ("Qwen/Qwen3-8B-FP8", "qwen3-8b", "fp8"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "qwen2.5-7b", "gptq"),
        ("TheBloke/Llama-2-7B-GPTQ", "llama2-7b", "gptq"),
        ("nvidia/Qwen3-30B-A3B-NVFP4", "qwen3-30b-a3b", "nvfp4"),
    ],
)
def test_a_quantized_repository_is_read_as_its_model_and_its_quantization(
    repository: str, name: str, quantization: str
) -> None:
    model = resolve(repository)
    assert (model.name, model.repository, model.quantization) == (name, repository, quantization)
    assert model.replace(repository="", quantization="") == resolve(name).replace(repository="")
    assert find_difference(model, resolve(name)) is None
    with pytest.raises(UserError, match="unknown model"):
        resolve("foo/bar-bnb-4bit")


def test_glm_5_has_the_rotary_base_of_its_config_json() -> None:
    assert build_model("glm5-744b-a40b").rope_theta == resolve("glm-5.1").rope_theta == 1e6


def test_exaone_4_has_the_rotary_scaling_of_its_config_json() -> None:
    assert CATALOG["exaone4-32b"].config["rope_scaling"]["factor"] == 16.0


def test_llama_31_reads_more_tokens_than_llama_3() -> None:
    config = transformers.LlamaConfig.from_dict(CATALOG["llama3.1-8b"].config)
    assert config.max_position_embeddings == 131_072
    for name, positions, kind in (("llama3-8b", 8192, None), ("llama3.1-8b", 131_072, "llama3")):
        model = build_model(name)
        assert model.positions == positions
        assert (model.rope_scaling and model.rope_scaling.kind) == kind
    assert build_model("llama3.1-8b").parameters == build_model("llama3-8b").parameters == 8_030_261_248


def test_the_repository_name_of_every_entry_contains_its_sizes() -> None:
    repositories = {name: entry.repository for name, entry in CATALOG.items() if entry.repository}
    assert len(repositories) > 40
    named = {name: find_repository(repository) for name, repository in repositories.items()}
    assert {name: other for name, other in named.items() if other != name} == {"deepseek-v3-mtp": "deepseek-v3"}
    assert find_repository("someone/tiny") is None


@pytest.mark.parametrize("rest", ["", "/", "/blob/main/config.json", "/resolve/main/config.json"])
def test_the_address_of_a_repository_is_its_name(rest: str) -> None:
    assert resolve(f"https://huggingface.co/Qwen/Qwen3-8B{rest}") == resolve("Qwen/Qwen3-8B")


def test_a_folder_comes_before_a_repository_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "Qwen" / "Qwen3-8B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CATALOG["nano"].config))
    assert resolve("Qwen/Qwen3-8B").layers == build_model("nano").layers


@pytest.mark.parametrize(
    ("repository", "similar"),
    [
        ("mistralai/Mistral-7B-v0.4", "(similar: mistral-7b"),
        ("meta-llama/Llama-3.3-8B", "(similar: llama3"),
        ("foo/bar", "catalog, and Fivefold downloads nothing."),
    ],
)
def test_an_unknown_repository_says_how_to_give_its_config(
    repository: str, similar: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refusal:
        resolve(repository)
    assert similar in str(refusal.value)
    assert f"`hf download {repository} config.json --local-dir DIR` and name DIR/config.json" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_the_catalog_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from fivefold.model.catalog import resolve; resolve('llama3-8b').parameters; print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "numpy"} & set(loaded)
