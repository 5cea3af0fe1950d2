"""Megatron-LM, Megatron-Core and Megatron-DeepSpeed: arguments in a script, a launch line, a YAML or a checkpoint.

keys · parse · to_job · emit   the four modules of a format, described in ``../format.py``
effects                        arguments that change the step and are not counted
"""

from __future__ import annotations

from fivefold.interop.format import ConfigFormat
from fivefold.interop.megatron.emit import emit
from fivefold.interop.megatron.keys import TABLE, VERSION
from fivefold.interop.megatron.parse import is_megatron, parse
from fivefold.interop.megatron.to_job import to_job

FORMATS = (
    ConfigFormat(
        "megatron",
        VERSION,
        "megatron-core",
        is_megatron,
        parse,
        to_job,
        emit,
        keys={"megatron": TABLE},
        main_keys=frozenset({"seq_length", "micro_batch_size"}),
        order=2,
        sample_data="random tokens (--mock-data, NullTokenizer)",
    ),
)
