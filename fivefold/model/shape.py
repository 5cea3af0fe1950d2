"""The shape of a model as a record: all facts that planning and training need.

Letters (``docs/notation.md``): L ``layers``, D ``width``, F ``ffn``, N ``heads``, K ``kv_heads``,
H ``head_dim``, V ``vocab``, E ``moe.experts``.
"""

from functools import lru_cache
from math import sqrt
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from fivefold.bounded_types import (
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
from fivefold.model.activations import ActivationName
from fivefold.model.altup import AltUp
from fivefold.model.attention import AttentionShape, Sliding
from fivefold.model.experts import MoE
from fivefold.model.factors import Multipliers, ResidualFactors, Temperature
from fivefold.model.hyper_connections import HyperConnections
from fivefold.model.latent_attention import MLA
from fivefold.model.mixers.compressed_attention import CompressedAttention
from fivefold.model.mixers.gated_delta_net import GatedDeltaNet
from fivefold.model.mixers.kimi_delta import KimiDelta
from fivefold.model.mixers.kinds import Mixer, MixerName
from fivefold.model.mixers.lightning import Lightning
from fivefold.model.mixers.mamba import Mamba
from fivefold.model.mixers.mamba2 import Mamba2
from fivefold.model.mixers.rg_lru import RGLRU
from fivefold.model.mixers.rwkv import RWKV
from fivefold.model.mixers.short_conv import ShortConv
from fivefold.model.multi_token_prediction import MTP
from fivefold.model.norms import NormName
from fivefold.model.per_layer_inputs import PerLayerInputs
from fivefold.model.rope import RopeScaling, RotaryTable
from fivefold.model.vision import VisionTower
from fivefold.record import Record

Rate = Annotated[float, Field(ge=0, lt=1)]


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

    @property
    def rope_dim(self) -> int:
        """Return the number of rotated dims per head of layers that do not slide."""
        return self.build_attention(slides=False).rope_dim

    @property
    def table_dims(self) -> tuple[int, ...]:
        """Return the dims of each pair of position tables (cos and sin) that attention reads.

        They are the rotary tables of all layers, those of sliding layers with a base of their own, those of attention
        to compressed keys, and the temperature's. The trainer builds these tables in this order, and the planner counts
        their bytes.
        """
        layers = range(self.layers + self.mtp_depth)
        tempered = (self.build_attention(slides=False).head_dim,) if any(map(self.has_temperature, layers)) else ()
        return self._rotary_dims + tuple(table.dim for table in self.compressed_tables) + tempered

    @property
    def _rotary_dims(self) -> tuple[int, ...]:
        """Return the dims of the tables of attention: of all layers, and of sliding ones with a base of their own."""
        if self.position != "rope":
            return ()
        return (self.rope_dim, *((self.build_attention(slides=True).rope_dim,) if self.rope_theta_sliding else ()))

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
        return self.build_attention(slides=self.has_window(layer))

    @property
    def attention_shapes(self) -> tuple[AttentionShape, ...]:
        """Return the distinct geometries of the model's attention, the one of layers that do not slide first."""
        return tuple(dict.fromkeys(self.build_attention(slides=slides) for slides in (False, True)))

    def build_attention(self, *, slides: bool) -> AttentionShape:
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
        return next((self.reads_chosen(other) for other in later if self.chooses_or_reads(other)), False)

    def chooses_or_reads(self, layer: int) -> bool:
        """Tell whether the layer attends to keys that an indexer chose: its own, or that of a layer before it."""
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
