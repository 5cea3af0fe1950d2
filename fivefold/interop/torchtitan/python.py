"""torchtitan 0.3's Python configs, read without running them, and written; and its launch lines."""

from __future__ import annotations

from typing import Any

from fivefold.interop.files import document as load
from fivefold.interop.format import RANKS_MISSING, Asked, Document, Plan, Written, reading, world
from fivefold.interop.keys import Table, Values, idle, listed, part, written
from fivefold.interop.shell.launch import keys
from fivefold.interop.torchtitan.call import Call, config, configs, modules
from fivefold.interop.torchtitan.emit import recomputed, shared
from fivefold.interop.torchtitan.flavors import MODULES, flavor_of, flavored, llama
from fivefold.interop.torchtitan.keys import PYTHON
from fivefold.interop.torchtitan.read import batch, compiled, degrees, pipeline, rate, sixteen_bits
from fivefold.interop.torchtitan.source import python_file
from fivefold.job import Recipe, recipe
from fivefold.model.shape import MTP
from fivefold.model.spec import Model
from fivefold.record import Mistake
from fivefold.results.reading import Reading

VERSION = "0.3.0"
P = "parallelism."
# A Llama of other sizes is spelled out: model_spec=replace(model_registry("8B"), model=Llama3Model.Config(…)).
SIZES = {
    "layers.n_layers": "layers", "dim": "width", "layers.n_heads": "heads", "layers.n_kv_heads": "kv_heads",
    "layers.rope.theta": "rope_theta",
    "layers.hidden_dim": "ffn", "vocab_size": "vocab", "enable_weight_tying": "tied_embeddings",
}  # fmt: skip
BELOW = "model_spec.model"
INNER = ("tok_embeddings", "norm", "lm_head", "layers")
TABLE: Table = {
    **PYTHON,
    **{f"{BELOW}.{key}": part(f"model.{field}, of a Llama that is no flavor", None) for key, field in SIZES.items()},
    **idle(BELOW, *(f"{BELOW}.{key}" for key in INNER), *(f"{BELOW}.{key}.*" for key in INNER)),
}
DROPPED = ("model_spec.0", "optimizer.0", "optimizer.name")


def recognises(document: Document) -> bool:
    """Whether a Python file returns a ``Trainer.Config`` of torchtitan, or a launch line names one."""
    if document.kind == "words":
        return {"--module", "--config"} <= {word.partition("=")[0] for word in document.words}
    return document.kind == "python" and "torchtitan" in document.text and "Config" in document.text


def read(document: Document, asked: Asked) -> Reading:
    """A Python config in our nouns; ``FILE:FUNCTION`` names one of several, a launch line one with changes."""
    said = keys(document.words) if document.kind == "words" else {}
    if said:
        document = _named(said, document)
    origin, text = document.origin, document.text
    name = document.values.get("function")
    if not name:
        known = configs(text, origin=origin)
        if len(known) != 1:
            raise Mistake(
                f"{origin}: holds {len(known)} configs; name one, as {origin}:{known[0] if known else 'NAME'}"
            )
        name = known[0]
    found = config(text, str(name), origin=origin)
    over = {key: value for key, value in said.items() if "." in key}
    given, model = _model({**found.values, **over}, text, document, asked.model)
    document = document._replace(remarks=(*document.remarks, *found.remarks))
    return _read(given, model, document, asked)


def _named(said: dict[str, object], document: Document) -> Document:
    """The file that ``--module`` names, with the function of ``--config``; ``Mistake`` if it is not there."""
    module, function = str(said["module"]), str(said["config"])
    names = (f"torchtitan/models/{module}/config_registry.py", f"{module.replace('.', '/')}.py")
    path = next((each for name in names if (each := document.folder / name).is_file()), None)
    if path is None:
        raise Mistake(f"{document.origin}: {names[0]} is not here; read that file, as config_registry.py:{function}")
    found = load(path)
    return found._replace(values={"function": function}, ranks=document.ranks, origin=document.origin)


