"""``fivefold read``: a config of other software as model, layout and job. Does not import torch."""

from __future__ import annotations

from fivefold.cli.options import show
from fivefold.cli.request_options import accept_request
from fivefold.requests.commands import ReadOptions
from fivefold.requests.configs import build_request


@accept_request(ReadOptions)
def read(request: ReadOptions) -> None:
    """Read a config of Megatron, torchtitan, DeepSpeed, … as model, layout and job, and list how each key was read."""
    from fivefold.interop.read import read as run
    from fivefold.rendering import reading

    reading_result = run(request.words, build_request(request.gpus, request.model, request.vocab))
    show(reading_result.model_dump_json(indent=2) if request.as_json else reading.render_page(reading_result))
