"""Write the reference: commands, configuration keys, results, Python API, models, machines, keys of other software.

    python docs/site/reference.py        writes docs/reference/*.md; a test compares them with the code

Everything is read from the code: the options of the commands, the fields of the records with the comments that explain
them, the docstrings of the public functions, and the catalogs.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterator
from html import escape
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from man_page import write_man_page

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
RESULTS = ("fivefold.step:Step", "fivefold.results.search_result:SearchResult", "fivefold.results.sweep_row:SweepRow")
KINDS = {
    "field": "read",
    "part": "read, together with other keys",
    "near": "approximated",
}


class Section(NamedTuple):
    """One table of ``configuration.md``: the record, the heading, and an introduction."""

    record: str
    title: str
    text: str


SECTIONS = (
    Section("fivefold.trainer.run:Run", "Run file", """`fivefold train RUN.toml` and `dryrun RUN.toml` read it.
Every key is optional. Keys without a heading come first, then one heading for each table:

```toml
model = "llama3-8b"
machine = "h100:8"
layout = "dp8 zero3 mbs1 ac=selective"
folder = "runs/llama3-8b"

[job]
sequence = 8192
global_batch = 64
precision = "bf16"

[data]
corpus = "/data/text"
tokenizer = "/data/tokenizer.json"
```"""),
    Section("fivefold.job:Job", "Job", """The table `[job]` of a run file, a file for `--job`, or `--set KEY=VALUE` on
a command line. Keys of the [software](#software) may be given as if they were the job's: `--set attention=flash2`."""),
    Section("fivefold.layout.spec:Layout", "Layout", """A layout is usually written as keywords, `dp8 tp2 zero3 mbs1`
([all keywords](../notation.md#7-words-of-a-layout)). The JSON of a command has these fields instead."""),
    Section("fivefold.model.spec:Model", "Model file", """A model that is neither in the [catalog](models.md) nor a
Hugging Face `config.json`: a TOML file whose path stands in place of the model's name."""),
    Section("fivefold.machine.spec:Machine", "Machine file", """See [machines](machines.md) for names, for the short
form `"l40s:320 nic=100Gbit/node"` and for files that change a few keys of a catalog machine."""),
    Section("fivefold.stack.spec:Stack", "Software", """A [stack](stacks.md) describes the software that runs a job. Set
one key with `--set KEY=VALUE`, or several in `[job.stack]`, on top of a named stack: `--stack torchtitan`."""),
)  # fmt: skip
ARGUMENTS = (
    "These arguments occur in many commands:",
    "",
    "- `MODEL`: a name of the [catalog](models.md), a Hugging Face `config.json`, or a",
    "  [model file](configuration.md#model-file).",
    "- `MACHINE`: a [GPU](machine-catalog.md) and the number of GPUs, such as `h100:64`, a",
    "  [machine file](configuration.md#machine-file), or `local` for this computer ([machines](machines.md)).",
    "- `LAYOUT`: how the step is distributed over GPUs, as [keywords](../notation.md#7-words-of-a-layout) in one "
    "argument,",
    "  such as `'dp16 tp4 zero1 mbs1'`.",
    "- `RUN`: a [run file](configuration.md#run-file), which states model, machine, layout, job and data",
    "  (of `report`: the folder of a run).",
    "- A job field is a [key of the job](configuration.md#job), such as its sequence length, precision or optimizer.",
    "  `--set KEY=VALUE` sets any of them.",
)
MEASURED = (
    "MatmulPoint", "AttentionPoint", "KernelPoint", "CollectivePoint", "StepFactor", "StepOverhead", "UnitPoint",
    "UpdatePoint",
)  # fmt: skip
"""Records that ``fivefold calibrate`` writes and nobody types."""


def list_commands() -> Iterator[tuple[str, Any]]:
    """Yield every command with its name."""
    from typer.main import get_command

    from fivefold.cli import app

    yield from sorted(get_command(app).commands.items())  # type: ignore[attr-defined]


def find_first_sentence(text: str | None) -> str:
    """Return the first sentence of a docstring as one line."""
    return " ".join((text or "").replace("``", "").split()).partition(". ")[0].rstrip(".") + "."


