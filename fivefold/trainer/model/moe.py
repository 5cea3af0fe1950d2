"""Mixture of experts: each row goes to the k experts its router scores highest, and to the shared experts if any.

    x → router → top-k → copies by expert ⇢ gate, up → act(gate, up) · weight → down ⇢ Σ over copies (+ shared) → d

Latent experts (arXiv:2601.18089) read a projection of x before the first ⇢; another one follows their sum.
⇢ is ``dispatcher``: under expert parallelism an all_to_all, which the shared experts overlap. The router computes in
fp32 (arXiv:2101.03961 §2.4). Operations are named as in ``planner/counts/operations/feedforward.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.model.spec import Model
from fivefold.trainer.model import expert_lora, routing
from fivefold.trainer.model.experts import Experts
from fivefold.trainer.model.kernels.activations import activate_limited
from fivefold.trainer.model.kernels.eager import EAGER, Kernels
from fivefold.trainer.model.kernels.kinds import INPUT_WEIGHTED, WEIGHTED
from fivefold.trainer.model.linear import Linear
from fivefold.trainer.model.mlp import Mlp
from fivefold.trainer.model.norm import build_norm
from fivefold.trainer.model.operation import Run, call_directly, exclude_from_graphs
from fivefold.trainer.model.router import ExpertRouting
from fivefold.trainer.model.routing import Permutation


def add_bias(rows: Tensor, bias: Tensor) -> Tensor:
    """Return rows [R, D] with a bias [D] added, of the rows' dtype."""
    return rows + bias.to(rows.dtype)


class TokenDispatcher:
    """Moves copies of rows to the ranks of their experts and back.

    This one is for experts that are all on this rank.
    """

    def plan(self, counts: Tensor) -> Any:
        """Plan a forward from the copies per expert ``counts`` [E]; every other method is given the plan."""
        return counts

    def send(self, rows: Tensor, share: Tensor, plan: Any) -> tuple[Tensor, Tensor]:
        """Start sending copies [n, D] and their routing weights ``share`` [n], both in order of expert."""
        return rows, share

    def arrive(self, rows: Tensor, share: Tensor, plan: Any) -> tuple[Tensor, Tensor]:
        """Wait for ``send``; return the rows [n', D] and weights [n'] that this rank's experts received."""
        return rows, share

    def offsets(self, plan: Any) -> Tensor:
        """Return the end of the received rows of each expert of this rank: [local experts], int32."""
        return plan.cumsum(0, dtype=torch.int32)

    def combine(self, rows: Tensor, plan: Any) -> Tensor:
        """Send the experts' outputs [n', D] back → [n, D] in the order of ``send``."""
        return rows


class SharedGate(nn.Module):
    """The factor of a row's shared experts: the sigmoid of its product with ``weight`` [1, D] (Qwen2-MoE)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, width))

    def forward(self, x_RD: Tensor, shared_RD: Tensor) -> Tensor:
        """Multiply the shared experts' output by the factors of the rows ``x``."""
        return _GateShared.apply(x_RD, shared_RD, self.weight)


class _GateShared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shared: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, shared, weight)
        return shared * torch.mv(x, weight[0]).sigmoid_()[:, None]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, shared, weight = ctx.saved_tensors
        factor = torch.mv(x, weight[0]).sigmoid_()
        logit_grad = torch.ops.aten.sigmoid_backward((grad * shared).sum(-1), factor)
        weight_grad = torch.mv(x.t(), logit_grad)[None] if weight.requires_grad else None
        return torch.outer(logit_grad, weight[0]), grad * factor[:, None], weight_grad


