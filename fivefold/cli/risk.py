"""The option ``--risk``: up to which probability of running out of memory a layout is proposed."""

from __future__ import annotations

from typing import Annotated

import typer

Risk = Annotated[
    float,
    typer.Option(
        "--risk", min=0, max=0.99, help="Propose layouts that run out of memory with at most this probability."
    ),
]
