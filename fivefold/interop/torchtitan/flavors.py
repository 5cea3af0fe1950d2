"""torchtitan's models by family and flavor, as our records.

Sources: torchtitan 0.2.2 and 0.3.0 torchtitan/models/llama3/__init__.py, qwen3, deepseek_v3 and gpt_oss next to it.
"""

from __future__ import annotations

from functools import cache

from fivefold.errors import UserError
from fivefold.model.catalog import build_model
from fivefold.model.experts import MoE
from fivefold.model.huggingface.write import find_difference
from fivefold.model.latent_attention import MLA
from fivefold.model.rope import RopeScaling
from fivefold.model.spec import Model
from fivefold.spelling import make_unknown_name_error

LLAMA: dict[str, tuple[int, int, int, int, int, int, bool]] = {  # layers, width, heads, kv heads, ffn, vocab, tied
    "debugmodel": (6, 256, 16, 16, 768, 2048, False),
    "1B": (16, 2048, 32, 8, 8192, 128_256, True),
    "3B": (28, 3072, 24, 8, 8192, 128_256, True),
    "8B": (32, 4096, 32, 8, 14_336, 128_256, False),
    "70B": (80, 8192, 64, 8, 28_672, 128_256, False),
    "405B": (126, 16_384, 128, 8, 53_248, 128_256, False),
}
QWEN = ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B")
DEEPSEEK = {"16B": "deepseek-v2-lite", "236B": "deepseek-v2", "671B": "deepseek-v3"}
GPT_OSS = {"20b": "gpt-oss-20b", "120b": "gpt-oss-120b"}
MODULES = ("llama3", "qwen3", "deepseek_v3", "gpt_oss")

SCALED = RopeScaling(
    kind="llama3", factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=8192
)


def build_llama(name: str, sizes: tuple[int, int, int, int, int, int, bool]) -> Model:
    """Build a model of torchtitan's llama3: RMSNorm, SwiGLU, rotary positions scaled as in Llama 3.1."""
    layers, width, heads, kv_heads, ffn, vocab, tied = sizes
    return Model(
        name=name,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width // heads,
        ffn=ffn,
        vocab=vocab,
        tied_embeddings=tied,
        rope_theta=500_000.0,
        rope_scaling=SCALED,
        positions=131_072,
    )


def _build_deepseek_debug() -> Model:
    """Return torchtitan's small DeepSeek-V3 of its debug configs."""
    return Model(
        name="deepseek-v3-debug",
        layers=6,
        width=256,
        heads=16,
        kv_heads=16,
        head_dim=192,
        ffn=1024,
        vocab=2048,
        mla=MLA(q_rank=None, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
        moe=MoE(experts=8, topk=3, ffn=256, shared_experts=2, dense_layers=1, balance="free", normalized=False),
    )


def _build_qwen_debug(*, experts: bool) -> Model:
    """Build torchtitan's debug model of Qwen3, dense or with experts."""
    moe = MoE(experts=64, topk=8, ffn=768, balance="free") if experts else None
    return Model(
        name="qwen3-debug",
        layers=8,
        width=256,
        heads=16,
        kv_heads=8,
        head_dim=128,
        ffn=3072,
        vocab=2048,
        qk_norm="head",
        rope_theta=1e6,
        norm_epsilon=1e-6,
        tied_embeddings=not experts,
        moe=moe,
    )


@cache
def list_flavors(family: str) -> dict[str, Model]:
    """Return the models of a family by flavor."""
    if family == "llama3":
        return {flavor: build_llama(f"llama3-{flavor.lower()}", sizes) for flavor, sizes in LLAMA.items()}
    if family == "qwen3":
        sizes = {flavor: _balance_by_bias(build_model(f"qwen3-{flavor.lower()}")) for flavor in QWEN}
        return sizes | {
            "debugmodel": _build_qwen_debug(experts=False),
            "debugmodel_moe": _build_qwen_debug(experts=True),
        }
    if family == "deepseek_v3":
        return {"debugmodel": _build_deepseek_debug()} | {
            key: _balance_by_bias(build_model(name)) for key, name in DEEPSEEK.items()
        }
    if family == "gpt_oss":
        return {key: _balance_by_bias(build_model(name)) for key, name in GPT_OSS.items()}
    raise UserError(f"unknown model of torchtitan {family!r}; known: {', '.join(MODULES)}; or add --model NAME")


def _balance_by_bias(model: Model) -> Model:
    """Return the model with experts balanced by router biases, without an auxiliary loss (``load_balance_coeff``)."""
    return model.replace(moe=model.moe.replace(balance="free")) if model.moe else model


def resolve_flavor(family: str, flavor: str) -> Model:
    """Return the model of a flavor; raise ``UserError`` if torchtitan has none of that name."""
    known = list_flavors(family)
    base = flavor
    for suffix in ("_flex_attn", "_varlen_attn", "_flex", "_varlen", "_non_fused_qkv"):  # kernels, not sizes
        base = base.removesuffix(suffix)
    if base not in known:
        message = str(make_unknown_name_error(flavor, list(known), kind=f"flavor of torchtitan's {family}")).rstrip("?")
        raise UserError(f"{message}; or add --model NAME")
    return known[base]


def find_flavor(model: Model) -> tuple[str, str] | None:
    """Return family and flavor of ``model``.

    The scaling of positions and an auxiliary loss of experts may differ.
    """
    for family in MODULES:
        for flavor, known in list_flavors(family).items():
            if (known.layers, known.width, known.vocab) != (model.layers, model.width, model.vocab):
                continue
            adapted = _balance_by_bias(model).replace(rope_scaling=known.rope_scaling, norm_epsilon=known.norm_epsilon)
            if find_difference(adapted, known) is None:
                return family, flavor
    return None


def find_nearest_flavor(model: Model) -> str:
    """Return the flavor whose number of parameters is nearest."""
    candidates = [(family, flavor, known) for family in MODULES for flavor, known in list_flavors(family).items()]
    family, flavor, known = min(candidates, key=lambda candidate: abs(candidate[2].parameters / model.parameters - 1))
    return f"{family} {flavor} ({known.parameters / 1e9:.3g} B parameters)"


def make_unknown_error(model: Model) -> UserError:
    """Return the error that no flavor is the model."""
    return UserError(
        f"model {model.name!r}: it is not a flavor of torchtitan; the nearest is {find_nearest_flavor(model)}; a dense "
        "Llama of any size is written by --to torchtitan (its Python config)"
    )
