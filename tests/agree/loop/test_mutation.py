"""A mistake in the loop is seen: each of these, planted by itself, moves the log away from the reference's.

They are what a run does not complain of: wrong data, wrong sums, a wrong rate. Each run goes through to its end.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.agree.loop.cases import APART, CONSTANT, COSINE, LONG, SHORT, WSD, Case
from tests.agree.loop.compare import TOLERANCE, distance, folder_of, get_reference_log, train_and_log
from tests.agree.loop.mutate import Mutation, locate, plant
from tests.selection import mark_share

SEEN = 1e-4  # a hundred times what the comparison allows
ALONE, TWO = Case("llama", "mbs4", COSINE, SHORT), Case("llama", "dp2 mbs2", COSINE, SHORT)
FOUR = Case("llama", "dp2 tp2 mbs2", COSINE, SHORT)
PACKED = Case("llama", "mbs4", COSINE, SHORT | APART)
FAR = Case("llama", "mbs2", CONSTANT, LONG | {"steps": 4})
FALLING = Case("llama", "mbs4", WSD | {"warmup_steps": 1, "decay_steps": 4}, SHORT)
EXPERTS = Case("mixtral", "mbs4", COSINE, SHORT)
ADAMW = "torch.optim.AdamW(groups, lr=rate, betas=settings.betas, eps=settings.epsilon"
INTO_GRADIENT = "transform.gradient_(probabilities, chunk).mul_(gradient_scale)"
Planted = list[tuple[Case, Mutation]]


def edit(case: Case, place: str, *changes: tuple[str, str, str]) -> Planted:
    """Of one function of ``fivefold/trainer``: what each change is called, what is there, and what comes instead."""
    return [(case, Mutation(name, f"trainer.{place}", old, new)) for name, old, new in changes]


DATA = [
    *edit(FOUR, "loop:Loop._read",
          ("a rank's place is rank % dp", 'self.built.ranks["dp"].rank', "self.built.ranks.rank % layout.dp")),
    *edit(TWO, "loop:Loop._read", ("all ranks train on one's rows", 'rank=self.built.ranks["dp"].rank', "rank=0")),
    *edit(ALONE, "run:Run.loader", ("the order ignores the seed", "seed = job.seed if", "seed = 0 if")),
    *edit(ALONE, "data.loader:permute_epochs", ("every epoch has one order", "epoch=int(epoch)", "epoch=0")),
    *edit(ALONE, "data.loader:Loader.read_window",
          ("windows share two tokens", "window * self", "window * (self.sequence - 1) or self")),
    *edit(ALONE, "loop:Loop._step",
          ("samples are read twice", "take(self.samples,", "take(max(0, self.samples - 4),")),
    *edit(ALONE, "engine:Engine._run_stage",
          ("a token is its own target", "in range(2 + n_further)", "in [0] * (2 + n_further)")),
    *edit(PACKED, "engine:Engine._number_documents",
          ("an end opens the next document", " - ends.long()", ""),
          ("documents are joined", 'if self.job.documents == "joined"', "if True")),
    *edit(FAR, "model.rotary:_compute_tables",
          ("positions are bf16", "positions.to(device,", "positions.bfloat16().to(device,")),
]  # fmt: skip
HELDOUT = [
    *edit(TWO, "evaluation:Evaluator.heldout_loss",
          ("all ranks evaluate one's rows", 'rank=ranks["dp"].rank', "rank=0"),
          ("the mean is over one rank's tokens", "self.layout.dp * rows", "rows"),
          ("a row has T + 1 targets", "self.run.job.sequence if", "(self.run.job.sequence + 1) if")),
    *edit(ALONE, "evaluation:Evaluator.heldout_loss",
          ("held-out rows are training rows", 'split="heldout"', 'split="train"')),
    *edit(ALONE, "run:Run.loader", ("held-out rows follow the run's seed", 'if split == "train" else 0', "")),
]  # fmt: skip
SUMS = [
    *edit(TWO, "optimizers.optimizer:sum_over_ranks", ("the norm is of one rank", "packed[0].sqrt()", "square.sqrt()")),
    *edit(TWO, "engine:Engine._scale_losses", ("gradients are those of one rank's mean", "scale / (", "2 * scale / (")),
    *edit(ALONE, "engine:Engine._scale_losses",
          ("gradients are divided by T + 1", "sequences * self.job.sequence", "sequences * (self.job.sequence + 1)")),
    *edit(ALONE, "engine:Engine._resize_schedule",
          ("a small batch is scaled as the whole", "layout.dp * micro_batches * layout.mbs", "self.job.global_batch")),
    *edit(ALONE, "model.kernels.loss:nats",
          ("ends are not learned", INTO_GRADIENT, INTO_GRADIENT + ".mul_(target != 0)")),
    *edit(EXPERTS, "engine:Engine._scale_losses",
          ("the auxiliary loss is not divided", "routing.scale = scale / tokens", "routing.scale = scale")),
    *edit(EXPERTS, "model.routing:aux_gradient",
          ("the auxiliary loss is of the micro-batch", "// sequences.parts", "* 0")),
]  # fmt: skip
UPDATE = [
    *edit(ALONE, "loop:Loop._step",
          ("the rate is of the step before", "step=step,", "step=max(0, step - 1),"),
          ("the rate is used a step late", "set_rate(built.optimizer, self.rate)",
           "set_rate(built.optimizer, vars(self).get('late', 0.0)); self.late = self.rate")),
    *edit(ALONE, "optimizers.optimizer:compute_learning_rate",
          ("the warm-up begins at 0", "(step + 1) / warmup", "step / warmup"),
          ("the cosine ends at 0", "(schedule.floor + (1 - schedule.floor) * remaining)", "remaining"),
          ("the cosine ends a step late", "max(1, steps - 1 - decay_start)", "max(1, steps - decay_start)")),
    *edit(FALLING, "optimizers.optimizer:compute_learning_rate",
          ("the decay begins late", "(schedule.decay_steps or", "(1 or"),
          ("the decay is a cosine", 'schedule.kind == "cosine"', "True")),
    *edit(ALONE, "optimizers.optimizer:set_rate", ("groups have one rate", 'rate * group.get("times", 1.0)', "rate")),
    *edit(ALONE, "optimizers.optimized_weights:OptimizedWeights.make_groups",
          ("groups have one decay", "rates.weight_decay", "0.5")),
    *edit(ALONE, "optimizers.optimizer:find_weight_group", ("norms decay", "if weight.is_vector", "if False")),
    *edit(ALONE, "optimizers.adamw:build_fp32",
          ("epsilon is inside the root", ADAMW, ADAMW + "**0.5"),
          ("the decay goes through the moments", ADAMW, ADAMW.replace("AdamW", "Adam")),
          ("the betas are exchanged", ADAMW, ADAMW.replace("betas,", "betas[::-1],"))),
    *edit(ALONE, "optimizers.optimizer:clip", ("small gradients are enlarged", ".clamp(max=1.0)", "")),
    *edit(ALONE, "engine:Engine.update", ("nothing is clipped", "largest=self.job.optimizer.clip", "largest=0.0")),
]  # fmt: skip
RESUME = [
    *edit(ALONE, "loop:Loop._resume",
          ("samples are passed over", "self.saver.newest, self.samples = newest, progress.samples",
           "self.saver.newest, self.samples = newest, progress.samples + 4")),
    *edit(ALONE, "checkpoint.checkpoint:load",
          ("moments begin anew", "load_tensors({**_list_tensors(built)",
           "load_tensors({**{name: kept for name, kept in _list_tensors(built).items() if name[0] == 'w'}")),
    *edit(ALONE, "optimizers.optimizer:compute_learning_rate",
          ("the rate begins anew", "warmup = schedule.warmup_steps", "step, warmup = step - 2, schedule.warmup_steps")),
]  # fmt: skip


def make_params(planted: Planted) -> list[object]:
    return [pytest.param(case, mutation, id=mutation.name) for case, mutation in planted]


@pytest.mark.long  # tests of a test
@pytest.mark.parametrize(("case", "mutation"), mark_share(20, make_params([*DATA, *HELDOUT, *SUMS, *UPDATE])))
def test_a_planted_mistake_is_detected(case: Case, mutation: Mutation, tmp_path: Path) -> None:
    ours = train_and_log(case, folder_of(tmp_path / "run"), partial(plant, mutation))
    assert distance(ours, get_reference_log(case)) > SEEN


@pytest.mark.long  # tests of a test
@pytest.mark.parametrize(("case", "mutation"), mark_share(3, make_params(RESUME)))
def test_a_planted_mistake_in_resuming_is_detected(case: Case, mutation: Mutation, tmp_path: Path) -> None:
    """Two steps, and the others in a second start, which is not right."""
    folder, begun = folder_of(tmp_path / "run"), 3
    assert distance(train_and_log(case, folder, stop_after=1)[:begun], get_reference_log(case)[:begun]) <= TOLERANCE
    resumed = [line for line in train_and_log(case, folder, partial(plant, mutation)) if line["step"] > 2]
    assert distance(resumed, get_reference_log(case)[begun:]) > SEEN


def test_the_source_text_of_every_planted_mistake_exists() -> None:
    for _, mutation in [*DATA, *HELDOUT, *SUMS, *UPDATE, *RESUME]:
        assert locate(mutation).text.count(mutation.old) == 1, mutation


@pytest.mark.long  # tests of a test
def test_unchanged_code_passes_the_mutation_test(tmp_path: Path) -> None:
    """So what is seen above is the mistake, not the planting."""
    every = {result.place: result._replace(new=result.old) for _, result in [*DATA, *HELDOUT, *SUMS, *UPDATE, *RESUME]}
    ours = train_and_log(EXPERTS, folder_of(tmp_path / "run"), partial(plant, *every.values()))
    assert distance(ours, get_reference_log(EXPERTS)) <= TOLERANCE
