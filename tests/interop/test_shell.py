"""Scripts and launch lines as words: as bash makes them, and what is logic is named and not followed."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from fivefold.interop.shell.launch import strip_launchers
from fivefold.interop.shell.script import read_script

PLAIN = r"""
export A=1 B="two words"
LIST=(--x $A
    --y "$B"   # a comment ( with brackets
    --z 'a # b')
LIST+=(--more)
TEXT="--one 1 \
  --two 2"
N=$((A*8+$A))
show "${LIST[@]}" $TEXT ${UNSET:-default} "q${A}r" $N a\ b '$A' "\$A" x"$B"y; show second && show third | show fourth
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_words_are_split_as_bash_does() -> None:
    function = 'show() { printf "%s\\n" "show" "$@" END; }\n'
    run = subprocess.run(
        ["bash", "-c", function + PLAIN.replace("| show", "\nshow")], capture_output=True, text=True, check=True
    )
    theirs = [tuple(part.strip("\n").split("\n")) for part in run.stdout.split("END\n") if part]
    assert list(read_script(PLAIN).commands) == theirs


BRANCHES = """
A=1 B=fp8 E=
if [[ "$B" == "fp8" ]]; then
  X=(--fp8 hybrid)
  if [ -z "$E" ]; then X+=(--empty); else X+=(--full); fi
elif [ "$B" = bf16 ]; then X=(--bf16)
else
  X=(--fp32)
  for i in 1 2; do X+=(--never); done
fi
if [ $A -gt 3 ]; then Y=big
elif [ ! $A -eq 1 ]; then
  Y=odd
else Y=small; fi
if [[ "$B" == "x" ]] || [[ -z "$E" ]] && [ $A = 1 ]; then X+=(--both); fi
if [[ -n "$E" || "$B" == "fp8" && $A -lt 1 ]]; then X+=(--neither); fi
Z=${4:-"MOCK"}
if [[ "$Z" == "MOCK" ]]; then X+=(--mock ${UNSET:-"a b"}); fi
show "${X[@]}" $Y
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_branches_are_taken_as_in_bash() -> None:
    code = BRANCHES.replace('show "', 'printf "%s\\n" show "')
    run = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    result = read_script(BRANCHES)
    assert [list(words) for words in result.commands] == [run.stdout.split()]
    assert result.remarks == ()


def test_shell_logic_is_reported_and_not_executed() -> None:
    result = read_script(
        'A=1\nif [ -z "$C" ]; then\n  A=2\n  for i in 1 2; do B=3; done\nfi\nf() {\n  A=9\n}\nrun $A $B\n'
    )
    assert result.commands == (("run", "1", "$B"),)
    assert [(said.key, said.value) for said in result.remarks] == [
        ("line 2", 'if [ -z "$C" ]'),
        ("line 6", "f() { A=9 }"),
    ]


def test_blocks_that_only_print_or_leave_are_no_remark() -> None:
    text = 'if [ ! -f "$FILE" ]; then\n  echo "none"\n  exit 1\nfi\nif [ -n "$KEY" ]; then\n  ARGS+=(--key)\nfi\n'
    result = read_script(text + "run $ARGS\n")
    assert [said.key for said in result.remarks] == ["line 5"]


def test_output_of_a_command_is_one_word() -> None:
    result = read_script(
        'HEAD=$(scontrol show hostnames "$LIST" | head -n 1)\nL="run --at $HEAD:6000 --tee 3"\nsrun $L `pwd`/t.py\n'
    )
    assert result.commands[-1] == ("srun", "run", "--at", "$(scontrol):6000", "--tee", "3", "$(pwd)/t.py")


def test_here_documents_are_passed_over() -> None:
    assert read_script("cat > x <<EOF\n{ if (a }\nEOF\nrun it\n").commands == (("run", "it"),)


@pytest.mark.parametrize(
    ("text", "words", "ranks"),
    [
        ("torchrun --nnodes 4 --nproc-per-node=8 train.py --x 1", ("train.py", "--x", "1"), 32),
        ("torchrun --standalone --nproc_per_node 8 -m torchtitan.train --y", ("torchtitan.train", "--y"), 8),
        ("python3 -u -m torch.distributed.launch --nproc_per_node 4 t.py", ("t.py",), 4),
        ("srun -N 2 torchrun --nnodes 2 --nproc_per_node 4 t.py", ("t.py",), 8),
        ("accelerate launch --config_file a.yaml --num_processes 16 t.py -a", ("t.py", "-a"), 16),
        ("deepspeed --num_gpus 8 --num_nodes 2 t.py --deepspeed ds.json", ("t.py", "--deepspeed", "ds.json"), 16),
        ("A=1 nohup python t.py", ("t.py",), None),
        ("torchrun --nnodes $N --nproc_per_node 8 t.py", ("t.py",), None),
    ],
)
def test_launcher_commands_are_removed(text: str, words: tuple[str, ...], ranks: int | None) -> None:
    result = strip_launchers(text.split())
    assert (result.words, result.ranks()) == (words, ranks)


def test_nodes_and_gpus_are_read_from_slurm_options() -> None:
    result = read_script("#SBATCH --nodes=4\n#SBATCH --gres=gpu:h100:8\nsrun torchrun --nnodes $SLURM_NNODES t.py\n")
    run = strip_launchers(result.commands[0])
    assert run.ranks(result.slurm.nodes, result.slurm.per_node) == 32


def test_a_branch_that_the_script_does_not_decide_ends_the_reading_of_shell_logic() -> None:
    result = read_script("A=1\nif [ $A = 2 ]; then B=2\nelif [ $C = 3 ]; then B=3\nelse B=4; fi\nrun $B\n")
    assert result.commands == (("run", "$B"),)
    assert [said.key for said in result.remarks] == ["line 3"]
