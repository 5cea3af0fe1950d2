"""Runs one training step on this rank: run the pipeline schedule, reduce gradients, clip their norm, update the shards.

tokens [micro-batches, mbs, T + 1] → F, B, W of this rank's stages → reductions → norm, clip, update

A job with ``objective = "sft"`` or ``"dpo"`` gives T inputs and T targets of each sequence instead. A negative target
has no loss: ``LAST`` marks that of the last token of a document. With ``dpo`` the reference runs all micro-batches
forward first: the model without its adapters, or with the frozen copy of the weights that ``hold_reference`` makes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.job import Job
from fivefold.layout.schedule import schedule
from fivefold.layout.spec import Layout
from fivefold.layout.stages import list_stage_layers
from fivefold.model.spec import Model
from fivefold.trainer.build import Built
from fivefold.trainer.data.packing import LAST
from fivefold.trainer.measure.meter import StepObserver
from fivefold.trainer.measure.noise_scale import GradientNoise, NoiseScale
from fivefold.trainer.model.dropout import sequence_keys
from fivefold.trainer.model.lora import disable_adapters
from fivefold.trainer.model.mtp import MTPTargets
from fivefold.trainer.model.precision import Dtypes
from fivefold.trainer.model.preference_loss import Reference
from fivefold.trainer.optimizers import optimizer
from fivefold.trainer.optimizers.loss_scaling import MIN_SCALE
from fivefold.trainer.parallel import expert
from fivefold.trainer.parallel.collectives import sum_rows
from fivefold.trainer.parallel.pipeline import Pipeline
from fivefold.trainer.parallel.zero import gather_all


class Rewards(NamedTuple):
    """Means over the pairs of a step (DPO): β (log π − log ρ) of both, and the share ranked as in the data."""

    chosen: float
    rejected: float
    accuracy: float


class StepResult(NamedTuple):
    """The result of a step, equal on all ranks: mean loss in nats per token, gradient norm before clipping, stop vote.

    ``skipped``: no update was made, as a scaled gradient was not finite or ``judge`` returned False; weights, moments
    and routing biases are unchanged.
    """

    loss: float
    norm: float
    stop: bool
    skipped: bool = False
    loss_scale: float = 1.0  # scale of the loss in this step (fp16)
    noise: GradientNoise | None = None  # None if it was not measured in this step
    further: tuple[float, ...] = ()  # mean losses of the modules of multi-token prediction, without their weight
    rewards: Rewards | None = None  # only of DPO


class Engine:
    """The engine that runs training steps on this rank.

    If ``meter`` is set, the trainer sets its phase and tracks ``kept_bytes``: the peak bytes of activations saved
    between two passes, over all live micro-batches.
    """

    def __init__(self, built: Built, *, model: Model, layout: Layout, job: Job, end: int | None = None) -> None:
        """Set up the schedule. ``end``: id of the end-of-document token, if tokens attend only inside documents."""
        self.has_targets = job.has_targets  # the batch has them, and not only tokens
        if job.documents == "separate" and end is None and not self.has_targets:
            raise ValueError("documents=separate needs the id of the end-of-document token; give end=")
        self.built, self.layout, self.job = built, layout, job
        self.end = end if job.documents == "separate" else None
        self.n_targets: int | None = None  # targets with a loss in this step, or pairs, over all ranks; None: all
        self.reference_log_probs = torch.zeros(0, device=built.ranks.device)
        if job.objective == "dpo":
            self.reference_log_probs = self.reference_log_probs.new_zeros(layout.micro_batches(job), layout.mbs)
        self._runs_reference = False
        self.layers = list_stage_layers(model, layout)
        self.sequences = job.global_batch  # of this step, over all ranks
        self.mtp_depth = model.mtp_depth
        self.scale = 1.0  # factor of each token's loss, so that gradients are of the mean loss
        self.tokens = torch.empty(0, dtype=torch.long)
        self.dp, self.step_number = built.ranks["dp"].rank, 0  # ``number``: of the step, from 0
        self.keys = torch.zeros(0, layout.mbs, dtype=torch.long, device=built.ranks.device)
        drops = any(model.dropout_rates) or (job.adapter is not None and job.adapter.dropout > 0)
        if drops or model.draws_experts:  # keys of a step's sequences
            self.keys = self.keys.new_zeros(layout.micro_batches(job), layout.mbs)
        self.has_active_dropout = False  # whether dropout is active, as it is in training
        self.meter: StepObserver | None = None
        self.noise: NoiseScale | None = None
        self.kept_bytes, self._baseline = 0, -1  # ``_baseline``: live bytes before the first forward; -1: unknown yet
        self.moe_layers, self.routings = built.moe_layers, built.routings
        self._scale_losses(1.0)
        is_frozen = job.freezes_text  # biases of routers stay as they are
        self.balances_without_loss = model.moe is not None and model.moe.balance == "free" and not is_frozen
        experts = model.moe.choices if model.moe else 0
        self.loads = torch.zeros(len(self.moe_layers), experts, dtype=torch.int64, device=built.ranks.device)
        rows = layout.mbs * job.sequence // layout.cp
        hyper = model.hyper_connections
        streams = () if hyper is None else (hyper.streams,)
        self._pipeline = partial(
            Pipeline,
            ranks=built.ranks,
            wgrad_store=built.wgrad_store,
            stages={
                stage: partial(self._run_stage, stage) for stage in built.table.rank_stages[built.ranks["pp"].rank]
            },
            shape=(rows // layout.tp if layout.sp else rows, *streams, model.width),
            dtype=Dtypes(job.precision).weights,
            losses=(job.loss_sums + model.mtp_depth,) if model.mtp or job.loss_sums > 1 else (),
        )
        self.pipeline = self._pipeline(built.table)
        self.pipeline.on_pass = self._on_pass_end
        self.pipeline.before_wait = self._gather_lasting_weights

    def step(
        self,
        tokens: Tensor,
        *,
        counted: int | None = None,
        stop: bool = False,
        judge: Callable[[float, float], bool] | None = None,
    ) -> StepResult:
        """Run one optimizer step on this data rank's ``tokens`` [micro-batches, mbs, T + 1] (sft: [.., 2 T]).

        Every rank calls it. With multi-token prediction a sequence has one more token per module.

        ``counted``: the number of targets with a loss (DPO: of pairs) over all ranks, by which the summed loss is
        divided; None: every target counts.
        ``stop``: this rank's vote to stop, summed over all. ``judge(loss, norm)``: called before the update, with the
        same values on all ranks; False skips it. Not called for an overflow that a lower loss scale can fix.
        """
        scaler = self.built.scaler
        scale = 1.0 if scaler is None else scaler.scale
        if scaler is not None or self.has_targets or len(tokens) != self.pipeline.table.micro_batches:
            self.n_targets = counted
            self._resize_schedule(len(tokens))
            self._scale_losses(scale)
        biases = (
            [moe.bias.clone() for moe in self.moe_layers.values()] if scaler is not None or judge is not None else []
        )
        measures = self.noise is not None and self.meter is None  # a metered step has exactly the planned messages
        if self.noise is not None:
            self.noise.begin(wanted=measures)
        total = self.backward(tokens)
        if self.meter:
            self.meter.phase = "optimizer"
        noise_squares = self.noise.squares() if self.noise is not None else []
        norm, sums = self.sum_norm(*noise_squares, *(total / self.layout.tp).view(-1), float(stop))
        loss, *further, stop_votes = sums[len(noise_squares) :]
        is_finite = True
        if scaler is not None:
            norm = norm / scale
            is_finite = math.isfinite(norm.item())  # the same on all ranks
        updates = is_finite
        if judge is not None and (is_finite or scale <= MIN_SCALE):
            updates = judge(loss.item() / scale, norm.item()) and is_finite
        if scaler is not None and updates == is_finite:
            scaler.update(finite=is_finite)
        if updates:
            self.update(norm, scale=scale)
        else:  # the backward has moved the routing biases by this step's load: restore them
            for moe, bias in zip(self.moe_layers.values(), biases, strict=True):
                moe.bias.copy_(bias)
        self.step_number += 1
        rewards, weight = None, scale * self.built.module.head.weight
        if self.job.objective == "dpo":
            rewards = Rewards(*(part.item() / scale for part in further))
            further = []
        return StepResult(
            loss.item() / scale,
            norm.item(),
            stop_votes.item() > 0,
            skipped=not updates,
            loss_scale=scale,
            further=tuple(part.item() / weight for part in further),
            rewards=rewards,
            noise=self._estimate_noise(sums[: len(noise_squares)], scale),
        )

    def _estimate_noise(self, sums: list[Tensor], scale: float) -> GradientNoise | None:
        return None if self.noise is None else self.noise.take(sums, sequences=self.sequences, scale=scale)

    def sum_norm(self, *numbers: float | Tensor) -> tuple[Tensor, list[Tensor]]:
        """Compute the gradient norm, and the sums of ``numbers`` over all ranks."""
        return optimizer.sum_over_ranks(self.built.shards, *numbers, ranks=self.built.ranks)

    def update(self, norm: Tensor, *, scale: float) -> None:
        """Clip the gradients and update the shards."""
        optimizer.clip(self.built.shards, norm, largest=self.job.optimizer.clip, scale=scale)
        optimizer.update(self.built.optimizer, self.built.shards)

    def _resize_schedule(self, micro_batches: int) -> None:
        """Build the pipeline schedule for ``micro_batches``, and expect that number of gradients of each weight."""
        former_pipeline, layout = self.pipeline, self.layout
        if micro_batches == former_pipeline.table.micro_batches:
            return
        first_backward = former_pipeline.table.first_backward
        table = schedule(
            layout.schedule, pp=layout.pp, v=layout.v, micro_batches=micro_batches, first_backward=first_backward
        )
        for unit in self.built.units:
            unit.gradients.repeat(micro_batches, before=former_pipeline.table.micro_batches)
        self.pipeline = self._pipeline(table)
        self.pipeline.on_action, self.pipeline.on_pass = former_pipeline.on_action, former_pipeline.on_pass
        self.pipeline.before_wait = former_pipeline.before_wait
        self.sequences = layout.dp * micro_batches * layout.mbs

    def _scale_losses(self, scale: float) -> None:
        """Set the factor of a token's loss and of the aux loss to loss scale ``scale`` / tokens of the step.

        The loss is a mean over the counted targets, of DPO over pairs, and the aux loss over all tokens.
        """
        tokens = self.sequences * self.job.sequence
        n_terms = self.sequences // 2 if self.job.objective == "dpo" else tokens
        self.scale = scale / (n_terms if self.n_targets is None else max(1, self.n_targets))
        for expert_routing in self.routings:
            expert_routing.scale = scale / tokens

    def backward(self, tokens: Tensor) -> Tensor:
        """Run forward and backward of all micro-batches, and reductions: every shard has its gradient afterwards.

        Returns the sum of this rank's scaled losses.
        """
        self.tokens = tokens.to(self.built.ranks.device, non_blocking=True)
        self.kept_bytes, self._baseline = 0, -1
        self._run_reference(len(tokens))
        self._draw_keys(len(tokens))
        total = self.pipeline.step()
        self.has_active_dropout = False
        for unit in self.built.units:
            unit.gradients.finish()
        if self.balances_without_loss:
            self._balance()
        return total

    def hold_reference(self) -> None:
        """Keep the present weights as the frozen reference of DPO, if the job keeps a copy of them."""
        if self.job.copies_reference:
            for unit in self.built.units:
                unit.hold_reference()

    @torch.no_grad()
    def _run_reference(self, micro_batches: int) -> None:
        """Compute the reference's log-probabilities of all sequences in ``tokens``, which only DPO needs."""
        if self.job.objective != "dpo":
            return
        if len(self.reference_log_probs) != micro_batches:
            self.reference_log_probs = self.reference_log_probs.new_zeros(micro_batches, self.layout.mbs)
        if self.meter is not None:
            self.meter.phase = "reference"
        with self._use_reference_weights(), disable_adapters():
            self.pipeline.evaluate(micro_batches)

    @contextmanager
    def _use_reference_weights(self) -> Iterator[None]:
        """Compute with the reference's weights; the hooks of passes are those of training and are not called."""
        units = self.built.units if self.job.copies_reference else []
        pipeline = self.pipeline
        hooks = pipeline.on_action, pipeline.on_pass
        self._runs_reference, pipeline.on_action, pipeline.on_pass = True, None, None
        for unit in units:
            unit.swap_reference()
        try:
            yield
        finally:
            for unit in units:
                unit.swap_reference()
            for unit in self.built.units:
                unit.drop_released()
            self._runs_reference, (pipeline.on_action, pipeline.on_pass) = False, hooks

    def _draw_keys(self, micro_batches: int) -> None:
        """Draw the keys of this rank's sequences, by seed, step and their numbers in the global batch."""
        self.has_active_dropout = self.keys.numel() > 0
        if not self.has_active_dropout:
            return
        sequence = torch.arange(self.layout.mbs, device=self.keys.device)
        layout = self.layout
        row = torch.arange(micro_batches, device=self.keys.device)[:, None] * layout.dp + self.dp
        keys = sequence_keys(row * layout.mbs + sequence, seed=self.job.seed, step=self.step_number)
        if len(self.keys) != micro_batches:
            self.keys = torch.empty_like(keys)
        self.keys.copy_(keys)

    def expert_loads(self) -> dict[int, list[int]]:
        """Return layer → choices per expert [E] since the last call, for the layers of this rank's stages.

        They are summed over all data ranks. Every rank calls it.
        """
        if not self.balances_without_loss:
            self._balance()
        loads, self.loads = self.loads, torch.zeros_like(self.loads)
        return dict(zip(self.moe_layers, loads.tolist(), strict=True))

    def gather_expert_shares(self) -> dict[int, list[float]]:
        """Return ``expert_loads`` of all stages, relative to the layer's mean (1 = even), by all_gather_object.

        Every rank calls it.
        """
        if self.loads.shape[1] == 0:  # no experts anywhere
            return {}
        loads_of_ranks: list[dict[int, list[int]]] = [{}] * self.built.ranks.world
        dist.all_gather_object(loads_of_ranks, self.expert_loads())
        loads = {layer: load for rank_loads in loads_of_ranks for layer, load in rank_loads.items() if sum(load)}
        return {layer: [round(n * len(load) / sum(load), 3) for n in load] for layer, load in sorted(loads.items())}

    def _balance(self) -> None:
        """Add this step's choices per expert, all_reduced over data ranks, to ``loads``; update routing biases."""
        if self.moe_layers:
            axes = [self.built.ranks[name] for name in ("stage", "twin") if name in self.built.ranks.axes]
            self.loads += expert.balance(torch.nn.ModuleList(self.moe_layers.values()), *axes)

    def zero_grad(self) -> None:
        """Free the gradients; gathered copies of the weights are stale and will be gathered again."""
        for unit in self.built.units:
            unit.on_optimizer_step()

    @torch.no_grad()
    def evaluate(self, tokens: Tensor) -> Tensor:
        """Return this rank's summed loss in nats of ``tokens`` [batches, mbs, T + 1]; the caller sums over ranks."""
        scale, self.scale = self.scale, 1.0
        self.tokens = tokens.to(self.built.ranks.device)
        self._run_reference(len(tokens))
        total = self.pipeline.evaluate(len(tokens)) / self.layout.tp
        self.scale = scale
        return total

    def _gather_lasting_weights(self) -> None:
        """Gather stale weights that then stay gathered, while this rank waits for the rows of another one.

        All stages do it at once. Gathered by the first forward, they would delay the stages one after the other.
        """
        for unit in self.built.units:
            if unit.policy.weights_stay:
                gather_all([unit], "forward")

    def _run_stage(self, stage: int, entry: Tensor | None, micro_batch: int) -> Tensor:
        """Run a stage forward on one micro-batch; ``entry`` [R, D]: output of the previous stage.

        Returns the output [R, D], or the loss of the last stage.
        """
        if not self._runs_reference:
            self._begin_forward(entry)
        module, tokens = self.built.module, self.tokens[micro_batch]
        predicted = self.mtp_depth if torch.is_grad_enabled() else 0
        further: list[Tensor] = []
        if self.has_targets:
            inputs, targets = tokens.chunk(2, dim=1)
        else:
            length = tokens.shape[1] - 1 - predicted
            n_further = predicted if stage == self.pipeline.last else 0
            inputs, targets, *further = (tokens[:, shift : shift + length] for shift in range(2 + n_further))
        documents = self._number_documents(inputs, targets)
        if module.positions is not None:
            inputs, targets, *further = (ids[:, module.positions] for ids in (inputs, targets, *further))
        keys = self.keys[micro_batch] if self.has_active_dropout else None
        out = module.stage(
            inputs,
            targets,
            layers=self.layers[stage],
            last=stage == self.pipeline.last,
            entry_RD=entry,
            documents_BT=documents,
            keys_B=keys,
            scale=self.scale,
            mtp_targets=MTPTargets((targets, *further[:-1]), tuple(further)) if further else None,
            reference=self._get_reference(micro_batch),
        )
        if self._runs_reference:
            if stage == self.pipeline.last:
                self.reference_log_probs[micro_batch] = out
                out = out.sum()
            return out
        if self._active_meter is not None:
            self._active_meter.phase = "backward"
        is_vector = self.job.objective == "dpo" and stage == self.pipeline.last
        return out[0] if is_vector and not torch.is_grad_enabled() else out

    def _get_reference(self, micro_batch: int) -> Reference | None:
        """Return the reference of a micro-batch's loss; None while the reference runs, and without one."""
        if self._runs_reference or self.job.objective != "dpo":
            return None
        sum_over_ranks = partial(sum_rows, self.built.ranks["cp"]) if self.layout.cp > 1 else None
        log_probs = self.reference_log_probs[micro_batch]
        return Reference(log_probs, self.job.dpo_beta, sum_over_ranks, self.layout.cp)

    def _number_documents(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return the number of the document of each token [mbs, T]; None if tokens attend to all earlier ones."""
        if self.job.documents == "joined":
            return None
        ends = targets.eq(LAST) if self.has_targets else inputs.eq(self.end or 0)
        return ends.cumsum(1) - ends.long()

    # Measurement

    @property
    def _active_meter(self) -> StepObserver | None:
        """Return the meter; None while two micro-batches are interleaved, as their bytes cannot be separated."""
        interleaver = self.built.ranks.interleaver
        return self.meter if interleaver is None or interleaver.is_running_one else None

    def _begin_forward(self, entry: Tensor | None) -> None:
        if self._active_meter is not None:
            self._active_meter.phase = "forward"
            if self._baseline < 0:
                self._baseline = self._count_persistent_bytes(self._active_meter) - (
                    0 if entry is None else entry.untyped_storage().nbytes()
                )

    def _on_pass_end(self) -> None:
        self.built.in_flight_reduction.pass_ended()
        self._track_kept_bytes()

    def _track_kept_bytes(self) -> None:
        if self._active_meter is not None and self._baseline >= 0:
            self.kept_bytes = max(self.kept_bytes, self._count_persistent_bytes(self._active_meter) - self._baseline)

    def _count_persistent_bytes(self, meter: StepObserver) -> int:
        """Return live bytes without transient ones: gathered weights, gradients, messages between pipeline stages."""
        transient = [
            *self.pipeline.messages(),
            *(tensor for unit in self.built.units for tensor in unit.transient_tensors()),
        ]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in transient}
        return meter.live_bytes - sum(storages.values())
