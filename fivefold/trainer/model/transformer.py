"""A plain decoder, which ``parallel/`` distributes by replacing attributes: embedding, blocks, head with loss.

    x = embed(tokens);  x = block(x) per layer;  loss = head(x, targets)

The residual stream x_RD has a row per token, R = B · T, sequence after sequence. Module names: ``model/weights.py``.
"""

from __future__ import annotations

from collections.abc import Container
from functools import partial

import torch
from torch import Tensor, nn

from fivefold.model.spec import Model
from fivefold.trainer.model.altup import make_projections, match_magnitudes
from fivefold.trainer.model.block import Block
from fivefold.trainer.model.chunked_loss import chunked_loss
from fivefold.trainer.model.embed import Embed
from fivefold.trainer.model.hyper_connections import HyperConnection
from fivefold.trainer.model.kernels.eager import EAGER, Kernels
from fivefold.trainer.model.kernels.loss import Nats, cross_entropy
from fivefold.trainer.model.linear import Linear
from fivefold.trainer.model.logits import LogitTransform
from fivefold.trainer.model.lora import project
from fivefold.trainer.model.mtp import MTPTargets, Prediction, join_losses, look_up
from fivefold.trainer.model.norm import build_norm
from fivefold.trainer.model.operation import Run, call_directly
from fivefold.trainer.model.preference_loss import Reference, preference_loss, sequence_log_probs
from fivefold.trainer.model.rotary import RowInputs, list_tables


