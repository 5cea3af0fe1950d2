"""Bytes that live on one rank: states at rest, and the fullest moment of a step with its cause.

    states = weights + gradients + optimizer, each whole or 1/S by the ZeRO policy (docs/notation.md §2)
    peak   = the largest of: gathers, each unit forward and backward over what the earlier ones keep, the update

The order of events is that of ``train/parallel/zero.py``: gradient sums are born with a unit's first gradient.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from fivefold.job import Job
from fivefold.layout.sharding import Policy, Unit, padded_numel, policy, shard_numel, units
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.plan.count.layer import activation_bytes, block, embedding, head
from fivefold.plan.count.tape import Profile, play
from fivefold.step import StageMemory


class UnitStates(NamedTuple):
    """Bytes of one unit's states on the first rank, and of the buffers in which it travels."""

    whole: int  # gathered weights
    apart: int  # the optimizer's copy, where it is not within the gathered weights
    sums: int  # whole gradients
    reduced: int  # this rank's part of them, where it is a buffer of its own
    moments: int
    travel: int  # of a gather: the received weights, and the sent ones where they are a copy


def unit_states(unit: Unit, *, layout: Layout, job: Job) -> UnitStates:
    """What ``unit`` holds on the rank with the largest shards."""
    recipe, keeps, shards = job.precision, policy(layout), layout.shards
    padded = padded_numel(unit, shards=shards)
    own = padded // shards
    local = sum(min(shard_numel(weight, shards=shards), weight.numel) for weight in unit.weights)
    apart = recipe.updated_bytes != recipe.weights_bytes or not keeps.weights_stay
    sent_is_copy = not (apart and recipe.updated_bytes == recipe.weights_bytes)
    travel = 0 if shards == 1 else (padded + (own if sent_is_copy else 0)) * recipe.weights_bytes
    return UnitStates(
        whole=padded * recipe.weights_bytes,
        apart=own * recipe.updated_bytes if apart else 0,
        sums=padded * recipe.summed_bytes,
        reduced=0 if keeps.gradients_stay else own * recipe.summed_bytes,
        moments=local * sum(recipe.moments_bytes) + 4 * len(unit.weights),  # and AdamW's step count per weight
        travel=travel,
    )


def stage_memory(model: Model, *, layout: Layout, job: Job) -> StageMemory:
    """Memory of the one stage of a layout without a pipeline."""
    keeps = policy(layout)
    states = [unit_states(unit, layout=layout, job=job) for unit in units(model)]
    parameters = sum((state.whole if keeps.weights_stay else 0) + state.apart for state in states)
    gradients = sum(state.sums if keeps.gradients_stay else state.reduced for state in states)
    moments = sum(state.moments for state in states)
    walk = _Walk(model, layout=layout, job=job, states=states, resident=parameters + moments)
    peak, cause = walk.run()
    activations = walk.kept_bytes
    rest = peak - parameters - gradients - moments - activations
    return StageMemory(
        stage=0,
        parameters_bytes=parameters,
        gradients_bytes=gradients,
        optimizer_bytes=moments,
        activations_bytes=activations,
        temporary_bytes=max(0, rest),
        peak_bytes=peak,
        peak_cause=cause,
    )


