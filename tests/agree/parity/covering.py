"""A pairwise covering array of layouts: any two values of any two factors meet in a case, where that is legal.

Greedy: take a pair that no case has yet, draw legal cases that hold it, keep the one with the most new pairs. What may
go together is asked of ``Layout.parse`` and ``refuse`` alone. After Cohen et al., "The AETG System" (1997).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from functools import lru_cache

from fivefold.errors import UserError
from fivefold.layout.schedule.pipeline_schedule import SCHEDULES
from fivefold.layout.spec import Layout
from fivefold.layout.validity import refuse
from tests.agree.parity.cases import MODELS, TOKENS, Case, job_for, make_uneven_stages, model_for

MAX_RANKS = 8
# A value is what is written into the layout line; the first of each factor says nothing.
FACTORS: Mapping[str, tuple[str, ...]] = {
    "dp": ("dp1", "dp2", "dp3", "dp4", "dp8"),
    "tp": ("", "tp2", "tp4"),
    "cp": ("", "cp2", "cp4", "cp2 cp=ulysses", "cp4 cp=ulysses"),
    "pp": ("", "pp2", "pp4"),
    "schedule": ("", *(s for s in SCHEDULES if s != "interleaved"), "interleaved v2", "interleaved v3"),
    "model": tuple(MODELS),
    "ep": ("", "ep2", "ep4"),
    "etp": ("", "etp2"),
    "zero": ("zero0", "zero1", "zero2", "zero3", "zero1/2", "zero3/2"),
    "stream": ("", "nosp"),
    "mbs": ("mbs1", "mbs2", "mbs3"),
    "ac": ("", "ac=selective", "ac=full", "ac=full/2", "ac=norm+act", "ac=qkv+up", "ac=core+mlp", "ac=rope+out"),
    "stages": ("", "uneven"),
}
SKELETON = ("dp", "tp", "cp", "pp", "schedule", "model", "ep", "etp")  # what decides most about what is legal
TRIES, KEPT = 300, 24  # draws for a pair, and how many legal ones are compared

Choice = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]


@lru_cache(maxsize=1)
def build_cases(*, seed: int = 5) -> tuple[tuple[Case, ...], tuple[Pair, ...]]:
    """The cases, always the same, and the pairs that no legal case holds."""
    chance = random.Random(seed)
    skeletons = _skeletons()
    missing = {
        pair: None
        for one, other in itertools.combinations(FACTORS, 2)
        for pair in itertools.product(((one, v) for v in FACTORS[one]), ((other, v) for v in FACTORS[other]))
    }
    cases: list[Case] = []
    impossible: list[Pair] = []
    while missing:
        pair = next(iter(missing))
        drawn = _draw(pair, skeletons, chance)
        if not drawn:
            impossible.append(pair)
            del missing[pair]
            continue
        # new pairs, and rather on few processes
        best = max(
            drawn, key=lambda choice: sum(p in missing for p in _pairs(choice)) / (4 + _case(choice).layout.world)
        )
        for result in _pairs(best):
            missing.pop(result, None)
        cases.append(_case(best))
    return tuple(cases), tuple(impossible)


def _draw(pair: Pair, skeletons: list[Choice], chance: random.Random) -> list[Choice]:
    fixed = dict(pair)
    fitting = [
        skeleton for skeleton in skeletons if all(skeleton.get(name, value) == value for name, value in fixed.items())
    ]
    results: list[Choice] = []
    for _ in range(TRIES if fitting else 0):
        rest = {name: chance.choice(values) for name, values in FACTORS.items() if name not in SKELETON}
        choice = {**rest, **chance.choice(fitting), **fixed}
        if _is_legal(choice):
            results.append(choice)
        if len(results) == KEPT:
            break
    return results


def _skeletons() -> list[Choice]:
    rest = {name: values[0] for name, values in FACTORS.items() if name not in SKELETON}
    results = []
    for values in itertools.product(*(FACTORS[name] for name in ("dp", "tp", "cp", "pp"))):
        degrees = dict(zip(("dp", "tp", "cp", "pp"), values, strict=True))
        try:
            if Layout.parse(" ".join(values)).world > MAX_RANKS:
                continue
        except UserError:
            continue
        for others in itertools.product(*(FACTORS[name] for name in SKELETON[4:])):
            choice = {**degrees, **dict(zip(SKELETON[4:], others, strict=True))}
            if _is_legal({**rest, **choice}):
                results.append(choice)
    return results


def _pairs(choice: Choice) -> list[Pair]:
    return list(itertools.combinations(((name, choice[name]) for name in FACTORS), 2))


def _is_legal(choice: Choice) -> bool:
    if bool(choice["pp"]) != bool(choice["schedule"]) or (choice["stages"] and not choice["pp"]):
        return False
    try:
        case = _case(choice)
        layout = case.layout
        refuse(layout, model=model_for(case.model_name, layout), job=job_for(layout))
    except UserError:
        return False
    return not (layout.tp > 1 and layout.sp and layout.mbs * TOKENS // layout.cp % layout.tp)


def _case(choice: Choice) -> Case:
    words = [choice[name] for name in FACTORS if name not in ("model", "stages")]
    text = " ".join(word for word in words if word)
    if choice["stages"]:
        text += " " + make_uneven_stages(Layout.parse(text))
    return Case(choice["model"], str(Layout.parse(text)))


def cross() -> tuple[Case, ...]:
    """Every schedule × recomputation × compilation, dense and with experts, on two or four pipeline ranks."""
    results = []
    schedules = ("gpipe", "1f1b", "interleaved v2", "zb1p", "zb2p", "zbv v2", "dualpipe", "dualpipev v2")
    for number, (schedule, ac, compiled, model) in enumerate(
        itertools.product(schedules, ("none", "selective", "full"), (False, True), ("dense", "moe"))
    ):
        pp = 4 if number % 7 == 0 and not compiled else 2
        results.append(Case(model, str(Layout.parse(f"dp1 pp{pp} {schedule} ac={ac}")), compiled))
    return tuple(results)


def build_compiled_cases() -> tuple[Case, ...]:
    """Compilation under the other axes, and on one process."""
    dense = ("dp1", "dp1 ac=full", "dp2 zero3", "tp2", "tp2 nosp ac=norm+act", "cp2", "cp2 cp=ulysses", "dp2 tp2 cp2")
    experts = ("dp1", "dp2 ep2 zero1", "tp2 ep2", "tp2 etp2", "dp2 tp2 pp2 ep2 zero2 zbv ac=selective")
    latent = ("dp1", "tp2 ac=qkv+up", "cp2 ep2")
    pairs = (("biased", dense), ("moe", experts), ("mla", latent), ("nemotron", ("dp1", "tp2 ep2 ac=full")))
    return tuple(Case(model, str(Layout.parse(text)), True) for model, texts in pairs for text in texts)


def list_cases() -> tuple[Case, ...]:
    """Without doubles, cheap ones first."""
    cases = dict.fromkeys((*build_cases()[0], *cross(), *build_compiled_cases()))
    return tuple(sorted(cases, key=lambda case: (case.compiled, case.layout.world)))
