"""The shape of a model as a record: all facts that planning and training need.

Letters (``docs/notation.md``): L ``layers``, D ``width``, F ``ffn``, N ``heads``, K ``kv_heads``,
H ``head_dim``, V ``vocab``, E ``moe.experts``.
"""

from functools import lru_cache
from math import sqrt
from typing import Annotated, Literal, NamedTuple, Self, get_args

from pydantic import Field, model_validator

from fivefold.bounded_types import (
    PARAMETERS,
    Experts,
    Ffn,
    HeadDim,
    Heads,
    Latent,
    Layers,
    Positive,
    Scalar,
    Tokens,
    Vocab,
    Width,
)
from fivefold.model.activations import ACTIVATIONS, ActivationName
from fivefold.model.altup import AltUp
from fivefold.model.attention import AttentionShape, Sliding
from fivefold.model.hyper_connections import HyperConnections
from fivefold.model.indexer import Indexer
from fivefold.model.mixers.compressed_attention import CompressedAttention
from fivefold.model.mixers.gated_delta_net import GatedDeltaNet
from fivefold.model.mixers.kimi_delta import KimiDelta
from fivefold.model.mixers.lightning import Lightning
from fivefold.model.mixers.mamba import Mamba
from fivefold.model.mixers.mamba2 import Mamba2
from fivefold.model.mixers.rg_lru import RGLRU
from fivefold.model.mixers.rwkv import RWKV
from fivefold.model.mixers.short_conv import ShortConv
from fivefold.model.norms import NormName
from fivefold.model.per_layer_inputs import PerLayerInputs
from fivefold.model.rope import RopeScaling, RotaryTable
from fivefold.model.vision import VisionTower
from fivefold.record import Record
from fivefold.units import ceil_div

Rate = Annotated[float, Field(ge=0, lt=1)]


class MLA(Record):
    """Multi-head latent attention (DeepSeek-V2): low-rank queries and a compressed key-value latent."""

    q_rank: Latent | None = None  # rank of the compressed queries; None: queries are not compressed
    kv_rank: Latent  # rank of the compressed keys and values
    nope_dim: HeadDim  # dims of a head that are not rotated
    rope_dim: HeadDim  # dims of a head that are rotated
    v_dim: HeadDim  # dims of a value head
    norm_epsilon: Positive = 1e-6  # epsilon of the norms of both latents
    key_norm: bool = False  # the rotary key, which all heads share, is normed before its rotation (Dots 3)
    # queries and the output gate are made from their latent both before and after its norm (A.X K2)
    gates_queries: bool = False
    # what √(width / rank) multiplies after the norms: both latents (Dots 3), or that of keys and the queries (LongCat)
    scaled: Literal["none", "latents", "queries"] = "none"
    indexer: Indexer | None = None  # chooses the keys that a query attends to; None: all

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        """Raise a ``ValueError`` for fields that contradict each other."""
        if self.indexer is not None and self.q_rank is None:
            raise ValueError("an indexer needs compressed queries: give q_rank, or no indexer")
        if self.indexer is not None and not self.indexer.has_own(0):
            raise ValueError("layer 0 must have an indexer of its own: begin indexer.pattern with true")
        if self.scaled == "queries" and self.indexer is not None:
            raise ValueError("mla.scaled='queries' is not supported with mla.indexer: leave one out")
        if self.gates_queries and self.q_rank is None:
            raise ValueError("gates_queries needs compressed queries: give q_rank")
        if self.gates_queries and self.scaled != "none":
            raise ValueError(f"gates_queries is not supported with scaled={self.scaled!r}: leave one out")
        if self.scaled != "none" and self.q_rank is None:
            raise ValueError(f"scaled={self.scaled!r} needs compressed queries: give q_rank, or leave it out")
        return self


