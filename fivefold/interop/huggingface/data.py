"""Data of TRL, Axolotl, LLaMA-Factory and ms-swift as the table ``[data]`` of our run file, and what they train on it.

Nothing of the table changes what a step costs, so a difference is a remark on the written run file and no error; of the
objective it does. Sources: trl/trainer/sft_config.py, dpo_config.py; axolotl 0.19.0 axolotl/utils/schemas/config.py,
datasets.py and core/builders/rl.py; llamafactory 0.9.5 llamafactory/hparams/data_args.py and finetuning_args.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from fivefold.errors import UserError
from fivefold.interop.files import find_file
from fivefold.interop.format import Document
from fivefold.interop.keys import Table, Values, is_number, part, shorten_value, to_list
from fivefold.job import Job
from fivefold.results.reading import DataReading
from fivefold.text_files import read_text

OBJECTIVE, BETA = "job.objective", "job.dpo_beta"
FORMAT, LOSS_ON, PACKING = "data.format", "data.loss_on", "data.packing"
TEMPLATE, EXCESS, HELDOUT = "data.chat_template", "data.excess", "data.heldout"
OWN_TEMPLATE = "the run takes the tokenizer's own chat template; for another set [data] chat_template to a .jinja file"

TABLES: dict[str, Table] = {
    "trl": {
        "assistant_only_loss": part(f"{FORMAT} and {LOSS_ON}", False),
        "completion_only_loss": part(f"{FORMAT} and {LOSS_ON}", None),
        "datasets": part("data.corpus", None),
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
        "dataset_dir": part("where dataset_info.json is, which describes the data set", "data"),
        "template": part(TEMPLATE, None),
        "train_on_prompt": part(LOSS_ON, False),
        "mask_history": part(LOSS_ON, False),
        "val_size": part(HELDOUT, 0.0),
        "pref_loss": part(OBJECTIVE, "sigmoid"),
        "pref_beta": part(BETA, None),
        "pref_ftx": part(OBJECTIVE, 0.0),
    },
    "ms-swift": {
        "dataset": part("data.corpus", None),
        "use_chat_template": part(FORMAT, True),
        "template": part(TEMPLATE, None),
        "loss_scale": part(LOSS_ON, "default"),
        "truncation_strategy": part(EXCESS, "delete"),
        "split_dataset_ratio": part(HELDOUT, 0.0),
        "rlhf_type": part(OBJECTIVE, None),
        "beta": part(BETA, None),
    },
}
DATASET_INFO = "dataset_info.json"
VERBATIM = "{instruction}"  # Axolotl's format of a prompt without a template
PAIR_FIELDS = ("field_prompt", "field_chosen", "field_rejected")  # of Axolotl's type for pairs
CHAT, TEXT = "chat_template", "completion"  # Axolotl's types of conversations, and of plain text
SIGNS = {
    "trl": tuple(TABLES["trl"]),
    "axolotl": ("datasets",),
    "llamafactory": ("dataset", "template"),
    "ms-swift": ("dataset",),
}
SIGMOID = ("sigmoid", ["sigmoid"])  # the loss of DPO
OTHER_OBJECTIVE = "an objective other than the next token"
LOSS_TERMS = {
    "rpo_alpha": "a loss on the chosen completion is added",
    "label_smoothing": "the loss of pairs smooths its labels",
    "dpo_label_smoothing": "the loss of pairs smooths its labels",
    "use_weighting": "the loss of pairs needs every probability",
    "dpo_use_weighting": "the loss of pairs needs every probability",
    "dpo_use_liger_kernel": "the loss of pairs never makes all logits",
    "dpo_use_logits_to_keep": "the head runs only over completions",
    "dpo_norm_loss": "another loss of pairs",
    "dpo_padding_free": "pairs without padding",
    "precompute_ref_log_probs": "the reference runs before the training; counted in every step",
}
REFERENCE_KEYS = ("ref_model", "ref_model_adapters", "ref_model_quantization_bit", "ref_adapters")

SWITCHES = {
    "trl": ("loss_type", "beta"),
    "axolotl": ("rl", "rl_beta"),
    "llamafactory": ("stage", "pref_beta"),
    "ms-swift": ("rlhf_type", "beta"),
}


def read_preferences(values: Values) -> dict[str, Any]:
    """Return objective and β of a config that trains on preferences by DPO, or nothing; doubt other objectives."""
    software = _find_software(values)
    switch, beta = SWITCHES[software]
    is_dpo = values[switch] in SIGMOID if software == "trl" else values[switch] == "dpo"
    for key in SWITCHES["trl"] if software != "trl" else ():
        if values.is_set(key) and key != beta and not (software == "ms-swift" and is_dpo and values[key] in SIGMOID):
            values.mark_not_modelled(key, OTHER_OBJECTIVE)
    if not is_dpo:
        if values[switch] not in (None, "nll", "sft", "pt"):
            values.mark_not_modelled(switch, f"{OTHER_OBJECTIVE}; counted as it")
        if software != "llamafactory" and values[beta] is not None:
            values.mark_not_modelled(beta, f"of {OTHER_OBJECTIVE}")
        return {}
    if software == "llamafactory":
        if values["pref_loss"] != "sigmoid":
            values.mark_not_modelled("pref_loss", "another loss of pairs; counted as DPO's, with a reference")
        if values["pref_ftx"]:
            values.mark_not_modelled("pref_ftx", "a loss on the chosen completion is added")
    for key, reason in LOSS_TERMS.items():
        if values.given.get(key):
            values.mark_not_modelled(key, reason)
    if values.given.get("dpo_loss_type", "sigmoid") not in SIGMOID:
        values.mark_not_modelled("dpo_loss_type", "another loss of pairs; counted as DPO's, with a reference")
    for key in REFERENCE_KEYS:
        if values.given.get(key) and values.given[key] != values["model_name_or_path"]:
            values.mark_not_modelled(key, "a reference of another model; counted as the model before its training")
    strength = values.number(beta)
    return {OBJECTIVE: "dpo"} | ({} if strength is None else {BETA: strength})


def _find_software(values: Values) -> str:
    return values.software if values.software in TABLES else "trl"


def read_data(values: Values, document: Document, *, ranks_pairs: bool = False) -> DataReading | None:
    """Return the table ``[data]``, and what of the config it cannot express; None if the config has no data.

    ``document``: the config, which names files. ``ranks_pairs``: the data is of preferences.
    """
    software = _find_software(values)
    if not any(values.is_set(key) for key in (*SIGNS[software], "packing")):
        return None
    remarks: list[str] = []
    if software == "llamafactory":
        pairs = _read_llamafactory(values, remarks, _find_dataset(values, document))
    else:
        pairs = {"trl": _read_trl, "axolotl": _read_axolotl, "ms-swift": _read_swift}[software](values, remarks)
    fields = {name: value for name, value in pairs if value is not None}
    if ranks_pairs:
        kept = ("corpus", "key", "chat_template", "excess", "heldout")
        fields = {name: fields[name] for name in kept if name in fields} | {"format": "preferences"}
        of_replies = ("written as messages", "loss on all", "a prompt and a completion")
        remarks = [remark for remark in remarks if not remark.endswith(of_replies)]
        if len(str(fields.get("key", "")).split(",")) != 3:
            fields.pop("key", None)
            remarks.append("pairs are read as prompt, chosen and rejected; for other names set [data] key")
    if fields.get("format", "text") != "text" and (tokenizer := _read_tokenizer(values, remarks, document)) is not None:
        fields["tokenizer"] = tokenizer
    return DataReading(fields=fields, remarks=tuple(remarks))


def _read_tokenizer(values: Values, remarks: list[str], document: Document) -> str | None:
    """Return the tokenizer of the config, or that of its model; None without either."""
    name = values.given.get("tokenizer_config") or values["model_name_or_path"]
    if name is None:
        return None
    if not _exists(document, str(name)):
        remarks.append(f"tokenizer {name}: the run reads a folder with tokenizer.json; download it, and set its path")
    return str(name)


def _exists(document: Document, name: str) -> bool:
    try:
        return document.find(name).exists()
    except (OSError, ValueError):  # not allowed, or no name of a file
        return False


Fields = Iterator[tuple[str, Any]]


def _read_trl(values: Values, remarks: list[str]) -> Fields:
    """Yield the fields of ``[data]`` in a config of TRL."""
    completion = values["completion_only_loss"]
    datasets = values["datasets"]
    first = datasets[0] if isinstance(datasets, list) and datasets and isinstance(datasets[0], dict) else {}
    if first:
        yield "corpus", _read_corpus(first.get("data_files") or first.get("path"), remarks)
    if values.is_set("dataset_text_field") and not values["assistant_only_loss"] and completion is None:
        yield "key", _read_column(values["dataset_text_field"], "dataset_text_field", values)
        return
    yield "format", "messages" if completion is None else "completions"
    if not values["assistant_only_loss"] and not completion:
        yield "loss_on", "all"
    if completion is None and not values["assistant_only_loss"]:
        remarks.append("the data set decides whether it is text, messages or prompts; written as messages, loss on all")
    yield "packing", None if values["packing"] else "none"
    if values["packing"] and values["packing_strategy"] != "bfd":
        remarks.append(
            f"packing_strategy {values['packing_strategy']}: there, samples are cut at the end of a sequence; the "
            "run packs best-fit"
        )
    yield "chat_template", _read_template(values["chat_template_path"], remarks)
    if values["truncation_mode"] != "keep_start":
        remarks.append("truncation_mode keep_end: there, a long sample loses its beginning; in the run, its end")


def _read_axolotl(values: Values, remarks: list[str]) -> Fields:
    """Yield the fields of ``[data]`` in a config of Axolotl."""
    datasets = values["datasets"]
    first = datasets[0] if isinstance(datasets, list) and datasets and isinstance(datasets[0], dict) else {}
    if isinstance(datasets, list) and len(datasets) > 1:
        remarks.append(f"{len(datasets)} data sets; the run has one corpus: put their files in one folder")
    path, kind = first.get("path"), first.get("type")
    template = str(values["chat_template_jinja"] or "")
    jinja = template if template.endswith(".jinja") else None
    yield "corpus", _read_corpus(first.get("data_files") or path, remarks)
    if kind == TEXT:
        yield "key", _read_column(first.get("field", "text"), "field of datasets", values)
        yield "heldout", _read_heldout_share(values["val_set_size"], remarks)
        return
    if (fields := _list_written_fields(kind)) is not None:
        yield "format", "completions"
        yield "key", fields
    elif kind in (CHAT, "sharegpt", None):
        yield "format", "messages"
        yield "key", _read_column(first.get("field_messages"), "field_messages of datasets", values)
        named = first.get("chat_template") or values["chat_template"]
        yield (
            "chat_template",
            _read_template(jinja if jinja is not None and named in (None, "jinja") else named, remarks),
        )
    else:
        name = "its own" if isinstance(kind, dict) else kind
        remarks.append(f"datasets: type {name} renders a prompt; write data with a prompt and a completion")
        yield "format", "completions"
    if values["chat_template_jinja"] and jinja is None:
        remarks.append("chat_template_jinja: write it to a file, and set [data] chat_template to it")
    roles = first.get("roles_to_train")
    if roles not in (None, ["assistant"], ["gpt"], ["assistant", "gpt"], ["gpt", "assistant"]):
        remarks.append(f"roles_to_train {roles}: the run trains the assistant's turns")
    yield "loss_on", "all" if values["train_on_inputs"] is True else None
    yield "packing", None if values["padding_free"] else "none"
    if values["excess_length_strategy"] == "raise":
        remarks.append("excess_length_strategy raise: there, a long sample is an error; the run leaves it out")
    yield "excess", None if values["excess_length_strategy"] == "truncate" else "drop"
    yield "heldout", _read_heldout_share(values["val_set_size"], remarks)


def _list_written_fields(kind: object) -> str | None:
    """Return the fields of a record that Axolotl's type joins without a template, by commas; None for other types."""
    if not isinstance(kind, dict):
        return None
    if kind.get("format") == kind.get("no_input_format") == VERBATIM and not kind.get("system_prompt"):
        return ",".join(str(kind.get(name)) for name in ("field_instruction", "field_output"))
    pairs = [kind.get(name) for name in PAIR_FIELDS]
    return ",".join(map(str, pairs)) if all(pairs) else None


