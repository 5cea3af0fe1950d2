"""Names of mesh axes, pipeline schedules and kinds of cp. Imports nothing, so that any record may use them."""

from __future__ import annotations

from typing import Literal

Axis = Literal["dp", "tp", "cp", "ep", "pp"]
MeshAxis = Literal["tp", "cp", "dp", "pp"]
DEFAULT_ORDER: tuple[MeshAxis, ...] = ("tp", "cp", "dp", "pp")  # nearest ranks first

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb1p", "zb2p", "zbv", "dualpipe", "dualpipev"]
SCHEDULES: tuple[ScheduleName, ...] = (
    "gpipe", "1f1b", "interleaved", "zb1p", "zb2p", "zbv", "dualpipe", "dualpipev",
)  # fmt: skip
V_SHAPED: tuple[ScheduleName, ...] = ("zbv", "dualpipev")  # two stages per rank, placed as a V

CpKind = Literal["ring", "ulysses"]
