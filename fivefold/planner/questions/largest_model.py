"""The largest model with the proportions of another that fits a machine."""

from __future__ import annotations

from math import ceil

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.validity import is_legal
from fivefold.layout.validity.job import validate_job
from fivefold.layout.where import ANY_LAYOUT
from fivefold.machine.spec import Machine
from fivefold.model.attention import Sliding
from fivefold.model.spec import Model
from fivefold.planner.predict import Planner
from fivefold.planner.questions.bisection import find_largest
from fivefold.planner.questions.least_states import bound_ranks
from fivefold.planner.search import find_fitting_layout
from fivefold.planner.search.garbage import collect_garbage_rarely
from fivefold.planner.search.neighbours import climb, shrink
from fivefold.planner.search.work import EXACT_UNITS, SearchWork
from fivefold.results.search_result import QuestionAnswer
from fivefold.step import FITS_RISK
from fivefold.units import show_count

DOUBLED_MODEL_UNITS = EXACT_UNITS // 2  # of work to find a layout of the first size of a model, or of a doubled one
MODEL_UNITS = EXACT_UNITS // 2  # of work to find layouts of all sizes between
SHRINKING_UNITS = 2 * EXACT_UNITS // 25  # of work to make the layout of another size fit, by single changes
FASTER_MODEL_UNITS = 3 * EXACT_UNITS // 25  # of work to make the layout of the largest model faster


@collect_garbage_rarely()
def find_largest_model(
    *, model: Model, machine: Machine, job: Job, risk: float = FITS_RISK
) -> tuple[QuestionAnswer, Model]:
    """Return the largest model that fits the machine.

    Layers and heads of ``model`` are scaled in eighths, up to 32 times or to where the states exceed the memory. A
    layout that fits one size is tried first at the next, and then made smaller by single changes. A size is taken not
    to fit, and named, if no layout is found to fit within a work limit, which all sizes between known ones share. The
    layout is the first that was found to fit, made faster by single changes: a search for the fastest at the edge of
    the memory takes many times as long.
    """
    validate_job(model, job, machine)
    fits, undecided = dict[int, tuple[Planner, Layout]](), list[int]()
    work_between = SearchWork(exact_units=MODEL_UNITS)

    def fits_at(eighths: int) -> bool:
        """Tell whether the model fits at ``eighths`` of its layers and heads; the last that fits is tried first."""
        planner = Planner(model=scale_model(model, eighths / 8), machine=machine, job=job, risk=risk)
        between_known = fits and eighths < 2 * max(fits)
        work = work_between if between_known else SearchWork(exact_units=DOUBLED_MODEL_UNITS)
        layout = _find_layout_like(planner, fits[max(fits)][1] if fits else None, work=work)
        if layout is not None:
            fits[eighths] = planner, layout
        elif work.is_spent:
            undecided.append(eighths)
        return layout is not None

    def holds_states(eighths: int) -> bool:
        return bound_ranks(scale_model(model, eighths / 8), machine, job) <= machine.ranks

    most = find_largest(fits_at, limit=find_largest(holds_states, limit=256), start=8)
    if most == 0:
        limit = " within the work limit" if undecided else ""
        raise UserError(
            f"not even an eighth of the layers and heads of {model.name} fits on {machine.name}{limit}; use a chip "
            "with more memory"
        )
    planner, layout = fits[most]
    largest = planner.model
    estimate = climb(planner, layout, work=SearchWork(exact_units=FASTER_MODEL_UNITS))
    size = f"{largest.layers} layers of width {largest.width}"
    size += f", {largest.moe.experts} experts of width {largest.moe.ffn}" if largest.moe is not None else ""
    line = f"{show_count(largest.parameters)} parameters: {model.name} scaled to {size}"
    remarks = [
        *planner.list_remarks(estimate.layout, is_searched=True),
        "the layout is the first one that fits, made faster by single changes; a search may find a faster one",
    ]
    if undecided:
        sizes = " and ".join(f"{model.name} x{eighths / 8:g}" for eighths in sorted(undecided))
        remarks.append(f"whether {sizes} would fit was not decided within the work limit")
    answer = QuestionAnswer(
        question="largest model",
        line=line,
        value=largest.parameters,
        layout=str(estimate.layout),
        memory_bytes=estimate.peak_bytes,
        step_seconds=estimate.step_time.seconds,
        remarks=tuple(remarks),
    )
    return answer, largest


