"""Random questions that have an answer, and whether its figures agree with one another and with ``predict``.

    python -m tests.endure.answers --inputs 500 --seed 1

Models of the catalog, machines of 1 to 512 ranks, jobs with up to three of ``SETTINGS``, layouts of divisors that are
legal, batches that they divide. Held: verdict, risk and bytes; tokens per second and MFU from their formulas and the
chip's peak; a risk that is no larger with more memory of the chip or with a smaller micro-batch; the text of
``predict`` against its JSON; layout and verdict of ``search``, ``ask`` and ``compare`` against ``predict`` of it.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import isclose
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout, list_divisors
from fivefold.layout.validity import is_legal
from fivefold.layout.validity.job import validate_job
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model, list_names
from fivefold.requests.job import load_job
from fivefold.step import FITS_RISK, TIGHT_RISK
from fivefold.units import show_bytes, show_seconds
from tests.endure.commands import LIMIT_SECONDS, answer, isolate, judge
from tests.endure.files import folder
from tests.endure.spellings import respell_layout
from tests.endure.stop_signals import end_at_stop_signal

SMALL = ("tiny", "nano", "llama3-8b", "qwen3-4b", "gpt-oss-20b", "deepseek-v2-lite", "gemma3-1b", "mixtral-8x7b")
HYBRIDS = (
    "lfm2-350m", "jamba-v0.1", "kimi-linear-48b-a3b", "nemotron3-nano-30b-a3b", "nemotron3-super-120b-a12b",
    "qwen3.5-35b-a3b", "deepseek-v4-flash",
)  # fmt: skip
MACHINES = ("h100", "h200", "a100", "gb200", "l40s", "h800", "mi300x", "v100-16", "gb300")
INSTANCES = ("p3.8xlarge", "a3-highgpu-2g")  # nodes of fewer GPUs than their chips usually have
PRECISIONS = ("bf16", "bf16", "bf16", "fp8", "fp8-delayed", "fp8-param", "bf16-grad16", "bf16-full")
STACKS = ("", "", "", "torchtitan", "megatron", "deepspeed", "fsdp2")
SCHEDULES = ("1f1b", "interleaved", "zb1p", "zbv", "gpipe", "dualpipev")
SETTINGS: tuple[tuple[str, ...], ...] = (  # of which a job has up to three that are legal with one another
    ("fused_scans=true",),
    ("fused_scans=true",),
    ("adapter=lora:8", "adapter.rank_pattern=q_proj:2,o_proj:64", "adapter.alpha_pattern=q_proj:4"),
    ("adapter=lora:16", "adapter.targets=q_proj,v_proj,experts.gate_up_proj,experts.down_proj"),
    ("adapter=lora:4", "adapter.targets=all-linear,experts.down_proj", "adapter.rank_pattern=experts.down_proj:16"),
    ("adapter=qlora:16",),
    ("adapter=lora:16", "adapter.base=fp4", "adapter.double_quantization=false"),
    ("adapter=lora:16", "adapter.base=fp8"),
    ("adapter=lora:8", "adapter.targets=q_proj,embed_tokens,lm_head"),
    ("adapter=dora:8", "adapter.dropout=0.1"),
    ("adapter=qdora:8",),
    ("adapter=lora:8", "adapter.modules_to_save=embed_tokens,lm_head"),
    ("freeze=embed_tokens,layers[:-2]",),
    ("freeze=layers[1:].mlp",),
    ("objective=dpo",),
    ("objective=dpo", "adapter=lora:8"),
    ("objective=sft",),
    ("documents=separate",),
    ("offload=optimizer",),
    ("offload=optimizer,parameters",),
    ("offload=activations",),
    ("images=1",),
    ("images=1", "freeze_vision_tower=true"),
    ("optimizer.kind=muon",),
    ("optimizer.kind=adamw8bit",),
    ("loss=chunked",),
    ("attention=unfused",),
    ("fp8_attention=true",),
    ("compile=true",),
    ("kernels=plain",),
    ("reduce=step",),
    ("reshard=backward",),
    ("dispatcher=fused",),
    ("async_tp=true",),
    ("vocab_multiple=128",),
    ("imbalance=1.5",),
)
QUESTIONS = (
    "predict", "micro-batch", "sequence", "changes", "run", "compare", "search", "gpus", "batch", "plan", "deadline",
)  # fmt: skip
WEIGHTS = (40, 8, 5, 8, 6, 10, 4, 3, 3, 2, 3)
DEADLINE_DAYS, DEADLINE_TOKENS = 60, "1e10"
ATTEMPTS = 200  # layouts that are drawn until one is legal
TOLERANCE = 1e-9


class Question(NamedTuple):
    """A command line with the options of its job, and the model, machine and layout."""

    words: list[str]
    model: str
    machine: str
    layout: str
    job: list[str]


class Ended(NamedTuple):
    """How a question ended: its exit code, and what is wrong with it."""

    question: Question
    code: int
    seconds: float
    wrong: str


def draw_question(number: int, *, seed: int) -> Question:
    """Return a question whose layout is legal."""
    rng = random.Random(f"answers {seed} {number}")
    asked = rng.choices(QUESTIONS, WEIGHTS)[0]
    is_searched = asked in ("search", "gpus", "batch", "plan", "sequence", "deadline")
    while True:
        name = rng.choice(SMALL if is_searched or rng.random() < 0.6 else list_names())
        name = rng.choice(HYBRIDS) if rng.random() < 0.2 else name
        chip, power = rng.choice((*MACHINES, *INSTANCES)), rng.randint(0, 3 if is_searched else 9)
        ranks = 2**power * (3 if rng.random() < 0.1 and power else 1)
        sequence = rng.choice((512, 2048, 4096)) if name not in ("tiny", "nano") else 128
        precision = rng.choice(PRECISIONS)
        stack = rng.choice(STACKS)
        settings = [word for words in rng.sample(SETTINGS, rng.choice((0, 0, 1, 1, 2, 2, 3))) for word in words]
        make_job = partial(load_job, settings=settings, seq=sequence, precision=precision, stack=stack or None)
        if layout := _draw_layout(rng, name, f"{chip}:{ranks}", make_job):
            break
    text, batch = layout
    if rng.random() < 0.2:
        text = respell_layout(rng, text)
    job = ["--seq", str(sequence), "--gbs", str(batch)]
    job += ["--precision", precision] if precision != "bf16" else []
    job += ["--stack", stack] if stack else []
    job += [word for setting in settings for word in ("--set", setting)]
    machine = f"{chip}:{ranks}"
    words = {
        "predict": ["predict", name, machine, text],
        "compare": ["compare", name, machine, text, _vary(rng, text)],
        "search": ["search", name, machine],
        "plan": ["plan", name, machine],
        "deadline": ["search", name, rng.choice((chip, machine)), "--deadline", f"{DEADLINE_DAYS}d"],
        "gpus": ["ask", "gpus", name, machine],
        "batch": ["ask", "batch", name, machine, text],
    }.get(asked, ["ask", asked, name, machine, text])
    more = ["--tokens", "1e11"] if asked in ("run", "batch") else []
    more = ["--tokens", DEADLINE_TOKENS] if asked == "deadline" else more
    return Question([*words, *job, *more], name, machine, text, job)


def _draw_layout(rng: random.Random, name: str, machine: str, make_job: Callable[..., Job]) -> tuple[str, int] | None:
    """Return a legal layout of all ranks with a global batch that it divides; None if none is drawn.

    ``make_job``: returns the job with a batch ``gbs``.
    """
    model, ranks = build_model(name), int(machine.partition(":")[2])
    chips = resolve(machine, local=Path("/nowhere"))
    try:
        validate_job(model, make_job(gbs=8))
    except UserError:
        return None
    for _ in range(ATTEMPTS):
        left, degrees = ranks, dict[str, int]()
        for axis in rng.sample(("tp", "pp", "cp", "dp"), 4):
            degrees[axis] = rng.choice(list_divisors(left))
            left //= degrees[axis]
        degrees["dp"] *= left
        pp, mbs = degrees["pp"], rng.choice((1, 1, 2, 4))
        schedule = rng.choice(SCHEDULES) if pp > 1 else "1f1b"
        stages = {"interleaved": rng.choice((2, 3)), "zbv": 2, "dualpipev": 2}.get(schedule, 1)
        micro_batches = rng.choice((1, 2, 4)) if pp == 1 else pp * rng.choice((2, 3))
        ep = rng.choice(list_divisors(degrees["dp"])) if model.moe else 1
        try:
            layout = Layout(
                **degrees, v=stages, schedule=schedule, mbs=mbs, ep=ep, ac=rng.choice(("none", "full", "selective")),
                zero=rng.choice((0, 1, 2, 3)) if degrees["dp"] * degrees["cp"] > 1 else 0,
            )  # fmt: skip
            batch = layout.dp * mbs * micro_batches
            if is_legal(layout, model=model, job=make_job(gbs=batch), machine=chips):
                return str(layout), batch
        except (UserError, ValueError):
            continue
    return None


def _vary(rng: random.Random, text: str) -> str:
    """Return the layout with another recomputation."""
    layout = Layout.parse(text)
    return str(layout.replace(ac=rng.choice([ac for ac in ("none", "full", "selective") if ac != layout.ac])))


def run(number: int, *, seed: int) -> Ended:
    """Ask one question twice, as text and as JSON, and return what is wrong with the answers."""
    question = draw_question(number, seed=seed)
    begin = time.process_time()
    with folder({}):
        code, out, err, wrong = answer([*question.words, "--json"], limit=LIMIT_SECONDS * 1.5)
        wrong = wrong or judge(code, err)
        if code == 0 and not wrong:
            wrong = next(find_faults(question, json.loads(out)), "")
        if code == 2 and question.layout not in question.words and "layout '" in err:
            wrong = f"a layout that was not asked for is not valid: {err}"
    return Ended(question, code, time.process_time() - begin, wrong)


def find_faults(question: Question, result: Any) -> Iterator[str]:
    """Yield what is wrong with an answer."""
    command, asked = question.words[0], question.words[1]
    if command == "predict":
        yield from check_step(question, result)
        yield from check_text(question, result)
        yield from check_risk_order(question, result)
    elif command == "compare":
        for variant in result["variants"]:
            yield from check_step(question, variant["step"]) if variant["step"] else ()
            yield from compare_with_predict(question, variant["step"]) if variant["step"] else ()
    elif command == "search" and "--deadline" in question.words:
        yield from _check_deadline(question, result)
    elif command == "search":
        for ranked in [*result["best"], *([result["proposal"]["choice"]] if result["proposal"] else [])]:
            yield from check_step(question, ranked["step"])
            if ranked["step"]["memory"]["risk"] > result["risk"]:
                yield f"{ranked['step']['layout']}: a risk of {ranked['step']['memory']['risk']} is proposed"
        for ranked in result["best"][:2]:
            job = question.job
            if not any(word.startswith("reduce=") for word in job):  # a search tries both
                job = [*job, "--set", f"reduce={ranked['reduce']}"]
            yield from compare_with_predict(question._replace(job=job), ranked["step"])
        times = [ranked["step"]["time"]["step_seconds"] for ranked in result["best"]]
        if times != sorted(times):
            yield f"the best are not in order: {times}"
    elif asked in ("micro-batch", "gpus", "sequence", "run", "changes"):
        yield from _check_question(question, asked, result)


def _check_deadline(question: Question, result: Any) -> Iterator[str]:
    """Yield where an offer misses the deadline, or ``predict`` says another utilization of its layout."""
    for offer in result["offers"]:
        if offer["run"] is None:
            continue
        if offer["run"]["seconds"] > DEADLINE_DAYS * 86_400:
            yield f"{offer['ranks']} ranks take {offer['run']['seconds']} s"
        machine = f"{question.machine.partition(':')[0]}:{offer['ranks']}"
        words = ["predict", question.model, machine, offer["layout"], *question.job, "--json"]
        code, out, err, _ = answer(words, limit=LIMIT_SECONDS)
        step = json.loads(out) if code == 0 else None
        if step is None or not step["memory"]["fits"] or step["world"] > offer["ranks"]:
            yield f"{shlex.join(words)} ends with {code} or does not fit: {err[-200:]}"
        elif not any("reduce=" in word for word in words) and step["mfu"]["causal"] > offer["mfu"] * (1 + TOLERANCE):
            yield f"{shlex.join(words)}: MFU {step['mfu']['causal']} instead of at most {offer['mfu']}"


def _check_question(question: Question, asked: str, result: Any) -> Iterator[str]:
    first = result[0]["answer"] if asked == "sequence" else result[0] if result else {}
    if asked == "changes":
        for change in result[:3]:
            is_of_layout = Layout.parse(change["layout"]) != Layout.parse(question.layout)
            if is_of_layout and " and " not in change["change"]:  # the second of a pair may be of the job
                yield from _check_figures(question, change["layout"], change, question.job)
            if change["fits"] != (change["risk"] <= FITS_RISK):
                yield f"{change['change']}: fits is {change['fits']} at a risk of {change['risk']}"
        return
    job, machine = question.job, question.machine
    if asked == "sequence":
        job = [*job[:1], str(int(first["value"])), *job[2:]]
    if asked == "gpus":
        machine = f"{machine.partition(':')[0]}:{int(first['value'])}"
        if Layout.parse(first["layout"]).world != first["value"]:
            yield f"{first['value']} GPUs with the layout {first['layout']}"
    renamed = first | {"memory_bytes": first.get("memory_bytes", first.get("peak_bytes"))}
    yield from _check_figures(question._replace(machine=machine), first["layout"], renamed, job, fits=asked != "run")


def _check_figures(
    question: Question, layout: str, figures: dict[str, Any], job: Sequence[str], *, fits: bool = False
) -> Iterator[str]:
    """Yield where ``predict`` of a layout says other figures, or that it does not fit."""
    words = ["predict", question.model, question.machine, layout, *job, "--json"]
    code, out, err, _ = answer(words, limit=LIMIT_SECONDS)
    if code != 0:
        yield f"{shlex.join(words)} ends with {code}: {err[-200:]}"
        return
    step = json.loads(out)
    if step["memory"]["peak_bytes"] != figures["memory_bytes"]:
        yield f"{shlex.join(words)}: {step['memory']['peak_bytes']} bytes instead of {figures['memory_bytes']}"
    if not isclose(step["time"]["step_seconds"], figures["step_seconds"], rel_tol=TOLERANCE):
        yield f"{shlex.join(words)}: {step['time']['step_seconds']} s instead of {figures['step_seconds']}"
    if fits and not step["memory"]["fits"]:
        yield f"{shlex.join(words)} does not fit"
    for name in ("risk", "fits", "verdict"):
        if name in figures and figures[name] != step["memory"][name]:
            yield f"{shlex.join(words)}: {name} {step['memory'][name]} instead of {figures[name]}"


def compare_with_predict(question: Question, step: dict[str, Any]) -> Iterator[str]:
    """Yield where ``predict`` says other figures of a step's layout."""
    figures = {"memory_bytes": step["memory"]["peak_bytes"], "step_seconds": step["time"]["step_seconds"]}
    figures |= {name: step["memory"][name] for name in ("risk", "fits", "verdict")}
    yield from _check_figures(question, step["layout"], figures, question.job)


