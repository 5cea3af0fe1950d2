"""Mixture of experts: each row goes to the k experts its router scores highest, and to the shared experts if any.

    x → router → top-k → copies by expert ⇢ gate, up → act(gate, up) · weight → down ⇢ Σ over copies (+ shared) → d

Latent experts (arXiv:2601.18089) read a projection of x before the first ⇢; another one follows their sum.
⇢ is ``dispatcher``: under expert parallelism an all_to_all, which the shared experts overlap. The router computes in
fp32 (arXiv:2101.03961 §2.4). Operations are named as in ``planner/counts/operations/feedforward.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.spec import Model
from fivefold.record import RunFailure
from fivefold.trainer.model import expert_lora, routing, sparse_mixer
from fivefold.trainer.model.experts import Experts
from fivefold.trainer.model.kernels.activations import activate_limited
from fivefold.trainer.model.kernels.eager import EAGER, Kernels
from fivefold.trainer.model.kernels.kinds import INPUT_WEIGHTED, WEIGHTED
from fivefold.trainer.model.linear import Linear, WgradStore, accumulate_grad
from fivefold.trainer.model.mlp import Mlp
from fivefold.trainer.model.norm import build_norm
from fivefold.trainer.model.operation import Run, call_directly, exclude_from_graphs, take_all_rows
from fivefold.trainer.model.routing import Permutation, Sequences


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
        ends: Tensor = plan.cumsum(0, dtype=torch.int32)
        return ends

    def combine(self, rows: Tensor, plan: Any) -> Tensor:
        """Send the experts' outputs [n', D] back → [n, D] in the order of ``send``."""
        return rows


class Router(nn.Module):
    """Linear layer to expert logits [R, E], in fp32 for rows of any dtype; its dW can be deferred.

    ``norm``: of its input, called by the layer; ``expert_scale`` [E]: factors on the routing weights.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        assert model.moe is not None
        self.weight = nn.Parameter(torch.empty(model.moe.choices, model.width))
        self.bias = nn.Parameter(torch.empty(model.moe.choices)) if model.moe.router_bias else None
        is_normed = model.moe.joined_norms  # experts next to an MLP with norms of their own (Gemma 4)
        self.norm = build_norm(model, model.width) if is_normed else None
        self.factor = model.width**-0.5 if is_normed else 1.0  # on the logits
        self.expert_scale = nn.Parameter(torch.empty(model.moe.choices)) if is_normed else None
        self.wgrad_store = WgradStore()

    def forward(self, x_RD: Tensor) -> Tensor:
        """Compute the expert logits: [R, D] → [R, E] in fp32."""
        logits: Tensor = _route(x_RD, self)
        return logits


class SharedGate(nn.Module):
    """The factor of a row's shared experts: the sigmoid of its product with ``weight`` [1, D] (Qwen2-MoE)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, width))

    def forward(self, x_RD: Tensor, shared_RD: Tensor) -> Tensor:
        """Multiply the shared experts' output by the factors of the rows ``x``."""
        out_RD: Tensor = _GateShared.apply(x_RD, shared_RD, self.weight)  # type: ignore[no-untyped-call]
        return out_RD


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


