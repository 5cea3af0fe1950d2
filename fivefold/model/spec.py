"""The model as a record: every fact about its shape that planning or training needs, and nothing else.

Letters (``docs/notation.md``): L ``layers``, D ``width``, F ``ffn``, N ``heads``, K ``kv_heads``,
H ``head_dim``, V ``vocab``, E ``moe.experts``.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from fivefold.record import Record


class MLA(Record):
    """Multi-head latent attention (DeepSeek-V2): low-rank queries and a compressed key/value latent."""

    q_rank: PositiveInt | None
    kv_rank: PositiveInt
    nope_dim: PositiveInt
    rope_dim: PositiveInt
    v_dim: PositiveInt
    norm_epsilon: float = Field(1e-6, gt=0)  # of the two norms on the latents


class MoE(Record):
    """A mixture of experts in place of the MLP, from layer ``dense_layers`` on."""

    experts: PositiveInt
    topk: PositiveInt
    ffn: PositiveInt
    shared_experts: int = Field(0, ge=0)
    shared_ffn: PositiveInt | None = None  # of one shared expert; None: as a routed one
    dense_layers: int = Field(0, ge=0)
    score: Literal["softmax", "sigmoid"] = "softmax"
    balance: Literal["none", "aux", "free"] = "aux"
    aux_coefficient: float = Field(0.01, ge=0)
    capacity: float | None = Field(None, gt=0)  # tokens per expert over the even share; None: dropless
    normalized: bool = True  # top-k weights rescaled to sum to one
    scaling: float = 1.0
    groups: PositiveInt = 1  # ranked by their best expert (softmax) or their two best (sigmoid)
    topk_groups: PositiveInt = 1
    router_bias: bool = False
    expert_bias: bool = False

    @model_validator(mode="after")
    def _legal(self) -> Self:
        if self.topk > self.experts:
            raise ValueError(f"topk={self.topk} is more than experts={self.experts}")
        if self.experts % self.groups:
            raise ValueError(f"experts={self.experts} is not divisible by groups={self.groups}")
        if self.topk_groups > self.groups:
            raise ValueError(f"topk_groups={self.topk_groups} is more than groups={self.groups}")
        if self.topk > (within := self.topk_groups * (self.experts // self.groups)):
            raise ValueError(f"topk={self.topk} is more than the {within} experts of topk_groups={self.topk_groups}")
        return self


class RopeScaling(Record):
    """How rotary frequencies are stretched beyond the length of pre-training."""

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    factor: float = 1.0
    original_positions: PositiveInt | None = None
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dims: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


class Model(Record):
    """A decoder-only transformer. All counts are of the whole model, unsharded and unpadded."""

    name: str
    layers: PositiveInt
    width: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    ffn: PositiveInt
    vocab: PositiveInt
    positions: PositiveInt = 4096  # the longest sequence it was made for

    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_epsilon: float = Field(1e-5, gt=0)
    norm_plus_one: bool = False  # the weight is stored less one (Gemma)
    block: Literal["pre", "post", "sandwich", "parallel"] = "pre"
    mlp: Literal["gated", "plain"] = "gated"
    activation: Literal["silu", "gelu", "gelu_tanh", "relu2", "clamped_swiglu"] = "silu"
    mlp_bias: bool = False

    position: Literal["rope", "learned", "none"] = "rope"
    rope_theta: float = Field(10_000.0, gt=0)
    rope_theta_sliding: float | None = None  # of the sliding-window layers, which then have no rope_scaling
    rope_fraction: float = Field(1.0, gt=0, le=1)  # of the head dim that is rotated
    rope_scaling: RopeScaling | None = None

    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    attention_sinks: bool = False
    attention_scale: float | None = None  # None: 1/√head_dim (with mla: nope_dim + rope_dim)
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    window: PositiveInt | None = None
    window_pattern: tuple[bool, ...] = ()  # per layer, repeated: True slides; empty: all slide if window
    mla: MLA | None = None
    moe: MoE | None = None

    tied_embeddings: bool = False
    embedding_scale: float = 1.0
    head_bias: bool = False
    dropout: float = Field(0.0, ge=0, lt=1)
    source: str = ""

    @model_validator(mode="after")
    def _legal(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not divisible by kv_heads={self.kv_heads}")
        if self.position == "rope" and self.rope_dim % 2:
            raise ValueError(f"rotary dim {self.rope_dim} is odd; head_dim x rope_fraction must be even")
        if self.window_pattern and self.window is None:
            raise ValueError("window_pattern is given without window")
        if self.moe is not None and self.moe.dense_layers > self.layers:
            raise ValueError(f"moe.dense_layers={self.moe.dense_layers} exceeds layers={self.layers}")
        if self.rope_scaling is not None and self.rope_scaling.kind == "longrope":
            lengths = {len(self.rope_scaling.short_factors), len(self.rope_scaling.long_factors)}
            if lengths != {self.rope_dim // 2}:
                raise ValueError(f"longrope needs {self.rope_dim // 2} short and long factors, not {sorted(lengths)}")
        return self

    @property
    def rope_dim(self) -> int:
        """How many of the head's dims are rotated."""
        return self.mla.rope_dim if self.mla else int(self.head_dim * self.rope_fraction)

    def slides(self, layer: int) -> bool:
        """Whether ``layer`` sees only the last ``window`` tokens."""
        if self.window is None:
            return False
        return self.window_pattern[layer % len(self.window_pattern)] if self.window_pattern else True

    def is_moe(self, layer: int) -> bool:
        """Whether ``layer`` routes its tokens to experts."""
        return self.moe is not None and layer >= self.moe.dense_layers

    @cached_property
    def parameters(self) -> int:
        """Trainable parameters of the whole model."""
        from fivefold.model.weights import count

        return count(self)

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token passes through: of the experts, only the top-k and the shared."""
        from fivefold.model.weights import count

        return count(self, active=True)