def check_step(question: Question, step: dict[str, Any]) -> Iterator[str]:
    """Yield where the figures of a step contradict one another."""
    memory, seconds = step["memory"], step["time"]["step_seconds"]
    risk, layout = memory["risk"], Layout.parse(step["layout"])
    verdict = "fits" if risk <= FITS_RISK else "tight" if risk <= TIGHT_RISK else "does not fit"
    if memory["verdict"] != verdict or memory["fits"] != (verdict == "fits"):
        yield f"{layout}: {memory['verdict']} at a risk of {risk}"
    levels = [memory["peak_bytes"], memory["reserved_bytes"], memory["driver_bytes"]]
    if levels != sorted(levels):
        yield f"{layout}: peak, reserved and driver bytes are {levels}"
    if memory["fits"] and memory["peak_bytes"] > memory["capacity_bytes"]:
        yield f"{layout}: fits with {memory['peak_bytes']} of {memory['capacity_bytes']} bytes"
    if max(stage["peak_bytes"] for stage in memory["stages"]) != memory["peak_bytes"]:
        yield f"{layout}: the peak is not that of its fullest stage"
    if step["world"] != layout.world or layout.world > int(question.machine.partition(":")[2]):
        yield f"{layout} on {step['world']} ranks of {question.machine}"
    job = step["job"]
    tokens = job["global_batch"] * job["sequence"] / seconds / step["world"]
    if not isclose(tokens, step["tokens_per_second_per_gpu"], rel_tol=1e-6):
        yield f"{layout}: {step['tokens_per_second_per_gpu']} tokens per second instead of {tokens}"
    if not 0 < step["mfu"]["causal"] <= step["mfu"]["non_causal"] < 1:
        yield f"{layout}: MFU {step['mfu']}"
    peak = resolve(question.machine, local=Path("/nowhere")).chip.peak(job["precision"]["compute"])
    for name in ("causal", "non_causal"):
        share = step["work"][f"model_flops_{name}"] / (seconds * step["world"] * peak)
        if not isclose(share, step["mfu"][name], rel_tol=1e-6) or share > 1:
            yield f"{layout}: MFU {step['mfu'][name]} instead of {share} of {peak:.6g} FLOP/s"
    ratio = step["work"]["model_flops_causal"] / step["work"]["model_flops_non_causal"]
    if not isclose(ratio, step["mfu"]["causal"] / step["mfu"]["non_causal"], rel_tol=1e-6):
        yield f"{layout}: MFU {step['mfu']} of {step['work']}"
    if step["time"]["bubble_seconds"] + step["time"]["optimizer_seconds"] > seconds * (1 + 1e-9):
        yield f"{layout}: bubble and optimizer take longer than the step"