class Moe(nn.Module):
    """Routed and shared experts. Parallelisms replace ``run``, ``dispatcher`` and ``sequences``.

    ``load`` [E]: how often each expert was chosen on this rank since it was last cleared. ``bias`` [E]: added to the
    scores when experts are chosen, updated from the load under balance "free". ``table`` [V, k]: the experts of each
    token id, if they do not depend on the scores (Hash layers, arXiv:2106.04426); ``own_rows``: selects this rank's
    rows under sp.
    """

    bias: Tensor
    load: Tensor
    table: Tensor | None

    def __init__(self, model: Model, *, layer: int = 0) -> None:
        super().__init__()
        assert model.moe is not None
        self.moe, self.activation, self.is_gated = model.moe, model.activation, model.mlp == "gated"
        self.run: Run = call_directly
        self.kernels: Kernels = EAGER
        self.dispatcher, self.sequences = TokenDispatcher(), Sequences()
        self.count_copies: Callable[[Tensor], int] = routing.count_copies
        self.scale: float | None = None  # factor of the auxiliary loss, set by the trainer: 1 / tokens of a step
        self.router = Router(model)
        draws, experts = model.draws_experts, model.moe.experts
        self.noise = sparse_mixer.ExpertNoise(layer=layer, experts=experts) if draws else None
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
        self.register_buffer("load", torch.zeros(model.moe.choices, dtype=torch.int64), persistent=False)
        self.own_rows: Callable[[Tensor], Tensor] = take_all_rows
        shape, is_hashed = (model.vocab, model.moe.topk), model.hashes_experts(layer)
        self.register_buffer("table", torch.zeros(shape, dtype=torch.int32) if is_hashed else None)

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
        weights, chosen = self.run("moe.topk", self._choose_experts, logits, keys_B, ids_BT)
        permutation, plan = self._plan_dispatch(chosen)
        entry = x_RD if self.latent_down is None else self.run("moe.latent_down", self.latent_down, x_RD)
        routed, share = self.run("moe.dispatch", _copy_rows, entry, weights, permutation, self.kernels)
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
        out_RD: Tensor = self.run("moe.combine", _combine_copies, expert_out, permutation, self.kernels)
        del expert_out
        if self.latent_up is not None:
            out_RD = self.run("moe.latent_up", self.latent_up, out_RD)
        if self.moe.identity_experts:
            out_RD = self.run("moe.identity", _add_tokens, out_RD, x_RD, weights, chosen, self.moe.experts)
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
        activate: Callable[..., Tensor] = getattr(self.kernels, methods[self.activation])
        return activate

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

    def _choose_experts(
        self, logits: Tensor, keys_B: Tensor | None, ids_BT: Tensor | None = None, chosen: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute routing weights and expert indices [R, k] from logits [R, E].

        ``keys_B`` and ``ids_BT``: as in ``forward``. ``chosen``: use these experts instead of the layer's own choice.
        """
        if self.table is not None and chosen is None:
            assert ids_BT is not None
            chosen = self.own_rows(self.table[ids_BT].flatten(0, 1)).long()
        if self.noise is not None:
            weights, chosen = _mix_sparsely(logits, keys_B, self, self.noise, chosen)
        else:
            scores = SCORES[self.moe.score](logits)
            if chosen is None:
                with torch.no_grad():
                    ranked = logits if self.moe.biased == "logits" else scores
                    bias = self.bias if self.moe.balance == "free" else None
                    chosen = routing.choose_experts(ranked, bias, moe=self.moe)
            weights = routing.routing_weights(_add_balance(scores, chosen, self), chosen, moe=self.moe)
        if self.router.expert_scale is not None:
            weights = _scale_experts(weights, chosen, self.router.expert_scale)
        return weights, chosen

    @exclude_from_graphs
    @torch.no_grad()
    def _plan_dispatch(self, chosen: Tensor) -> tuple[Permutation, Any]:
        """Return permutation and dispatch plan; made once per forward and reused if operations are recomputed."""
        if self.moe.identity_experts:
            computed: Tensor | None = chosen < self.moe.experts
        else:
            computed = routing.mask_capacity(chosen, self.sequences, moe=self.moe)
        copies = chosen.numel() if computed is None else self.count_copies(computed)
        permutation = routing.build_permutation(chosen, computed, copies=copies, experts=self.moe.experts)
        return permutation, self.dispatcher.plan(permutation.counts)


class _Balance(torch.autograd.Function):
    """Identity on the scores [R, E]; its backward, run once, counts the load and adds the gradient of the aux loss.

    With SparseMixer it is the identity on the logits, whose softmax are the scores of that loss.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, chosen: Tensor, layer: Moe) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(scores, chosen)
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        layer: Moe = ctx.layer
        scores, chosen = ctx.saved_tensors
        flat = chosen.flatten()
        layer.load.scatter_add_(0, flat, torch.ones_like(flat))
        if layer.moe.balance == "aux" and layer.moe.aux_coefficient:
            if layer.scale is None:
                raise RunFailure("the auxiliary loss has no weight: set moe.scale to 1 / tokens of a step")
            logits_given = layer.noise is not None
            scores = scores.softmax(-1) if logits_given else scores
            aux_gradient = routing.aux_gradient(scores, chosen, layer.sequences, moe=layer.moe, scale=layer.scale)
            if logits_given:
                aux_gradient = torch.ops.aten._softmax_backward_data(aux_gradient, scores, -1, scores.dtype)
            gradient = aux_gradient.add_(gradient)
        return gradient, None, None