def _find_dataset(values: Values, document: Document) -> Mapping[str, Any]:
    """Return the entry of LLaMA-Factory's dataset_info.json for the data set; empty if the file is missing."""
    path = find_file(document, f"{values['dataset_dir']}/{DATASET_INFO}")
    if path is None:
        return {}
    try:
        entry = json.loads(read_text(path, kind="a data set's description")).get(str(values["dataset"]))
    except (UserError, ValueError, AttributeError):
        return {}
    return entry if isinstance(entry, dict) and entry.get("file_name") else {}


def _read_llamafactory(values: Values, remarks: list[str], entry: Mapping[str, Any]) -> Fields:
    """Yield the fields of ``[data]`` in a config of LLaMA-Factory; ``entry``: the data set in dataset_info.json."""
    yield "corpus", _read_corpus(entry.get("file_name") or values["dataset"], remarks)
    columns = entry["columns"] if isinstance(entry.get("columns"), dict) else {}
    if values["stage"] == "pt":
        yield "key", _read_column(columns.get("prompt"), f"prompt of {DATASET_INFO}", values)
        yield "heldout", _read_heldout_share(values["val_size"], remarks)
        return
    is_verbatim = values["template"] == "empty"
    if is_verbatim and columns:
        fields = [columns.get(name) for name in ("prompt", "response", "chosen", "rejected")]
        yield "format", "completions"
        yield "key", ",".join(str(field) for field in fields if field)
    else:
        if not columns:
            remarks.append("dataset_info.json describes the data set there; written as messages")
        yield "format", "messages"
        yield "key", _read_column(columns.get("messages"), f"messages of {DATASET_INFO}", values)
    if values.is_set("template") and not is_verbatim:
        remarks.append(f"template {values['template']}: {OWN_TEMPLATE}")
    if values["mask_history"]:
        remarks.append("mask_history: there, only the last reply is trained; the run trains every reply")
    yield "loss_on", "all" if values["train_on_prompt"] else None
    yield "packing", None if values["padding_free"] or values["packing"] else "none"
    yield "heldout", _read_heldout_share(values["val_size"], remarks)


