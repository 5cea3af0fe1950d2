"""``fivefold generate``: text from a trained model, printed as it is generated."""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from fivefold.cli.options import print_line, show
from fivefold.cli.request_options import accept_request
from fivefold.requests.commands import GenerateOptions

if TYPE_CHECKING:
    from fivefold.trainer.generate.sample import Sample


@accept_request(GenerateOptions)
def generate(request: GenerateOptions) -> None:
    """Generate text with the weights of a run's newest checkpoint, of any layout, or of a Hugging Face folder.

    Adapters, of a run or of a PEFT adapter folder, are merged into the weights of their base.
    """
    from fivefold.trainer.generate.decode import SamplingParams
    from fivefold.trainer.generate.sample import generate_samples
    from fivefold.trainer.generate.source import WeightSource

    sampling = SamplingParams.read(
        {name: getattr(request, name) for name in ("temperature", "top_p", "seed")}, origin="generate"
    )
    source = WeightSource.find(request.source, base=request.base)
    tokenizer = source.tokenizer(request.tokenizer)
    prompts = [*request.prompt] or [""]
    decoder = source.decoder(dtype=request.dtype)
    is_streamed = len(prompts) == 1 and not request.as_json
    if is_streamed:
        _write(prompts[0])
    begin = perf_counter()
    texts = generate_samples(
        decoder,
        tokenizer,
        prompts,
        tokens=request.tokens,
        window=request.window or source.window,
        sampling=sampling,
        ends=source.get_end_tokens(tokenizer),
        **({"on_text": _write_piece} if is_streamed else {}),
    )
    seconds = perf_counter() - begin
    _finish(source.path, texts, seconds=seconds, was_streamed=is_streamed, json=request.as_json)


def _finish(path: Path, texts: list[Sample], *, seconds: float, was_streamed: bool, json: bool) -> None:
    """Print the texts (only a line end, if ``was_streamed``) or the JSON, and the speed on stderr."""
    token_count = sum(text.tokens for text in texts)
    facts: dict[str, Any] = {"source": str(path), "seconds": seconds, "tokens_per_second": token_count / seconds}
    if json:
        import json as json_module

        values = facts | {"samples": [text.model_dump() for text in texts]}
        show(json_module.dumps(values, indent=2, ensure_ascii=False))
        return
    if was_streamed:
        _write("\n")
    else:
        show("\n\n".join(text.prompt + text.text for text in texts))
    print_line(f"{path}: {token_count} tokens in {seconds:.2f} s, {facts['tokens_per_second']:.1f} a second")


def _write_piece(_number: int, piece: str) -> None:
    _write(piece)


def _write(text: str) -> None:
    """Write to stdout without buffering."""
    sys.stdout.write(text)
    sys.stdout.flush()
