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

    Parameters
    ----------
    *words : str or PathLike
        A file, with ``NAME=VALUE`` for what it leaves open, or a launch command word by word.
    gpus, model, vocab : str, str, int, optional
        Machine, model and vocabulary size, if the config does not state them.
    ignore : iterable of str
        Keys to ignore although they may change memory, FLOPs, messages or time.

    Returns
    -------
    LoadedConfig
        ``model``, ``layout`` and ``job``; ``notes`` lists keys that were ignored, approximated or have no effect.

    Raises
    ------
    UserError
        If a key may change memory, FLOPs, messages or time, is not modelled, and is not in ``ignore``.

    Examples
    --------
    >>> command = "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --micro-batch-size 1"
    >>> command += " --global-batch-size 64 --seq-length 4096 --bf16 --use-distributed-optimizer"
    >>> config = ff.read_config(*command.split(), gpus="h100:8", model="llama3-8b")
    >>> str(config.layout)
    'dp4 tp2 zero1 mbs1 nosp'
    >>> ff.predict(config.model, "h100:8", config.layout, job=config.job).memory.fits
    True
    """
    return load_config([fspath(word) for word in words], build_request(gpus, model, vocab), ignore=ignore)