def _read_swift(values: Values, remarks: list[str]) -> Fields:
    """Yield the fields of ``[data]`` in a config of ms-swift; ``#500`` after a data set takes 500 of its samples."""
    datasets = [str(name).partition("#")[0] for name in to_list(values["dataset"])]
    if len(datasets) > 1:
        remarks.append(f"{len(datasets)} data sets; the run has one corpus: put their files in one folder")
    yield "corpus", _read_corpus(datasets, remarks)
    yield "heldout", _read_heldout_share(values["split_dataset_ratio"], remarks)
    if values["use_chat_template"] is False:
        yield "format", "text"
        return
    yield "format", "messages"
    if values["template"] is not None:
        remarks.append(f"template {values['template']}: {OWN_TEMPLATE}")
    base, *others = str(values["loss_scale"]).split("+")
    if base == "last_round" or others or base not in ("default", "all"):
        remarks.append(
            f"loss_scale {values['loss_scale']}: there, some replies weigh otherwise; the run trains every one"
        )
    yield "loss_on", "all" if base == "all" else None
    yield "excess", "drop" if values["truncation_strategy"] == "delete" else None
    yield "packing", None if values["packing"] else "none"


def _read_column(name: object, key: str, values: Values) -> str | None:
    """Return the name of a column, or None if it is unset; raise ``UserError`` for anything but text."""
    if name is None or isinstance(name, str):
        return name
    raise UserError(f"{values.origin}: {key} must be the name of a column, not {shorten_value(name)!r}")


