"""The command generate: text from what was trained, printed as it comes."""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fivefold.cli.options import AsJson, say, show

if TYPE_CHECKING:
    from fivefold.trainer.generate.sample import Sample


def generate(
    source: Annotated[Path, typer.Argument(help="A run file, a run's or checkpoint's folder, or one of Hugging Face.")],
    prompt: Annotated[list[str] | None, typer.Option(help="Text to go on from; several are read side by side.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="At most so many are drawn.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the likeliest token.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Draw from the fewest tokens that have this share.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws.")] = 0,
    window: Annotated[int | None, typer.Option(min=2, help="Tokens seen at once; without it, as trained.")] = None,
    dtype: Annotated[
        Literal["bf16", "fp32"] | None, typer.Option(help="Of the weights; without it, bf16 on a GPU, else fp32.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json, or bytes, instead of the one there.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Go on from prompts with the weights of a run's newest checkpoint, of any layout, or of a Hugging Face folder."""
    from fivefold.trainer.generate.decode import SamplingParams
    from fivefold.trainer.generate.sample import samples
    from fivefold.trainer.generate.source import Source

    sampling = SamplingParams.read({"temperature": temperature, "top_p": top_p, "seed": seed}, origin="generate")
    found = Source.find(source)
    used, prompts = found.tokenizer(tokenizer), prompt or [""]
    decoder = found.decoder(dtype=dtype)
    alone = len(prompts) == 1 and not json
    if alone:
        _write(prompts[0])
    begin = perf_counter()
    texts = samples(
        decoder, used, prompts, tokens=tokens, window=window or found.window, sampling=sampling, ends=found.ends(used),
        **({"on_text": _aloud} if alone else {}),
    )  # fmt: skip
    seconds = perf_counter() - begin
    _finish(found.path, texts, seconds=seconds, alone=alone, json=json)


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
