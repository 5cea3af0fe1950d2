"""nanotron's YAML, of version 0.4 and of its main branch.

keys · parse · to_job · emit   the four modules of a format, described in ``../format.py``
"""

from __future__ import annotations

from fivefold.interop.format import ConfigFormat
from fivefold.interop.nanotron.emit import emit
from fivefold.interop.nanotron.keys import TABLE, VERSION
from fivefold.interop.nanotron.parse import is_nanotron, parse
from fivefold.interop.nanotron.to_job import to_job

FORMATS = (
    ConfigFormat(
        "nanotron",
        VERSION,
        "nanotron",
        is_nanotron,
        parse,
        to_job,
        emit,
        keys={"nanotron": TABLE},
        sample_data="stas/openwebtext-10k",
    ),
)
