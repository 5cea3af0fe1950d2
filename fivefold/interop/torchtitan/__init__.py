"""Python configs of torchtitan 0.3.

keys · parse · to_job · emit   the four modules of a format, described in ``../format.py`` flavors    its models by
family and flavor
"""

from __future__ import annotations

from fivefold.interop.format import ConfigFormat
from fivefold.interop.torchtitan.emit import emit
from fivefold.interop.torchtitan.keys import TABLE, VERSION
from fivefold.interop.torchtitan.parse import is_torchtitan, parse
from fivefold.interop.torchtitan.to_job import to_job

FORMATS = (
    ConfigFormat(
        "torchtitan",
        VERSION,
        "torchtitan",
        is_torchtitan,
        parse,
        to_job,
        emit,
        keys={"torchtitan": TABLE},
        main_keys=frozenset({"training.seq_len", "training.local_batch_size", "training.global_batch_size"}),
        sample_data="c4",
    ),
)
