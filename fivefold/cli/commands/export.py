"""``fivefold export``: the weights of a checkpoint as a Hugging Face folder, or adapters as a PEFT adapter folder."""

from __future__ import annotations

from fivefold.cli.options import show
from fivefold.cli.request_options import accept_request
from fivefold.requests.commands import ExportOptions
from fivefold.requests.words import parse_bytes
from fivefold.units import show_bytes


@accept_request(ExportOptions)
def export(request: ExportOptions) -> None:
    """Write the weights of a checkpoint, of any layout, as a folder that transformers loads.

    For a run with adapters, it writes the adapters as a folder that peft loads, or with --merge the merged weights.
    """
    file_bytes = parse_bytes(request.file_size, option="--file-size")
    from fivefold.rendering.progress import show_progress
    from fivefold.trainer.checkpoint.huggingface_export import export, find

    with show_progress("exporting") as report:
        summary = export(
            find(request.source),
            request.to,
            dtype=request.dtype,
            file_bytes=file_bytes,
            report=report,
            merge=request.merge,
            base=request.base,
        )
    if request.as_json:
        show(summary.model_dump_json(indent=2))
        return
    show(
        f"{summary.folder}: {summary.family} after step {summary.step}, {summary.holds} in {summary.tensors} tensors "
        f"in {summary.files} files, {show_bytes(summary.bytes)} of {summary.dtype}"
    )
