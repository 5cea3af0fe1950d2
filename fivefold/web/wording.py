"""The names of pages and controls, and messages that name them instead of commands and options of the terminal.

    raise --gbs, or use --set offload=optimizer    raise “sequences per step”, or use offload=optimizer

Messages come from code that every interface calls. ``/api`` and the commands to copy keep the words of the terminal.
"""

from __future__ import annotations

import re

from fivefold.requests.answers import QUESTIONS

PAGES = (
    ("plan", "Plan"),
    ("search", "Search"),
    ("ask", "Ask"),
    ("compare", "Compare"),
    ("sweep", "Sweep"),
    ("dryrun", "Dry run"),
    ("runs", "Runs"),
    ("trace", "Trace"),
    ("explain", "Explain"),
    ("learn", "Learn"),
)
LABELS = {  # of the controls, by option
    "seq": "tokens per sequence",
    "gbs": "sequences per step",
    "precision": "precision",
    "optimizer": "optimizer",
    "adapter": "adapters",
    "attention": "attention",
    "stack": "software",
    "stacks": "software",
    "where": "only layouts with",
    "memory": "memory per GPU",
    "risk": "risk of running out, at most",
    "top": "layouts to show",
    "front": "memory limits to search again, for the Pareto front",
    "exact": "prove the best layout (may take minutes), propose no simpler one",
    "within": "count as equal within",
    "by": "minimize",
    "keep": "try one change at a time from",
    "tokens": "tokens of the run",
    "deadline": "the run takes at most",
    "budget": "the run costs at most, in dollars",
    "gpu-counts": "numbers of GPUs",
    "price": "dollars per GPU and hour",
    "assume": "assumptions about the site",
    "noise": "gradient noise scale, in tokens",
    "step": "only this ProfilerStep",
    "against": "compare with the prediction of this layout",
    "out": "file for the rows",
    "run_config": "config of a trainer",
}
_AGAINST = re.compile(r"--against MODEL MACHINE LAYOUT")
_FROM = re.compile(r"with --from FILE")
_SETTING = re.compile(r"--set (?=[a-z_.]+[=:])")
_OPTION = re.compile(rf"(?<![\w-])--({'|'.join(sorted(LABELS, key=len, reverse=True))})(?![\w-])")
_OF_CONFIGS = tuple(  # advice about a config in a terminal, and the same on the page
    (re.compile(pattern), text)
    for pattern, text in (
        ("before --from, or with `read` and `write` by --model NAME", "as “catalog name or file”"),
        (r"add \S+=4096 after the file [^;]*; `predict` and `write` take --seq too", "give --seq"),
        ("which does not exist; put it next to this file", "which is not in the folder of this page; put it there"),
        (r" \(or to read and write --vocab \d+\)", ""),
        ("or add --model NAME", "or name it as “catalog name or file”"),
        (": predictions fail unless --ignore KEY names them", ", and the prediction is without it"),
        (r"\b(?:try|use) --gpus NAME:(\d+)", r"give \1 GPUs as “chip:GPUs”"),
        ("name it in place of the model, as in `[^`]*`", "paste it under “Paste a config.json”"),
    )
)
_COMMAND = re.compile(rf"`fivefold (ask )?({'|'.join([*QUESTIONS, *(path for path, _ in PAGES)])})`")


def use_page_words(message: object) -> str:
    """Return a message as text, with options and commands of the terminal replaced by controls and pages."""
    message = str(message)
    if not any(sign in message for sign in ("--", "`", "this file")):
        return message
    for pattern, text in _OF_CONFIGS:
        message = pattern.sub(text, message)
    message = _AGAINST.sub("--against", message)
    message = _FROM.sub("in a terminal with fivefold predict --from FILE", message)
    message = _SETTING.sub("", message)
    message = _OPTION.sub(lambda match: f"“{LABELS[match[1]]}”", message)
    return _COMMAND.sub(lambda match: _name_page(match[2]), message)


def _name_page(name: str) -> str:
    """Return the page of a command, or of a question of ``ask``."""
    titles = dict(PAGES)
    return titles[name] if name in titles else f"“{titles['ask']}: {dict(QUESTIONS)[name]}”"  # type: ignore[index]