def _model(
    given: dict[str, Any], text: str, document: Document, asked: Model | None
) -> tuple[dict[str, Any], Model | None]:
    """The keys with family and flavor as their own, and the model, which is ``asked`` if the user names one."""
    if given.get("model_spec") == "replace":  # (model_registry(…), model=Llama3Model.Config(…))
        inner = given.pop("model_spec.0", None)
        if isinstance(inner, Call):
            given["model_spec"] = inner.name
            given |= {f"model_spec.{place}": each for place, each in enumerate(inner.positional)}
            given |= {f"model_spec.{key}": value for key, value in inner.named.items()}
    if given.get("model_spec") != "model_registry":
        return given, asked
    module = modules(text).get("model_registry", "")
    family = next((name for name in MODULES if name in module.split(".")), document.folder.name)
    flavor = str(given.pop("model_spec.flavor", given.get("model_spec.0")))
    given |= {"model_spec": family, "model_spec.flavor": flavor}
    if asked:
        return given, asked
    if f"{BELOW}.dim" in given:
        said = {field: given.get(f"{BELOW}.{key}") for key, field in SIZES.items()}
        said["kv_heads"] = said["kv_heads"] or said["heads"]
        numbers = [said[field] for field in ("layers", "width", "heads", "kv_heads", "ffn", "vocab")]
        if not all(isinstance(number, int) and number > 0 for number in numbers):
            raise Mistake(f"{document.origin}: the sizes of its Llama3Model are not all whole numbers: {numbers}")
        layers, width, heads, kv_heads, ffn, vocab = (int(str(number)) for number in numbers)
        sizes = (layers, width, heads, kv_heads, ffn, vocab, bool(said["tied_embeddings"]))
        model = llama(f"llama-{layers}x{width}", sizes)
        return given, model.replace(rope_theta=said["rope_theta"] or model.rope_theta)
    model, ahead = flavored(family, flavor), given.get("model_spec.num_mtp_layers")
    return given, model.replace(mtp=MTP(depth=ahead)) if isinstance(ahead, int) and ahead > 0 else model


def _read(given: dict[str, Any], model: Model | None, document: Document, asked: Asked) -> Reading:
    given = {key: value for key, value in given.items() if key not in DROPPED}
    values = Values(TABLE, given, origin=document.origin, software=f"torchtitan {VERSION}")
    ranks = world(document, asked)
    fields = values.fields()
    fields |= {"job.stack.name": "torchtitan", "job.stack.early_stop": False, "job.documents": "apart"}
    fields |= compiled(values) | rate(values)
    fields["job.seed"] = values["debug.seed"] or 0
    asynchronous = values["compile.enable_async_tensor_parallel"] or values["model_spec.tp_gemm_backend"] != "default"
    fields["job.stack.overlap"] = ("dp", "tp") if asynchronous else ("dp",)
    fields["job.stack.graphs"] = "none" if values["training.disable_cuda_graphs"] else "full"
    fields["job.stack.dispatcher"] = (
        "all_to_all" if values["model_spec.moe_comm_backend"] in ("standard", None) else "fused"
    )
    fields["layout.ac"] = _recomputed(values)
    fields["layout.sp"] = fields["layout.sp"] or fields["layout.tp"] == 1
    if ranks is not None and model is not None:
        pp = fields["layout.pp"]
        fields |= degrees(values, ranks)
        fields |= batch(values, dp=fields["layout.dp"], pp=pp) | pipeline(values, model, pp=pp)
        fields["job.precision"] = _precision(values)
        without = model.moe is not None and fields["layout.ep"] == 1
        fields["layout.etp"] = fields["layout.tp"] if without else 1
    missing = () if ranks else (RANKS_MISSING,)
    return reading(
        ("torchtitan", VERSION), values, fields, document=document, model=model,
        ranks=ranks if model else None, missing=missing,
    )  # fmt: skip


def _recomputed(values: Values) -> str:
    mode = values["activation_checkpoint"]
    if mode is None or mode == "None":
        return "none"
    if mode == "FullAC":
        return "full"
    if mode == "SelectiveAC":
        values.approximate(
            "activation_checkpoint", "keeps every second matmul; read as ac=norm+rope+act, which keeps all of them"
        )
        return "norm+rope+act"
    values.doubt("activation_checkpoint", "what the compiler then keeps is not known; read as ac=none")
    return "none"