class _Walk:
    """One optimizer step in order; ``self.full`` notes the fullest moment so far."""

    def __init__(self, model: Model, *, layout: Layout, job: Job, states: list[UnitStates], resident: int) -> None:
        self.layout, self.job, self.states = layout, job, states
        self.policy: Policy = policy(layout)
        self.profiles = _profiles(model, job, layout.mbs, tuple(state.sums for state in states))
        self.profiles_later = _profiles(model, job, layout.mbs, tuple(0 for _ in states))
        self.kept_bytes = sum(profile.kept_bytes for profile in self.profiles)
        self.tied = model.tied_embeddings
        # The head's gradient of a tied weight waits for the embedding's.
        self.waiting = model.vocab * model.width * job.precision.gradients_bytes if self.tied else 0
        self.stream = activation_bytes(model, job, sequences=layout.mbs)
        self.base = resident + _inputs_bytes(model, job, sequences=layout.mbs)
        self.whole = 0  # gathered weights that come and go
        self.sums = 0  # gradients that live so far
        self.full = (0, "")
        self.names = ["embed", *(f"block {index}" for index in range(model.layers)), "head"]

    def run(self) -> tuple[int, str]:
        micro_batches = self.layout.micro_batches(self.job)
        for index in sorted({0, min(1, micro_batches - 1), micro_batches - 1}):
            self._micro_batch(first=index == 0, last=index == micro_batches - 1)
        job, widen = self.job.precision, 0
        if job.summed_bytes != job.updated_bytes:  # gradients are widened for the update
            widen = sum(state.sums // self.layout.shards for state in self.states)
            widen = widen * job.updated_bytes // job.summed_bytes
        self._note(self.base + self.sums + widen, "optimizer")
        return self.full

    def _note(self, live: int, cause: str) -> None:
        if live > self.full[0]:
            self.full = (live, cause)

    def _micro_batch(self, *, first: bool, last: bool) -> None:
        profiles = self.profiles if first else self.profiles_later
        kept, come_and_go, count = 0, not self.policy.weights_stay, len(profiles)
        for index, (name, profile, state) in enumerate(zip(self.names, profiles, self.states, strict=True)):
            self.whole += state.whole if come_and_go else 0
            live = self.base + self.sums + self.whole + kept
            if first or come_and_go:
                self._note(live + (self.stream if index else 0) + state.travel, f"{name} gather")
            self._note(live + profile.forward_peak_bytes, f"{name} forward")
            stays = index == count - 1 or (index == 0 and self.tied)
            self.whole -= state.whole if come_and_go and not stays else 0
            kept += profile.kept_bytes
        for index in reversed(range(count)):
            name, profile, state = self.names[index], profiles[index], self.states[index]
            stayed = index == count - 1 or index == 0  # the embedding needs no weights to go back
            if come_and_go and not stayed:
                self.whole += state.whole
                self._note(self.base + self.sums + self.whole + kept + self.stream + state.travel, f"{name} gather")
            kept -= profile.kept_bytes
            at = f"{name} backward {profile.backward_cause}".strip()
            self._note(self.base + self.sums + self.whole + kept + profile.backward_peak_bytes, at)
            self.sums += state.sums if first else 0
            if index in (0, count - 1):
                self.sums += self.waiting if index else -self.waiting
            if come_and_go and not (index == 0 and not self.tied):
                self.whole -= state.whole
            if last and not self.policy.gradients_stay:
                self._note(self.base + self.sums + self.whole + kept + self.stream + state.reduced, f"{name} reduce")
                self.sums += state.reduced - state.sums


def _inputs_bytes(model: Model, job: Job, *, sequences: int) -> int:
    """Token ids of a micro-batch with their targets, and the rotary tables."""
    tables = 0
    if model.position == "rope":
        tables = 2 * model.rope_dim * activation_bytes(model, job, sequences=1) // model.width
    return 8 * sequences * (job.sequence + 1) + tables


@lru_cache(maxsize=256)
def _profiles(model: Model, job: Job, sequences: int, sums: tuple[int, ...]) -> list[Profile]:
    """Memory profile of every unit; blocks of one shape are played once."""
    width = job.precision.gradients_bytes
    stream = activation_bytes(model, job, sequences=sequences)
    first = play(
        embedding(model, job, sequences=sequences), entry="ids", entry_bytes=0, width=width, sums_bytes=sums[0]
    )
    played: dict[tuple[bool, bool, int], Profile] = {}
    blocks = []
    for layer in range(model.layers):
        shape = model.slides(layer), model.is_moe(layer), sums[layer + 1]
        if shape not in played:
            ops = block(model, job, layer=layer, sequences=sequences)
            played[shape] = play(ops, entry="x", entry_bytes=stream, width=width, sums_bytes=sums[layer + 1])
        blocks.append(played[shape])
    last = play(head(model, job, sequences=sequences), entry="x", entry_bytes=stream, width=width, sums_bytes=sums[-1])
    return [first, *blocks, last]