class _Route(torch.autograd.Function):
    """The router's linear layer in fp32; the backward accumulates its dW itself, at once or deferred.

    A frozen one saves nothing.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, _weight: Tensor, router: Router) -> Tensor:
        ctx.router, ctx.dtype = router, x.dtype
        ctx.save_for_backward(x if router.weight.requires_grad else None)
        logits = F.linear(x.float(), router.weight.float(), None if router.bias is None else router.bias.float())
        return logits if router.factor == 1 else logits.mul_(router.factor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        router: Router = ctx.router
        gradient = gradient if router.factor == 1 else gradient * router.factor
        if router.weight.requires_grad:
            x = ctx.saved_tensors[0].detach()  # a deferred dW must not hold the graph
            router.wgrad_store.run_or_defer(lambda: _accumulate_router_grads(router, x, gradient))
        return (gradient @ router.weight.float()).to(ctx.dtype), None, None


def _accumulate_router_grads(router: Router, x: Tensor, gradient: Tensor) -> None:
    if router.bias is not None:
        accumulate_grad(router.bias, gradient.sum(0).to(router.bias.dtype))
    accumulate_grad(router.weight, (gradient.t() @ x.float()).to(router.weight.dtype))


class _SqrtSoftplus(torch.autograd.Function):
    """√softplus, which saves its output alone: the derivative of softplus is 1 − e^(−softplus)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        scores = F.softplus(logits).sqrt_()
        ctx.save_for_backward(scores)
        return scores

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (scores,) = ctx.saved_tensors
        slope = scores.square().neg_().expm1_().div_(scores).mul_(-0.5)
        logits_gradient: Tensor = slope.masked_fill_(scores == 0, 0).mul_(gradient)
        return logits_gradient


def _compute_sqrt_softplus(logits: Tensor) -> Tensor:
    scores: Tensor = _SqrtSoftplus.apply(logits)  # type: ignore[no-untyped-call]
    return scores


# scores [R, E] of logits, of which the highest are chosen
SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": partial(torch.softmax, dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": _compute_sqrt_softplus,
}


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


class _ScaleExperts(torch.autograd.Function):
    """Multiply routing weights [R, k] by the factors [E] of their experts."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(weights, chosen, scale)
        return weights * scale[chosen].float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor | None]:
        weights, chosen, scale = ctx.saved_tensors
        scale_gradient = None
        if ctx.needs_input_grad[2]:
            sums = torch.zeros(len(scale), dtype=weights.dtype, device=weights.device)
            sums.index_add_(0, chosen.flatten(), (gradient * weights).flatten())
            scale_gradient = sums.to(scale.dtype)
        return gradient * scale[chosen].float(), None, scale_gradient


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
def _route(x: Tensor, router: Router) -> Tensor:
    logits: Tensor = _Route.apply(x, router.weight, router)  # type: ignore[no-untyped-call]
    return logits


@exclude_from_graphs
def _add_balance(scores: Tensor, chosen: Tensor, layer: Moe) -> Tensor:
    balanced: Tensor = _Balance.apply(scores, chosen, layer)  # type: ignore[no-untyped-call]
    return balanced


@exclude_from_graphs
def _mix_sparsely(
    logits: Tensor, keys_B: Tensor | None, layer: Moe, noise: sparse_mixer.ExpertNoise, chosen: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute weights and experts [R, 2] as SparseMixer does: drawn in training, when sequences have keys.

    ``chosen``: use these experts instead of the drawn ones.
    """
    jitter = layer.moe.jitter
    with torch.no_grad():
        uniform = None if keys_B is None else noise.draw(keys_B, rows=logits.shape[0])
        drawn, factors = sparse_mixer.choose_experts(logits, uniform, jitter=jitter)
    chosen = drawn if chosen is None else chosen
    weights = sparse_mixer.weigh_experts(_add_balance(logits, chosen, layer), chosen, factors, jitter=jitter)
    return weights * layer.moe.scaling if layer.moe.scaling != 1 else weights, chosen


@exclude_from_graphs
def _scale_experts(weights: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    scaled: Tensor = _ScaleExperts.apply(weights, chosen, scale)  # type: ignore[no-untyped-call]
    return scaled


@exclude_from_graphs
def _copy_rows(x: Tensor, weights: Tensor, permutation: Permutation, kernels: Kernels) -> tuple[Tensor, Tensor]:
    """Copy rows [R, D] and routing weights [R, k] to copies [n, D] and their weights [n], in order of expert."""
    copies: Tensor = _Copy.apply(x, permutation, kernels)  # type: ignore[no-untyped-call]
    return copies, weights.flatten().index_select(0, permutation.order)


@exclude_from_graphs
def _add_tokens(out: Tensor, x: Tensor, weights: Tensor, chosen: Tensor, experts: int) -> Tensor:
    added: Tensor = _AddTokens.apply(out, x, weights, chosen, experts)  # type: ignore[no-untyped-call]
    return added


@exclude_from_graphs
def _combine_copies(rows: Tensor, permutation: Permutation, kernels: Kernels) -> Tensor:
    combined: Tensor = _SumRows.apply(rows, permutation, kernels)  # type: ignore[no-untyped-call]
    return combined
