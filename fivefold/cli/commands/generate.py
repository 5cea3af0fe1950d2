"""The command generate: text from what was trained, printed as it comes."""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from fivefold.cli.options import say, show
from fivefold.cli.request_options import takes_request
from fivefold.requests.commands import GenerateOptions

if TYPE_CHECKING:
    from fivefold.trainer.generate.sample import Sample


@takes_request(GenerateOptions)
def generate(request: GenerateOptions) -> None:
    """Go on from prompts with the weights of a run's newest checkpoint, of any layout, or of a Hugging Face folder."""
    from fivefold.trainer.generate.decode import SamplingParams
    from fivefold.trainer.generate.sample import samples
    from fivefold.trainer.generate.source import Source

    sampling = SamplingParams.read(
        {name: getattr(request, name) for name in ("temperature", "top_p", "seed")}, origin="generate"
    )
    found = Source.find(request.source)
    used, prompts = found.tokenizer(request.tokenizer), [*request.prompt] or [""]
    decoder = found.decoder(dtype=request.dtype)
    alone = len(prompts) == 1 and not request.as_json
    if alone:
        _write(prompts[0])
    begin = perf_counter()
    texts = samples(
        decoder, used, prompts, tokens=request.tokens, window=request.window or found.window, sampling=sampling,
        ends=found.ends(used), **({"on_text": _aloud} if alone else {}),
    )  # fmt: skip
    seconds = perf_counter() - begin
    _finish(found.path, texts, seconds=seconds, alone=alone, json=request.as_json)


def _finish(path: Path, texts: list[Sample], *, seconds: float, alone: bool, json: bool) -> None:
    drawn = sum(text.tokens for text in texts)
    facts: dict[str, Any] = {"source": str(path), "seconds": seconds, "tokens_per_second": drawn / seconds}
    if json:
        import json as json_module

        values = facts | {"samples": [text.model_dump() for text in texts]}
        show(json_module.dumps(values, indent=2, ensure_ascii=False))
        return
    if alone:
        _write("\n")
    else:
        show("\n\n".join(text.prompt + text.text for text in texts))
    say(f"{path}: {drawn} tokens in {seconds:.2f} s, {facts['tokens_per_second']:.1f} a second")


def _aloud(_number: int, piece: str) -> None:
    _write(piece)


def _write(text: str) -> None:
    """To stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