def write_commands() -> str:
    """Return the reference of the command line."""
    parts = [
        "# Commands",
        "",
        "Every command prints its answer to stdout and everything else to stderr. An error is one line that says how",
        "to fix the problem; the exit code is 2 for an error of the user and 1 for one of the system.",
        "",
        *ARGUMENTS,
    ]
    for name, command in list_commands():
        arguments = [param for param in command.params if param.param_type_name == "argument"]
        words = [
            param.metavar or (param.name.upper() if param.required else f"[{param.name.upper()}]")
            for param in arguments
        ]
        usage = f"`{' '.join(['fivefold', name, *words])}`"
        parts += [
            "",
            f"## {name}",
            "",
            *textwrap.wrap(" ".join((command.help or "").replace("\\[", "[").split()), 116),
            "",
            usage,
            "",
        ]
        parts += ["| argument | meaning |", "| --- | --- |"] if arguments else []
        for word, argument in zip(words, arguments, strict=True):
            parts.append(f"| `{escape_cell(word)}` | {escape_cell(argument.help or '')} |")
        parts += [""] if arguments else []
        options = [param for param in command.params if param not in arguments and param.name != "help"]
        parts += ["| option | meaning | default |", "| --- | --- | --- |"] if options else []
        for option in sorted(options, key=lambda option: option.opts[0]):
            unset = option.default in (None, False, (), [], "") or callable(option.default)
            names = "` `".join([*option.opts, *option.secondary_opts])
            parts.append(f"| `{names}` | {escape_cell(option.help or '')} | {'' if unset else f'`{option.default}`'} |")
    return "\n".join(parts) + "\n"


def write_python() -> str:
    """Return the reference of ``import fivefold as ff``."""
    import fivefold as ff

    parts = [
        "# Python API",
        "",
        "`import fivefold as ff`: functions with the options and defaults of the commands. Examples and notebooks:",
        "[use Fivefold from Python](../how-to/python.md).",
    ]
    for name in sorted(ff.__all__):
        value = getattr(ff, name)
        if inspect.isfunction(value):
            signature = f"```python\n{write_signature(name, value)}\n```"
        elif inspect.isclass(value):
            signature = f"Class of `{value.__module__}`."
        else:
            continue
        described = describe_function(value) if inspect.isfunction(value) else describe_record(value)
        parts += ["", f"## ff.{name}", "", signature, "", wrap_prose(described)]
    return "\n".join(parts) + "\n"


def wrap_prose(text: str) -> str:
    """Return the text with its long lines in lines of the pages' width, outside of code and tables."""
    blocks = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        block
        if block.startswith("```")
        else "\n".join(
            textwrap.fill(line, 116, subsequent_indent="  " if line.startswith("- ") else "", break_on_hyphens=False)
            if len(line) > 116 and not line.startswith("|")
            else line
            for line in block.split("\n")
        )
        for block in blocks
    )


def describe_function(function: Any) -> str:
    """Return the numpydoc docstring of a function as Markdown: parameters as a list, examples as code."""
    from fivefold.api.documentation import split_sections

    summary, sections = split_sections(inspect.getdoc(function) or "")
    parts = [summary.replace("``", "`")]
    for title, text in sections.items():
        if title == "Examples":
            parts.append(f"Example:\n\n```pycon\n{text}\n```")
            continue
        entries = re.findall(r"^(\S[^\n]*)\n((?:    [^\n]*\n?)+)", f"{text}\n", flags=re.MULTILINE)
        lines = [f"- `{name.partition(' : ')[0]}`: {' '.join(body.split())}" for name, body in entries]
        parts.append("\n".join([f"{title}:", "", *lines]).replace("``", "`"))
    return "\n\n".join(parts)


def write_signature(name: str, function: Any) -> str:
    """Return the signature of a function with one parameter a line."""
    signature = inspect.signature(function)
    lines, starred = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            lines.append("    *,")
            starred = True
        starred |= parameter.kind is parameter.VAR_POSITIONAL
        lines.append(f"    {parameter},")
    end = "" if signature.return_annotation is signature.empty else f" -> {signature.return_annotation}"
    text = re.sub(r"(?:fivefold|typing|pathlib)\.(?:\w+\.)*", "", "\n".join([f"ff.{name}(", *lines, f"){end}"]))
    return re.sub(r": '([^'\n]*)'", r": \1", text)


