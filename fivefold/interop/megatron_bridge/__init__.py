"""Configs that Megatron-Bridge and NeMo 2 save, with other names of Megatron's arguments.

keys · parse · emit   three of the four modules of a format (``../format.py``); ``to_job`` is Megatron's
nemo                  classes of NeMo 2, whose defaults its files leave out
"""

from __future__ import annotations

from fivefold.interop.format import ConfigFormat
from fivefold.interop.megatron.to_job import to_job
from fivefold.interop.megatron_bridge.emit import emit
from fivefold.interop.megatron_bridge.keys import BRIDGE, BRIDGE_AND_CORE_KEYS
from fivefold.interop.megatron_bridge.nemo import NEMO_KEYS
from fivefold.interop.megatron_bridge.parse import is_bridge, parse

FORMATS = (
    ConfigFormat(
        "bridge",
        BRIDGE,
        "megatron-bridge",
        is_bridge,
        parse,
        to_job,
        emit,
        keys={"bridge": BRIDGE_AND_CORE_KEYS, "nemo": NEMO_KEYS},
        order=1,
        sample_data="random tokens (MockGPTDatasetConfig, NullTokenizer)",
    ),
)
