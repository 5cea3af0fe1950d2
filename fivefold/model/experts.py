"""Mixtures of experts."""

from typing import Literal, Self

from pydantic import Field, model_validator

from fivefold.bounded_types import Experts, Ffn, Positive, Scalar
from fivefold.record import Record
from fivefold.units import ceil_div


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
