"""``fivefold import``: examines a folder of Hugging Face or peft, and writes a run file that starts from its weights.

Nothing is converted: a run file names the folder, and each rank reads its own shard from it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fivefold.adapter import Adapter
from fivefold.base_format import BITSANDBYTES_BASES
from fivefold.cli.options import print_line, show
from fivefold.cli.request_options import accept_request
from fivefold.errors import UserError
from fivefold.model.weights import count_adapters
from fivefold.requests.commands import ImportOptions
from fivefold.text_files import read_file
from fivefold.units import show_bytes, show_count

if TYPE_CHECKING:
    from fivefold.trainer.checkpoint.huggingface_import import HuggingFaceFolder


class StartAdapter(NamedTuple):
    """The PEFT adapter folder from which a run is to start, and its adapter."""

    folder: Path
    adapter: Adapter


MAX_WRITTEN_SEQUENCE = 4096  # highest sequence length in the written run file; lower if the model has fewer positions


@accept_request(ImportOptions)
def import_(request: ImportOptions) -> None:
    """Check that a Hugging Face model can be trained: its family, and every name and shape of its weights.

    For a PEFT adapter folder, it checks the adapters and the model under them. With --to, it writes a run file that
    starts from them.
    """
    from fivefold.model.huggingface.read import describe_remark
    from fivefold.trainer.checkpoint import merged_adapter, peft_adapter
    from fivefold.trainer.checkpoint.huggingface_import import CONFIG, DTYPES, HuggingFaceFolder

    folder, to, start = request.folder, request.to, None
    if (folder / peft_adapter.CONFIG).is_file():
        adapters = merged_adapter.open_adapter_folder(folder, base=request.base)
        start = StartAdapter(folder, adapters.adapter)
        folder = adapters.base.path
        opened = adapters.base
    elif request.base is not None:
        raise UserError(f"{folder} has no {peft_adapter.CONFIG}; drop --base")
    else:
        opened = HuggingFaceFolder.open(folder)
    if warning := describe_remark(read_file(folder / CONFIG), name=opened.model.name):
        print_line(f"fivefold: {warning}")
    model, stored = opened.model, opened.dtypes()
    stored_bytes = round(sum(DTYPES[dtype] * count for dtype, count in stored.items()))
    if to is not None:
        _write_run(to, opened, start)
    facts: dict[str, Any] = {
        "folder": str(folder),
        "family": opened.family,
        "parameters": model.parameters,
        "tensors": len(opened.tensors) - len(opened.ignored),
        "bytes": stored_bytes,
        "dtypes": sorted(stored),
        "ignored": list(opened.ignored),
        "run": None if to is None else str(to),
        "adapter": None if start is None else {"folder": str(start.folder), **start.adapter.model_dump(mode="json")},
    }
    if request.as_json:
        import json as json_module

        show(json_module.dumps(facts, indent=2))
        return
    show(
        f"{model.name}: {opened.family}, {show_count(model.parameters)} parameters in {facts['tensors']} tensors, "
        f"{show_bytes(stored_bytes)} of {', '.join(sorted(stored))}"
    )
    if start is not None:
        trained = count_adapters(model, start.adapter)
        show(
            f"{start.folder}: adapters of rank {start.adapter.rank} on {', '.join(start.adapter.targets)}, "
            f"{show_count(trained)} parameters"
        )
    if opened.ignored:
        print_line(f"left out {len(opened.ignored)} tensors that the model does not need, such as {opened.ignored[0]}")
    if to is not None:
        print_line(f"wrote {to}; start with: fivefold train {to}")


def _write_run(path: Path, opened: HuggingFaceFolder, start: StartAdapter | None) -> None:
    """Write a run file with the folder as model and weights, and its tokenizer; the rest has its defaults."""
    from fivefold.machine.toml import emit

    tokenizer = opened.path / "tokenizer.json"
    if not tokenizer.is_file():
        raise UserError(
            f"{opened.path} has no tokenizer.json, which defines what its token ids mean; copy it into the folder"
        )
    values: dict[str, Any] = {
        "model": str(opened.path),
        "folder": f"runs/{opened.model.name}",
        "start": {"weights": str(opened.path)},
        "job": {"sequence": min(opened.model.positions, MAX_WRITTEN_SEQUENCE)},
        "data": {"tokenizer": str(tokenizer)},
    }
    base = opened.model.quantization
    if start is None and base in BITSANDBYTES_BASES:  # over which adapters alone are trained
        stored = Adapter(base=base, double_quantization=opened.model.double_quantization)
        values["job"]["adapter"] = {"rank": stored.rank, **stored.dump_changes()}
    if start is not None:
        values["start"]["adapter"] = str(start.folder)
        values["job"]["adapter"] = start.adapter.dump_changes()
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(emit(values))
    except FileExistsError:
        raise UserError(f"{path} exists already; remove it or give another file") from None
