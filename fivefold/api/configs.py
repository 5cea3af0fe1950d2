"""Reads configs of other software from Python: ``read_config``."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike, fspath

from fivefold.requests.configs import LoadedConfig, build_request, load_config


def read_config(
    *words: str | PathLike[str],
    gpus: str | None = None,
    model: str | None = None,
    vocab: int | None = None,
    ignore: Iterable[str] = (),
) -> LoadedConfig:
    """Read a config of Megatron, torchtitan, DeepSpeed, … into its model, layout and job.

    ``words``: a file, with ``NAME=VALUE`` for what it leaves open, or a launch command; ``gpus``, ``model`` and
    ``vocab``: what the config does not state. Raises ``UserError`` for keys that may change memory, FLOPs, messages or
    time and are not modelled, unless ``ignore`` lists them; ``notes`` of the result lists keys that were ignored,
    approximated or have no effect.

    ``config = read_config("train.toml", gpus="h100:8")``, then
    ``predict(config.model, "h100:8", config.layout, job=config.job)``.
    """
    return load_config([fspath(word) for word in words], build_request(gpus, model, vocab), ignore=ignore)
