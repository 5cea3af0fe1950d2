"""Each recipe of CONTRIBUTING's "How to add" is followed in a copy of the package, and what must then work is run.

``ADDITIONS`` holds what a maintainer writes for each addition: new files, and lines put into files that exist. Their
number is the number of files that the addition touches. Further additions have tests of their own:
a schedule tests/layout/test_added_schedule.py, a column tests/rendering/test_views.py, a configuration format
tests/interop/test_formats.py, an activation or norm tests/model/test_activations.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


class Addition(NamedTuple):
    """Files that an addition creates, and text that it puts in front of a line of others; ``uses``: what must work."""

    most_files: int
    uses: str
    files: Mapping[str, str] = {}
    inserts: Mapping[str, tuple[tuple[str, str], ...]] = {}


CHIP = """    "z9": Row(
        generation="hopper", efficiency=measured.H100, memory=TotalMemory(2 * 81089 * MIB, "a test"), tflops=HOPPER,
        terabytes_per_second=3.35, ranks_per_node=8, near=NVLINK4, far=NIC_400, source="a test", watts=700,
    ),
"""
MODEL = """    "fake-1b": Entry("nobody/Fake-1B", _llama3(layers=16, width=2048, heads=32, ffn=8192)),
"""
RECIPE = """        Recipe(
            name="bf16-moments16", compute="bf16", weights_bytes=2, gradients_bytes=2, master_bytes=4,
            moments_bytes=(2, 2),
        ),
"""
LION_COST = '''"""Lion (arXiv:2302.06675): one moment, elementwise."""

from fivefold.optimizers.cost import OptimizerCost, local_numel


class LionCost(OptimizerCost):
    """Lion."""

    title = "Lion"
    elementwise = True
    fp32_states = True
    counts_2d_tp = True
    updates_flat_buffer = False

    def state_bytes(self, weights, *, shards, quantised, job):
        return 4 * sum(local_numel(weight, shards) for weight in weights)

    def moved_bytes(self, job):
        return 4

    def scratch_bytes(self, weights, job):
        return 0


COST = LionCost()
'''
LION = '''"""Lion with fp32 arithmetic."""

import torch

from fivefold.trainer.optimizers.fp32_update import all_weights, blocks


def build(weights):
    job = weights.job
    return Lion(weights.make_groups(weights.shards), lr=job.learning_rate.peak, betas=job.optimizer.betas)


class Lion(torch.optim.Optimizer):
    def __init__(self, groups, *, lr, betas):
        super().__init__(groups, {"lr": lr, "betas": betas})
        for weight in all_weights(self.param_groups):
            self.state[weight]["momentum"] = torch.zeros_like(weight, dtype=torch.float32)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in group["params"]:
                for w, g, m in blocks(weight, self.state[weight]["momentum"]):
                    w.mul_(1 - group["lr"] * group["weight_decay"])
                    w.add_(torch.lerp(g, m, first).sign_(), alpha=-group["lr"])
                    m.lerp_(g, 1 - second)
'''
COMMAND = '''"""The command ``size``."""

from fivefold.cli.options import show
from fivefold.cli.request_options import takes_request
from fivefold.requests.commands import SizeOptions


@takes_request(SizeOptions)
def size(request: SizeOptions, model, machine, layout, job) -> None:
    """Print the parameters of a model."""
    show(f"{model.parameters} {request.unit}")
'''
SCHEMA = '''class SizeOptions(LayoutRequest, JobOptions):
    """``fivefold size``."""

    unit: Annotated[str, Field(description="The unit that is printed.")] = "parameters"


'''
SETUP = """
from pathlib import Path
from fivefold.job import Job, recipe
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import named
from fivefold.planner.predict import predict
from fivefold.planner.search import search
tiny = named("tiny").replace(layers=2, width=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=256)
node, job = resolve("h100:8", local=Path()), Job(sequence=64, global_batch=16)
layout = Layout.parse("dp4 tp2 zero1 mbs1")
"""
DRY_RUN = """
from fivefold.dry_run import dryrun
from fivefold.results.step_comparison import compare
run = dryrun(model=tiny, machine=node, layout=layout, job=job).step
predicted = predict(model=tiny, machine=node, layout=layout, job=job)
assert [row for row in compare(predicted, run) if row.wrong] == []
"""
ADDITIONS = {
    "a chip": Addition(
        1,
        """
z9 = resolve("z9:8", local=Path())
ours, other = (predict(model=named("llama3-8b"), machine=each, layout=layout, job=job) for each in (z9, node))
assert ours.time.step_seconds == other.time.step_seconds  # of equal figures, but for the memory
assert z9.chip.memory_bytes == 2 * node.chip.memory_bytes
assert search(model=named("llama3-8b"), machine=z9, job=Job(sequence=2048, global_batch=16)).best
""",
        inserts={"machine/catalog.py": (('    "h100": Row(\n', CHIP),)},
    ),
    "a model of the catalog": Addition(
        1,
        """
model = named("fake-1b")
assert model.layers == 16
assert predict(model=model, machine=node, layout=layout, job=job).model == "fake-1b"
assert search(model=model, machine=node, job=Job(sequence=2048, global_batch=16)).best
""",
        inserts={"model/catalog.py": (('    "llama3-8b": Entry(', MODEL),)},
    ),
    "a precision recipe": Addition(
        1,
        """