def _find_layout_like(planner: Planner, like: Layout | None, *, work: SearchWork) -> Layout | None:
    """Return a layout that fits: ``like`` or a smaller one, a few single changes away, else any that is found."""
    model, machine, job, risk = planner.model, planner.machine, planner.job, planner.risk
    if like is not None and is_legal(like, model=model, job=job, machine=machine):
        smaller = shrink(planner, like, work=SearchWork(exact_units=SHRINKING_UNITS))
        if smaller is not None:
            return smaller
    if work.is_spent:
        return None
    return find_fitting_layout(ANY_LAYOUT, model=model, machine=machine, job=job, risk=risk, using=planner, work=work)


def scale_model(model: Model, factor: float) -> Model:
    """Return ``model`` with layers and width times ``factor``.

    head_dim and the number of experts stay; ffn, widths of experts, kv heads, and heads or channels of other token
    mixers keep their ratio to heads. Layers that share keys and layers with sparse gates keep their share of layers.
    """
    ratio = model.heads // model.kv_heads
    kv_heads = max(1, round(model.kv_heads * factor))
    share = kv_heads / model.kv_heads
    pair = 2 if model.moe is not None and model.moe.shortcut else 1  # layers of which the second adds the experts
    layers = pair * max(1, round(model.layers * factor / pair))
    sparsity = model.gate_sparsity and [model.gate_sparsity[layer * model.layers // layers] for layer in range(layers)]
    name = f"{model.name} x{factor:g}"

    def scale(ffn: int | None) -> int | None:
        return ffn if ffn is None or share == 1 else 64 * ceil(ffn * share / 64)

    return Model.read(
        model.model_dump()
        | {
            "name": name,
            "layers": layers,
            "shared_kv_layers": _scale_shared_kv_layers(model, layers),
            "shared_kv_ffn": scale(model.shared_kv_ffn),
            "gate_sparsity": sparsity,
            "kv_heads": kv_heads,
            "heads": ratio * kv_heads,
            "sliding": model.sliding and _scale_heads(model, share),
            **{kind: getattr(model, kind).scale(share) for kind in model.non_attention_mixers},
            "width": 8 * round(model.width * share / 8),
            "ffn": scale(model.ffn),
            "moe": model.moe
            and model.moe.replace(
                dense_layers=min(model.moe.dense_layers, layers),
                ffn=scale(model.moe.ffn),
                shared_ffn=scale(model.moe.shared_ffn),
                latent_width=scale(model.moe.latent_width),
            ),
        },
        origin=name,
    )


def _scale_shared_kv_layers(model: Model, layers: int) -> int:
    """Return the share of ``layers`` without keys of their own; those before them have a layer of each window."""
    windows = [model.has_window(layer) for layer in range(layers)]
    lenders = 1 + max(windows.index(window) for window in {*windows})
    return min(model.shared_kv_layers * layers // model.layers, layers - lenders)


def _scale_heads(model: Model, share: float) -> Sliding:
    """Return the geometry of sliding layers with heads and kv heads times ``share``, in the same ratio."""
    attention_shape = model.attention_shapes[-1]
    kv_heads = max(1, round(attention_shape.kv_heads * share))
    assert model.sliding is not None
    if model.mla is not None:  # of latent attention every head has keys of its own
        return model.sliding.replace(heads=kv_heads)
    return model.sliding.replace(kv_heads=kv_heads, heads=attention_shape.heads // attention_shape.kv_heads * kv_heads)
