"""What a user's mistakes get: one line, with the user's line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fivefold.diagnosis.doctor import examine
from fivefold.diagnosis.doctor.file import load
from fivefold.errors import UserError

MODEL = "import torch\nfrom torch import nn\ndef model():\n    return nn.Linear(4, 4)\n"


def examine_file(path: Path) -> None:
    given = load(path)
    examine(given.model, given.loss, make_optimizer=given.optimizer, step=given.step, file=given.name)


def line_of(folder: Path, text: str) -> str:
    """What the doctor says of a file."""
    path = folder / "mine.py"
    path.write_text(text)
    with pytest.raises(UserError) as said:
        examine_file(path)
    line = str(said.value)
    assert "\n" not in line
    return line.replace(str(path), "mine.py")


def write_loss(body: str) -> str:
    return MODEL + f"def loss(model):\n    x = model(torch.ones(2, 4))\n    {body}\n    return x.sum()\n"


@pytest.mark.parametrize(
    ("text", "begins", "holds"),
    [
        ("x = (\n", "mine.py:1: ", "never closed"),
        ("x = 1\ny = '\0'\n", "mine.py:2 has a null byte", "doctor takes the .py file"),
        ("x = 1\n", "mine.py has no function 'model'", "def model()"),
        (MODEL, "mine.py has no function 'loss'", "def loss(model)"),
        (MODEL + "def losses(m): ...\n", "mine.py has no function 'loss'", "did you mean 'losses'"),
        ("1 / 0\n", "mine.py:1: ZeroDivisionError", "division by zero"),
        ("import sys\nsys.exit()\n", "mine.py: ends the program", "__main__"),
        (write_loss("x.sum().foo()"), "mine.py:7: AttributeError", "foo"),
        (write_loss("x @ torch.ones(3, 3)"), "mine.py:7: RuntimeError", "4"),
        (write_loss("x.nonzero()"), "mine.py:7: ", "shape depends on values"),
        (write_loss("x[x > 0]"), "mine.py:7: ", "shape depends on values"),
        (write_loss("x.argmax(1).tolist()"), "mine.py:7: ", "reads a number from a tensor"),
        (write_loss("x.argmax().item()"), "mine.py:7: ", "reads a number from a tensor"),
        (write_loss("x.detach().numpy()"), "mine.py:7: ", "asks for values"),
        (write_loss("x.cuda()"), "mine.py:7: ", "leave the device to the doctor"),
        (write_loss("torch.ones(2, device='cuda')"), "mine.py:7: ", "leave the device to the doctor"),
        (write_loss("x = x.detach()"), "", "without a graph"),
        (write_loss("return x"), "", "shape [2, 4]"),
        (MODEL.replace("4)", "4).to('cuda')") + "def loss(m): ...\n", "mine.py:4: ", "leave the device to the doctor"),
        (MODEL.replace("4)", "4).cuda()") + "def loss(m): ...\n", "mine.py:4: ", "leave the device to the doctor"),
        ("from torch import nn\nM = nn.Linear(4, 4)\ndef model(): return M\ndef loss(m): ...\n", "parameter weight",
         "inside of model()"),
        ("def model(): return 3\ndef loss(m): ...\n", "model() returned int", "torch.nn.Module"),
        (MODEL + "def loss(m): ...\ndef optimizer(m): return 3\n", "optimizer(model) returned int", "Optimizer"),
    ],
)  # fmt: skip
def test_an_error_in_the_users_file_is_a_one_line_error(tmp_path: Path, text: str, begins: str, holds: str) -> None:
    line = line_of(tmp_path, text)
    assert line.startswith(begins)
    assert holds in line


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load(tmp_path / "nothing.py")


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def test_reading_the_value_of_a_fake_tensor_is_a_remark() -> None:
    def loss(model: nn.Module) -> Tensor:
        value = model(torch.ones(2, 4)).sum()
        print(f"{value.item():.3f}")
        return -value if value < 0 else value

    remarks = examine(linear, loss).remarks
    lines = [remark for remark in remarks if "tests/diagnosis/doctor/test_mistakes.py:" in remark]
    assert len(lines) == 2
    assert "the doctor assumes 0" in lines[0]
    assert "a branch on it is not taken" in lines[1]


def test_recorded_user_errors_are_recognized() -> None:
    def loss(model: nn.Module) -> Tensor:
        return model(torch.ones(int(torch.tensor(3).item()), 4)).sum()

    result = examine(linear, loss)
    assert result.remarks == ()
    assert result.forward_flops == 2 * 3 * 4 * 4


def test_a_failed_examination_restores_threads_dtype_and_hooks() -> None:
    threads, default = torch.get_num_threads(), torch.get_default_dtype()
    with pytest.raises(UserError):
        examine(linear, lambda model: model(torch.ones(2, 5)).sum())
    assert type(torch.ones(2)) is torch.Tensor
    assert (torch.get_num_threads(), torch.get_default_dtype()) == (threads, default)
    assert not torch.nn.modules.module._global_forward_pre_hooks
