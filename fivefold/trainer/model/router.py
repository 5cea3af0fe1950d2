"""The routing of experts: scores of a linear layer, the k best experts of each row, and their weights.

    x → router → scores → top-k, weights

Experts of an MLP (``moe.py``) and of attention (``expert_attention.py``) share it. The router computes in fp32
(arXiv:2101.03961 §2.4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.errors import RunFailure
from fivefold.model.spec import Model
from fivefold.trainer.model import routing, sparse_mixer
from fivefold.trainer.model.linear import WgradStore, accumulate_grad
from fivefold.trainer.model.norm import build_norm
from fivefold.trainer.model.operation import exclude_from_graphs, take_all_rows
from fivefold.trainer.model.routing import Permutation, Sequences


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
        return _route(x_RD, self)


class ExpertRouting(nn.Module):
    """Chooses the experts of each row. Parallelisms replace ``sequences``.

    ``load`` [E]: how often each expert was chosen on this rank since it was last cleared. ``bias`` [E]: added to the
    scores when experts are chosen, if they are balanced without a loss. ``table`` [V, k]: the experts of each token id,
    if they do not depend on the scores (Hash layers, arXiv:2106.04426); ``own_rows``: selects this rank's rows under
    sp.
    """

    bias: Tensor
    load: Tensor
    table: Tensor | None

    def __init__(self, model: Model, *, layer: int = 0) -> None:
        super().__init__()
        assert model.moe is not None
        self.moe = model.moe
        self.sequences = Sequences()
        self.count_copies: Callable[[Tensor], int] = routing.count_copies
        self.scale: float | None = None  # factor of the auxiliary loss, set by the trainer: 1 / tokens of a step
        self.router = Router(model)
        draws, experts = model.draws_experts, model.moe.experts
        self.noise = sparse_mixer.ExpertNoise(layer=layer, experts=experts) if draws else None
        self.register_buffer("load", torch.zeros(model.moe.choices, dtype=torch.int64), persistent=False)
        self.own_rows: Callable[[Tensor], Tensor] = take_all_rows
        self.register_buffer("table", None)

    def choose_experts(
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
    def permute(self, chosen: Tensor) -> Permutation:
        """Return the order of copies by expert; made once per forward and reused if operations are recomputed."""
        if self.moe.identity_experts:
            computed: Tensor | None = chosen < self.moe.experts
        else:
            computed = routing.mask_capacity(chosen, self.sequences, moe=self.moe)
        copies = chosen.numel() if computed is None else self.count_copies(computed)
        return routing.build_permutation(chosen, computed, copies=copies, experts=self.moe.experts)


class _Balance(torch.autograd.Function):
    """Identity on the scores [R, E]; its backward, run once, counts the load and adds the gradient of the aux loss.

    With SparseMixer it is the identity on the logits, whose softmax are the scores of that loss.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, chosen: Tensor, layer: ExpertRouting) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(scores, chosen)
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        layer: ExpertRouting = ctx.layer
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
        return slope.masked_fill_(scores == 0, 0).mul_(gradient)


def _compute_sqrt_softplus(logits: Tensor) -> Tensor:
    return _SqrtSoftplus.apply(logits)


# scores [R, E] of logits, of which the highest are chosen
SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": partial(torch.softmax, dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": _compute_sqrt_softplus,
}


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


@exclude_from_graphs
def _add_balance(scores: Tensor, chosen: Tensor, layer: ExpertRouting) -> Tensor:
    return _Balance.apply(scores, chosen, layer)


@exclude_from_graphs
def _mix_sparsely(
    logits: Tensor, keys_B: Tensor | None, layer: ExpertRouting, noise: sparse_mixer.ExpertNoise, chosen: Tensor | None
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
    return _ScaleExperts.apply(weights, chosen, scale)


@exclude_from_graphs
def _route(x: Tensor, router: Router) -> Tensor:
    return _Route.apply(x, router.weight, router)
