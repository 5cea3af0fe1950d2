"""Data of TRL, Axolotl and LLaMA-Factory as the table ``[data]`` of our run file, and the objective that they train.

Nothing of the table changes what a step costs, so a difference is a remark on the written run file and no error; of the
objective it does. Sources: trl/trainer/sft_config.py, dpo_config.py; axolotl 0.19.0 axolotl/utils/schemas/config.py,
datasets.py and core/builders/rl.py; llamafactory 0.9.5 llamafactory/hparams/data_args.py and finetuning_args.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fivefold.interop.keys import Table, Values, is_number, part, shorten_value
from fivefold.record import UserError
from fivefold.results.reading import DataReading

OBJECTIVE, BETA = "job.objective", "job.dpo_beta"
FORMAT, LOSS_ON, PACKING = "data.format", "data.loss_on", "data.packing"
TEMPLATE, EXCESS, HELDOUT = "data.chat_template", "data.excess", "data.heldout"
OWN_TEMPLATE = "the run takes the tokenizer's own chat template; for another set [data] chat_template to a .jinja file"

TABLES: dict[str, Table] = {
    "trl": {
        "assistant_only_loss": part(f"{FORMAT} and {LOSS_ON}", False),
        "completion_only_loss": part(f"{FORMAT} and {LOSS_ON}", None),
        "dataset_text_field": part(f"{FORMAT}: text, and data.key", None),
        "chat_template_path": part(TEMPLATE, None),
        "packing_strategy": part(PACKING, "bfd"),
        "truncation_mode": part(EXCESS, "keep_start"),
        "loss_type": part(OBJECTIVE, "nll"),
        "beta": part(BETA, None),
        "disable_dropout": part("the adapter's dropout", True),
    },
    "axolotl": {
        "datasets": part(f"{FORMAT}, data.corpus and data.key", None),
        "chat_template": part(TEMPLATE, None),
        "chat_template_jinja": part(TEMPLATE, None),
        "train_on_inputs": part(LOSS_ON, False),
        "excess_length_strategy": part(EXCESS, "drop"),
        "val_set_size": part(HELDOUT, 0.0),
        "rl": part(OBJECTIVE, None),
        "rl_beta": part(BETA, None),
    },
    "llamafactory": {
        "dataset": part(f"{FORMAT} and data.corpus", None),
        "template": part(TEMPLATE, None),
        "train_on_prompt": part(LOSS_ON, False),
        "mask_history": part(LOSS_ON, False),
        "val_size": part(HELDOUT, 0.0),
        "pref_loss": part(OBJECTIVE, "sigmoid"),
        "pref_beta": part(BETA, None),
        "pref_ftx": part(OBJECTIVE, 0.0),
    },
}
CHAT, TEXT = "chat_template", "completion"  # Axolotl's types of conversations, and of plain text
SIGNS = {"trl": tuple(TABLES["trl"]), "axolotl": ("datasets",), "llamafactory": ("dataset", "template")}
SIGMOID = ("sigmoid", ["sigmoid"])  # the loss of DPO
ANOTHER = "another objective than the next token"
LOSS_TERMS = {
    "rpo_alpha": "a loss on the chosen completion is added",
    "label_smoothing": "the loss of pairs smooths its labels",
    "dpo_label_smoothing": "the loss of pairs smooths its labels",
}

SWITCHES = {"trl": ("loss_type", "beta"), "axolotl": ("rl", "rl_beta"), "llamafactory": ("stage", "pref_beta")}


def read_preferences(values: Values) -> dict[str, Any]:
    """Return objective and β of a config that trains on preferences by DPO, or nothing; doubt other objectives."""
    software = _software(values)
    switch, beta = SWITCHES[software]
    for key in SWITCHES["trl"] if software != "trl" else ():
        if values.is_set(key):
            values.doubt(key, ANOTHER)
    is_dpo = values[switch] in SIGMOID if software == "trl" else values[switch] == "dpo"
    if not is_dpo:
        if values[switch] not in (None, "nll", "sft", "pt"):
            values.doubt(switch, f"{ANOTHER}; counted as it")
        if software != "llamafactory" and values[beta] is not None:
            values.doubt(beta, f"of {ANOTHER}")
        return {}
    if software == "llamafactory":
        if values["pref_loss"] != "sigmoid":
            values.doubt("pref_loss", "another loss of pairs; counted as DPO's, with a reference")
        if values["pref_ftx"]:
            values.doubt("pref_ftx", "a loss on the chosen completion is added")
    for key, reason in LOSS_TERMS.items():
        if values.given.get(key):
            values.doubt(key, reason)
    if values.given.get("precompute_ref_log_probs"):
        values.doubt("precompute_ref_log_probs", "the reference runs before the training; counted in every step")
    strength = values.number(beta)
    return {OBJECTIVE: "dpo"} | ({} if strength is None else {BETA: strength})


def _software(values: Values) -> str:
    return values.software if values.software in TABLES else "trl"


def read_data(values: Values, *, ranks_pairs: bool = False) -> DataReading | None:
    """Return the table ``[data]``, and what of the config it cannot express; None if the config has no data.

    ``ranks_pairs``: the data is of preferences.
    """
    software = _software(values)
    if not any(values.is_set(key) for key in (*SIGNS[software], "packing")):
        return None
    reader = {"trl": _read_trl, "axolotl": _read_axolotl, "llamafactory": _read_llamafactory}[software]
    remarks: list[str] = []
    fields = {name: value for name, value in reader(values, remarks) if value is not None}
    if ranks_pairs:
        kept = ("corpus", "chat_template", "excess", "heldout")
        fields = {name: fields[name] for name in kept if name in fields} | {"format": "preferences"}
        of_replies = ("written as messages", "loss on all", "a prompt and a completion")
        remarks = [remark for remark in remarks if not remark.endswith(of_replies)]
        remarks.append("pairs are read as prompt, chosen and rejected; for other names set [data] key")
    if fields.get("format", "text") != "text" and (tokenizer := _tokenizer(values, remarks)) is not None:
        fields["tokenizer"] = tokenizer
    return DataReading(fields=fields, remarks=tuple(remarks))


def _tokenizer(values: Values, remarks: list[str]) -> str | None:
    """Return the tokenizer of the config, or that of its model; None without either."""
    name = values.given.get("tokenizer_config") or values["model_name_or_path"]
    if name is None:
        return None
    if not Path(str(name)).exists():
        remarks.append(f"tokenizer {name}: the run reads a folder with tokenizer.json; download it, and set its path")
    return str(name)


Fields = Iterator[tuple[str, Any]]


def _read_trl(values: Values, remarks: list[str]) -> Fields:
    completion = values["completion_only_loss"]
    if values.is_set("dataset_text_field") and not values["assistant_only_loss"] and completion is None:
        yield "key", _column(values["dataset_text_field"], "dataset_text_field", values)
        return
    yield "format", "messages" if completion is None else "completions"
    if not values["assistant_only_loss"] and not completion:
        yield "loss_on", "all"
    if completion is None and not values["assistant_only_loss"]:
        remarks.append("the data set decides whether it is text, messages or prompts; written as messages, loss on all")
    yield "packing", None if values["packing"] else "none"
    if values["packing"] and values["packing_strategy"] != "bfd":
        remarks.append(f"packing_strategy {values['packing_strategy']}: samples are cut there; the run packs best-fit")
    yield "chat_template", _template(values["chat_template_path"], remarks)
    if values["truncation_mode"] != "keep_start":
        remarks.append("truncation_mode keep_end: a long sample loses its beginning there; in the run its end")


def _read_axolotl(values: Values, remarks: list[str]) -> Fields:
    datasets = values["datasets"]
    first = datasets[0] if isinstance(datasets, list) and datasets and isinstance(datasets[0], dict) else {}
    if isinstance(datasets, list) and len(datasets) > 1:
        remarks.append(f"{len(datasets)} data sets; the run has one corpus: put their files in one folder")
    path, kind = first.get("path"), first.get("type")
    yield "corpus", _corpus(first.get("data_files") or path, remarks)
    if kind == TEXT:
        yield "key", _column(first.get("field", "text"), "field of datasets", values)
        return
    if kind in (CHAT, "sharegpt", None):
        yield "format", "messages"
        yield "key", _column(first.get("field_messages"), "field_messages of datasets", values)
        yield "chat_template", _template(first.get("chat_template") or values["chat_template"], remarks)
    else:
        name = "its own" if isinstance(kind, dict) else kind
        remarks.append(f"datasets: type {name} renders a prompt; write data with a prompt and a completion")
        yield "format", "completions"
    if values["chat_template_jinja"]:
        remarks.append("chat_template_jinja: write it to a file, and set [data] chat_template to it")
    roles = first.get("roles_to_train")
    if roles not in (None, ["assistant"], ["gpt"], ["assistant", "gpt"], ["gpt", "assistant"]):
        remarks.append(f"roles_to_train {roles}: the run trains the assistant's turns")
    yield "loss_on", "all" if values["train_on_inputs"] is True else None
    yield "packing", None if values["padding_free"] else "none"
    if values["excess_length_strategy"] == "raise":
        remarks.append("excess_length_strategy raise: a long sample is an error there; the run leaves it out")
    yield "excess", None if values["excess_length_strategy"] == "truncate" else "drop"
    yield "heldout", _share(values["val_set_size"], remarks)


def _read_llamafactory(values: Values, remarks: list[str]) -> Fields:
    yield "corpus", _corpus(values["dataset"], remarks)
    if values["stage"] == "pt":
        return
    remarks.append("dataset_info.json describes the data set there; written as messages")
    yield "format", "messages"
    if values.is_set("template"):
        remarks.append(f"template {values['template']}: {OWN_TEMPLATE}")
    if values["mask_history"]:
        remarks.append("mask_history: the last reply alone is trained there; the run trains every reply")
    yield "loss_on", "all" if values["train_on_prompt"] else None
    yield "packing", None if values["padding_free"] or values["packing"] else "none"
    yield "heldout", _share(values["val_size"], remarks)


def _column(name: object, key: str, values: Values) -> str | None:
    """Return the name of a column, or None if it is unset; raise ``UserError`` for anything but text."""
    if name is None or isinstance(name, str):
        return name
    raise UserError(f"{values.origin}: {key} must be the name of a column, not {shorten_value(name)!r}")


def _corpus(name: object, remarks: list[str]) -> str | None:
    """Return the corpus; a data set of the hub is one of a file to be downloaded."""
    text = str(name[0] if isinstance(name, list) and name else name or "")
    if text and not text.endswith((".jsonl", ".parquet")):
        remarks.append(f"data set {text}: the run reads .jsonl and .parquet; download or convert it")
    return text or None


def _template(name: object, remarks: list[str]) -> str | None:
    """Return a template's file; a name stands for a template of the software's own."""
    if name in (None, "", "tokenizer_default"):
        return None
    if str(name).endswith(".jinja"):
        return str(name)
    remarks.append(f"chat_template {name}: {OWN_TEMPLATE}")
    return None


def _share(size: object, remarks: list[str]) -> float | None:
    """Return the share of held-out samples; a number of samples is a remark."""
    if not is_number(size) or not size:
        return None
    if size < 1:
        return float(size)
    remarks.append(f"{size:g} samples are held out there; the run holds out a share, 0.02")
    return None