def _precision(values: Values) -> Recipe:
    plain = sixteen_bits(values, sharded=True)  # fully_shard is always applied, over one rank too
    calls = [each for each in listed(values["model_spec.converters"]) if isinstance(each, Call)]
    named = {each.name: each.named for each in calls}
    key = "model_spec.converters"
    for name in named:
        if name not in (
            "Float8LinearConverter",
            "MXFP8LinearConverter",
            "NVFP4LinearConverter",
            "Float8GroupedExpertsConverter",
        ):
            values.doubt(key, f"{name} is not counted")
    for name, ours in (("MXFP8LinearConverter", "mxfp8"), ("NVFP4LinearConverter", "nvfp4")):
        if name in named:
            if not named[name].get("fqns"):
                values.doubt(key, "the output projection is converted too; counted in 16 bits")
            return recipe(ours)
    if "Float8LinearConverter" not in named:
        return plain
    if "lm_head" not in str(named["Float8LinearConverter"].get("filter_fqns", [])):
        values.doubt(key, "the output projection is in fp8 too; counted in 16 bits")
    by = named["Float8LinearConverter"].get("recipe_name", "rowwise")
    return recipe("fp8-rowwise-gw" if by == "rowwise_with_gw_hp" else "fp8-rowwise")


def write(plan: Plan) -> Written:
    """The Python config of a plan; ``Mistake`` for a model that it cannot spell, or what torchtitan cannot run."""
    model, layout, job = plan.model, plan.layout, plan.job
    mode, _ = recomputed(layout.ac, groups=False)
    values = written(PYTHON, {"job": job, "layout": layout, "model": model}) | shared(plan, head="lm_head", casts=True)
    if model.moe and layout.ep == 1 and layout.etp != layout.tp:
        raise Mistake(
            f"layout {str(layout)!r}: without ep, torchtitan cuts experts over tp; take etp{layout.tp} or ep2"
        )
    if model.moe and layout.ep > 1 and layout.etp > 1:
        raise Mistake(f"layout {str(layout)!r}: torchtitan 0.3 has no etp beside ep; take etp1")
    whole = job.stack.graphs == "full" and layout.pp == 1 and layout.ep == 1
    values |= {
        "training.disable_cuda_graphs": not whole,
        "activation_checkpoint": "FullAC" if mode == "full" else None,
        "compile.enable_async_tensor_parallel": layout.tp > 1 and "tp" in job.stack.overlap and job.stack.compile,
        "model_spec.converters": _converters(plan),
    }
    if model.mtp is not None:
        raise Mistake(
            f"model {model.name!r}: multi-token prediction is not written for torchtitan; take a model without"
        )
    found = flavor_of(model)
    sizes = None if found else _sizes(model)
    remarks = () if job.documents == "apart" else ("torchtitan 0.3 keeps documents of a sequence apart",)
    nodes, per_node = plan.hosts
    start = (
        f"torchrun --nnodes {nodes} --nproc_per_node {per_node} -m torchtitan.train "
        "--module torchtitan_config --config config"
    )
    text = python_file(
        values, PYTHON, model=model, flavor=found or ("llama3", "8B"), sizes=sizes,
        about=(f"torchtitan {VERSION}: {model.name}, {layout}.", f"Start: {start}"),
    )  # fmt: skip
    return Written({"torchtitan_config.py": text}, remarks)


def _converters(plan: Plan) -> str | None:
    """The call of a converter, as text."""
    asked = plan.job.precision
    if not asked.narrow:
        return None
    if plan.model.moe:
        raise Mistake(f"precision {asked.name}: experts in fp8 are not written for torchtitan; take bf16")
    names = {"fp8-rowwise": "rowwise", "fp8-rowwise-gw": "rowwise_with_gw_hp"}
    if asked.name not in names or asked != recipe(asked.name):
        raise Mistake(f"precision {asked.name}: torchtitan 0.3 has {' and '.join(names)}; take one of them")
    return (
        f'Float8LinearConverter.Config(recipe_name="{names[asked.name]}", filter_fqns=["lm_head"], '
        f"model_compile_enabled={plan.job.stack.compile})"
    )


def _sizes(model: Model) -> dict[str, Any]:
    """The numbers of a Llama of any size; ``Mistake`` if the model is another architecture."""
    from fivefold.model.huggingface.export import differs

    if model.position != "rope" or model.head_dim * model.heads != model.width:
        raise Mistake(
            f"model {model.name!r}: torchtitan's Llama has rotary positions and heads of width/heads="
            f"{model.width}/{model.heads}; take one of its flavors"
        )
    numbers = (model.layers, model.width, model.heads, model.kv_heads, model.ffn, model.vocab, model.tied_embeddings)
    there = llama(model.name, numbers)
    why = differs(there, model.replace(rope_scaling=there.rope_scaling, rope_theta=there.rope_theta,
                                       norm_epsilon=there.norm_epsilon))  # fmt: skip
    if why:
        raise Mistake(f"model {model.name!r}: torchtitan's Llama has {why}; take one of its flavors")
    return {field: getattr(model, field) for field in SIZES.values()}
