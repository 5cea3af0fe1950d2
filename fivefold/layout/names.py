"""The names of mesh axes and kinds of context parallelism. Imports nothing, so that any record may use them."""

from __future__ import annotations

from typing import Literal

Axis = Literal["dp", "tp", "cp", "ep", "pp"]
MeshAxis = Literal["tp", "cp", "dp", "pp"]
DEFAULT_ORDER: tuple[MeshAxis, ...] = ("tp", "cp", "dp", "pp")  # nearest ranks first

CpKind = Literal["ring", "ulysses"]
