"""A format of a software that does not exist."""

from fivefold.interop.format import ConfigFormat
from fivefold.interop.megacorp.emit import emit
from fivefold.interop.megacorp.keys import TABLE
from fivefold.interop.megacorp.parse import is_megacorp, parse
from fivefold.interop.megacorp.to_job import to_job

FORMATS = (
    ConfigFormat("megacorp", "7.0", "megatron-core", is_megacorp, parse, to_job, emit, keys={"megacorp": TABLE}),
)
