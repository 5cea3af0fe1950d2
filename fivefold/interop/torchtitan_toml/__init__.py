"""TOML files of torchtitan 0.2; keys and readers that 0.3 still has are in ``../torchtitan``.

keys · parse · to_job · emit   the four modules of a format, described in ``../format.py``
"""

from __future__ import annotations

from fivefold.interop.format import ConfigFormat
from fivefold.interop.torchtitan_toml.emit import emit
from fivefold.interop.torchtitan_toml.keys import TOML, VERSION
from fivefold.interop.torchtitan_toml.parse import is_torchtitan_toml, parse
from fivefold.interop.torchtitan_toml.to_job import to_job

FORMATS = (
    ConfigFormat(
        "torchtitan-0.2",
        VERSION,
        "torchtitan",
        is_torchtitan_toml,
        parse,
        to_job,
        emit,
        keys={"torchtitan-0.2": TOML},
        sample_data="c4",
    ),
)