class Head(nn.Module):
    """Last norm, output projection and loss; tensor parallelism sets ``loss``. ``chunked``: ``chunked_loss.py``.

    Before the projection some models have a matrix, an activation and another norm (ModernBERT).

    ``skips_negative_targets``: rows with a negative target have no loss. ``ranks_pairs``: the loss is that of pairs
    of sequences (``preference_loss.py``). ``mtp``: modules of multi-token prediction, which read ``embed``.
    """

    def __init__(self, model: Model, *, embed: Embed) -> None:
        super().__init__()
        self.run: Run = call_directly
        is_connected = model.hyper_connections is not None
        self.hyper = HyperConnection(model, name="head.hyper", is_head=True) if is_connected else None
        self.altup = make_projections(model)
        self.norm = build_norm(model, model.width) if model.final_norm else None
        self.transform: Linear | None = None
        if (activation := model.head_transform) is not None:
            self.activation = activation
            self.transform = Linear(model.width, model.width, bias=model.head_transform_bias)
            self.transform_norm = build_norm(model, model.width)
        bias, tied = model.head_bias, model.tied_embeddings
        self.out = Linear.tie(embed.tokens, bias=bias) if tied else Linear(model.width, model.vocab, bias=bias)
        self.kernels: Kernels = EAGER
        self.vocab, self.logit_transform = model.vocab, LogitTransform.from_model(model)
        self.loss: Nats | None = None  # set by tensor parallelism, over a sharded vocabulary
        self.chunked = self.skips_negative_targets = self.ranks_pairs = False
        self._embed = (embed,)  # in a tuple, so that torch does not register it as a submodule of this one
        self.weight = model.mtp.coefficient / model.mtp.depth if model.mtp else 0.0
        layers = range(model.layers, model.layers + model.mtp_depth)
        self.mtp = nn.ModuleList(Prediction(model, block=Block(model, layer=layer)) for layer in layers)

    def forward(
        self,
        x_RD: Tensor,
        targets_BT: Tensor | None,
        scale: float,
        mtp_targets: MTPTargets | None = None,
        rows: RowInputs | None = None,
        reference: Reference | None = None,
    ) -> Tensor:
        """Return ``scale`` · Σ over rows of −log p(target) in nats, an fp32 scalar; without targets the logits [R, V].

        With ``ranks_pairs`` it returns the sums of ``preference_loss``, or without a ``reference`` Σ log p(target) of
        each sequence, [B].

        With ``mtp_targets`` the result is a vector, followed by the losses of the modules of multi-token prediction,
        times their weight; they get ``rows`` as any block. ``chunked``: if gradients are required it is NaN until its
        backward has run.
        """
        if self.altup is not None:
            x_RD = self._average_parts(x_RD)
        if self.hyper is not None:
            x_RD, _ = self.hyper(x_RD)
        # handed over, so that a frozen output layer frees it
        normed = [x_RD if self.norm is None else self.run("head.norm", self.norm, x_RD)]
        if self.transform is not None:
            h_RD = self.run("head.transform", self.transform, normed.pop())
            h_RD = self.run("head.act", self.kernels.activate, h_RD, self.activation)
            normed = [self.run("head.transform_norm", self.transform_norm, h_RD)]
            del h_RD
        if targets_BT is None:
            return self.logit_transform.apply(self._project(normed.pop()))
        keys_B = None if rows is None else rows.keys
        if self.ranks_pairs:
            return self._compute_dpo_loss(normed.pop(), targets_BT, scale, reference, keys_B)
        if mtp_targets is None:
            return self._compute_loss(normed.pop(), targets_BT, scale, keys_B=keys_B)
        losses = torch.empty(1 + len(self.mtp), dtype=torch.float32, device=x_RD.device)
        hidden = normed
        for module, tokens_BT in zip(self.mtp, mtp_targets.tokens, strict=True):
            e_RD = self.run("mtp.embed", look_up, self._embed[0], tokens_BT)
            hidden.append(module(hidden[-1], e_RD, rows))
            del e_RD
        del x_RD
        scales = [scale, *(scale * self.weight for _ in self.mtp)]
        all_targets = (targets_BT, *mtp_targets.targets)
        parts = [
            self._compute_loss(hidden.pop(0), targets_BT, loss_scale, into=into)
            for targets_BT, loss_scale, into in zip(all_targets, scales, losses, strict=True)
        ]
        return join_losses(losses, parts, filled=self.chunked)

    def _average_parts(self, parts: Tensor) -> Tensor:
        """Return the mean of all parts of the stream [R, D], of which all but the first are projected (AltUp)."""
        assert self.altup is not None
        others = [self.run("head.altup", project, parts[:, index]) for index, project in enumerate(self.altup, start=1)]
        matched = self.run("head.altup.scale", match_magnitudes, parts[:, 0], *others)
        return self.run("head.altup.mean", torch.mean, matched, 1)

    def _project(self, h_RD: Tensor, keys_B: Tensor | None = None) -> Tensor:
        """Return the logits [R, V] of normed hidden states [R, D]; ``keys_B``: for dropout of an adapter's input."""
        if self.out.lora_a is None:
            return self.run("head.out", self.out, h_RD)
        (logits_RV,) = project(self.run, "head.out", h_RD, self.out, keys_B=keys_B)
        return logits_RV

    def _compute_loss(
        self,
        h_RD: Tensor,
        targets_BT: Tensor,
        scale: float,
        *,
        keys_B: Tensor | None = None,
        into: Tensor | None = None,
    ) -> Tensor:
        """Return ``scale`` · Σ nats of normed hidden states [R, D].

        ``keys_B``: random keys of the sequences, for dropout of an adapter's input; ``into``: as in ``chunked_loss``.
        """
        loss = self._choose_nats()
        if self.chunked:
            chunked = partial(chunked_loss, scale=scale, loss=loss, into=into)
            return self.run("loss", chunked, h_RD, self.out, targets_BT)
        logits_RV = self._project(h_RD, keys_B)
        del h_RD
        unchunked = partial(cross_entropy, scale=scale, loss=loss, rescale=self.kernels.rescale)
        return self.run("loss", unchunked, logits_RV, targets_BT.flatten())

    def _compute_dpo_loss(
        self, h_RD: Tensor, targets_BT: Tensor, scale: float, reference: Reference | None, keys_B: Tensor | None
    ) -> Tensor:
        """Return the sums of the DPO loss over pairs; without ``reference`` the log-probability of each sequence."""
        logits_RV = self._project(h_RD, keys_B)
        targets = targets_BT.flatten()
        del h_RD
        if reference is None:
            return sequence_log_probs(
                logits_RV, targets, loss=self._choose_nats(), sequences=len(targets_BT), gradient_scale=None
            )
        loss = partial(preference_loss, reference=reference, scale=scale, loss=self._choose_nats())
        return self.run("loss", partial(loss, rescale=self.kernels.rescale), logits_RV, targets)

    def _choose_nats(self) -> Nats:
        return self.loss or partial(
            self.kernels.nats,
            vocab=self.vocab,
            transform=self.logit_transform,
            skips_negative_targets=self.skips_negative_targets,
        )


