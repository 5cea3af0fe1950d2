"""torchtune's YAML configs, of version 0.6.1, for the recipes that fine-tune by next-token prediction or by DPO.

keys · parse · to_job · emit   the four modules of a format, described in ``../format.py``
builders                       the sizes of torchtune's models
"""

from __future__ import annotations

from fivefold.interop.format import ConfigFormat
from fivefold.interop.torchtune.emit import emit
from fivefold.interop.torchtune.keys import TABLE, VERSION
from fivefold.interop.torchtune.parse import is_torchtune, parse
from fivefold.interop.torchtune.to_job import to_job

FORMATS = (
    ConfigFormat(
        "torchtune",
        VERSION,
        "torchtune",
        is_torchtune,
        parse,
        to_job,
        emit,
        keys={"torchtune": TABLE},
        sample_data="one of the data sets that torchtune names",
    ),
)
