"""Trains config.json with arguments.yaml, on random tokens: put your data set in their place."""

import sys
from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class Ours:
    model_name_or_path: str
    max_length: int
    attn_implementation: str = "sdpa"


class RandomTokens(torch.utils.data.Dataset):
    def __init__(self, vocab: int, length: int) -> None:
        self.vocab, self.length = vocab, length

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict:
        tokens = torch.randint(self.vocab, (self.length,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


ours, arguments = HfArgumentParser((Ours, TrainingArguments)).parse_yaml_file(sys.argv[1])
config = AutoConfig.from_pretrained(ours.model_name_or_path)
model = AutoModelForCausalLM.from_config(config, attn_implementation=ours.attn_implementation)
Trainer(model=model, args=arguments, train_dataset=RandomTokens(config.vocab_size, ours.max_length)).train()