def write_results() -> str:
    """Return the reference of the records that commands print with ``--json``."""
    parts = [
        "# Results (JSON)",
        "",
        "What `--json` prints, and what `fivefold.load` returns. Sizes are in bytes, times in seconds. The keys of",
        "files that you write are in [configuration keys](configuration.md).",
    ]
    configured = {load(section.record) for section in SECTIONS}
    seen: set[type] = set(configured)
    todo = [load(place) for place in RESULTS]
    while todo:
        record = todo.pop(0)
        if record in seen:
            continue
        seen.add(record)
        parts += ["", f"## {record.__name__}", "", describe_record(record), "", *tabulate_fields(record)]
        todo += [nested for field in record.model_fields.values() for nested in inner_records(field.annotation)]
    return "\n".join(parts) + "\n"


def write_configuration() -> str:
    """Return the reference of all configuration keys: run file, job, layout, model, machine, software."""
    parts = [
        "# Configuration keys",
        "",
        "Every key that a file or `--set` takes, with its type, its default and what it sets. Sizes are in bytes,",
        "rates in bytes or FLOPs per second, times in seconds, unless the key's name says otherwise. An unknown key is",
        "an error that names the nearest known one.",
    ]
    seen = {load(section.record) for section in SECTIONS}
    for section in SECTIONS:
        parts += ["", f"## {section.title}", "", section.text]
        todo = [("", load(section.record))]
        while todo:
            path, record = todo.pop(0)
            if path:
                parts += ["", f"### {section.title}: {path}", "", describe_record(record)]
            parts += ["", *tabulate_fields(record)]
            for name, field in record.model_fields.items():
                for nested in inner_records(field.annotation):
                    if nested not in seen and nested.__name__ not in MEASURED:
                        seen.add(nested)
                        todo.append((f"{path}.{name}".lstrip("."), nested))
    return "\n".join(parts) + "\n"


def load(place: str) -> Any:
    """Return the record that ``module:Name`` names."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def describe_record(record: Any) -> str:
    """Return the docstring of a record as Markdown."""
    return (inspect.getdoc(record) or "").replace("``", "`")


def describe_fields(record: Any) -> dict[str, str]:
    """Return the help of each field: its description, or the comment above it or at the end of its line."""
    helps: dict[str, str] = {}
    for base in reversed(record.__mro__):
        if hasattr(base, "model_fields") and base.__module__.startswith("fivefold") and base.__name__ != "Record":
            helps |= read_field_comments(base)
    return {name: field.description or helps.get(name, "") for name, field in record.model_fields.items()}


def read_field_comments(record: type) -> dict[str, str]:
    """Return the comments of a class's fields, as its source has them."""
    source = textwrap.dedent(inspect.getsource(record))
    lines = source.splitlines()
    comments = {
        token.start[0]: (token.start[1], token.string.lstrip("# "))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    helps = {}
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    for node in tree.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        above: list[str] = []
        line = node.lineno - 1
        while line in comments and not lines[line - 1][: comments[line][0]].strip():
            above.insert(0, comments[line][1])
            line -= 1
        within = [comments[line][1] for line in range(node.lineno, (node.end_lineno or 0) + 1) if line in comments]
        helps[node.target.id] = " ".join([*above, *within]).replace("``", "`")
    return helps


def tabulate_fields(record: Any) -> list[str]:
    """Return the fields of a record as the lines of a Markdown table."""
    hints, helps = get_type_hints(record), describe_fields(record)
    lines = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in record.model_fields.items():
        default, meaning = show_default(field), split_by_value(escape_cell(helps[name]), hints.get(name))
        lines.append(f"| `{name}` | {show_type(hints.get(name))} | {default} | {meaning} |")
    return lines


def split_by_value(text: str, hint: Any) -> str:
    """Return the meaning of a field with a line for each value that it explains as ``VALUE: meaning``."""
    values = [value for choice in (hint, *get_args(hint)) for value in get_args(choice) if isinstance(value, str)]
    if not values:
        return text
    value = "|".join(map(re.escape, sorted(values, key=len, reverse=True)))
    head, *parts = re.split(rf"(?:^|(?<=; )|(?<=\. ))((?:{value})(?:, (?:{value}))*): ", text)
    lines = [
        f"`{names.replace(', ', '`, `')}`: {meaning.strip().rstrip(';')}"
        for names, meaning in zip(parts[::2], parts[1::2], strict=True)
    ]
    return "<br>".join([head.strip().rstrip(";.")] * bool(head) + lines) if len(lines) > 1 else text


def show_default(field: Any) -> str:
    """Return the default of a field as a Markdown cell: of a record its name, if it has one."""
    from fivefold.record import Record

    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, Record):
        default = getattr(default, "name", None)
    return "" if default in (None, (), {}) else f"`{escape_cell(shorten(default))}`"