class MoE(Record):
    """A mixture of experts that replaces the MLP from layer ``dense_layers`` on."""

    experts: Experts  # routed experts of a layer (E)
    topk: Experts  # experts per token
    ffn: Ffn  # width of one expert (F)
    shared_experts: int = Field(0, ge=0, le=2**10)  # experts that every token visits
    shared_ffn: Ffn | None = None  # width of one shared expert; None: equal to ``ffn``
    # width of what is dispatched to routed experts and returned, between two projections of the layer (LatentMoE,
    # arXiv:2601.18089); None: that of the model
    latent_width: Ffn | None = None
    shared_gate: bool = False  # the shared experts' output is multiplied by the sigmoid of a projection to one number
    dense_layers: int = Field(0, ge=0, le=2**12)  # number of first layers, which have a dense MLP
    # function of the router's logits; sparsemixer: two experts, drawn in training by their softmax among those near the
    # highest logit (arXiv:2409.12136); sqrtsoftplus: √softplus (DeepSeek-V4)
    score: Literal["softmax", "sigmoid", "sparsemixer", "sqrtsoftplus"] = "softmax"
    # sparsemixer: experts whose logit is further below the highest than twice this share of it are not drawn
    jitter: float = Field(0.01, ge=0, le=1e3)
    balance: Literal["none", "aux", "free"] = "aux"  # load balancing: auxiliary loss, or a bias without a loss
    biased: Literal["scores", "logits"] = "scores"  # what the bias is added to when experts are chosen
    aux_coefficient: float = Field(0.01, ge=0, le=1e30)  # weight of the auxiliary loss
    capacity: Positive | None = None  # capacity factor: maximum tokens per expert over the average; None: dropless
    normalized: bool = True  # top-k weights rescaled to sum to one
    scaling: Scalar = 1.0  # factor on the routing weights
    groups: Experts = 1  # groups of experts, ranked by their best expert (softmax) or two best experts (sigmoid)
    topk_groups: Experts = 1  # groups that a token's experts are chosen from
    router_bias: bool = False  # the router has a bias
    output_bias: bool = False  # what the experts of a layer add has a bias (JetMoE)
    expert_bias: bool = False  # the experts have biases
    # experts without weights: the router may send a token to them, and they give it back (LongCat)
    identity_experts: int = Field(0, ge=0, le=2**16)
    hashed_layers: int = Field(0, ge=0, le=2**12)  # first layers, whose experts a table of token ids names
    clamp: Positive | None = None  # limit in routed experts: gate at most this, up within ± this; None: no limit
    joins_mlp: bool = False  # layers that route have an MLP too, whose output is added to that of the experts
    # of experts next to an MLP: norms of their input and output, of the MLP's output and of the router's input, and a
    # factor on the routing weights of each expert (Gemma 4)
    joined_norms: bool = False
    shortcut: bool = False  # the output of experts next to an MLP is added at the end of the next layer (LongCat)
    post_norm: bool = False  # the output of the layer's experts, shared ones too, is normed (A.X K1)
    pattern: tuple[bool, ...] = ()  # per layer, repeated: True routes; empty: all from ``dense_layers`` on
    router_weight_on: Literal["outputs", "inputs"] = (
        "outputs"  # what routing weights multiply: outputs or inputs of experts (Llama 4: inputs)
    )

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        """Raise a ``ValueError`` for fields that contradict each other."""
        if self.shared_gate and not self.shared_experts:
            raise ValueError("shared_gate is given, but shared_experts=0: leave it out, or give shared_experts")
        if self.joined_norms and (not self.joins_mlp or self.shared_experts):
            raise ValueError("joined_norms needs joins_mlp and no shared_experts: leave it out, or change them")
        if self.shortcut and (not self.joins_mlp or self.joined_norms or self.pattern != (True, False)):
            raise ValueError("shortcut needs joins_mlp, pattern=[true, false] and no joined_norms: change them")
        if self.identity_experts and (self.groups > 1 or self.capacity is not None or self.expert_bias):
            raise ValueError("identity_experts is not supported with groups, capacity or expert_bias: leave one out")
        if self.latent_width is not None and (self.identity_experts or self.output_bias):
            raise ValueError("latent_width is not supported with identity_experts or output_bias: leave one out")
        if self.score == "sparsemixer":
            self._check_sparsemixer()
        if self.topk > self.experts:
            raise ValueError(f"topk={self.topk} is more than experts={self.experts}: lower it")
        if self.router_weight_on == "inputs" and self.expert_bias:
            raise ValueError(
                "router_weight_on='inputs' is not supported with expert_bias: routing weights would not reach the bias"
            )
        if self.experts % self.groups:
            raise ValueError(f"experts={self.experts} is not divisible by groups={self.groups}: change one")
        if self.topk_groups > self.groups:
            raise ValueError(f"topk_groups={self.topk_groups} is more than groups={self.groups}: lower it")
        if self.topk > (within := self.topk_groups * (self.experts // self.groups)):
            raise ValueError(
                f"topk={self.topk} is more than the {within} experts of topk_groups={self.topk_groups}: change one"
            )
        return self

    def _check_sparsemixer(self) -> None:
        """Raise a ``ValueError`` for fields that contradict drawn experts."""
        if self.topk != 2:
            raise ValueError(f"topk={self.topk}, but score='sparsemixer' chooses two experts: use topk=2")
        if self.normalized:
            raise ValueError("score='sparsemixer' does not rescale its weights: use normalized=false")
        if self.balance == "free" or self.groups > 1 or self.identity_experts:
            raise ValueError(
                "score='sparsemixer' is not supported with balance='free', groups or identity_experts: leave one out"
            )

    @property
    def shared_width(self) -> int:
        """Return the width of all shared experts of a layer together, 0 if it has none."""
        return self.shared_experts * (self.shared_ffn or self.ffn)

    @property
    def choices(self) -> int:
        """Return the number of experts that the router chooses from."""
        return self.experts + self.identity_experts

    @property
    def computed_per_token(self) -> int:
        """Return the experts that compute a token if the router chooses evenly; those that give it back do not."""
        return ceil_div(self.topk * self.experts, self.choices)


class Temperature(Record):
    """A factor on queries by their position (arXiv:2501.19399): 1 + scale · ln(1 + ⌊(position + 1) / floor⌋).

    Applies to layers without rotary positions. The first ``floor`` − 1 tokens of a sequence have the factor 1.
    """

    scale: Scalar = 0.1  # factor on the logarithm
    floor: Tokens = 8192  # tokens per step of the logarithm
    form: Literal["logarithm", "power"] = "logarithm"  # power: (1 + (position + 1) / floor)^scale instead (Beam)
    rotated: bool = False  # applies to rotary layers too, after the rotation (Ministral 3)
    first: int = Field(1, ge=0, le=1)  # what the first position counts as; 0: the first ``floor`` tokens have factor 1


class MTP(Record):
    """Multi-token prediction (DeepSeek-V3, arXiv:2412.19437 §2.2): ``depth`` modules, each a token further ahead.

    The training loss is that of the next token + ``coefficient`` / ``depth`` · Σ of the losses of the modules.
    """

    depth: Layers = 1  # modules, each of which predicts one token further ahead
    coefficient: Positive = 0.3  # weight of the modules' losses


class ResidualFactors(Record):
    """Factors on the stream and on the branch that is added to it, by the kind of the branch (MiniMax)."""

    attention: tuple[Scalar, Scalar] = (1.0, 1.0)  # factors of stream and branch for attention
    mixer: tuple[Scalar, Scalar] = (1.0, 1.0)  # the same for other token mixers
    feed_forward: tuple[Scalar, Scalar] = (1.0, 1.0)  # the same for the feed-forward


class Multipliers(Record):
    """Factors on tensors within a layer (Falcon-H1); each but 1 is an operation of its own."""

    attention_in: Scalar = 1.0  # factor of the input of attention
    attention_out: Scalar = 1.0  # factor of the output of attention
    key: Scalar = 1.0  # factor of projected keys, before their rotation
    mixer_in: Scalar = 1.0  # factor of the input of the Mamba-2
    mixer_out: Scalar = 1.0  # factor of the output of the Mamba-2
    mixer_parts: tuple[Scalar, ...] = ()  # factors of z, x, B, C and dt of a Mamba-2; empty: all 1
    gate: Scalar = 1.0  # factor of the feed-forward's projected gate
    down: Scalar = 1.0  # factor of the feed-forward's output


# The kinds of token mixers, by the field with their geometry; none: the layer is only a feed-forward.
MixerName = Literal[
    "attention",
    "none",
    "short_conv",
    "gated_delta_net",
    "mamba",
    "mamba2",
    "rg_lru",
    "kimi_delta",
    "lightning",
    "rwkv",
    "shared_key_attention",
    "heavily_compressed_attention",
    "compressed_sparse_attention",
]
Mixer = (
    ShortConv | GatedDeltaNet | Mamba | Mamba2 | RGLRU | KimiDelta | Lightning | RWKV | CompressedAttention
)  # the geometry of a token mixer other than attention


Block = Literal[
    "pre", "post", "sandwich", "parallel", "parallel_shared", "post_sum", "norm_stream"
]  # ``trainer/model/block.py``


class DropoutRates(NamedTuple):
    """Dropout rates in training: on the embedding, on attention probabilities, and on the output of each branch."""

    embedding: float
    attention: float
    residual: float


class ModelShape(Record):
    """A decoder-only transformer. All counts are those of the full model, without sharding and padding."""

    name: str  # as printed in tables
    layers: Layers  # transformer blocks (L)
    width: Width  # width of the residual stream (D)
    heads: Heads  # query heads (N)
    kv_heads: Heads  # key and value heads (K)
    head_dim: HeadDim  # dims of a head (H)
    value_dim: HeadDim | None = None  # dims of a value head; None: as ``head_dim``
    ffn: Ffn  # width of the feed-forward (F)
    vocab: Vocab  # vocabulary size (V)
    positions: Tokens = 4096  # longest supported sequence, in tokens

    norm: NormName = "rmsnorm"  # kind of norm
    norm_epsilon: Positive = 1e-5  # added to the variance
    norm_plus_one: bool = False  # the stored weight is the factor minus one (Gemma)
    norm_bias: bool = True  # a LayerNorm has a bias; an RMSNorm never has one
    # rank of two matrices, by the sigmoid of whose output the norm before a token mixer, and that before experts, is
    # multiplied (A.X K2); None: there are none
    norm_gate_rank: Latent | None = None
    norm_weight: bool = True  # norms have a weight, and if it is a LayerNorm the bias; False: neither (OLMo)
    final_norm: bool = True  # a norm before the head (False: GPT)
    first_norm: bool = True  # the first layer norms its input; False: an embedding_norm did (ModernBERT)
    # on the embedding; unit: an RMSNorm without weight (nanochat); weighted: a norm like all others (BLOOM)
    embedding_norm: Literal["none", "unit", "weighted"] = "none"
    # where norms are; parallel_shared: one norm for attention and feed-forward; post_sum: norms of both sums (GPT);
    # norm_stream: what norms make is the stream that branches are added to (MiniMax)
    block: Block = "pre"
    pre_norm_mixers: bool = False  # layers with a mixer other than attention have block "pre" (OLMo Hybrid)
    residual_scale: Scalar = 1.0  # factor on what attention and feed-forward add to the residual stream
    # the k-th sum of the stream is √((k − 1) / k) · stream + √(1 / k) · branch, with the embedding as the first (Beam)
    residual_by_depth: bool = False
    residual_weights: bool = False  # the stream has a trained factor for each channel in each sum (Doge)
    residual_factors: ResidualFactors | None = None  # factors of each residual addition; None: all 1
    hyper_connections: HyperConnections | None = None  # several streams that each token mixes; None: one
    multipliers: Multipliers | None = None  # factors of tensors within a layer; None: all 1
    # gated (SwiGLU, GEGLU) or plain feed-forward; receptance: a plain one of means of a token and the one before it,
    # times the sigmoid of a projection of another mean (RWKV)
    mlp: Literal["gated", "plain", "receptance"] = "gated"
    activation: ActivationName = "silu"  # activation function of the feed-forward
    mlp_bias: bool = False  # the feed-forward has biases
    # limit in MLPs and shared experts: gate at most this, up within ± this; None: no limit
    mlp_clamp: Positive | None = None
    sub_norm: bool = False  # norms before the last matrix of attention and of the MLP (sub-LayerNorm, BitNet)

    # how positions are encoded; alibi: a bias on scores by distance (arXiv:2108.12409); sinusoidal: a fixed table of
    # sines and cosines that is added to the embedding (arXiv:1706.03762 §3.5)
    position: Literal["rope", "learned", "sinusoidal", "alibi", "none"] = "rope"
    position_offset: int = Field(0, ge=0, le=2**10)  # first rows of the table of positions, which none has (OPT: 2)
    # the D / 2 frequencies of sinusoidal positions fall by equal factors to 1 / 10,000 itself, as in tensor2tensor
    # (XGLM); False: to the step before it (arXiv:1706.03762)
    sinusoid_endpoint: bool = False
    rope_theta: Positive = 10_000.0  # base of the rotary frequencies
    rope_theta_sliding: Positive | None = None  # base of sliding-window layers, which then ignore rope_scaling
    rope_fraction: float = Field(1.0, gt=0, le=1)  # share of the head dim that is rotated
    rope_scaling: RopeScaling | None = None  # scaling for sequences longer than in pre-training
    rope_pattern: tuple[bool, ...] = ()  # per layer, repeated: True rotates; empty: all rotate, if position is rope

    qkv_bias: bool = False  # the projections of q, k and v have biases
    out_bias: bool = False  # the output projection has a bias
    last_out_bias: bool = False  # the output projection of the last layer has a bias (GPT-NeoX Japanese)
    # queries in pairs of heads attend to the same values, of two heads; the difference of their outputs is normed
    # (arXiv:2410.05258)
    differential: bool = False
    # each token's queries and output are made by its ``moe.topk`` of ``moe.experts`` experts (JetMoE, arXiv:2404.07413)
    attention_experts: bool = False
    # values make a number of each key, which is added to its scores; a query sees this many keys.
    # The numbers are a tensor of each query and key (Doge)
    dynamic_mask: Tokens | None = None
    # head: per head, with one shared weight; heads: per head, each with its own weight; full: over all heads at once;
    # unit: per head without a weight, in rotary layers only
    qk_norm: Literal["none", "head", "heads", "full", "unit"] = "none"
    qk_norm_after_rope: bool = False  # queries and keys are normed after their rotation (Hunyuan)
    qkv_clip: Positive | None = None  # queries, keys and values are clipped to ± this, before the rotation (OLMo)
    temperature: Temperature | None = None  # factor on queries that grows with the position
    value_scale: Scalar = 1.0  # factor on values (MiMo)
    value_norm: bool = False  # values are normed per head, without a weight (Gemma 4)
    tied_values: bool = False  # values are the projected keys, before their norm and rotation (Gemma 4)
    output_gate: bool = False  # attention's output times the sigmoid of a projection of its input (Qwen3-Next)
    gate_per_head: bool = False  # the output gate has one number for each head, not for each of its dims (LFM3)
    gate_bias: bool = False  # the output gate has a bias for each head (Beam)
    gate_in_query: bool = False  # queries and gates are one linear layer in transformers (Qwen3-Next)
    gate_activation: Literal["sigmoid", "softplus"] = "sigmoid"  # function of the output gate; softplus: Laguna
    attention_sinks: bool = False  # a learned logit per head in the softmax (gpt-oss)
    attention_scale: Scalar | None = None  # None: 1/√head_dim (with mla: nope_dim + rope_dim)
    attention_softcap: Positive | None = None  # attention logits are capped at this by tanh
    logit_softcap: Positive | None = None  # output logits are capped at this by tanh
    window: Tokens | None = None  # tokens of sliding-window attention; None: full attention
    window_pattern: tuple[bool, ...] = ()  # per layer, repeated: True slides; empty: all slide, if window is given
    window_kind: Literal["sliding", "chunks"] = "sliding"  # chunks: attention within chunks of ``window`` tokens
    sliding: Sliding | None = None  # geometry of the attention of sliding layers; None: that of all layers
    mla: MLA | None = None  # latent attention
    sliding_mla: MLA | None = None  # that of sliding layers; None: as ``mla`` (Dots 3)
    mixers: tuple[MixerName, ...] = ()  # token mixer per layer, repeated; empty: attention in all layers
    feed_forwards: tuple[bool, ...] = ()  # per layer, repeated: False has no feed-forward; empty: all have one
    gated_delta_net: GatedDeltaNet | None = None  # geometry of the layers that are Gated DeltaNets
    kimi_delta: KimiDelta | None = None  # geometry of the layers that are Kimi delta attention
    mamba: Mamba | None = None  # geometry of the layers that are Mamba
    mamba2: Mamba2 | None = None  # geometry of the layers that are Mamba-2
    lightning: Lightning | None = None  # geometry of the layers that are lightning attention
    rwkv: RWKV | None = None  # geometry of the layers that are the time mixing of RWKV-4
    rg_lru: RGLRU | None = None  # geometry of the layers that are RG-LRUs
    # attention and a Mamba-2 of ``mamba2`` read the same norm in each layer, and their outputs are added (Falcon-H1)
    joins_mamba2: bool = False
    short_conv: ShortConv | None = None  # geometry of the layers that are gated short convolutions
    # last layers without keys and values: they attend to those of the last layer of their kind (sliding or not) before
    # these (Gemma 3n, Gemma 4)
    shared_kv_layers: int = Field(0, ge=0, le=2**12)
    shared_kv_ffn: Ffn | None = None  # width of the MLP of those layers; None: ``ffn``
    altup: AltUp | None = None  # several parts of the stream, of which each layer computes one; None: one (Gemma 3n)
    # rank of a branch next to attention that reads its input; None: no such branch (Gemma 3n)
    laurel_rank: Latent | None = None
    # per layer: share of an MLP's gates that are set to zero, the lowest; empty: none (Gemma 3n)
    gate_sparsity: tuple[Rate, ...] = ()
    per_layer_inputs: PerLayerInputs | None = None  # numbers of a token for each layer (Gemma 3n, Gemma 4)
    # geometry of the layers that attend only to the keys of a window (DeepSeek-V4)
    shared_key_attention: CompressedAttention | None = None
    # geometry of the layers that attend to the keys of a window and to all compressed keys (DeepSeek-V4)
    heavily_compressed_attention: CompressedAttention | None = None
    # geometry of the layers that attend to the keys of a window and to the compressed keys of an indexer (DeepSeek-V4)
    compressed_sparse_attention: CompressedAttention | None = None
    moe: MoE | None = None  # mixture of experts
    mtp: MTP | None = None  # multi-token prediction
    # vision tower and projector of a multimodal model, counted if the job has ``images``; not part of ``parameters``
    vision: VisionTower | None = None

    tied_embeddings: bool = False  # the head shares the weights of the embedding
    embedding_scale: Scalar = 1.0  # factor on the output of the embedding
    logit_scale: Scalar = 1.0  # factor on the output logits
    head_bias: bool = False  # the head has a bias
    # between the final norm and the head: a matrix [D, D], this activation and a norm; None: nothing (ModernBERT)
    head_transform: ActivationName | None = None
    head_transform_bias: bool = False  # that matrix has a bias
    dropout: Rate = 0.0  # rate on what attention and feed-forward add to the residual stream
    attention_dropout: Rate | None = None  # rate on attention probabilities; None: as ``dropout``
    embedding_dropout: Rate | None = None  # rate on the embedding; None: as ``dropout``
    source: str = ""  # where the figures are from
    repository: str = ""  # Hugging Face repository of the weights; "": that of the catalog's model of this name
    # how that repository quantizes its weights: nf4, fp4, int8, fp8, mxfp4 or another method; "": not at all
    quantization: str = ""
    double_quantization: bool = True  # of a repository in nf4 or fp4: the scales are quantized too
    # linear layers and experts of blocks that it keeps in 16 bits all the same, such as blocks.3.mlp.down
    unquantized: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        """Raise a ``ValueError`` for fields that contradict each other."""
        if (size := self._approximate_parameters()) > PARAMETERS:
            raise ValueError(f"about {size:.0e} parameters are more than {PARAMETERS:.0e}; make the model smaller")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not divisible by kv_heads={self.kv_heads}: change one")
        if self.position == "rope" and self.rope_dim % 2:
            raise ValueError(f"rotary dim {self.rope_dim} is odd; head_dim x rope_fraction must be even")
        if self.window_pattern and self.window is None:
            raise ValueError("window_pattern is given without window: give both")
        self._check_positions()
        if not self.first_norm and self.block not in ("pre", "sandwich"):
            raise ValueError(f"block={self.block!r} norms no input of a first layer: leave first_norm=False out")
        if self.last_out_bias and (self.out_bias or self.mla is not None):
            raise ValueError("last_out_bias needs grouped attention without out_bias: remove one of them")
        if self.head_transform_bias and self.head_transform is None:
            raise ValueError("head_transform_bias is of head_transform: give its activation, or leave it out")
        self._check_differential()
        self._check_attention_experts()
        if self.norm_gate_rank is not None and (self.block != "pre" or not self.first_norm):
            raise ValueError("norm_gate_rank needs a norm before each branch: use block='pre' with first_norm=true")
        self._check_factors()
        self._check_hyper_connections()
        if self.residual_by_depth and (self.residual_scale != 1 or self.block.startswith("parallel")):
            raise ValueError(
                "residual_by_depth scales each residual sum: leave residual_scale out and use no parallel block"
            )
        if self.position == "alibi" and self.attention_softcap is not None:
            raise ValueError("attention_softcap is not supported with position='alibi': leave one out")
        self._check_latent()
        self._check_sliding()
        self._check_indexer()
        self._check_values()
        self._check_sub_norm()
        self._check_gate()
        self._check_norms()
        self._check_mixers()
        self._check_mixer_activation()
        self._check_shared_kv()
        self._check_per_layer_inputs()
        self._check_experts()
        if self.rope_scaling is not None and self.rope_scaling.kind == "longrope":
            lengths = {len(self.rope_scaling.short_factors), len(self.rope_scaling.long_factors)}
            if lengths != {self.rope_dim // 2}:
                raise ValueError(f"longrope needs {self.rope_dim // 2} short and long factors, not {sorted(lengths)}")
        return self

    def _check_experts(self) -> None:
        """Raise ``ValueError`` for experts whose fields contradict those of the blocks."""
        moe, block = self.moe, self.block
        if moe is None:
            return
        if moe.post_norm and block in ("post", "sandwich", "post_sum"):
            raise ValueError(f"block={block!r} already norms the output of the experts: leave moe.post_norm out")
        if moe.joined_norms and (block != "sandwich" or not self.norm_weight or self.norm != "rmsnorm"):
            raise ValueError(
                f"moe.joined_norms with block={block!r}, norm={self.norm!r} and norm_weight={self.norm_weight} is "
                "not supported: take block='sandwich', norm='rmsnorm' and norms with weights"
            )
        if moe.shortcut and not self._has_plain_pairs():
            raise ValueError(
                "moe.shortcut needs block='pre', an even number of layers that all have a feed-forward, and no dense "
                "layers, multi-token prediction, hyper-connections or per-layer inputs: change them"
            )
        if ACTIVATIONS[self.activation].parameters:
            raise ValueError(
                f"experts with activation={self.activation!r}, which has trained parameters, are not supported: use "
                "another activation"
            )
        if moe.dense_layers > self.layers:
            raise ValueError(f"moe.dense_layers={moe.dense_layers} exceeds layers={self.layers}: lower it")

    def _check_positions(self) -> None:
        """Raise ``ValueError`` for a field that positions of this kind would ignore."""
        if self.position_offset and self.position not in ("learned", "sinusoidal"):
            raise ValueError(
                f"position_offset={self.position_offset} applies to learned or sinusoidal positions only: leave it out"
            )
        if self.sinusoid_endpoint and self.position != "sinusoidal":
            raise ValueError("sinusoid_endpoint applies to sinusoidal positions only: leave it out")
        if self.position == "sinusoidal" and (self.width % 2 or self.width < 4):
            raise ValueError(f"position='sinusoidal' needs an even width of 4 or more, not {self.width}: change one")

    def _check_differential(self) -> None:
        """Raise ``ValueError`` for heads without pairs, and for what is not supported with pairs of heads."""
        if not self.differential:
            return
        if self.kv_heads % 2:
            raise ValueError(f"differential attention takes values of two heads: kv_heads={self.kv_heads} is odd")
        for field in ("mla", "value_dim", "output_gate", "attention_sinks", "sliding", "attention_dropout", "dropout"):
            if getattr(self, field):
                raise ValueError(f"{field} is not supported with differential attention: leave one out")

    def _check_attention_experts(self) -> None:
        """Raise ``ValueError`` for what is not supported with experts of attention, or with masks from values."""
        if self.attention_experts and (self.moe is None or self.heads != self.kv_heads * self.moe.topk):
            raise ValueError("attention_experts needs moe, and heads = moe.topk · kv_heads: give moe, or change heads")
        if not self.attention_experts and self.dynamic_mask is None:
            return
        for field in ("mla", "value_dim", "output_gate", "attention_sinks", "sliding", "differential", "qkv_clip"):
            if getattr(self, field):
                raise ValueError(f"{field} is not supported with attention_experts or dynamic_mask: leave one out")
        if not self.attention_experts or self.moe is None:
            return
        if self.qk_norm != "none" or self.value_scale != 1:
            raise ValueError("attention_experts has no qk_norm or value_scale: leave them out")
        for field in ("qkv_bias", "dynamic_mask", "tied_values", "value_norm", "sub_norm", "shared_kv_layers",
                      "temperature", "multipliers", "last_out_bias"):  # fmt: skip
            if getattr(self, field):
                raise ValueError(f"{field} is not supported with attention_experts: leave one out")
        for field in ("capacity", "identity_experts", "hashed_layers", "router_bias", "joined_norms"):
            if getattr(self.moe, field):
                raise ValueError(f"moe.{field} is not supported with attention_experts: leave one out")
        if self.moe.score == "sparsemixer" or self.moe.balance == "free":
            raise ValueError("attention_experts has no score='sparsemixer' or balance='free': change them")

    def _check_factors(self) -> None:
        """Raise ``ValueError`` for factors on sums or tensors that the model does not have."""
        if self.residual_factors is not None and (self.residual_scale != 1 or self.residual_by_depth):
            raise ValueError(
                "residual_factors already scales each residual addition: leave residual_scale and residual_by_depth out"
            )
        if self.joins_mamba2 and (self.mixers or self.mla is not None or self.block != "pre"):
            raise ValueError("joins_mamba2 is of pre-norm layers with grouped attention: leave mixers and mla out")
        parts = len(self.multipliers.mixer_parts) if self.multipliers is not None else 0
        if self.multipliers is not None and not self.joins_mamba2:
            raise ValueError(
                "multipliers is for attention and Mamba-2 in parallel: set joins_mamba2=true, or leave multipliers out"
            )
        if parts not in (0, 5):
            raise ValueError(f"multipliers.mixer_parts has {parts} factors, not five, of z, x, B, C and dt")

    def _check_hyper_connections(self) -> None:
        """Raise ``ValueError`` for what is not supported with several streams."""
        if self.hyper_connections is None:
            return
        if self.block != "pre" or not self.first_norm:
            raise ValueError("hyper_connections is of models that norm the input of each branch: use block='pre'")
        for field, default in (
            ("residual_scale", 1.0),
            ("residual_by_depth", False),
            ("residual_weights", False),
            ("residual_factors", None),
            ("mtp", None),
            ("joins_mamba2", False),
        ):
            if getattr(self, field) != default:
                raise ValueError(f"{field} is not supported with hyper_connections: leave one out")
        for field in ("dropout", "embedding_dropout"):
            if getattr(self, field):
                raise ValueError(f"{field} is not supported with hyper_connections: leave one out")

    def _check_latent(self) -> None:
        """Raise ``ValueError`` for a field that latent attention would ignore."""
        if self.sliding_mla is not None and (self.mla is None or self.sliding_mla.indexer is not None):
            raise ValueError("sliding_mla needs mla, and must have no indexer: leave it out")
        if self.mla is None:
            return
        if not all(self.rope_pattern):
            raise ValueError("with mla every layer rotates: leave rope_pattern out")
        if self.position not in ("rope", "none"):
            raise ValueError(f"position={self.position!r} is not supported with mla: use 'rope' or 'none'")
        if self.position == "none" and self.mla.indexer is not None:
            raise ValueError("mla.indexer rotates its queries and keys: use position='rope'")
        if self.temperature is not None and self.position == "none":
            raise ValueError("temperature is not supported with mla and position='none': leave temperature out")
        if self.temperature is not None and not self.temperature.rotated:
            raise ValueError("with mla every layer rotates: use temperature.rotated = true, or leave temperature out")
        for field in ("qkv_clip", "value_dim"):
            if (value := getattr(self, field)) is not None:
                raise ValueError(f"{field}={value} applies to grouped attention, not to mla: leave it out")
        if self.value_scale != 1:
            raise ValueError(f"value_scale={self.value_scale:g} applies to grouped attention, not to mla: leave it out")
        for field in ("value_norm", "tied_values"):
            if getattr(self, field):
                raise ValueError(f"{field} applies to grouped attention, not to mla: leave it out")
        if not self.norm_weight:
            raise ValueError("mla norms its latents with weights: leave norm_weight=False out")
        if self.gate_bias:
            raise ValueError("gate_bias applies to grouped attention, not to mla: leave it out")
        if self.mla.gates_queries and (not self.output_gate or self.gate_per_head):
            raise ValueError("mla.gates_queries makes an output gate for each dim: give output_gate")
        if self.qk_norm != "none":
            raise ValueError(f"mla norms its latents, not its heads: leave qk_norm={self.qk_norm!r} out")

    def _check_sliding(self) -> None:
        """Raise ``ValueError`` for a geometry of sliding layers that does not fit the model."""
        if self.sliding is None:
            return
        if not any(map(self.has_window, range(self.layers))):
            raise ValueError("sliding is given, but no layer has a sliding window: leave it out, or give window")
        if self.mla is not None and (self.sliding_mla is None or self.sliding != Sliding(heads=self.sliding.heads)):
            raise ValueError(
                "with mla, sliding may set only heads, and needs sliding_mla: leave sliding out, or give both"
            )
        sliding = self._build_attention(slides=True)
        full = self._build_attention(slides=False)
        if self.mla is None and sliding.head_dim != full.head_dim and self.temperature is not None:
            raise ValueError(
                "temperature needs equal head dims in sliding and full layers: leave it or sliding.head_dim out"
            )
        if sliding.heads % sliding.kv_heads:
            raise ValueError(
                f"sliding: heads={sliding.heads} is not divisible by kv_heads={sliding.kv_heads}: change one"
            )
        if self.qk_norm in ("full", "heads"):
            raise ValueError(
                f"qk_norm={self.qk_norm!r} is not supported with sliding: use qk_norm='head', or leave one out"
            )
        if self.position != "rope":
            if self.sliding.rope_fraction is not None:
                raise ValueError(
                    f"sliding.rope_fraction applies to rotary positions, not to position={self.position!r}: leave it "
                    "out"
                )
            return
        if sliding.rope_dim % 2:
            raise ValueError(f"sliding: rotary dim {sliding.rope_dim} is odd; head_dim x rope_fraction must be even")
        if sliding.rope_dim != full.rope_dim and self.rope_theta_sliding is None:
            raise ValueError(
                f"sliding layers rotate {sliding.rope_dim} dims, others {full.rope_dim}: give rope_theta_sliding, the "
                "base of their own table"
            )

    def _check_indexer(self) -> None:
        """Raise ``ValueError`` for what is not supported with keys that an indexer chooses."""
        if self.mla is None or self.mla.indexer is None:
            return
        if self.window and self.sliding_mla is None:
            raise ValueError(
                "window is not supported with mla.indexer, which chooses the keys: "
                "describe layers with a window in sliding_mla"
            )
        if not all(self.rope_pattern):
            raise ValueError("rope_pattern is not supported with mla.indexer: leave it out")
        first = next(filter(self._chooses_or_reads, range(self.layers)), None)
        if first is not None and not self.has_indexer(first):
            raise ValueError(
                f"layer {first} is the first that attends to chosen keys, and must choose them: let "
                "mla.indexer.pattern be true there"
            )
        for field in ("attention_softcap", "temperature", "attention_dropout", "dropout"):
            if getattr(self, field):
                raise ValueError(f"{field} is not supported with mla.indexer, which chooses the keys: leave one out")

    def _check_values(self) -> None:
        """Raise ``ValueError`` for values that cannot be the projected keys."""
        tied = [shape for shape in self.attention_shapes if shape.tied_values]
        if tied and not self.value_norm:
            raise ValueError("tied_values is supported with values that are normed: give value_norm, or leave it out")
        for shape in tied:
            if shape.head_dim != shape.value_dim:
                raise ValueError(
                    f"values of {shape.value_dim} dims cannot be keys of {shape.head_dim} dims: leave tied_values out"
                )

    def _check_sub_norm(self) -> None:
        """Raise ``ValueError`` for layers that have no norms before their last matrices."""
        if not self.sub_norm:
            return
        for feature, is_given in (
            ("mla", self.mla is not None),
            ("moe", self.moe is not None),
            ("mlp='receptance'", self.mlp == "receptance"),
            ("norm_weight=False", not self.norm_weight),
        ):
            if is_given:
                raise ValueError(f"sub_norm is not supported with {feature}: leave one out")

    def _check_gate(self) -> None:
        """Raise ``ValueError`` for a kind of output gate without an output gate."""
        for field, default in (
            ("gate_per_head", False),
            ("gate_bias", False),
            ("gate_in_query", False),
            ("gate_activation", "sigmoid"),
        ):
            if (value := getattr(self, field)) != default and not self.output_gate:
                raise ValueError(f"{field}={value!r} applies to an output gate: give output_gate, or leave it out")

    def _check_norms(self) -> None:
        """Raise ``ValueError`` for norms that contradict each other."""
        if not self.norm_weight and self.qk_norm in ("head", "heads", "full"):
            raise ValueError(f"norm_weight=False has no weights for qk_norm={self.qk_norm!r}: use qk_norm='unit'")
        if not self.norm_weight and self.norm_plus_one:
            raise ValueError(
                "norm_plus_one adds 1 to the weights of norms, and norm_weight=False leaves these out: drop one"
            )
        if self.pre_norm_mixers and (self.block != "post" or not self.non_attention_mixers):
            raise ValueError(
                "pre_norm_mixers is of models with block='post' and mixers other than attention: leave it out"
            )
        if self.qk_norm_after_rope and self.qk_norm not in ("head", "heads", "unit"):
            raise ValueError(
                f"qk_norm_after_rope needs norms per head, and qk_norm is {self.qk_norm!r}: "
                "set qk_norm to 'head' or leave it out"
            )

    def _check_mixers(self) -> None:
        """Raise ``ValueError`` for a token mixer without a geometry, or a geometry without a layer."""
        halves = [(self.mixer_name(layer) != "none", self.has_feed_forward(layer)) for layer in range(self.layers)]
        if (False, False) in halves:
            raise ValueError(
                f"layer {halves.index((False, False))} has neither a token mixer nor a feed-forward: give it one"
            )
        if self.block in ("parallel", "parallel_shared") and not all(map(all, halves)):
            raise ValueError(f"block={self.block!r} computes mixer and feed-forward in parallel: give all layers both")
        for kind in get_args(MixerName):
            if kind in ("attention", "none"):
                continue
            is_used = kind in self.mixers[: self.layers]
            geometry = getattr(self, kind)
            is_used |= kind == "mamba2" and self.joins_mamba2
            if is_used and geometry is None:
                raise ValueError(f"mixers has {kind} layers, but the table {kind} with their sizes is missing; add it")
            if geometry is not None and not is_used:
                raise ValueError(f"{kind} is given, but mixers has no {kind} layer; leave it out, or list its layers")

    def _check_mixer_activation(self) -> None:
        """Raise ``ValueError`` for an activation that cannot gate an RG-LRU, or that lightning attention cannot use."""
        activation = ACTIVATIONS[self.activation]
        is_clamped_pair = activation.clamps  # of a gate and its product, which lightning attention has not
        for name, is_unknown in (("rg_lru", is_clamped_pair or activation.parameters), ("lightning", is_clamped_pair)):
            if getattr(self, name) is not None and is_unknown:
                raise ValueError(f"{name} is not supported with activation={self.activation!r}: use another")

    def _check_shared_kv(self) -> None:
        """Raise ``ValueError`` for layers without keys that have none to attend to, or not as they are counted."""
        shared = self.shared_kv_layers
        if self.shared_kv_ffn is not None and not shared:
            raise ValueError(
                "shared_kv_ffn is the width of the last shared_kv_layers=0 layers: give their number, or leave it out"
            )
        if not shared:
            return
        own = {self.has_window(layer) for layer in range(self.layers - shared)}
        if missing := {self.has_window(layer) for layer in range(max(0, self.layers - shared), self.layers)} - own:
            kind = "sliding" if missing == {True} else "full"
            raise ValueError(
                f"shared_kv_layers={shared} leaves no {kind} layer with keys of its own, for the last {kind} ones to "
                "share: lower it"
            )
        self._check_defaults(
            "shared_kv_layers",
            *("mla", "mixers", "joins_mamba2", "differential", "attention_experts", "dynamic_mask", "qkv_clip", "mtp"),
            *("qk_norm_after_rope", "multipliers"),
        )
        if any(shape.sinks for shape in self.attention_shapes):
            raise ValueError("attention_sinks is not supported with shared_kv_layers: leave one out")
        if self.qk_norm == "full" or (self.shared_kv_ffn is not None and self.moe is not None):
            raise ValueError("shared_kv_layers is not supported with qk_norm='full', or with moe and shared_kv_ffn")

    def _check_per_layer_inputs(self) -> None:
        """Raise ``ValueError`` for what is not counted with inputs of each layer."""
        n_named = len(self.gate_sparsity)
        if n_named and (n_named != self.layers or self.mlp != "gated" or self.moe is not None):
            raise ValueError(f"gate_sparsity names {n_named} of {self.layers} gated MLPs: name each layer")
        if self.altup is not None and (self.per_layer_inputs is None or self.laurel_rank is None):
            raise ValueError("altup is counted with per_layer_inputs and laurel_rank: give them")
        if self.laurel_rank is not None and (self.altup is None or self.block != "sandwich"):
            raise ValueError("laurel_rank needs altup and block='sandwich': give them")
        if self.per_layer_inputs is None:
            return
        if self.block not in ("pre", "sandwich"):
            raise ValueError(f"per_layer_inputs is not supported with block={self.block!r}: use 'pre' or 'sandwich'")
        fields = ("hyper_connections", "feed_forwards", "mtp", "residual_by_depth", "dropout")
        self._check_defaults("per_layer_inputs", *fields)
        activation = ACTIVATIONS[self.activation]
        if activation.clamps or activation.parameters:
            raise ValueError(f"per_layer_inputs is not supported with activation={self.activation!r}: use another")

    def _check_defaults(self, feature: str, *fields: str) -> None:
        """Raise ``ValueError`` for the first of ``fields`` that is given, which ``feature`` is not counted with."""
        for field in fields:
            if getattr(self, field):
                raise ValueError(f"{field} is not supported with {feature}: leave one out")

    def _approximate_parameters(self) -> int:
        """Return the approximate number of parameters, without norms and biases; fast also for absurd sizes."""
        mla, moe, sliding = self.mla, self.moe, self.sliding
        head_dims = self.heads * (mla.nope_dim + mla.rope_dim + mla.v_dim if mla else 4 * self.head_dim)
        if sliding is not None and mla is None:
            head_dims = max(head_dims, 4 * (sliding.heads or self.heads) * (sliding.head_dim or self.head_dim))
        ffn = max(self.ffn, moe.experts * moe.ffn * (moe.latent_width or self.width) // self.width) if moe else self.ffn
        inputs = self.per_layer_inputs
        table = inputs.vocab * self.layers * inputs.width if inputs else 0
        ffn = max(ffn, self.shared_kv_ffn or 0)
        return (self.layers + self.mtp_depth) * self.width * (head_dims + 2 * ffn) + self.vocab * self.width + table

    @property
    def rope_dim(self) -> int:
        """Return the number of rotated dims per head of layers that do not slide."""
        return self._build_attention(slides=False).rope_dim

    @property
    def table_dims(self) -> tuple[int, ...]:
        """Return the dims of each pair of position tables (cos and sin) that attention reads.

        They are the rotary tables of all layers, those of sliding layers with a base of their own, those of attention
        to compressed keys, and the temperature's. The trainer builds these tables in this order, and the planner counts
        their bytes.
        """
        layers = range(self.layers + self.mtp_depth)
        tempered = (self._build_attention(slides=False).head_dim,) if any(map(self.has_temperature, layers)) else ()
        return self._rotary_dims + tuple(table.dim for table in self.compressed_tables) + tempered

    @property
    def _rotary_dims(self) -> tuple[int, ...]:
        """Return the dims of the tables of attention: of all layers, and of sliding ones with a base of their own."""
        if self.position != "rope":
            return ()
        return (self.rope_dim, *((self._build_attention(slides=True).rope_dim,) if self.rope_theta_sliding else ()))

    @property
    def compressed_tables(self) -> tuple[RotaryTable, ...]:
        """Return the distinct rotary tables of attention to compressed keys, in the order of the layers."""
        nets = filter(None, map(self.mixer, range(self.layers)))
        return tuple(dict.fromkeys(net.rotary_table for net in nets if isinstance(net, CompressedAttention)))

    def find_compressed_table(self, net: CompressedAttention) -> int:
        """Return the place of the cosines of ``net`` among all tables; the sines are next to them."""
        return 2 * (len(self._rotary_dims) + self.compressed_tables.index(net.rotary_table))

    def attention(self, layer: int) -> AttentionShape:
        """Return the geometry of the attention of ``layer``."""
        return self._build_attention(slides=self.has_window(layer))

    @property
    def attention_shapes(self) -> tuple[AttentionShape, ...]:
        """Return the distinct geometries of the model's attention, the one of layers that do not slide first."""
        return tuple(dict.fromkeys(self._build_attention(slides=slides) for slides in (False, True)))

    def _build_attention(self, *, slides: bool) -> AttentionShape:
        """Return heads and dims of the attention in layers with a sliding window, or in all others."""
        mla, sliding = self.mla, self.sliding
        if mla is not None:
            mla, heads = (self.sliding_mla, sliding and sliding.heads) if slides and self.sliding_mla else (mla, None)
            dims = mla.nope_dim + mla.rope_dim, mla.v_dim, mla.rope_dim
            return AttentionShape(heads or self.heads, heads or self.heads, *dims, self.attention_sinks)
        if sliding is None or not slides:
            dims = self.head_dim, self.value_dim or self.head_dim, int(self.head_dim * self.rope_fraction)
            return AttentionShape(self.heads, self.kv_heads, *dims, self.attention_sinks, self.tied_values)
        head_dim = sliding.head_dim or self.head_dim
        return AttentionShape(
            heads=sliding.heads or self.heads,
            kv_heads=sliding.kv_heads or self.kv_heads,
            head_dim=head_dim,
            value_dim=sliding.value_dim or self.value_dim or head_dim,
            rope_dim=int(head_dim * (sliding.rope_fraction or self.rope_fraction)),
            sinks=self.attention_sinks if sliding.sinks is None else sliding.sinks,
            tied_values=self.tied_values if sliding.tied_values is None else sliding.tied_values,
        )

    @property
    def mtp_depth(self) -> int:
        """Return the number of tokens predicted per position in addition to the next: the depth of MTP."""
        return self.mtp.depth if self.mtp else 0

    @property
    def shared_experts_width(self) -> int:
        """Return the width of all shared experts of a layer together, 0 if the model has none."""
        return self.moe.shared_width if self.moe else 0

    @property
    def expert_width(self) -> int:
        """Return the width of what routed experts read and return."""
        latent_width = self.moe and self.moe.latent_width
        return latent_width or self.width

    @property
    def draws_experts(self) -> bool:
        """Tell whether routers draw experts at random in training (SparseMixer)."""
        return self.moe is not None and self.moe.score == "sparsemixer"

    @property
    def dropout_rates(self) -> DropoutRates:
        """Return the dropout rates of embedding, attention and branches."""
        embedding, attention = self.embedding_dropout, self.attention_dropout
        return DropoutRates(
            embedding=self.dropout if embedding is None else embedding,
            attention=self.dropout if attention is None else attention,
            residual=self.dropout,
        )

    @property
    def shares_table(self) -> bool:
        """Tell whether the last stage also reads the token embedding: as output projection, or for MTP."""
        return self.tied_embeddings or self.mtp is not None

    def mixer_name(self, layer: int) -> MixerName:
        """Return the kind of the token mixer of ``layer``; modules of multi-token prediction attend."""
        if not self.mixers or layer >= self.layers:
            return "attention"
        return self.mixers[layer % len(self.mixers)]

    def mixer(self, layer: int) -> Mixer | None:
        """Return the geometry of the token mixer of ``layer``; None: it attends, or has none."""
        name = self.mixer_name(layer)
        geometry: Mixer | None = None if name in ("attention", "none") else getattr(self, name)
        return geometry

    def get_block(self, layer: int) -> Block:
        """Return where the norms of ``layer`` are."""
        return "pre" if self.pre_norm_mixers and not self.has_attention(layer) else self.block

    def count_gate_columns(self, shape: AttentionShape) -> int:
        """Return the numbers of an output gate: one for each head of attention, or for each of their dims."""
        return shape.heads if self.gate_per_head else shape.output_dims

    def get_residual_factors(self, layer: int) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the factors on stream and branch in the sums of ``layer``: of its token mixer, of its feed-forward."""
        if self.residual_by_depth:  # the embedding is the first summand of the stream
            summands = (2 * layer + 2, 2 * layer + 3)
            mixer, feed_forward = (((number - 1) / number, 1 / number) for number in summands)
            return (sqrt(mixer[0]), sqrt(mixer[1])), (sqrt(feed_forward[0]), sqrt(feed_forward[1]))
        factors = self.residual_factors or ResidualFactors()
        return factors.attention if self.has_attention(layer) else factors.mixer, factors.feed_forward

    def gates_norm(self, layer: int, name: Literal["norm1", "norm2"]) -> bool:
        """Tell whether a norm of ``layer`` is multiplied by a gate: that before experts is, that before an MLP not."""
        return self.norm_gate_rank is not None and (name == "norm1" or self.is_moe(layer))

    def has_norm1(self, layer: int) -> bool:
        """Tell whether ``layer`` has a norm with its token mixer."""
        return self.mixer_name(layer) != "none" and (self.first_norm or layer > 0)

    def has_out_bias(self, layer: int) -> bool:
        """Tell whether the output projection of attention in ``layer`` has a bias."""
        return self.out_bias or (self.last_out_bias and layer == self.layers - 1)

    def has_attention(self, layer: int) -> bool:
        """Tell whether the token mixer of ``layer`` is attention."""
        return self.mixer_name(layer) == "attention"

    def has_feed_forward(self, layer: int) -> bool:
        """Tell whether ``layer`` has a feed-forward; modules of multi-token prediction do."""
        pattern = self.feed_forwards
        return pattern[layer % len(pattern)] if pattern and layer < self.layers else True

    @property
    def non_attention_mixers(self) -> tuple[str, ...]:
        """Return the kinds of token mixers other than attention that the model's layers have, in order."""
        kinds = dict.fromkeys(map(self.mixer_name, range(self.layers if self.mixers else 0)))
        joined = ("mamba2",) if self.joins_mamba2 else ()
        return (*joined, *(kind for kind in kinds if kind not in ("attention", "none")))

    @property
    def mixer_geometries(self) -> tuple[Mixer, ...]:
        """Return the geometry of each kind of token mixer other than attention."""
        return tuple(getattr(self, kind) for kind in self.non_attention_mixers)

    def has_window(self, layer: int) -> bool:
        """Tell whether ``layer`` attends only to the last ``window`` tokens, or to those of the chunk."""
        if self.window is None or not self.has_attention(layer):
            return False
        return self.window_pattern[layer % len(self.window_pattern)] if self.window_pattern else True

    def has_rope(self, layer: int) -> bool:
        """Tell whether ``layer`` rotates its queries and keys."""
        pattern = self.rope_pattern
        if not self.has_attention(layer):
            return False
        return self.position == "rope" and (pattern[layer % len(pattern)] if pattern else True)

    def is_moe(self, layer: int) -> bool:
        """Tell whether ``layer`` routes its tokens to experts."""
        if self.moe is None or layer < self.moe.dense_layers or not self.has_feed_forward(layer):
            return False
        if layer >= self.layers and self.feed_forwards:  # the pattern is one of layers with a single branch
            return True
        return self.moe.pattern[layer % len(self.moe.pattern)] if self.moe.pattern else True

    def hashes_experts(self, layer: int) -> bool:
        """Tell whether a table of token ids names the experts of ``layer``."""
        return self.moe is not None and self.is_moe(layer) and layer < min(self.moe.hashed_layers, self.layers)

    def has_mlp(self, layer: int) -> bool:
        """Tell whether ``layer`` has an MLP, alone or next to experts."""
        joins = self.moe is not None and self.moe.joins_mlp
        return self.has_feed_forward(layer) and (joins or not self.is_moe(layer))

    def lends_experts(self, layer: int) -> bool:
        """Tell whether the output of the experts of ``layer`` is added at the end of the next layer."""
        return self.moe is not None and self.moe.shortcut and self.is_moe(layer)

    def adds_lent_experts(self, layer: int) -> bool:
        """Tell whether the output of the experts of the layer before ``layer`` is added at its end."""
        return self.moe is not None and self.moe.shortcut and not self.is_moe(layer)

    def find_lender(self, layer: int) -> tuple[int, str] | None:
        """Return the earlier layer of which ``layer`` reads more than the stream, and a text of what; None: of none.

        A pipeline sends only the stream from one stage to the next, so that both layers are in one stage.
        """
        if self.adds_lent_experts(layer):
            return layer - 1, f"adds what the experts of layer {layer - 1} return"
        if self.shares_kv(layer):
            kind = self.has_window(layer)
            own = range(self.layers - self.shared_kv_layers)
            lender = max(other for other in own if self.has_window(other) == kind)
            return lender, f"attends to the keys and values of layer {lender}"
        if self.reads_chosen(layer):
            lender = max(filter(self.has_indexer, range(layer)))
            return lender, f"attends to the keys that layer {lender} chose"
        return None

    def _has_plain_pairs(self) -> bool:
        """Tell whether the layers are pairs with nothing but a stream from one to the next."""
        is_plain = self.block == "pre" and not (self.mixers or self.feed_forwards or self.layers % 2)
        has_more = (self.mtp, self.hyper_connections, self.per_layer_inputs, self.altup)
        return is_plain and has_more == (None,) * 4 and self.moe is not None and not self.moe.dense_layers

    def list_unquantized(self, layer: int) -> frozenset[str]:
        """Return what of a block the repository keeps in 16 bits next to quantized weights, such as ``mlp.down``."""
        return _split_unquantized(self.unquantized).get(layer, frozenset()) if self.unquantized else frozenset()

    def shares_kv(self, layer: int) -> bool:
        """Tell whether ``layer`` attends to keys and values of an earlier layer."""
        return self.layers - self.shared_kv_layers <= layer < self.layers

    def lends_kv(self, layer: int) -> bool:
        """Tell whether later layers attend to the keys and values of ``layer``, the last of its kind that has any."""
        first = self.layers - self.shared_kv_layers
        if layer >= first or not self.shared_kv_layers:
            return False
        kinds = [self.has_window(later) for later in range(layer, self.layers)]
        return kinds[0] not in kinds[1 : first - layer] and kinds[0] in kinds[first - layer :]

    def has_sparse_gates(self, layer: int) -> bool:
        """Tell whether the MLP of ``layer`` sets some of its gates to zero."""
        return layer < len(self.gate_sparsity) and self.gate_sparsity[layer] > 0

    def get_ffn(self, layer: int) -> int:
        """Return the width of the MLP of ``layer``."""
        return self.shared_kv_ffn or self.ffn if self.shares_kv(layer) else self.ffn

    def has_indexer(self, layer: int) -> bool:
        """Tell whether ``layer`` has an indexer, which chooses the keys that its queries attend to."""
        latent = self.get_latent(layer)
        indexer = latent.indexer if latent else None
        return indexer is not None and self.mixer_name(layer) == "attention" and indexer.has_own(layer)

    def reads_chosen(self, layer: int) -> bool:
        """Tell whether ``layer`` attends to the keys that the indexer of an earlier layer chose."""
        latent = self.get_latent(layer)
        has_choice = latent is not None and latent.indexer is not None and self.has_attention(layer)
        return has_choice and not self.has_indexer(layer)

    def lends_chosen(self, layer: int) -> bool:
        """Tell whether later layers attend to the keys that the indexer of ``layer`` chooses."""
        if not self.has_indexer(layer):
            return False
        later = range(layer + 1, self.layers)
        return next((self.reads_chosen(other) for other in later if self._chooses_or_reads(other)), False)

    def _chooses_or_reads(self, layer: int) -> bool:
        return self.has_indexer(layer) or self.reads_chosen(layer)

    def get_latent(self, layer: int) -> MLA | None:
        """Return the latent attention of ``layer``; None: its attention is grouped."""
        return self.sliding_mla if self.sliding_mla is not None and self.has_window(layer) else self.mla

    def norms_feed_forward(self, layer: int) -> bool:
        """Tell whether a norm of its own, in addition to the one before it, follows the feed-forward of ``layer``."""
        return self.get_block(layer) == "sandwich" or (
            self.moe is not None and self.moe.post_norm and self.is_moe(layer)
        )

    def has_temperature(self, layer: int) -> bool:
        """Tell whether ``layer`` multiplies its queries by the temperature of their positions."""
        if self.temperature is None or not self.has_attention(layer):
            return False
        return self.temperature.rotated or not self.has_rope(layer)


@lru_cache(maxsize=64)
def _split_unquantized(names: tuple[str, ...]) -> dict[int, frozenset[str]]:
    """Return the names of ``ModelShape.unquantized`` by layer, relative to its block."""
    layers: dict[int, set[str]] = {}
    for name in names:
        _, layer, linear = name.split(".", 2)
        layers.setdefault(int(layer), set()).add(linear)
    return {layer: frozenset(linears) for layer, linears in layers.items()}
