"""Random legal plans for a stack, from one seed: what ``write`` takes or refuses, and must read back."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fivefold.adapter import Adapter
from fivefold.base_format import FOUR_BIT_BASES
from fivefold.errors import UserError
from fivefold.interop.equivalence import fit_free_fields, resolve_adapter, resolve_rate
from fivefold.interop.format import ConfigPlan, Overrides
from fivefold.interop.read import read
from fivefold.interop.registry import find_format
from fivefold.interop.write import drop_default_stages, write
from fivefold.job import Job, get_recipe
from fivefold.layout.schedule.pipeline_schedule import PIPELINE_SCHEDULES
from fivefold.layout.spec import Layout
from fivefold.layout.validity import list_reasons
from fivefold.model.catalog import build_model as model_named
from fivefold.model.huggingface.write import find_difference
from fivefold.model.spec import Model
from fivefold.record import list_differences
from fivefold.results.reading import DataReading
from fivefold.stack.catalog import build_stack as stack_named
from fivefold.stack.spec import Stack
from fivefold.update import LearningRate, Optimizer

MODELS = ("llama3-8b", "llama3-70b", "llama3.2-1b", "qwen3-8b", "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3", "tiny")
RECIPES = ("bf16", "bf16", "fp32", "fp8", "fp8-rowwise", "bf16-grad16", "fp16")


class Range(NamedTuple):
    """What is drawn of."""

    models: Sequence[str] = MODELS
    recipes: Sequence[str] = RECIPES
    acs: Sequence[str] = ("none", "none", "full", "selective", "full/2")
    axes: Sequence[str] = ("dp", "tp", "cp", "pp", "ep")
    fine_tuning: bool = False  # adapters, objectives and data


def layout(some: random.Random, stack: Stack, model: Model, among: Range) -> Layout:
    """A layout; often one that the stack runs."""
    pick, acs = some.choice, among.acs
    runs = stack.runs.replace(axes=tuple(axis for axis in stack.runs.axes if axis in among.axes))
    pp = pick((1, 1, 2, 4)) if "pp" in runs.axes else 1
    schedule = pick(runs.schedules) if pp > 1 else "1f1b"
    v = 2 if PIPELINE_SCHEDULES[schedule].is_v_shaped else pick((2, 3)) if schedule == "interleaved" else 1
    dp, cp = pick((1, 2, 4, 8)), pick((1, 1, 2)) if "cp" in runs.axes else 1
    tp = pick((1, 2, 4, 8)) if "tp" in runs.axes else 1
    zero = pick(runs.zero_with(pp)) if dp * cp > 1 else 0
    values: dict[str, Any] = {
        "dp": dp,
        "cp": cp,
        "tp": tp,
        "pp": pp,
        "v": v,
        "zero": zero,
        "schedule": schedule,
        "mbs": pick((1, 2)),
        "ac": pick(acs),
    }
    if zero and runs.shard_groups and dp > 2 and some.random() < 0.3:
        values["shard_group"] = cp * 2
    if cp > 1:
        values["cp_kind"] = pick(runs.cp_kinds)
    if model.moe and "ep" in runs.axes:
        values |= {"ep": pick((1, 2, 4)), "etp": pick((1, tp))}
    if pp > 1 and some.random() < 0.3:
        sizes = [model.layers // (pp * v)] * (pp * v)
        sizes[-1] += model.layers - sum(sizes) - 1
        sizes[0] += 1
        values["stages"] = tuple(sizes)
    return Layout(**values)


def draw_adapter(some: random.Random) -> Adapter | None:
    """An adapter, or None."""
    pick = some.choice
    if some.random() < 0.25:
        return None
    base = pick((None, "nf4", "fp4", "int8"))
    targets = pick((("all-linear",), ("q_proj", "v_proj"), ("gate_proj", "down_proj", "o_proj")))
    targets += pick(((), (), ("lm_head",), ("embed_tokens", "lm_head")))
    has_patterns = some.random() < 0.2
    return Adapter(
        kind=pick(("lora", "dora")) if base != "int8" else "lora",
        rank=pick((1, 16, 64)),
        alpha=pick((None, 16.0, 12.0)),
        dropout=pick((0.0, 0.0, 0.05)),
        targets=targets,
        rank_stabilized=pick((False, True)),
        base=base,
        double_quantization=base not in FOUR_BIT_BASES or pick((True, False)),
        modules_to_save=pick(((), (), ("lm_head",), ("embed_tokens", "lm_head"))),
        rank_pattern={"o_proj": 4} if has_patterns and targets[0] != "q_proj" else {},
        alpha_pattern={targets[0].replace("all-linear", "v_proj"): 24} if has_patterns else {},
    )


def draw_data(some: random.Random, objective: str) -> DataReading | None:
    """Data of a run file for an objective, or None."""
    pick = some.choice
    if some.random() < 0.3:
        return None
    formats = {"pretrain": ("text",), "sft": ("messages", "completions"), "dpo": ("preferences",)}[objective]
    kind = pick(formats)
    keys = {"text": "body", "messages": "talk", "completions": "ask,answer", "preferences": "ask,good,bad"}
    fields: dict[str, str | float] = {"corpus": pick(("chat.jsonl", "data.parquet")), "format": kind}
    optional: dict[str, tuple[str | float, ...]] = {"key": (keys[kind],), "heldout": (0.1,)}
    if kind != "text":
        optional |= {"excess": ("drop", "truncate"), "chat_template": ("own.jinja",)}
    if objective == "sft":
        optional |= {"loss_on": ("all", "replies"), "packing": ("none", "best-fit")}
    return DataReading(fields=fields | {name: pick(values) for name, values in optional.items() if pick((0, 1))})


def draw_rate(some: random.Random) -> LearningRate:
    """A schedule of the learning rate."""
    pick = some.choice
    return LearningRate(
        kind=pick(("cosine", "constant", "wsd")),
        peak=pick((3e-4, 2e-5, 1.7e-3)),
        floor=pick((0.0, 0.1, 0.37)),
        warmup_steps=pick((0, 2, 10, 13)),
        decay_steps=pick((None, 20, 31)),
    )


def draw_optimizer(some: random.Random) -> Optimizer:
    """An optimizer, most often AdamW."""
    pick = some.choice
    return Optimizer(
        kind=pick((*["adamw"] * 12, "adamw8bit", "adafactor", "sgd")),
        betas=pick(((0.9, 0.98), (0.8, 0.95), (0.9, 0.999))),
        clip=pick((0.5, 1.0, 0.0)),
        weight_decay=pick((0.0, 0.01, 0.1)),
        epsilon=pick((1e-8, 1e-6)),
    )


def plan(some: random.Random, stack: Stack, among: Range) -> ConfigPlan | None:
    """A plan that is legal for ``stack``, or None."""
    model = model_named(some.choice(among.models))
    try:
        chosen = layout(some, stack, model, among)
        steps = some.choice((100, 1000))
        job = Job(
            sequence=some.choice((2048, 4096)),
            global_batch=chosen.dp * chosen.mbs * some.choice((1, 2, 8)),
            precision=get_recipe(some.choice(among.recipes)),
            steps=steps,
            seed=some.choice((0, 7, 1234)),
            stack=stack,
            learning_rate=draw_rate(some),
            optimizer=draw_optimizer(some),
        )
        data = None
        if among.fine_tuning:
            objective = some.choice(("pretrain", "sft", "sft", "dpo"))
            data = draw_data(some, objective)
            documents = some.choice(("joined", "separate"))
            job = job.replace(adapter=draw_adapter(some), objective=objective, documents=documents)
            if objective == "dpo":
                chosen = chosen.replace(mbs=2)
                job = job.replace(global_batch=2 * job.global_batch, dpo_beta=some.choice((0.1, 0.3)))
    except ValueError:
        return None
    legal = next(list_reasons(chosen, model=model, job=job, machine=None), None) is None
    return ConfigPlan(model, chosen, job, data=data) if legal else None


def plans(stack: str, *, count: int, seed: int = 0, among: Range = Range()) -> Iterator[ConfigPlan]:  # noqa: B008
    """``count`` legal plans."""
    some, result = random.Random(seed), 0
    while result < count:
        if (drawn := plan(some, stack_named(stack), among)) is not None:
            result += 1
            yield drawn


def list_written_plans(stack: str, *, to: str, count: int, among: Range) -> list[ConfigPlan]:
    """The first ``count`` of 400 drawn plans that ``to`` can be told; fewer if it can be told fewer."""
    results: list[ConfigPlan] = []
    for drawn in plans(stack, count=400, among=among):
        try:
            write(drawn, to=to)
        except UserError:
            continue
        results.append(drawn)
        if len(results) == count:
            break
    return results


def check_round_trip(plan: ConfigPlan, *, to: str, folder: Any) -> str | None:
    """Why the plan was refused; None if it was written and read back. Raises if it was read back otherwise."""
    try:
        written = write(plan, to=to)
    except UserError as refusal:
        return str(refusal)
    for name, text in written.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    back = read([str(folder / next(iter(written.files)))], Overrides(ranks=plan.layout.world))
    assert back.model is not None
    assert back.job is not None
    assert back.layout == drop_default_stages(plan.layout, plan.model)
    assert find_difference(back.model, fit_free_fields(plan.model, back.model)) is None
    jobs = [
        job.replace(adapter=resolve_adapter(job.adapter, plan.model), optimizer=job.optimizer.reset_unused())
        for job in (back.job, plan.job)
    ]
    if to in ("megatron", "bridge") and plan.job.seed == 0:  # Megatron refuses seeds below 1
        assert back.job.seed == 1234
        jobs[0] = jobs[0].replace(seed=0)
    said = "\n".join(written.remarks)
    for difference in list_differences(jobs[0], jobs[1], skip=("stack", "learning_rate")):
        assert "the job is written with" in said, difference
        assert difference in said
        assert difference.startswith(("documents=", "objective=")), difference  # nothing else differs in silence
    rates = [resolve_rate(job.learning_rate, steps=job.steps) for job in (back.job, plan.job)]
    rate_differences = list(list_differences(rates[0], rates[1]))
    assert not rate_differences or to == "torchtune"  # which has a cosine to zero and a constant rate
    assert all(difference in said for difference in rate_differences)
    form = find_format(to)
    assert back.job.stack.name == (form.choose_stack(plan) if form.choose_stack else form.stack)
    assert back.not_understood == ()
    assert back.missing == ()
    return None