class Moe(ExpertRouting):
    """Routed and shared experts. Parallelisms replace ``run``, ``dispatcher`` and ``sequences``.

    ``bias`` is updated from the load under balance "free".
    """

    def __init__(self, model: Model, *, layer: int = 0) -> None:
        super().__init__(model, layer=layer)
        assert model.moe is not None
        self.activation, self.is_gated = model.activation, model.mlp == "gated"
        self.run: Run = call_directly
        self.kernels: Kernels = EAGER
        self.dispatcher = TokenDispatcher()
        self.experts = Experts(model)
        latent, bias = model.moe.latent_width, model.mlp_bias
        self.latent_down = None if latent is None else Linear(model.width, latent, bias=bias)
        self.latent_up = None if latent is None else Linear(latent, model.width, bias=bias)
        ffn = model.moe.shared_width
        self.shared = Mlp(model, ffn=ffn, name="moe.shared") if ffn else None
        self.shared_gate = SharedGate(model.width) if model.moe.shared_gate else None
        # next to an MLP: norms of its output, and of input and output of the experts
        self.mlp_norm, self.input_norm, self.output_norm = (
            build_norm(model, model.width) if model.moe.joined_norms else None for _ in range(3)
        )
        self.register_buffer("bias", torch.zeros(model.moe.choices, dtype=torch.float32))
        if model.hashes_experts(layer):
            self.table = torch.zeros(model.vocab, model.moe.topk, dtype=torch.int32)
        self.bias_out = nn.Parameter(torch.empty(model.width)) if model.moe.output_bias else None

    def forward(
        self,
        x_RD: Tensor,
        keys_B: Tensor | None = None,
        routed_by_RD: Tensor | None = None,
        *,
        ids_BT: Tensor | None = None,
    ) -> Tensor:
        """Apply the mixture of experts: [R, D] → [R, D].

        ``keys_B``: random keys of the sequences, as in ``Mlp``; ``routed_by_RD``: what the router reads; None: ``x``;
        ``ids_BT``: token ids of all rows, for ``table``.
        """
        logits = self.run("moe.router", self.router, x_RD if routed_by_RD is None else routed_by_RD)
        del routed_by_RD
        weights, chosen = self.run("moe.topk", self.choose_experts, logits, keys_B, ids_BT)
        permutation, plan = self._plan_dispatch(chosen)
        entry = x_RD if self.latent_down is None else self.run("moe.latent_down", self.latent_down, x_RD)
        routed, share = self.run("moe.dispatch", copy_rows, entry, weights, permutation, self.kernels)
        del entry
        # reusing the names frees the copies once the operation on them has run
        routed, share = self.run("moe.send", self.dispatcher.send, routed, share, plan)
        shared_RD = None if self.shared is None else self.shared(x_RD, keys_B)
        if self.shared_gate is not None:
            shared_RD = self.run("moe.shared_gate", self.shared_gate, x_RD, shared_RD)
        routed, share = self.run("moe.arrive", self.dispatcher.arrive, routed, share, plan)
        offsets = self.dispatcher.offsets(plan)
        entries = expert_lora.gate_up(self.run, self.experts, routed, offsets)  # gate and up, or up alone
        del routed
        act = self.run("moe.experts.act", self._select_activation, *entries, share, *self._activation_settings)
        del entries
        expert_out = expert_lora.project_down(self.run, self.experts, act, share, offsets)
        del act
        expert_out = self.run("moe.return", self.dispatcher.combine, expert_out, plan)
        out_RD: Tensor = self.run("moe.combine", combine_copies, expert_out, permutation, self.kernels)
        del expert_out
        if self.latent_up is not None:
            out_RD = self.run("moe.latent_up", self.latent_up, out_RD)
        if self.moe.identity_experts:
            out_RD = self.run("moe.identity", _add_tokens, out_RD, x_RD, weights, chosen, self.moe.experts)
        if self.bias_out is not None:
            out_RD = self.run("moe.bias", add_bias, out_RD, self.bias_out)
        return out_RD if shared_RD is None else self.run("moe.add", torch.add, out_RD, shared_RD)

    @property
    def _select_activation(self) -> Callable[..., Tensor]:
        """Return the kernel that activates the experts' rows and multiplies them by the routing weights."""
        if not self.is_gated:
            return self.kernels.weighted_plain
        if self.moe.clamp is not None:
            return activate_limited
        if self.activation not in WEIGHTED:
            return self.kernels.weighted_gated
        methods = INPUT_WEIGHTED if self.moe.router_weight_on == "inputs" else WEIGHTED
        return getattr(self.kernels, methods[self.activation])

    @property
    def _activation_settings(self) -> tuple[Any, ...]:
        """Return what the kernel of the activation gets besides tensors."""
        if self.moe.clamp is not None:
            return self.activation, self.moe.clamp
        return () if self.is_gated and self.activation in WEIGHTED else (self.activation,)

    @property
    def router_tensors(self) -> dict[str, Tensor]:
        """Return what the router holds and no step trains, by its name in this layer (``list_router_tensors``)."""
        return {"bias": self.bias} if self.table is None else {"bias": self.bias, "table": self.table}

    def update_bias(self, load: Tensor, *, rate: float = 1e-3) -> None:
        """Lower the bias of experts above the mean ``load`` [E] and raise others; call it once per step.

        ``load`` is summed over all ranks. Those of experts that give tokens back stay (arXiv:2509.01322 §2.1.1).
        """
        bias = routing.update_bias(self.bias, load, rate=rate)
        self.bias[: self.moe.experts] = bias[: self.moe.experts]

    @exclude_from_graphs
    @torch.no_grad()
    def _plan_dispatch(self, chosen: Tensor) -> tuple[Permutation, Any]:
        """Return permutation and dispatch plan; made once per forward and reused if operations are recomputed."""
        permutation = self.permute(chosen)
        return permutation, self.dispatcher.plan(permutation.counts)


