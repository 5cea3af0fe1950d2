"""What little says whose config a file is, and what is said of a script whose command is within logic of the shell."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.errors import UserError
from fivefold.interop.format import Overrides
from fivefold.interop.read import read

NANOTRON = """
parallelism: {dp: 3, tp: 2, pp: 2}
tokens: {sequence_length: 2048, micro_batch_size: 1, batch_accumulation_per_replica: 4}
model: {model_config: {hidden_size: 2048, num_hidden_layers: 16, num_attention_heads: 32, num_key_value_heads: 8,
  intermediate_size: 8192, vocab_size: 32000, max_position_embeddings: 2048, tie_word_embeddings: false}}
"""
TORCHTITAN = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 4096\nlocal_batch_size = 2\n'
LOOP = """
for tp in 1 2; do
torchrun pretrain_gpt.py --num-layers 4 --hidden-size 64 --tensor-model-parallel-size $tp
done
"""


@pytest.mark.parametrize(
    ("name", "text", "ranks", "software", "layout"),
    [
        ("run.yaml", NANOTRON, 12, "nanotron", "dp3 tp2 pp2 zero0 gpipe mbs1 nosp"),
        ("run.toml", TORCHTITAN, 8, "torchtitan", "dp8 zero3 mbs2"),
    ],
)
def test_a_config_is_recognized_by_few_keys(
    tmp_path: Path, name: str, text: str, ranks: int, software: str, layout: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    result = read([str(path)], Overrides(ranks=ranks))
    assert result.software.startswith(software)
    assert str(result.layout).startswith(layout)


def test_the_config_of_a_model_is_not_read_as_that_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 151936}')
    with pytest.raises(
        UserError, match=r"is the config of a model, not of a run; .* `fivefold predict .*config\.json "
    ):
        read([str(path)])


def test_a_command_in_a_loop_is_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(LOOP)
    with pytest.raises(UserError, match=r"holds no command, and line 2, 'for tp in 1 2', is logic of the shell"):
        read([str(path)], Overrides())