def write_models() -> str:
    """Return the catalog of models as a page."""
    from fivefold.model.catalog import build_model, list_names

    parts = [
        "# Models",
        "",
        "Names for the argument `MODEL`; `fivefold models` lists them, `fivefold models qwen3` those that contain a",
        "word. The beginning of a name is enough if it fits one model (`smollm3` is `smollm3-3b`). A Hugging Face",
        "`config.json`, a folder that holds one, or a [model file](configuration.md#model-file) work as well.",
        "",
        "| name | parameters | layers | width | heads (kv) | experts | vocabulary | source |",
        "| --- | --: | --: | --: | --: | --: | --: | --- |",
    ]
    for name in list_names():
        model = build_model(name)
        experts = f"{model.moe.experts}, top {model.moe.topk}" if model.moe else ""
        parts.append(
            f"| `{name}` | {model.parameters / 1e9:.3g} B | {model.layers} | {model.width} | {model.heads} "
            f"({model.kv_heads}) | {experts} | {model.vocab:,} | {escape_cell(model.source)} |"
        )
    return "\n".join(parts) + "\n"


MIXER_NAMES = {
    "attention": "attention", "gated_delta_net": "Gated DeltaNet", "kimi_delta": "Kimi delta attention",
    "lightning": "lightning attention", "mamba": "Mamba", "mamba2": "Mamba-2", "none": "none (only a feed-forward)",
    "rg_lru": "RG-LRU", "rwkv": "RWKV", "short_conv": "short convolution",
}  # fmt: skip
FUSED_ROWS = {
    0: "row by row in turn", 1: "", 4: "in each of 4 groups of heads",
    "heads": "head by head", "kv_heads": "key head by key head", "mixer_key_heads": "key head by key head",
}  # fmt: skip


