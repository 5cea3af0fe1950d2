"""``Config``: a Hugging Face ``config.json`` as one validated record.

Keys with one meaning under several names are one field; ``Family.keys`` says which family reads which key.
Source: configuration code of transformers 5.23.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from fivefold.bounded_types import Experts, Ffn, HeadDim, Heads, Latent, Layers, Positive, Scalar, Tokens, Vocab, Width
from fivefold.errors import UserError
from fivefold.model.altup import MAX_STREAMS
from fivefold.model.mixers.short_conv import Taps
from fivefold.record import Record

Layer = Annotated[int, Field(ge=0, le=2**12)]
Flag = Annotated[int, Field(ge=0, le=1)]
IGNORE_OTHERS = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Config(Record):
    """The keys of all families, one field per meaning; fields without a key keep their neutral default."""

    model_config: ClassVar[ConfigDict] = IGNORE_OTHERS

    name: str
    vocab_size: Vocab
    hidden_size: Width
    intermediate_size: Ffn | None
    intermediate_size_mlp: Ffn | None = None  # for dense layers, in a family whose intermediate_size is that of experts
    num_hidden_layers: Layers
    num_attention_heads: Heads
    num_key_value_heads: Heads | None = None
    head_dim: HeadDim | None = None
    hidden_act: str
    max_position_embeddings: Tokens = Field(gt=1)
    norm_epsilon: Positive
    rms_norm_epsilon: Positive | None = None  # of RMSNorms, in a family whose norm_epsilon is that of LayerNorms
    tie_word_embeddings: bool
    attention_bias: bool = False
    attention_out_bias: bool = False  # of the output projection, in a family whose attention_bias is that of q, k and v
    mlp_bias: bool = False
    attention_dropout: Scalar = 0.0
    hidden_dropout: Scalar = 0.0
    embedding_dropout: Scalar = 0.0
    scale_attn_weights: bool = True
    use_parallel_residual: bool = False
    use_qk_norm: bool = False
    qkv_clip: Positive | None = None
    value_scale: Scalar | None = None
    ties_values: bool = False  # in layers that do not slide, values are the projected keys
    global_head_dim: HeadDim | None = None  # of layers that do not slide
    global_key_value_heads: Heads | None = None  # of layers that do not slide, if their values are keys
    # keys that differ in single layers; global: those of layers that do not slide are the global ones; sliding: those
    # of layers that slide are the keys that begin with swa_
    per_layer_config: dict[str | int, dict[str, Any]] | Literal["global", "sliding"] | None = None
    per_layer_width: Annotated[int, Field(ge=0, le=2**22)] = 0  # of embeddings that each layer has; 0: none
    per_layer_vocab: Vocab = 262_144  # rows of the table of these embeddings
    num_kv_shared_layers: Annotated[int, Field(ge=0, le=2**12)] = 0  # last layers that attend to earlier layers' keys
    intermediate_sizes: Ffn | tuple[Ffn, ...] | None = None  # of all layers, or of each
    altup_num_inputs: Annotated[int, Field(ge=1, le=MAX_STREAMS)] = 1  # parts of the stream
    altup_coef_clip: Positive | None = None
    altup_correct_scale: bool = True
    laurel_rank: Latent | None = None
    activation_sparsity_pattern: Scalar | tuple[Scalar, ...] | None = None  # of each layer; None: that of its class
    use_double_wide_mlp: bool = False  # the MLP of those layers is twice as wide
    gating: bool | str = True
    use_attention_gate: bool = False
    heads_of_layers: tuple[Heads, ...] | None = None
    head_bias: bool = False
    head_transform_bias: bool = False
    head_activation: str = "gelu"  # of a matrix before the head
    norm_bias: bool = True
    norm_gate_rank: Latent | None = None
    use_post_norm: bool = False
    embedding_multiplier: Scalar = 1.0
    embedding_width: Width | None = None  # of the embedding's table, if a projection follows it
    mup_enabled: bool = False  # the embedding is multiplied by the root of hidden_size
    attention_multiplier: Scalar | None = None
    residual_multiplier: Scalar = 1.0
    logits_scaling: Positive = 1.0
    logit_scale: Scalar | None = 1.0
    scale_depth: Scalar | None = None
    dim_model_base: Width | None = None
    no_rope_layers: tuple[Flag, ...] | None = None  # 1: the layer has rotary positions
    no_rope_layer_interval: Layers = 4
    new_decoder_architecture: bool = False
    multi_query: bool = True
    parallel_attn: bool = True
    num_ln_in_parallel_attn: int | None = Field(None, ge=1, le=2)

    rope_theta: Positive = 10_000.0
    rope_local_base_freq: Positive | None = None
    partial_rotary_factor: Scalar = 1.0
    rotary_dim: HeadDim | None = None
    unread_rotary_factor: Scalar = 1.0  # partial_rotary_factor of a family that ignores it
    rope_interleave: bool | None = True
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    original_max_position_embeddings: Tokens | None = Field(None, gt=1)

    use_sliding_window: bool = True
    sliding_window: Tokens | None = None
    tokens_before: Tokens | None = None  # that a query of a sliding layer sees, besides itself
    max_window_layers: int = Field(0, ge=-(2**30), le=2**30)
    layer_types: tuple[str, ...] | None = None
    sliding_window_pattern: Layers = 1
    sliding_window_period: Layers | str | None = None  # sliding_window_pattern of a family that also writes "LLLG"
    attention_types: tuple[tuple[tuple[str, ...], Layer], ...] | None = None  # kinds of layers, and how often in a row
    layer_rope_theta: tuple[Annotated[float, Field(ge=0, le=1e30)] | None, ...] | None = None  # none or 0: no rotation
    attention_chunk_size: Tokens | None = None
    attn_temperature_tuning: bool = False
    floor_scale: Tokens = 8192
    attn_scale: Scalar = 0.1
    query_pre_attn_scalar: Positive = 1.0
    attn_logit_softcapping: Scalar | None = None
    final_logit_softcapping: Scalar | None = None

    conv_taps: Taps = 3
    conv_bias: bool = False
    ssm_heads: Heads = 1
    ssm_head_dim: HeadDim | str | None = None  # "auto": of heads that together are ssm_expand · hidden_size wide
    ssm_groups: Heads = 1
    ssm_state: HeadDim = 1
    ssm_expand: Layers = 2
    ssm_chunk: Tokens = 256
    ssm_bias: bool = False
    ssm_out_bias: bool = False  # of the last projection of a state-space layer, in a family that has a key for it
    ssm_inner: Width | None = None  # width of all heads of a state-space layer; None: ssm_expand times the stream's
    norms_states: bool = False  # the output of a state-space layer is normed
    norms_before_gate: bool = False  # and then gated
    ssm_multipliers: tuple[Scalar, ...] | None = None
    mlp_multipliers: tuple[Scalar, ...] | None = None
    ssm_in_multiplier: Scalar = 1.0
    ssm_out_multiplier: Scalar = 1.0
    attention_in_multiplier: Scalar = 1.0
    attention_out_multiplier: Scalar = 1.0
    key_multiplier: Scalar = 1.0
    full_attn_alpha_factor: Scalar = 1.0  # on the stream, in its sum with attention; beta: on attention
    full_attn_beta_factor: Scalar = 1.0
    linear_attn_alpha_factor: Scalar = 1.0
    linear_attn_beta_factor: Scalar = 1.0
    mlp_alpha_factor: Scalar = 1.0
    mlp_beta_factor: Scalar = 1.0
    ssm_rank: Latent | str = "auto"  # "auto": a sixteenth of the stream's width
    mixer_rms_eps: Positive = 1e-6
    attn_layer_period: Layers = 1
    attn_layer_offset: Layer = 0
    expert_layer_period: Layers = 1
    expert_layer_offset: Layer = 0
    time_step_min: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    layer_pattern: str | None = None  # a letter for each layer
    time_step_limit: tuple[Any, ...] | None = None  # smallest and largest step of a state-space layer
    position_embedding_type: str | None = None
    block_types: tuple[str, ...] | None = None  # kinds of token mixers, repeated
    lru_width: Width | None = None
    linear_attn_config: dict[str, Any] | None = None
    linear_head_dim: HeadDim = 128
    linear_num_heads: Heads = 32
    linear_key_heads: Heads = 16
    linear_value_heads: Heads = 32
    linear_key_dim: HeadDim = 128
    linear_value_dim: HeadDim = 128
    delta_key_heads: Heads | None = None  # of a family whose defaults depend on other keys
    delta_value_heads: Heads | None = None
    delta_key_dim: HeadDim | None = None
    delta_value_dim: HeadDim | None = None
    negative_eigenvalues: bool = False
    bounds_decay: bool = True  # of Kimi delta attention, by decay_lower_bound
    decay_lower_bound: float = Field(-5.0, ge=-1e6, lt=0)
    full_attention_interval: Layers = 4
    full_attention_layers: tuple[Layer, ...] | None = None
    rounds_intermediate_size: bool = False
    width_multiple: Ffn = 4  # intermediate_size over hidden_size, in a family that gives no intermediate_size
    intermediate_multiple: Ffn = 256
    intermediate_multiplier: Scalar | None = 1.0

    num_experts: Annotated[int, Field(ge=0, le=2**20)] | None = None  # 0: a dense model, in Granite 4
    identity_experts: Annotated[int, Field(ge=0, le=2**16)] | None = None
    sublayers: Layer | None = None  # layers of all blocks, in a family whose blocks are two layers
    use_routing_bias: bool = True
    num_experts_per_tok: Annotated[int, Field(ge=0, le=2**20)] | None = None
    enable_moe_block: bool = False  # experts next to the MLP of each layer
    topk_of_layers: Experts | tuple[Experts, ...] | None = None  # experts per token of all layers, or of each
    moe_intermediate_size: Ffn | None = None
    router_aux_loss_coef: Scalar = 0.0
    router_jitter_noise: Annotated[float, Field(ge=0, le=1e3)] = 0.0  # threshold of drawn experts
    aux_loss_alpha: Scalar | None = None
    norm_topk_prob: bool = True
    weight_norm: Positive | None = 1.0  # of the chosen experts' weights, which are divided by it; None: they are not
    mlp_only_layers: tuple[Layer, ...] | None = None
    moe_layers: tuple[Layer, ...] | None = None
    interleave_moe_layer_step: Layers = 1
    first_k_dense_replace: Layer = 0
    decoder_sparse_step: Layers = 1
    mlp_layer_types: tuple[str, ...] | None = None
    moe_layer_start_index: Layer = 0
    moe_layer_end_index: int = Field(-1, ge=-1, le=2**12)  # -1: the last layer
    moe_layer_interval: Layers = 1
    prefix_dense_sliding_window_pattern: Layers = 1
    prefix_dense_intermediate_size: Ffn | None = None
    shared_expert_combination_strategy: str = "sum"
    n_shared_experts: Layer | None = None
    shared_expert_intermediate_size: Annotated[int, Field(ge=0, le=2**22)] | None = None  # of all shared experts
    moe_latent_size: Ffn | None = None  # width of what routed experts read and return
    routed_scaling_factor: Scalar = 1.0
    n_group: Experts | None = None
    topk_group: Experts | None = None
    topk_method: str | None = None
    scoring_func: str | None = None
    num_nextn_predict_layers: Layer = 0
    mtp_layer_types: tuple[str, ...] | None = None  # of a module of multi-token prediction
    mtp_layer_pattern: str | None = None
    q_lora_rank: Latent | None = None
    swa_num_attention_heads: Heads | None = None  # of sliding layers, as those below
    swa_q_lora_rank: Latent | None = None
    swa_kv_lora_rank: Latent | None = None
    swa_head_dim: HeadDim | None = None
    swa_qk_nope_head_dim: HeadDim | None = None
    swa_v_head_dim: HeadDim | None = None
    kv_lora_rank: Latent = 1
    qk_nope_head_dim: HeadDim = 1
    qk_rope_head_dim: HeadDim = 1
    v_head_dim: HeadDim | None = 1
    index_heads: Heads = 1
    index_head_dim: HeadDim = 1
    index_topk: Tokens = 1
    compress_rates: dict[str, Tokens] | None = None  # tokens of a compressed key, by the kind of a layer
    compress_rate_csa: Tokens | None = None  # the same rates in old keys
    compress_rate_hca: Tokens | None = None
    compress_ratios: tuple[Annotated[int, Field(ge=0, le=2**12)], ...] | None = None  # that of each layer, in old files
    compress_rope_theta: Positive = 10_000.0  # of layers with compressed keys
    rope_head_dim: HeadDim | None = None  # qk_rope_head_dim of a family that reads a share of head_dim first
    rotated_share: Scalar | None = None  # partial_rotary_factor of that family
    out_groups: Heads = 1
    out_rank: Latent = 1
    hyper_streams: Annotated[int, Field(ge=1, le=2**6)] = 1
    hyper_iterations: Layers = 1
    hyper_epsilon: Positive = 1e-6
    hyper_magnitude: Scalar = 2.0
    swiglu_limit: Scalar | None = None
    hashed_layers: Layer = 0
    indexer_types: tuple[str, ...] | None = None  # full: the layer chooses keys; shared: it takes those chosen before
    # the same in older keys: a letter or word for each layer, or a period that begins after some layers
    index_topk_pattern: str | tuple[str, ...] | None = None
    index_topk_freq: Layer = 1
    index_skip_topk_offset: Layer = 2

    @model_validator(mode="before")
    @classmethod
    def _drop_unused_window(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Leave out a window of 0 tokens that is not used, which Qwen2-MoE's class writes."""
        unused = values.get("use_sliding_window") is False and values.get("sliding_window") == 0
        return {**values, "sliding_window": None} if unused else values

    def mistake(self, what: str) -> UserError:
        """Make the one-line ``UserError`` for a feature or value that ``Model`` cannot represent."""
        return UserError(f"{self.name}: {what}")