class Transformer(nn.Module):
    """The full decoder. Build it on the meta device and give the parameters storage before use.

    ``positions`` [T]: positions of this rank's tokens among the ``length`` tokens of a sequence (context parallelism);
    None: all. Of ``layers`` (None: of all) the blocks are built; the others have no weights and cannot run.
    """

    def __init__(self, model: Model, *, layers: Container[int] | None = None) -> None:
        super().__init__()
        self.model = model
        self.layers = [layer for layer in range(model.layers) if layers is None or layer in layers]
        self.positions: Tensor | None = None
        self.length: int | None = None
        self.embed = Embed(model)
        self.blocks = nn.ModuleList(
            Block(model, layer=layer) if layer in self.layers else nn.Module() for layer in range(model.layers)
        )
        self.head = Head(model, embed=self.embed)
        self.tables: tuple[Tensor, ...] = ()  # result of ``list_tables``, computed at the first forward

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        *,
        scale: float = 1.0,
        mtp_targets: MTPTargets | None = None,
    ) -> Tensor:
        """Return the loss (``scale`` · Σ nats) of ``targets``, or logits [B, T, V] if there are none.

        ``mtp_targets``: as in ``Head``.
        """
        out = self.stage(tokens_BT, targets_BT, layers=range(self.model.layers), scale=scale, mtp_targets=mtp_targets)
        return out if targets_BT is not None else out.view(*tokens_BT.shape, -1)

    def stage(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None,
        *,
        layers: range,
        last: bool = True,
        entry_RD: Tensor | None = None,
        documents_BT: Tensor | None = None,
        keys_B: Tensor | None = None,
        scale: float = 1.0,
        mtp_targets: MTPTargets | None = None,
        reference: Reference | None = None,
    ) -> Tensor:
        """Run a pipeline stage: ``layers`` on ``entry_RD``, or on the embedding if None; the ``last`` also the head.

        ``documents_BT``: a document id per token of the full sequences, if tokens attend only inside their document.
        ``keys_B``: keys of the sequences for dropout; None: no dropout. ``reference``: as in ``Head``.
        """
        entry = self.embed(tokens_BT, self.positions, keys_B) if entry_RD is None else entry_RD
        x_RD, all_inputs = entry if isinstance(entry, tuple) else (entry, None)
        del entry
        tokens, model = tokens_BT.shape[1], self.model
        rows = RowInputs(tokens, self._rotary(tokens, like=x_RD), documents_BT, keys_B)
        inputs = () if all_inputs is None else all_inputs.unbind(1)
        del all_inputs
        lent: dict[bool, tuple[Tensor, Tensor]] = {}  # keys and values of full (False) and of sliding layers (True)
        chosen: Tensor | None = None  # keys for the layers that choose none
        experts: Tensor | None = None  # output of the experts of the layer before
        row_inputs = rows
        for layer in layers:
            slides = model.has_window(layer)
            row_inputs = rows._replace(
                layer_input=inputs[layer] if inputs else None,
                keys_values=lent[slides] if model.shares_kv(layer) else None,
                chosen=None if model.has_indexer(layer) else chosen,
                experts=experts,
                ids=tokens_BT if model.hashes_experts(layer) else None,
            )
            experts = None
            x_RD = self.blocks[layer](x_RD, row_inputs)
            if model.lends_chosen(layer):
                x_RD, chosen = x_RD
            if model.lends_experts(layer):
                x_RD, experts = x_RD
            if model.lends_kv(layer):
                x_RD, *keys_values = x_RD
                lent[slides] = (keys_values[0], keys_values[1])
        del lent, inputs, chosen, row_inputs
        if not last:
            return x_RD
        return self.head(x_RD, targets_BT, scale, mtp_targets, rows, reference)

    def _rotary(self, tokens: int, *, like: Tensor) -> tuple[Tensor, ...]:
        """Return the cached tables of the first ``tokens``, in the dtype and on the device of ``like``."""
        if not self.tables or self.tables[0].shape[0] < tokens:
            positions = torch.arange(tokens, device=like.device) if self.positions is None else self.positions
            self.tables = list_tables(
                self.model, positions=positions, length=self.length, dtype=like.dtype, device=like.device
            )
        return tuple(table[:tokens] for table in self.tables)