def _read_corpus(name: object, remarks: list[str]) -> str | None:
    """Return the corpus; a data set of the hub is one of a file to be downloaded."""
    text = str(name[0] if isinstance(name, list) and name else name or "")
    if text and not text.endswith((".jsonl", ".parquet")):
        remarks.append(f"data set {text}: the run reads .jsonl and .parquet; download or convert it")
    return text or None


def _read_template(name: object, remarks: list[str]) -> str | None:
    """Return a template's file; a name stands for a template of the software's own."""
    if name in (None, "", "tokenizer_default"):
        return None
    if str(name).endswith(".jinja"):
        return str(name)
    remarks.append(f"chat_template {name}: {OWN_TEMPLATE}")
    return None


def _read_heldout_share(size: object, remarks: list[str]) -> float | None:
    """Return the share of held-out samples; a number of samples is a remark."""
    if not is_number(size) or not size:
        return None
    if size < 1:
        return float(size)
    remarks.append(f"{size:g} samples are held out; the run holds out a share of all, 0.02")
    return None


USUAL_KEYS = {"text": "text", "messages": "messages", "completions": "prompt,completion",
              "preferences": "prompt,chosen,rejected"}  # fmt: skip
FORMAT_OF = {"pretrain": "text", "sft": "messages", "dpo": "preferences"}  # where the plan has no data


def write_data(data: DataReading | None, job: Job, software: str) -> dict[str, Any]:
    """Return the keys of a trainer for the objective and the data, a placeholder if the plan has none.

    The inverse of ``read_data`` and ``read_preferences``. Names of packing are those of TrainingArguments.
    """
    fields = dict(data.fields) if data else {"corpus": "data.jsonl"}
    kind = "preferences" if job.objective == "dpo" else str(fields.get("format", FORMAT_OF[job.objective]))
    fields = {"format": kind, "key": fields.get("key") or USUAL_KEYS[kind]} | {
        name: value for name, value in fields.items() if name not in ("format", "key")
    }
    writer = {"trl": _write_trl, "axolotl": _write_axolotl, "llamafactory": _write_llamafactory}[software]
    return writer(fields, job)


