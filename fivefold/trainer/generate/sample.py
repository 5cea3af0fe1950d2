"""Generates text from prompts: tokenizes, decodes with sampling, and streams the text as it grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fivefold.model.spec import Model
from fivefold.record import Record
from fivefold.trainer.build import Built
from fivefold.trainer.checkpoint.full_weights import build_full_module
from fivefold.trainer.data.tokenizer import Tokenizer
from fivefold.trainer.generate.decode import SamplingParams, generate
from fivefold.trainer.model.transformer import Transformer
from fivefold.trainer.run import Run

OnText = Callable[[int, str], None]
CUT = "\ufffd"  # the tokenizer decodes the first bytes of an incomplete character to this


class Sample(Record):
    """A prompt and its continuation ``text`` of ``tokens`` tokens; ``ended``: an end token ended it, not the limit."""

    prompt: str
    text: str
    tokens: int
    ended: bool


def generate_samples(
    module: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    tokens: int,
    window: int,
    sampling: SamplingParams,
    ends: frozenset[int] | None = None,
    on_text: OnText = lambda number, piece: None,
) -> list[Sample]:
    """Continue each of ``prompts`` by up to ``tokens`` tokens; arguments as of ``generate``.

    ``on_text``: called with the number of a prompt and each new piece of its continuation, in order.
    """
    ends = frozenset([tokenizer.end]) if ends is None else ends
    prompt_ids = [[int(token) for token in tokenizer.encode(prompt)] for prompt in prompts]
    drawn_ids: list[list[int]] = [[] for _ in prompts]
    emitted, counts = ["" for _ in prompts], [0 for _ in prompts]
    steps = generate(
        module,
        [ids or [tokenizer.end] for ids in prompt_ids],
        tokens=tokens,
        window=window,
        vocab=tokenizer.vocab,
        ends=ends,
        sampling=sampling,
    )
    starts = [tokenizer.decode(ids) for ids in prompt_ids]  # may differ a little from the prompt
    for step in steps:
        for number, token in enumerate(step):
            if token is None:
                continue
            counts[number] += 1
            if token in ends:
                continue
            drawn_ids[number].append(token)
            text = tokenizer.decode(prompt_ids[number] + drawn_ids[number])[len(starts[number]) :]
            if not text.endswith(CUT):
                on_text(number, text[len(emitted[number]) :])
                emitted[number] = text
    samples_of_prompts = []
    for number, prompt in enumerate(prompts):
        text = tokenizer.decode(prompt_ids[number] + drawn_ids[number])[len(starts[number]) :]
        if text != emitted[number]:
            on_text(number, text[len(emitted[number]) :])
        ended = counts[number] > len(drawn_ids[number])
        samples_of_prompts.append(Sample(prompt=prompt, text=text, tokens=len(drawn_ids[number]), ended=ended))
    return samples_of_prompts


def sample_run(built: Built, *, model: Model, run: Run, tokenizer: Tokenizer) -> str:
    """Continue the run's prompt with the current weights, gathered on the first rank; every rank calls it.

    Returns the text on the first rank, "" on others.
    """
    module = build_full_module(built, model=model)
    if module is None:
        return ""
    return sample(
        module, tokenizer, prompt=run.sample, tokens=run.sample_tokens, window=run.job.sequence, seed=run.job.seed
    )


def sample(module: Transformer, tokenizer: Tokenizer, *, prompt: str, tokens: int, window: int, seed: int) -> str:
    """Return ``prompt`` and up to ``tokens`` more tokens as text, drawn at temperature 0.8 from a decoder on CPU."""
    (result,) = generate_samples(
        module, tokenizer, [prompt], tokens=tokens, window=window, sampling=SamplingParams(seed=seed)
    )
    return result.prompt + result.text