class _AddTokens(torch.autograd.Function):
    """Add rows x [R, D] times the sum of those of their weights [R, k] whose expert gives the token back."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, weights: Tensor, chosen: Tensor, experts: int) -> Tensor:
        ctx.experts = experts
        ctx.save_for_backward(x, weights, chosen)
        return torch.addcmul(out, x, _sum_identity(weights, chosen, experts).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x, weights, chosen = ctx.saved_tensors
        share = _sum_identity(weights, chosen, ctx.experts)
        products = (gradient * x).sum(-1, keepdim=True, dtype=weights.dtype)
        return gradient, gradient * share.to(x.dtype), products * (chosen >= ctx.experts), None, None


def _sum_identity(weights: Tensor, chosen: Tensor, experts: int) -> Tensor:
    """Return the sum of the weights [R, k] of experts that give a token back: [R, 1]."""
    return (weights * (chosen >= experts)).sum(-1, keepdim=True)


class _Copy(torch.autograd.Function):
    """Copy rows [R, D] to [n, D] in order of expert. ``_SumRows`` is the reverse; each is the other's backward.

    The backward frees the permutation, which would otherwise last as long as the graph.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, permutation: Permutation, kernels: Kernels) -> Tensor:
        ctx.permutation, ctx.kernels = permutation, kernels
        return kernels.gather_rows(x, permutation.tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        permutation, ctx.permutation = ctx.permutation, None
        return ctx.kernels.sum_copies(gradient, permutation.places, permutation.starts), None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, permutation: Permutation, kernels: Kernels) -> Tensor:
        ctx.permutation, ctx.kernels = permutation, kernels
        return kernels.sum_copies(rows, permutation.places, permutation.starts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        permutation, ctx.permutation = ctx.permutation, None
        return ctx.kernels.gather_rows(gradient, permutation.tokens), None, None


@exclude_from_graphs
def copy_rows(x: Tensor, weights: Tensor, permutation: Permutation, kernels: Kernels) -> tuple[Tensor, Tensor]:
    """Copy rows [R, D] and routing weights [R, k] to copies [n, D] and their weights [n], in order of expert."""
    copies: Tensor = _Copy.apply(x, permutation, kernels)
    return copies, weights.flatten().index_select(0, permutation.order)


@exclude_from_graphs
def _add_tokens(out: Tensor, x: Tensor, weights: Tensor, chosen: Tensor, experts: int) -> Tensor:
    return _AddTokens.apply(out, x, weights, chosen, experts)


@exclude_from_graphs
def combine_copies(rows: Tensor, permutation: Permutation, kernels: Kernels) -> Tensor:
    """Add the copies [n, D] of each row, which are in order of expert: [R, D]."""
    return _SumRows.apply(rows, permutation, kernels)