usual = predict(model=tiny, machine=node, layout=layout, job=job.replace(precision=recipe("bf16-grad16")))
job = job.replace(precision=recipe("bf16-moments16"))
narrow = predict(model=tiny, machine=node, layout=layout, job=job)
ratio = narrow.memory.stages[0].optimizer_bytes / usual.memory.stages[0].optimizer_bytes
assert 0.5 <= ratio < 0.51, ratio
assert search(model=tiny, machine=node, job=job).best
""",
        inserts={"job.py": (('        Recipe(name="bf16-pure",', RECIPE),)},
    ),
    "an optimizer": Addition(
        2,
        """
from fivefold.planner.whole_run import checkpoint_bytes
from fivefold.record import Mistake
adamw = predict(model=tiny, machine=node, layout=layout, job=job)
saved = checkpoint_bytes(tiny, job)
job = Job(sequence=64, global_batch=16, optimizer={"kind": "lion"})
lion = predict(model=tiny, machine=node, layout=layout, job=job)
states = [step.memory.stages[0].optimizer_bytes for step in (lion, adamw)]
assert 0 < states[0] < states[1], states
assert checkpoint_bytes(tiny, job) < saved
assert search(model=tiny, machine=node, job=job).best
"""
        + DRY_RUN
        + """
try:
    Job.read({"optimizer": {"kind": "tiger"}}, origin="job")
except Mistake as wrong:
    assert "'lion'" in str(wrong)
else:
    raise AssertionError("an unknown optimizer was taken")
""",
        files={"optimizers/costs/lion.py": LION_COST, "trainer/optimizers/lion.py": LION},
    ),
    "a collective algorithm": Addition(
        2,
        """
from fivefold.layout.mesh import Group
from fivefold.planner.time.constants import PUBLISHED
from fivefold.planner.time.network import Network
group = Group(ranks=8, stride=1)
usual, slower = (Network(node, PUBLISHED.replace(direct_share=share)) for share in (1e-9, 1.0))
assert Network(node).seconds("all_gather", 10**6, group) == slower.seconds("all_gather", 10**6, group)
assert slower.seconds("all_gather", 10**6, group) < usual.seconds("all_gather", 10**6, group)
assert search(model=tiny, machine=node, job=job).best
""",
        inserts={
            "planner/time/constants.py": (
                (
                    "    # Matmuls and attention\n",
                    '    direct_share: Annotated[float, About("of a link", "direct", "a test", (0.5, 1.0))] = 1.0\n\n',
                ),
            ),
            "planner/time/network.py": (
                (
                    '        if collective in ("all_gather", "reduce_scatter"):\n',
                    '        if collective == "all_gather":\n'
                    "            direct = Line(place.near.quick, place.ring_per_byte / (4 * constants.direct_share))\n"
                    "            return [*_ring(place, constants, turns=1), direct]\n",
                ),
            ),
        },
    ),
    "a command": Addition(
        3,
        """
from typer.testing import CliRunner
from fivefold.cli import app
said = CliRunner().invoke(app, ["size", "llama3-8b", "h100:8", "dp8", "--unit", "weights"])
assert (said.exit_code, said.output) == (0, f"{named('llama3-8b').parameters} weights\\n"), said
assert "The unit that is printed." in CliRunner().invoke(app, ["size", "--help"]).output
""",
        files={"cli/size.py": COMMAND},
        inserts={
            "requests/commands.py": (("class AskRequest(MachineRequest):\n", SCHEMA),),
            "cli/__init__.py": (('    "predict": "plan.predict",', '    "size": "size.size",\n'),),
        },
    ),
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a copy of the package to which all additions were made."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "fivefold", folder / "fivefold", ignore=shutil.ignore_patterns("__pycache__"))
    for addition in ADDITIONS.values():
        for name, text in addition.files.items():
            assert not (folder / "fivefold" / name).exists(), name
            (folder / "fivefold" / name).write_text(text, encoding="utf-8")
        for name, inserts in addition.inserts.items():
            path = folder / "fivefold" / name
            text = path.read_text(encoding="utf-8")
            for line, new in inserts:
                assert text.count(line) == 1, f"{name} has no line, or several, with {line!r}"
                text = text.replace(line, new + line)
            path.write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", ADDITIONS)
def test_an_addition_touches_few_files_and_works(name: str, package: Path) -> None:
    addition = ADDITIONS[name]
    assert len(addition.files) + len(addition.inserts) <= addition.most_files
    found = subprocess.run(
        [sys.executable, "-c", f"{SETUP}{addition.uses}\nprint('works')"], cwd=package, check=False, timeout=240,
        env={**os.environ, "PYTHONPATH": str(package)}, capture_output=True, text=True,
    )  # fmt: skip
    assert found.stdout.splitlines()[-1:] == ["works"], found.stderr[-3000:]


def test_contributing_names_the_files_of_each_addition() -> None:
    recipes = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## How to add")[2]
    for name, addition in ADDITIONS.items():
        for path in (*addition.inserts, *(str(Path(file).parent) for file in addition.files)):
            assert path in recipes, f"{name}: {path}"