def _is_packed(fields: Mapping[str, Any]) -> bool:
    return bool(fields["format"] != "preferences" and fields.get("packing", "best-fit") != "none")


def _write_trl(fields: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """Return TRL's keys of the data."""
    kind, corpus = fields["format"], str(fields.get("corpus", "data.jsonl"))
    loader = "parquet" if corpus.endswith(".parquet") else "json"
    values: dict[str, Any] = {"datasets": [{"path": loader, "data_files": corpus}]}
    on_replies = fields.get("loss_on", "replies") == "replies"
    if kind == "preferences":
        return values | {"loss_type": "sigmoid", "beta": job.dpo_beta}
    values["chat_template_path"] = fields.get("chat_template")
    if kind == "text":
        values["dataset_text_field"] = fields["key"]
    elif kind == "messages":
        values["assistant_only_loss"] = on_replies
    else:
        values["completion_only_loss"] = on_replies
    if not _is_packed(fields):
        return values | {"packing": False}
    return values | {"packing": True, "packing_strategy": "bfd" if job.documents == "separate" else "wrapped"}


def _write_axolotl(fields: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """Return Axolotl's keys of the data."""
    kind, names = fields["format"], str(fields["key"]).split(",")
    entry: dict[str, Any] = {"path": fields.get("corpus", "data.jsonl")}
    if str(entry["path"]).endswith((".jsonl", ".parquet")):
        entry["ds_type"] = "parquet" if str(entry["path"]).endswith(".parquet") else "json"
    if kind == "text":
        entry |= {"type": TEXT, "field": names[0]}
    elif kind == "messages":
        entry |= {"type": CHAT, "field_messages": names[0]}
    elif kind == "completions":
        entry["type"] = {"field_instruction": names[0], "field_output": names[-1]}
        entry["type"] |= {"format": VERBATIM, "no_input_format": VERBATIM}
    else:
        entry["type"] = dict(zip(PAIR_FIELDS, names, strict=False))
    values: dict[str, Any] = {"datasets": [entry], "val_set_size": fields.get("heldout", 0.0)}
    if kind != "text":
        values["excess_length_strategy"] = fields.get("excess", "truncate")
    if kind == "preferences":
        return values | {"rl": "dpo", "rl_beta": job.dpo_beta}
    if fields.get("chat_template"):
        values |= {"chat_template": "jinja", "chat_template_jinja": fields["chat_template"]}
    if kind != "text":
        values["train_on_inputs"] = fields.get("loss_on", "replies") == "all"
    return values | {"padding_free": _is_packed(fields) and job.documents == "separate"}


def _write_llamafactory(fields: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """Return the keys of LLaMA-Factory for the format of the data, its loss and its packing."""
    kind = fields["format"]
    stage = {"text": "pt", "preferences": "dpo"}.get(kind, "sft")
    values: dict[str, Any] = {"stage": stage, "do_train": True, "dataset": "data", "dataset_dir": "."}
    values["val_size"] = fields.get("heldout", 0.0)
    if kind == "preferences":
        return values | {"template": "empty", "pref_beta": job.dpo_beta, "pref_loss": "sigmoid"}
    if kind == "completions":
        values["template"] = "empty"
    if kind != "text":
        values["train_on_prompt"] = fields.get("loss_on", "replies") == "all"
    is_packed = _is_packed(fields)
    return values | {"packing": is_packed, "padding_free": is_packed and job.documents == "separate"}


def describe_dataset(data: DataReading | None, job: Job) -> dict[str, Any]:
    """Return LLaMA-Factory's dataset_info.json (data/README.md of its repository) for the data set ``data``."""
    fields = data.fields if data else {}
    kind = "preferences" if job.objective == "dpo" else str(fields.get("format", FORMAT_OF[job.objective]))
    names = str(fields.get("key") or USUAL_KEYS[kind]).split(",")
    entry: dict[str, Any] = {"file_name": fields.get("corpus", "data.jsonl")}
    if kind == "messages":
        tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
        entry |= {"formatting": "sharegpt", "columns": {"messages": names[0]}, "tags": tags | {"system_tag": "system"}}
    elif kind == "preferences":
        entry |= {"ranking": True, "columns": dict(zip(("prompt", "chosen", "rejected"), names, strict=False))}
    else:
        entry["columns"] = dict(zip(("prompt", "response"), names, strict=False))
    return {"data": entry}