def check_risk_order(question: Question, step: dict[str, Any]) -> Iterator[str]:
    """Yield where more memory of the chip, or a micro-batch of half the size, has a larger risk or a larger peak.

    A step of one micro-batch needs no sums of gradients, and schedules that run all forwards first keep the same
    activations of more micro-batches: their micro-batches are not halved.
    """
    memory, layout = step["memory"], Layout.parse(step["layout"])
    words, batch = ["predict", question.model, question.machine, question.layout, *question.job, "--json"], step["job"]
    micro_batches = batch["global_batch"] // (layout.dp * layout.mbs)
    larger = [*words[:2], f"{question.machine} memory={memory['capacity_bytes'] * 9 // (8 * 2**30)}GiB", *words[3:]]
    asked = [larger]
    if layout.mbs % 2 == 0 and micro_batches > 1 and not layout.pipeline.forwards_first:
        asked.append([*words[:3], str(layout.replace(mbs=layout.mbs // 2)), *words[4:]])
    for line in asked:
        code, out, _, _ = answer(line, limit=LIMIT_SECONDS)
        other = json.loads(out)["memory"] if code == 0 else memory
        if code != 0 and line is larger:
            yield f"{shlex.join(line)} ends with {code}"
        for name in ("risk", "peak_bytes", "driver_bytes"):
            if other[name] > memory[name]:
                yield f"{shlex.join(line)}: {name} {other[name]} instead of at most {memory[name]}"


def check_text(question: Question, step: dict[str, Any]) -> Iterator[str]:
    """Yield figures of the JSON that the text does not print."""
    code, out, _, wrong = answer(question.words, limit=LIMIT_SECONDS)
    text = " ".join(out.split())
    memory = step["memory"]
    shown = [step["layout"], show_bytes(memory["peak_bytes"]), show_seconds(step["time"]["step_seconds"])]
    shown += [show_bytes(memory["driver_bytes"]).split()[0], f"MFU {step['mfu']['causal']:.1%}", memory["verdict"]]
    for part in shown:
        if code != 0 or wrong or part not in text:
            yield f"the text does not say {part!r}: {text[:300]}"
            return


def main() -> None:
    """Ask questions and print those whose answers are wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--inputs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this time")
    asked = parser.parse_args()
    codes, bad, slowest, end = dict[int, int](), 0, (0.0, ""), time.monotonic() + asked.seconds
    with end_at_stop_signal(), isolate():
        for number in range(asked.inputs) if asked.only is None else [asked.only]:
            if time.monotonic() > end:
                break
            ended = run(number, seed=asked.seed)
            codes[ended.code] = codes.get(ended.code, 0) + 1
            slowest = max(slowest, (ended.seconds, shlex.join(ended.question.words)))
            if ended.wrong:
                bad += 1
                print(f"{number}: fivefold {shlex.join(ended.question.words)}\n    {ended.wrong}", flush=True)
    print(f"exit codes {codes}; {bad} wrong; the slowest took {slowest[0]:.1f} s: {slowest[1]}")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
