"""The vision tower of a multimodal model as a record: a transformer over patches, and the projector to text tokens.

    pixels ── patches ──(+ positions)── norm? ── blocks ── norm? ── projector ── tokens of the text model

An image of P patches becomes P / ``patches_per_token`` tokens. ``vision_weights.py`` lists the weights, and
``planner/counts/operations/vision.py`` the operations.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from fivefold.bounded_types import Ffn, Heads, LayerIndex, Layers, Tokens, Width
from fivefold.model.activations import ActivationName
from fivefold.model.norms import NormName
from fivefold.record import Record


class ProjectorLayer(Record):
    """One step from the blocks' output to tokens of the text model.

    It maps R rows of D channels, at first one row for each patch, to other rows:

    - ``merge``: joins ``size`` adjacent rows side by side, R/size rows of D·size channels, without a copy.
    - ``shuffle``: joins rows as ``merge`` does, and copies them in memory.
    - ``pool``: takes the mean of ``size`` adjacent rows, R/size rows of D channels.
    - ``norm``, ``activation``: keep the shape.
    - ``linear``: R rows of ``size`` channels.
    - ``mlp``, ``gated_mlp``: R rows of ``size`` channels, with an inner width of ``ffn``.
    """

    kind: Literal["merge", "shuffle", "pool", "norm", "linear", "activation", "mlp", "gated_mlp"]  # what it does
    size: Width = 1  # rows that become one (merge, shuffle, pool), or channels of the output (linear, MLPs)
    ffn: Ffn = 1  # inner width of an MLP
    bias: bool = False  # the matrices, or the LayerNorm, have a bias
    norm: NormName = "layernorm"  # kind of a norm
    activation: ActivationName = "gelu"  # activation function of an MLP, or of a layer of its own


class VisionTower(Record):
    """A vision transformer and its projector. All counts are those of the full tower, without sharding."""

    patch: int = Field(ge=1, le=2**12)  # pixels of a patch in each direction
    frames: int = Field(1, ge=1, le=2**10)  # frames of a patch; of an image all are the same
    channels: int = Field(3, ge=1, le=2**10)  # color channels of a pixel
    patches: Tokens | None = None  # patches of an image, if all images have one size; None: any size
    layers: Layers  # transformer blocks
    width: Width  # width of the residual stream
    heads: Heads  # attention heads
    ffn: Ffn  # width of the feed-forward
    norm: NormName = "layernorm"  # kind of norm
    mlp: Literal["gated", "plain"] = "plain"  # gated or plain feed-forward
    activation: ActivationName = "gelu"  # activation function of the feed-forward
    mlp_bias: bool = True  # the feed-forward has biases
    qkv_bias: bool = True  # the projections of q, k and v have biases
    out_bias: bool = True  # the output projection has a bias
    qk_norm: bool = False  # queries and keys are normed over all heads, by RMSNorms
    patch_bias: bool = True  # the projection of patches has a bias
    class_token: bool = False  # a learned row before the patches, which no token is made of
    positions: int = Field(0, ge=0, le=2**24)  # rows of a learned table that is added to the patches; 0: there is none
    rotary: bool = False  # queries and keys are rotated by their place in the image
    first_norm: bool = False  # patches are normed before the blocks
    final_norm: Literal["none", "used", "unused"] = "none"  # unused: it has weights, but tokens are made without it
    final_norm_kind: NormName | None = None  # kind of the final norm; None: as ``norm``
    layer_scale: bool = False  # a trained factor for each channel on what a branch adds to the stream
    pooling_head: bool = False  # attention that makes one vector of an image; it has weights, but makes no tokens
    window: Tokens | None = None  # patches of a window that layers attend within; None: all attend to the full image
    full_layers: tuple[LayerIndex, ...] = ()  # layers that attend to the full image, if others have a window
    # layers whose outputs are joined for the projector, counted from 1; 0: the patches before the first layer; empty:
    # the last layer
    features: tuple[LayerIndex, ...] = ()
    projector: tuple[ProjectorLayer, ...]  # from the last layer to tokens, in order
    newline: bool = False  # a learned token that ends the rows of an image
    deepstack: tuple[
        LayerIndex, ...
    ] = ()  # layers whose outputs become tokens by projectors of their own (arXiv:2406.04334)
    deepstack_projector: tuple[ProjectorLayer, ...] = ()  # the projector of each of them

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        """Raise a ``ValueError`` for fields that contradict each other."""
        if self.width % self.heads:
            raise ValueError(f"width={self.width} of the vision tower is not divisible by heads={self.heads}")
        if self.rotary and self.head_dim % 2:
            raise ValueError(f"head dim {self.head_dim} of the vision tower is odd, and cannot be rotated")
        for layer in (*self.full_layers, *(layer - 1 for layer in self.features), *self.deepstack):
            if not -1 <= layer < self.layers:
                raise ValueError(f"the vision tower has {self.layers} layers, and no layer {layer}")
        if self.patches is not None and self.patches % self.patches_per_token:
            raise ValueError(
                f"patches={self.patches} of an image are not divisible by the {self.patches_per_token} of a token: "
                "change one"
            )
        return self

    @property
    def head_dim(self) -> int:
        """Return the dims of a head."""
        return self.width // self.heads

    @property
    def patches_per_token(self) -> int:
        """Return the patches that one token of the text model is made of."""
        result = 1
        for layer in self.projector:
            result *= layer.size if layer.kind in ("merge", "shuffle", "pool") else 1
        return result

    def count_tokens(self, image_tokens: int | None) -> int:
        """Return the tokens of an image; ``image_tokens``: those given, None only if all images have one size."""
        if image_tokens is not None:
            return image_tokens
        assert self.patches is not None
        return self.patches // self.patches_per_token

    @property
    def computed_layers(self) -> int:
        """Return the number of layers whose output tokens are made of; those after them compute without a use."""
        return max((*self.features, *(layer + 1 for layer in self.deepstack))) if self.features else self.layers

    def has_window(self, layer: int) -> bool:
        """Tell whether ``layer`` attends within windows."""
        return self.window is not None and layer not in self.full_layers
