"""A small tokenizer with a chat template, and conversations: what the tests of supervised data read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# ChatML without marks, as Qwen 2.5 renders it; MARKED says what the assistant wrote.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' }}{{ message.content }}{{ '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = (
    "{%- for message in messages %}\n"
    "    {%- if message.role == 'assistant' %}\n"
    "        {{- '<|im_start|>assistant\\n' }}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}\n"
    "        {{- '\\n' }}\n"
    "    {%- else %}\n"
    "        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
WORDS = [
    "the", "ring", "tower", "cave", "river", "gold", "king", "sword", "dragon", "ship", "storm", "north", "road",
    "fire", "hall", "song",
]  # fmt: skip


def write_tokenizer(folder: Path, *, template: str = CHATML, vocab: int = 400) -> Path:
    """Write a byte-level BPE with ChatML's tokens, as Hugging Face stores it."""
    folder.mkdir(parents=True, exist_ok=True)
    rust = Tokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    rust.train_from_iterator([json.dumps(record) for record in conversations(60)], trainer=trainer)
    rust.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v}))
    return folder


def conversations(number: int, *, turns: int = 3) -> list[dict[str, list[dict[str, str]]]]:
    """Conversations of one to ``turns`` questions and answers, some after a system message; no two are equal."""
    records = []
    for record in range(number):
        messages = [{"role": "system", "content": "Speak plainly."}] if record % 3 == 0 else []
        for turn in range(1 + record % turns):
            words = [WORDS[(record * 7 + turn * 3 + place * place) % len(WORDS)] for place in range(2 + record % 9)]
            messages += [
                {"role": "user", "content": f"Tell me {record} of {' '.join(words[::-1])}?"},
                {"role": "assistant", "content": f"It was {' '.join(words)}, naïve – {turn}."},
            ]
        records.append({"messages": messages})
    return records


def completions(number: int) -> list[dict[str, str]]:
    """Prompts and completions as text."""
    first = (record["messages"][-2:] for record in conversations(number))
    return [{"prompt": ask["content"], "completion": " " + answer["content"]} for ask, answer in first]


def write_lines(path: Path, records: list) -> Path:  # type: ignore[type-arg]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def preferences(number: int, *, chat: bool = False) -> list[dict[str, Any]]:
    """Prompts with a chosen and a rejected completion of other lengths, as text or as messages."""
    records: list[dict[str, Any]] = []
    for record, (one, other) in enumerate(zip(conversations(number), conversations(number + 5)[5:], strict=True)):
        question, chosen = (message["content"] for message in one["messages"][-2:])
        rejected = other["messages"][-1]["content"] + f" {record}"
        if chat:
            ends = {key: [{"role": "assistant", "content": text}] for key, text in
                    (("chosen", chosen), ("rejected", rejected))}  # fmt: skip
            records.append({"prompt": one["messages"][:-1], **ends})
        else:
            records.append({"prompt": f"Q: {question}\nA:", "chosen": f" {chosen}", "rejected": f" {rejected}"})
    return records
