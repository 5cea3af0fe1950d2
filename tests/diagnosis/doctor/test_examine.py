"""The doctor against hand counts, the real run on the CPU and torch's own FLOP counter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fivefold.diagnosis.doctor import Diagnosis, examine
from fivefold.trainer.measure.meter import Meter

VOCABULARY = 300


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8))


def mlp_loss(model: nn.Module) -> Tensor:
    return model(torch.randn(16, 32)).square().mean()


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.deep, self.up = nn.Conv2d(16, 16, 3, groups=16), nn.ConvTranspose2d(16, 8, 2, 2)
        self.last = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.up(functional.relu(self.deep(self.first(x)), inplace=True)).mean((2, 3)))


def cnn_loss(model: nn.Module) -> Tensor:
    return functional.cross_entropy(model(torch.randn(4, 3, 20, 20)), torch.randint(10, (4,)))


class Tied(nn.Module):
    """Embedding and head are one weight."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(tokens)))


def tied_loss(model: nn.Module) -> Tensor:
    tokens = torch.randint(VOCABULARY, (2, 25))
    with sdpa_kernel(SDPBackend.MATH):  # which torch's counter knows
        return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


CASES = {"mlp": (mlp, mlp_loss), "cnn": (Cnn, cnn_loss), "tied": (Tied, tied_loss)}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_bytes_of_parameters_gradients_and_moments_follow_the_formula(case: str) -> None:
    make, loss = CASES[case]
    result, weights = examine(make, loss), list(make().parameters())
    numel = sum(weight.numel() for weight in weights)
    assert result.parameters == result.trainable == numel
    assert result.parameters_bytes == result.gradients_bytes == 4 * numel
    assert result.optimizer_bytes == 8 * numel + 4 * len(weights)  # two moments and a count of steps each


def test_saved_bytes_of_an_mlp_match_a_manual_count() -> None:
    result = examine(mlp, mlp_loss)
    # the input is none of its; each ReLU keeps its output, which the next layer keeps too; then the last output
    # for the square; the loss, and the 1 that its backward begins with
    assert result.kept_bytes == 4 * 16 * (64 + 48 + 8) + 4 + 4
    assert result.forward_flops == 2 * 16 * (32 * 64 + 64 * 48 + 48 * 8)
    assert result.backward_flops == 2 * result.forward_flops - 2 * 16 * 32 * 64  # the input's gradient is not needed
    kept = {part.module: part.kept_bytes for part in result.parts}
    assert (kept["1"], kept["3"], kept["0"] + kept["2"]) == (4 * 16 * 64, 4 * 16 * 48, 0)


def real_peaks(case: str, steps: int = 2) -> list[int]:
    """With storages counted as they live on the CPU."""
    make, loss = CASES[case]
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    peaks = []
    for _ in range(steps):
        states = [value for state in optimizer.state.values() for value in state.values()]
        with Meter([*model.parameters(), *model.buffers(), *states], axis=str) as meter:
            value = loss(model)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            del value
        peaks.append(meter.peak_bytes)
    return peaks


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_peak_is_that_of_the_real_run(case: str) -> None:
    result = examine(*CASES[case])
    assert [result.first.peak_bytes, result.steady.peak_bytes] == real_peaks(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_flops_equal_those_of_flop_counter_mode(case: str) -> None:
    make, loss = CASES[case]
    model, result = make(), examine(make, loss)
    with FlopCounterMode(display=False) as counter:
        loss(model).backward()
    mine = result.forward_flops + result.backward_flops
    assert result.recomputed_flops == 0
    assert mine == counter.get_total_flops() - (DEPTHWISE if case == "cnn" else 0)


# torch counts the gradient of a grouped convolution's weight as if each output met every input: 4 sequences,
# 8 x 8 outputs, 16 filters of 9, 15 inputs too many
DEPTHWISE = 2 * 4 * 8 * 8 * 16 * 9 * 15


def step_accumulating(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        (mlp_loss(model) / 3).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def test_a_user_step_function_may_accumulate_gradients() -> None:
    once, thrice = examine(mlp, mlp_loss), examine(mlp, step=step_accumulating)
    assert thrice.forward_flops == 3 * once.forward_flops
    assert thrice.gradients_bytes == once.gradients_bytes
    assert thrice.kept_bytes == once.kept_bytes


def shallow() -> nn.Module:
    return Tied(layers=2)


def half() -> nn.Module:
    return shallow().bfloat16()


@pytest.mark.slow
def test_bf16_weights_halve_states_and_autocast_saves_activation_bytes() -> None:
    narrow = examine(half, tied_loss)
    assert narrow.parameters_bytes == narrow.gradients_bytes == 2 * narrow.parameters

    def compute_mixed(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return tied_loss(model)

    plain = examine(shallow, tied_loss)
    assert examine(shallow, compute_mixed).kept_bytes < plain.kept_bytes

    def compute_for_gpu(model: nn.Module) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return tied_loss(model)

    result = examine(shallow, compute_for_gpu)
    assert result.kept_bytes == plain.kept_bytes
    assert any("autocast('cuda') does nothing" in remark for remark in result.remarks)


@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"amsgrad": True}], ids=str)
def test_memory_of_each_adamw_variant_follows_the_formula(options: dict[str, bool]) -> None:
    result = examine(mlp, mlp_loss, make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), **options))
    numel = result.parameters
    states = 3 if options.get("amsgrad") else 2
    assert result.optimizer_bytes == 4 * states * numel + 4 * 6
    # square roots of the moments: of all at once; of one with their quotient, and what is left of the one before
    roots = 4 * (2 * 64 * 48 + 64) if options.get("foreach") is False else 4 * numel
    assert result.steady.temporary_bytes == roots