def write_families() -> str:
    """Return the families of Hugging Face models as a page, with one column for each question."""
    from fivefold.model.huggingface.families import FAMILIES
    from fivefold.model.huggingface.write import to_config
    from fivefold.requests.catalogs import list_families

    parts = [
        "# Hugging Face families",
        "",
        "Find a model by the `model_type` in its `config.json`. This page says what its layers are, whether Fivefold",
        "can train it or only plan it, and how its file stores the weights. `fivefold models --families` also lists",
        "the multimodal types whose text model is one of these, and what keeps types from training. How to import and",
        "export weights: [Hugging Face](../how-to/hugging-face.md).",
        "",
        "- **token mixers**: the kinds of attention or state-space layers, in the order in which they first appear. A",
        "  *window* means that some layers attend only to the nearest tokens.",
        "- **train**: *yes*, or *plan only*: `predict` and `search` work; weights are neither imported nor exported.",
        "- **exported as**: the `model_type` that `fivefold export` writes, which is the first one that computes the",
        "  same. Empty: its own; –: not known. The column was computed with a small model; a model that uses more of",
        "  its family's keys may keep the family's name.",
        "- **feed-forward in the file**: names within a block, in the order gate, up, down; or up, down if there is no",
        "  gate. All start as the first does. `N` is the number of an expert; experts without it are one tensor.",
        "- **fused tensors**: tensors that hold several weights, in their order, and those stored as [in, out]",
        "  (*transposed*).",
        "- **rotary pairs**: *adjacent* if the two rows of a pair lie side by side in the file; *as `rope_interleave`*",
        "  if that key of the config decides. Empty: half a rotary dim apart, as in Llama's.",
        "",
        "| `model_type` | token mixers | feed-forward | train | exported as | feed-forward in the file | fused tensors "
        "| rotary pairs |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    trained = {entry.name for entry in list_families() if entry.status == "trained"}
    for name, family in sorted(FAMILIES.items()):
        model = build_small_model(family)
        exported = to_config(model)["model_type"] if model and name in trained else name
        cells = (
            f"`{name}`",
            describe_mixers(family, model),
            describe_feed_forward(family, model),
            "yes" if name in trained else "plan only",
            "–" if model is None else f"`{exported}`" if exported != name else "",
            name_feed_forward(family, model),
            describe_fused_tensors(family),
            describe_rotary_pairs(family),
        )
        parts.append(f"| {' | '.join(cells)} |")
    return "\n".join(parts) + "\n"


def build_small_model(family: Any) -> Any:
    """Return a small model of ``family``; None for some text models of multimodal types.

    Its config is that of the tests, or of a family that is read by the same function.
    """
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    from fivefold.model.huggingface.families import FAMILIES
    from fivefold.model.huggingface.read import from_config
    from tests.model.mutations import FAMILIES as SMALL_CONFIGS

    relatives = (family, *(other for other in FAMILIES.values() if other.to_model is family.to_model))
    config = next((SMALL_CONFIGS[other.model_type] for other in relatives if other.model_type in SMALL_CONFIGS), None)
    if config is None:
        return None
    header = {"model_type": family.model_type, "architectures": [family.architecture]}
    return from_config(header | config, name=family.model_type)


def describe_mixers(family: Any, model: Any) -> str:
    """Return the kinds of token mixers of a family."""
    attention = "latent attention" if family.has_latent_attention else "attention"
    if model is None:
        return attention
    names = MIXER_NAMES | {"attention": attention}
    mixers = [names.get(mixer, mixer.replace("_", " ")) for mixer in dict.fromkeys(model.mixers)] or [attention]
    if model.joins_mamba2:
        mixers = [f"{attention} and Mamba-2 in parallel"]
    return ", ".join([*mixers, *(["window"] if any(map(model.has_window, range(model.layers))) else [])])


def describe_feed_forward(family: Any, model: Any) -> str:
    """Return the kinds of feed-forward layers of a family."""
    if model is None:
        return "experts" if family.has_experts else "MLP"
    routed = {model.is_moe(layer) for layer in range(model.layers) if model.has_feed_forward(layer)}
    kinds = [name for name, is_routed in (("MLP", False), ("experts", True)) if is_routed in routed]
    return ", ".join([*kinds, *(["shared expert"] if model.moe and model.moe.shared_experts else [])]) or "none"


def name_feed_forward(family: Any, model: Any) -> str:
    """Return the names of the feed-forward's matrices in the file, the experts' where there are any."""
    names = family.tensors | {key: name for block in family.block_tensors.values() for key, name in block.items()}
    has_experts = family.has_experts if model is None else model.moe is not None
    kind = "moe.experts" if has_experts else "mlp"
    parts = ("up", "down") if model and model.mlp == "plain" else ("gate", "up", "down")
    tensors = [names[f"{kind}.{part}"] for part in parts if f"{kind}.{part}" in names]
    files = dict.fromkeys(
        (tensor if isinstance(tensor, str) else tensor.name).removesuffix(".weight").replace("{}", "N")
        for tensor in tensors
    )
    folder = next(iter(files), "").rpartition(".")[0]
    return ", ".join(f"`{name.removeprefix(f'{folder}.') if index else name}`" for index, name in enumerate(files))


def describe_fused_tensors(family: Any) -> str:
    """Return the tensors of the file that hold several weights, with the weights in their order."""
    from fivefold.model.huggingface.decoder import FusedTensor

    tensors = dict.fromkeys(
        value
        for names in (family.tensors, *family.block_tensors.values())
        for value in names.values()
        if isinstance(value, FusedTensor) and (len(value.weights) > 1 or value.transposed)
    )
    cells = []
    for tensor in tensors:
        weights = "; ".join(weight.rpartition(".")[2] for weight in tensor.weights)
        details = ", ".join(filter(None, (FUSED_ROWS[tensor.groups], "transposed" if tensor.transposed else "")))
        name = tensor.name.replace("{}", "N").removesuffix(".weight")
        cells.append(f"`{name}` [{weights}]{f' {details}' if details else ''}")
    return ", ".join(dict.fromkeys(cells))


def describe_rotary_pairs(family: Any) -> str:
    """Return how the two rows of a rotary pair lie in the file."""
    if family.interleaved_rotary:
        return "adjacent"
    return "as `rope_interleave`" if "rope_interleave" in family.keys.values() else ""


def write_machines() -> str:
    """Return the catalog of machines as a page."""
    from fivefold.machine.catalog import INSTANCES, list_names, resolve, spell_machine

    parts = [
        "# Machine catalog",
        "",
        "Names for the argument `MACHINE`: `h100` is one node, `h100:512` are 512 GPUs. A card on PCIe, such as",
        "`rtx4090`, has no usual node: its name alone is one GPU. `fivefold machines` lists all names. How to change",
        "one fact or to describe your own: [machines](machines.md). Rates are per GPU and direction.",
        "",
        "| name | GPUs per node | memory | memory rate | dense 16-bit peak | links, from near to far |",
        "| --- | --: | --: | --: | --: | --- |",
    ]
    for name in list_names():
        machine = resolve(name, local=Path("none"))
        chip = machine.chip
        peak = max(chip.peak("bf16"), chip.peak("fp16"))
        links = "; ".join(f"{link.name} {link.bandwidth / 1e9:.4g} GB/s" for link in machine.links)
        parts.append(
            f"| `{name}` | {machine.ranks_per_node} | {chip.memory_bytes / 2**30:.1f} GiB | "
            f"{chip.memory_bandwidth / 1e12:.3g} TB/s | {peak / 1e12:.0f} TFLOP/s | {escape_cell(links)} |"
        )
    parts += [
        "",
        "## Instances of clouds",
        "",
        "An instance is a name too: `p4d.24xlarge` is one node, `4xp4d.24xlarge` are four nodes, and",
        "`p4d.24xlarge:32` are 32 GPUs. It is its chip with what differs from the chip's usual node.",
        "",
        "| instance | machine |",
        "| --- | --- |",
        *(f"| `{name}` | `{spell_machine(f'1x{name}')}` |" for name in INSTANCES),
    ]
    return "\n".join(parts) + "\n"


def find_keys() -> dict[str, dict[str, Any]]:
    """Return the keys of each software that are read, from the tables by which its files are read."""
    from fivefold.interop.registry import FORMATS

    tables = {software: table for form in FORMATS for software, table in form.keys.items()}
    return {
        software: {key: entry for key, entry in sorted(table.items()) if entry.kind in KINDS}
        for software, table in tables.items()
    }


def write_keys() -> str:
    """Return how each key of other software is read, as a page."""
    parts = [
        "# Keys of other software",
        "",
        "The keys that `fivefold read` and `--from` understand, with the default of the version that is read. Any",
        "other key that can change a training step is an error unless `--ignore KEY` accepts an answer without it",
        "([why](../how-to/configs/index.md#keys-that-are-not-modelled)); keys of logs, checkpoints and evaluation",
        "have no effect. The most frequent keys, with the keywords that you would write instead:",
        "[if you come from another trainer](coming-from-other-trainers.md).",
    ]
    for software, table in find_keys().items():
        parts += [
            "",
            f"## {software}",
            "",
            "| key | default | what Fivefold does | meaning |",
            "| --- | --- | --- | --- |",
        ]
        parts += [
            f"| `{key}` | `{escape_cell(shorten(entry.default))}` | {KINDS[entry.kind]} | {escape_cell(entry.means)} |"
            for key, entry in table.items()
        ]
    return "\n".join(parts) + "\n"


def inner_records(annotation: Any) -> list[Any]:
    """Return the records that the type of a field contains."""
    from pydantic import BaseModel

    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [record for part in getattr(annotation, "__args__", ()) for record in inner_records(part)]


def show_type(annotation: Any) -> str:
    """Return a type as a Markdown cell."""
    return "`" + escape_cell(name_type(annotation)) + "`"


def name_type(annotation: Any) -> str:
    """Return a type in the short form of annotations, without the bounds of its values."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return name_type(args[0])
    if origin is Literal:
        return " | ".join(json.dumps(value) for value in args)
    if origin in (Union, UnionType):
        return " | ".join(name_type(part) for part in args)
    if origin is not None:
        inner = ", ".join("..." if part is Ellipsis else name_type(part) for part in args)
        return f"{origin.__name__}[{inner}]"
    if annotation is type(None):
        return "None"
    return str(getattr(annotation, "__name__", annotation))


def shorten(value: object) -> str:
    """Return a default as JSON, cut where it is long."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}…"


def escape_cell(text: str) -> str:
    """Return text for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def list_layout_keywords() -> list[tuple[str, str]]:
    """Return the keywords of a layout with their meaning, from the table of the notation."""
    text = (DOCS / "notation.md").read_text(encoding="utf-8")
    rows: list[tuple[str, str]] = re.findall(r"^\| (`[^|]*?) \| ([^|]*?) \|", text, flags=re.MULTILINE)
    keywords = re.compile(r"`(dp|tp|pp|cp|ep|etp|v|zero|mbs|ac=|cp=|nosp|gpipe)")
    return [row for row in rows if keywords.match(row[0])]


def write_cheat_sheet() -> str:
    """Return one page to print: commands, keywords of a layout, options of a job, functions of the Python API."""
    import fivefold as ff
    from fivefold.rendering.elements import STYLE
    from fivefold.requests.commands import JobOptions
    from fivefold.requests.schema import describe_fields as describe_options

    def rows(pairs: list[tuple[str, str]]) -> str:
        return "".join(f"<dt><code>{escape(name)}</code></dt><dd>{escape(text)}</dd>" for name, text in pairs)

    functions = [name for name in sorted(ff.__all__) if name[0].islower()]
    lists = {
        "Commands": [(name, find_first_sentence(command.help)) for name, command in list_commands()],
        "Keywords of a layout": [
            (keywords.replace("`", ""), meaning.replace("`", "")) for keywords, meaning in list_layout_keywords()
        ],
        "Options of a job": [(f"--{name}", text) for name, text in describe_options(JobOptions)],
        "In Python: import fivefold as ff": [
            (f"ff.{name}", find_first_sentence(inspect.getdoc(getattr(ff, name)))) for name in functions
        ],
    }
    body = "".join(f"<section><h2>{name}</h2><dl>{rows(pairs)}</dl></section>" for name, pairs in lists.items())
    style = """
    body{margin:0;padding:6mm}.fivefold{max-width:none;columns:4;column-gap:5mm;font-size:8.8px;line-height:1.25}
    .fivefold h2{font-size:12px;margin:2mm 0 1mm;border:0;padding:0;break-after:avoid}.fivefold code{font-size:8.6px}
    h1{font:600 15px system-ui;margin:0 0 2mm}dl{margin:0}dt{break-after:avoid;margin-top:.6mm}dd{margin:0 0 0 3mm}
    @page{size:A4 landscape;margin:6mm}@media print{body{padding:0}}
    @media screen and (max-width:900px){.fivefold{columns:1}}
    """
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Fivefold: cheat sheet</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{STYLE}{style}</style></head><body><h1>Fivefold {ff.__version__}</h1>"
        f'<main class="fivefold">{body}</main></body></html>\n'
    )


PAGES = {
    "commands.md": write_commands,
    "configuration.md": write_configuration,
    "results.md": write_results,
    "python.md": write_python,
    "models.md": write_models,
    "families.md": write_families,
    "machine-catalog.md": write_machines,
    "keys.md": write_keys,
    "fivefold.1": lambda: write_man_page(list_commands()),
}
"""The pages of ``docs/reference`` that are generated, with the functions that write them."""


def main() -> None:
    """Write the generated pages into ``docs/reference``."""
    for name, write in PAGES.items():
        (DOCS / "reference" / name).write_text(write(), encoding="utf-8")


if __name__ == "__main__":
    main()
