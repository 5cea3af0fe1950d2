"""One decoder layer: attention and feed-forward, each a branch that is added to the residual stream x.

pre       y = x + A(n1(x))           z = y + F(n2(y))                 Llama
post      y = x + n1(A(x))           z = y + n2(F(y))                 OLMo 2
sandwich  y = x + n1'(A(n1(x)))      z = y + n2'(F(n2(y)))            Gemma 2
post_sum  y = n1(x + A(x))           z = n2(y + F(y))                 GPT
parallel  y = x + A(n1(x))           z = y + F(n2(x))                 GPT-NeoX     shared: F(n1(x)), Command-R
norm_stream   y = h + A(h)           z = g + F(g)                     MiniMax-01: h = n1(x), g = n2(y)
joined    y = x + a A(n1(x)) + m M(s n1(x))                       Falcon-H1: M is a Mamba-2, s, a and m are factors
streams   y = C x + p A(n1(Σ q x))   z = C' y + p' F(n2(Σ q' y))     DeepSeek-V4: C, p and q of each token and stream

Factors may multiply both summands of a sum. F may be the sum of an MLP and experts, which may have norms of their own
(Gemma 4), or whose output is added at the end of the next layer (LongCat-Flash). A layer may lack either branch, with
its norms: Mamba has no feed-forward, Nemotron-H one branch in each layer. The first layer of ModernBERT has no n1.
Gemma 3n and Gemma 4 add an input of each layer to z (``per_layer_inputs.py``); Gemma 3n has a stream of several parts,
of which a layer computes the first (``altup.py``). Streams: ``hyper_connections.py``. A norm before a branch may have a
gate: ``norm_gate.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from fivefold.model.factors import Multipliers
from fivefold.model.spec import Model
from fivefold.trainer.model.altup import AltUpLayer, Laurel, add_to_others
from fivefold.trainer.model.attention import GroupedAttention, LatentAttention, SelfAttention
from fivefold.trainer.model.dropout import ATTENTION, FEED_FORWARD, Dropout, place_in
from fivefold.trainer.model.expert_attention import ExpertAttention
from fivefold.trainer.model.hyper_connections import HyperConnection
from fivefold.trainer.model.indexed_attention import IndexedAttention
from fivefold.trainer.model.mixers import build_mixer
from fivefold.trainer.model.mlp import Mlp
from fivefold.trainer.model.moe import Moe
from fivefold.trainer.model.norm import build_norm
from fivefold.trainer.model.norm_gate import NormGate
from fivefold.trainer.model.operation import Run, call_directly
from fivefold.trainer.model.per_layer_inputs import LayerInput
from fivefold.trainer.model.receptance_mlp import ReceptanceMlp
from fivefold.trainer.model.rotary import RowInputs

Add = Callable[[Tensor, Tensor], Tensor]


class Block(nn.Module):
    """A token mixer, then MLP or mixture of experts, as ``model`` has at ``layer``, with the norms around them."""

    def __init__(self, model: Model, *, layer: int) -> None:
        super().__init__()
        self.run: Run = call_directly
        self.kind = model.get_block(layer)
        self.factors = dict(zip(("attention", "mlp"), model.get_residual_factors(layer), strict=True))
        self.add: Add = residual if model.residual_scale == 1 else partial(residual, scale=model.residual_scale)
        mixer, feeds = model.mixer_name(layer), model.has_feed_forward(layer)
        mixes = mixer != "none"
        attends = model.has_attention(layer)
        routes = model.is_moe(layer)
        self.lends_attention = model.lends_kv(layer) or model.lends_chosen(layer)
        self.lends_experts, self.adds_lent_experts = model.lends_experts(layer), model.adds_lent_experts(layer)
        self.lends = self.lends_attention or self.lends_experts
        self.altup = AltUpLayer(model) if model.altup is not None else None
        connects = model.hyper_connections is not None
        self.hyper1 = HyperConnection(model, name="hyper1") if connects and mixes else None
        self.norm1 = build_norm(model, model.width) if model.has_norm1(layer) else None
        gates = (mixes and model.gates_norm(layer, "norm1"), feeds and model.gates_norm(layer, "norm2"))
        self.norm1_gate = NormGate(model, name="norm1") if gates[0] else None
        self.norm2_gate = NormGate(model, name="norm2") if gates[1] else None
        self.attention = build_attention(model, layer=layer) if attends else None
        joins = attends and model.joins_mamba2
        self.mixer = build_mixer(model, layer=layer) if joins or (mixes and not attends) else None
        self.multipliers = (model.multipliers or Multipliers()) if joins else None
        self.norm1_post = build_norm(model, model.width) if mixes and self.kind == "sandwich" else None
        self.hyper2 = HyperConnection(model, name="hyper2") if connects and feeds else None
        self.norm2 = build_norm(model, model.width) if feeds and self.kind != "parallel_shared" else None
        self.moe = Moe(model, layer=layer) if routes else None
        sparsity = model.gate_sparsity[layer] if model.has_sparse_gates(layer) else 0.0
        has_mlp = model.has_mlp(layer)
        self.mlp: Mlp | ReceptanceMlp | None = None
        if has_mlp and model.mlp == "receptance":
            self.mlp = ReceptanceMlp(model, ffn=model.get_ffn(layer))
        elif has_mlp:
            self.mlp = Mlp(model, ffn=model.get_ffn(layer), name="mlp", sparsity=sparsity)
        self.norm2_post = build_norm(model, model.width) if feeds and model.norms_feed_forward(layer) else None
        self.laurel = Laurel(model) if model.laurel_rank is not None else None
        self.per_layer = LayerInput(model) if model.per_layer_inputs is not None else None
        self.stream1, self.stream2 = (  # factors of the stream in each sum
            nn.Parameter(torch.empty(model.width)) if model.residual_weights and is_there else None
            for is_there in (mixes, feeds)
        )
        self.drops = nn.ModuleDict()
        if model.dropout:
            places = (("attention", ATTENTION, mixes), ("mlp", FEED_FORWARD, feeds))
            for branch, place, is_there in places:
                if is_there:
                    self.drops[branch] = Dropout(model.dropout, place=place_in(layer, place))

    @property
    def token_mixer(self) -> nn.Module | None:
        """Return attention, or the token mixer that the layer has instead; None: it has none.

        A Mamba-2 next to attention is ``mixer``.
        """
        return self.attention or self.mixer

    @property
    def feed_forward(self) -> nn.Module | None:
        """Return the mixture of experts or the MLP; None: the layer has neither."""
        return self.moe or self.mlp

    def forward(self, x_RD: Tensor, rows: RowInputs) -> Tensor | tuple[Tensor, ...]:
        """Apply the layer: [R, D] → [R, D], with AltUp or hyper-connections [R, n, D] each.

        A layer whose keys and values later layers attend to returns them too, [B, T, K, H] each; one that chooses keys
        for later layers returns their indices, and one whose experts' output the next layer adds, that output.
        """
        parts: Tensor | None = None
        lent: list[Tensor] = []  # torch.compile does not trace list[Tensor]()
        if self.hyper1 is not None or self.hyper2 is not None:
            x_RD = self._connect_branches(x_RD, rows, lent)
            return (x_RD, *lent) if self.lends else x_RD
        if self.altup is not None:
            parts, x_RD = self.altup.predict_parts(x_RD)
        z_RD = self._apply_branches(x_RD, rows, lent)
        if self.per_layer is not None:
            assert rows.layer_input is not None
            if self.altup is None or parts is None:
                z_RD = self.run("per_layer.add", torch.add, z_RD, self.per_layer(z_RD, rows.layer_input))
            else:
                parts = self.altup.correct_parts(parts, x_RD, z_RD)
                del x_RD, z_RD
                first_RD = self.altup.read_first(parts)
                y_RD = self.per_layer(first_RD, rows.layer_input)
                del first_RD
                z_RD = self.run("per_layer.add", add_to_others, parts, y_RD)
        return (z_RD, *lent) if self.lends else z_RD

    def _apply_branches(self, x_RD: Tensor, rows: RowInputs, lent: list[Tensor]) -> Tensor:
        """Add attention and feed-forward to the stream [R, D]; what later layers read of attention goes to ``lent``."""
        is_post = self.kind in ("post", "post_sum")
        is_parallel = self.kind in ("parallel", "parallel_shared")
        norms_stream = self.kind == "norm_stream"
        y_RD, entry_RD = x_RD, None
        if self.token_mixer is not None:
            h_RD = x_RD if is_post or self.norm1 is None else self._normalize("norm1", x_RD)
            mixed = self.token_mixer(h_RD, rows)
            a_RD: Tensor = mixed[0] if self.lends_attention else mixed
            lent += mixed[1:] if self.lends_attention else ()
            del mixed
            entry_RD = h_RD if self.kind == "parallel_shared" else None  # input of the feed-forward too
            laurel_RD = h_RD if self.laurel is not None else None
            stream_RD = h_RD if norms_stream else x_RD
            if self.multipliers is not None:
                a_RD = self._scale("attention.out.scale", a_RD, self.multipliers.attention_out)
                h_RD = self._scale("mixer.in.scale", h_RD, self.multipliers.mixer_in)
                a_RD = self._join_mixer(a_RD, h_RD, rows, factor=self.multipliers.mixer_out)
            del h_RD
            y_RD = self._add_branch("attention", stream_RD, a_RD, rows, name="norm1" if is_post else "norm1_post")
            del a_RD, stream_RD
            if self.laurel is not None:
                y_RD = self.laurel(laurel_RD, y_RD)
            del laurel_RD
        if self.feed_forward is None:
            return y_RD
        if entry_RD is None:
            stream_RD = x_RD if is_parallel else y_RD
            entry_RD = stream_RD if is_post else self._normalize("norm2", stream_RD)
            del stream_RD
        if norms_stream:
            y_RD = entry_RD
        joins = self.moe is not None and self.mlp is not None
        if self.lends_experts:
            assert self.mlp is not None
            assert self.moe is not None
            d_RD: Tensor = self.mlp(entry_RD, rows.keys)
            lent.append(self.moe(entry_RD, rows.keys, ids_BT=rows.ids))
        else:
            d_RD = self._join_experts(entry_RD, y_RD, rows) if joins else self._feed_forward(entry_RD, rows)
        del entry_RD
        z_RD = self._add_branch("mlp", y_RD, d_RD, rows, name="norm2" if is_post else "norm2_post")
        if not self.adds_lent_experts:
            return z_RD
        return self.run("mlp.shortcut", torch.add, z_RD, rows.experts)

    def _connect_branches(self, x_RnD: Tensor, rows: RowInputs, lent: list[Tensor]) -> Tensor:
        """Connect the streams [R, n, D] with attention and feed-forward, each of which reads the norm of a sum of them.

        ``lent``: as in ``_apply_branches``.
        """
        if self.hyper1 is not None and self.token_mixer is not None:
            entry_RD, numbers = self.hyper1(x_RnD)
            entry_RD = self._normalize("norm1", entry_RD)
            mixed = self.token_mixer(entry_RD, rows)
            del entry_RD
            a_RD: Tensor = mixed[0] if self.lends else mixed
            lent += mixed[1:] if self.lends else ()
            del mixed
            x_RnD = self.hyper1.mix(x_RnD, a_RD, numbers)
            del a_RD, numbers
        if self.hyper2 is not None and self.feed_forward is not None:
            entry_RD, numbers = self.hyper2(x_RnD)
            entry_RD = self._normalize("norm2", entry_RD)
            joins = self.moe is not None and self.mlp is not None
            d_RD = self._join_experts(entry_RD, entry_RD, rows) if joins else self._feed_forward(entry_RD, rows)
            del entry_RD
            if self.norm2_post is not None:  # of experts alone
                d_RD = self.run("norm2_post", self.norm2_post, d_RD)
            x_RnD = self.hyper2.mix(x_RnD, d_RD, numbers)
        return x_RnD

    def _normalize(self, name: Literal["norm1", "norm2"], x_RD: Tensor) -> Tensor:
        """Return the norm ``name`` of the stream, times its gate if it has one."""
        normed_RD: Tensor = self.run(name, getattr(self, name), x_RD)
        gate: NormGate | None = getattr(self, f"{name}_gate")
        return normed_RD if gate is None else gate(normed_RD)

    def _feed_forward(self, entry_RD: Tensor, rows: RowInputs) -> Tensor:
        """Return the output of the experts or of the MLP, of which the layer has one."""
        if self.moe is None:
            assert self.mlp is not None
            is_mixed = isinstance(self.mlp, ReceptanceMlp)
            return self.mlp(entry_RD, rows.tokens if is_mixed else rows.keys)
        return self.moe(entry_RD, rows.keys, ids_BT=rows.ids)

    def _join_experts(self, entry_RD: Tensor, stream_RD: Tensor, rows: RowInputs) -> Tensor:
        """Return the MLP's output plus that of the experts next to it.

        Both read ``entry_RD``; experts with norms of their own read the stream, as does their router.
        """
        assert self.moe is not None
        assert self.mlp is not None
        d_RD: Tensor = self.mlp(entry_RD, rows.keys)
        if self.moe.input_norm is None:
            e_RD: Tensor = self.moe(entry_RD, rows.keys, ids_BT=rows.ids)
        else:
            d_RD = self.run("moe.mlp_norm", self.moe.mlp_norm, d_RD)
            router_RD = self.run("moe.router.norm", self.moe.router.norm, stream_RD)
            input_RD = self.run("moe.input_norm", self.moe.input_norm, stream_RD)
            e_RD = self.moe(input_RD, rows.keys, router_RD, ids_BT=rows.ids)
            del input_RD
            del router_RD
            e_RD = self.run("moe.output_norm", self.moe.output_norm, e_RD)
        return self.run("moe.join", torch.add, d_RD, e_RD)

    def _scale(self, name: str, x_RD: Tensor, factor: float) -> Tensor:
        """Return ``factor`` times a tensor of the layer; a factor of 1 is no operation."""
        return x_RD if factor == 1 else self.run(name, torch.mul, x_RD, factor)

    def _join_mixer(self, a_RD: Tensor, h_RD: Tensor, rows: RowInputs, *, factor: float) -> Tensor:
        """Return attention's output plus ``factor`` times that of the Mamba-2 next to it, which reads ``h_RD``."""
        assert self.mixer is not None
        m_RD = self._scale("mixer.out.scale", self.mixer(h_RD, rows), factor)
        return self.run("mixer.join", torch.add, a_RD, m_RD)

    def _add_branch(self, branch: str, onto_RD: Tensor, out_RD: Tensor, rows: RowInputs, *, name: str) -> Tensor:
        """Return ``onto_RD`` plus the output of ``branch``, through the norm ``name`` if the block has one there.

        The norm is of the branch, or with ``post_sum`` of the sum.
        """
        post_norm, norms_sum = getattr(self, name), self.kind == "post_sum"
        if post_norm is not None and not norms_sum:
            out_RD = self.run(name, post_norm, out_RD)
        if rows.keys is not None and branch in self.drops:
            out_RD = self.run(f"{branch}.dropout", self.drops[branch], out_RD, rows.keys, rows.tokens)
        onto_factor, out_factor = self.factors[branch]
        if onto_factor != 1:
            onto_RD = self.run(f"{branch}.scale", torch.mul, onto_RD, onto_factor)
        if out_factor != 1:
            out_RD = self.run(f"{branch}.scale", torch.mul, out_RD, out_factor)
        stream_weight = self.stream1 if branch == "attention" else self.stream2
        if stream_weight is not None:
            onto_RD = self.run(f"{branch}.stream", torch.mul, onto_RD, stream_weight)
        sum_RD: Tensor = self.run(f"{branch}.add", self.add, onto_RD, out_RD)
        if norms_sum:
            del onto_RD, out_RD
            sum_RD = self.run(name, post_norm, sum_RD)
        return sum_RD


def build_attention(model: Model, *, layer: int) -> SelfAttention:
    """Build the attention of a layer."""
    if model.attention_experts:
        return ExpertAttention(model, layer=layer)
    latent = model.get_latent(layer)
    if latent is None:
        return GroupedAttention(model, layer=layer)
    return (LatentAttention if latent.indexer is None else IndexedAttention)(model, layer=layer)


def residual(x_RD: Tensor, y_RD: Tensor, *, scale: float = 1.0) -> Tensor:
    """Return ``x + scale · y`` of the residual stream."""
    return torch.add(x_RD, y_RD, alpha=scale)