def test_frozen_weights_have_neither_gradient_nor_moments() -> None:
    def make_frozen() -> nn.Module:
        model = mlp()
        model[0].requires_grad_(False)
        return model

    result = examine(make_frozen, mlp_loss)
    assert result.parameters - result.trainable == 33 * 64
    assert result.gradients_bytes == 4 * result.trainable


@pytest.mark.slow
def test_the_users_own_checkpointing_is_recognized() -> None:
    from fivefold.diagnosis.doctor import recompute

    def make_wrapped() -> nn.Module:
        model = Tied()
        recompute(model, ("body.layers.0", "body.layers.1"))
        return model

    def loss(model: nn.Module) -> Tensor:  # a kernel that is chosen around a step is not chosen when it runs again
        return model(torch.randint(VOCABULARY, (2, 24))).square().mean()

    plain, again = examine(Tied, loss), examine(make_wrapped, loss)
    assert again.forward_flops == plain.forward_flops
    assert again.backward_flops == plain.backward_flops
    layer = next(part for part in plain.parts if part.module == "body.layers.0")
    assert again.kept_bytes < plain.kept_bytes - layer.kept_bytes
    # the last product of a layer is not recomputed: its output is not kept
    assert again.recomputed_flops == 2 * (layer.forward_flops - 2 * 48 * 64 * 32)


@pytest.mark.slow
def test_a_model_of_transformers_is_examined() -> None:
    transformers = pytest.importorskip("transformers")

    def make() -> nn.Module:
        config = transformers.LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY
        )
        return transformers.LlamaForCausalLM(config)

    def loss(model: nn.Module) -> Tensor:
        tokens = torch.randint(VOCABULARY, (2, 16))
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    result = examine(make, loss)
    layer = 4 * 64 * 64 + 3 * 64 * 128
    assert result.forward_flops == 2 * 32 * (2 * layer + 64 * VOCABULARY) + 2 * 4 * 32 * 16 * 64
    assert result.remarks == ()


@pytest.mark.slow
def test_the_peak_is_broken_down_by_category_and_tensor() -> None:
    result = examine(Tied, tied_loss)
    at = result.steady
    assert Diagnosis.model_validate_json(result.model_dump_json()) == result
    assert at.phase == "backward"
    assert at.parameters_bytes == result.parameters_bytes
    assert at.optimizer_bytes == result.optimizer_bytes
    assert sum(item.total_bytes for item in at.largest) <= at.peak_bytes
    weight = next(item for item in at.largest if item.category == "parameters" and item.name == "embedding.weight")
    assert weight.total_bytes == 4 * VOCABULARY * 32
    lines = {item.line for item in at.largest if item.category == "activations" and not item.name}
    assert {line.partition(":")[0] for line in lines} == {"tests/diagnosis/doctor/test_examine.py"}
