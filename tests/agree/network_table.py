"""Make the table and the picture of ``network.py``: seconds of a step over each link, predicted and measured.

network   the compute of the prediction is set so that the unshaped step is what was measured: what is left to be
          predicted is the network, over each link, and what overlaps with compute
total     nothing is set
"""

from __future__ import annotations

import json
import math
import statistics
from itertools import combinations, pairwise
from pathlib import Path
from typing import NamedTuple

from fivefold.layout.spec import Layout
from fivefold.machine import toml
from fivefold.machine.spec import Machine
from fivefold.planner.predict import Planner
from fivefold.rendering.grid import Grid
from tests.agree.network import MODELS, WIRES, Case

BITS = {"10gbit": 1e10, "1gbit": 1e9, "300mbit": 3e8, "100mbit": 1e8}
CLEAR = 0.03  # two layouts nearer than this are equal, by what rounds differ
QUICK_ERROR = 0.12  # median of the quick form
HERE = 0.10  # an added time below this share of the step says nothing of the network


class Row(NamedTuple):
    """Seconds of a step of ``case`` over ``wire``; ``noise``: how far the rounds lie apart, relative."""

    case: Case
    wire: str
    measured: float
    noise: float
    unshaped: float
    network: float
    whole: float

    @property
    def error(self) -> float:
        """Of the step whose compute is as measured."""
        return self.network / self.measured - 1

    @property
    def full_error(self) -> float:
        """Of the step predicted from nothing but the calibration."""
        return self.whole / self.measured - 1

    @property
    def added_error(self) -> float | None:
        """Of what the link adds; None where it adds little."""
        added = self.measured - self.unshaped
        return (self.network - self.unshaped) / added - 1 if added > HERE * self.measured else None


def rows(folder: Path) -> list[Row]:
    """Every case over every link but the unshaped one."""
    machines = {
        wire.name: toml.read(path) for wire in WIRES if (path := folder / "machines" / f"{wire.name}.toml").exists()
    }
    result: dict[Case, dict[str, list[list[float]]]] = {}
    for line in (folder / "cases.jsonl").read_text().splitlines():
        told = json.loads(line)
        model, layout, overlap, precision, wires = told["case"]
        result.setdefault(Case(model, layout, overlap, precision, tuple(wires)), {})[told["wire"]] = told["rounds"]
    return [row for case, measured in result.items() for row in _rows_of(case, measured, machines)]


def _rows_of(case: Case, measured: dict[str, list[list[float]]], machines: dict[str, Machine]) -> list[Row]:
    """A case over each link; the compute of all is that which was measured over the unshaped one."""
    plain = machines["unshaped"]
    unshaped, _ = find_least_disturbed(measured["unshaped"])
    factor = compute_factor(case, plain, unshaped)
    made = []
    for wire, rounds in measured.items():
        if wire == "unshaped":
            continue
        over = _replace_links(plain, machines[wire])
        seconds, noise = find_least_disturbed(rounds)
        network = predict_seconds(case, slow_down(over, factor))
        made.append(Row(case, wire, seconds, noise, unshaped, network, predict_seconds(case, over)))
    return made


def find_least_disturbed(rounds: list[list[float]]) -> tuple[float, float]:
    """Seconds of a step in the least disturbed round, and by how much the others were slower."""
    item = sorted(statistics.median(steps) for steps in rounds)
    return item[0], item[len(item) // 2] / item[0] - 1


def _replace_links(machine: Machine, link: Machine) -> Machine:
    """The hosts of ``machine`` with the links and messages of ``link``."""
    assert machine.calibration is not None
    assert link.calibration is not None
    calibration = machine.calibration.replace(collectives=link.calibration.collectives)
    return machine.replace(links=link.links, calibration=calibration)


def slow_down(machine: Machine, factor: float) -> Machine:
    """``machine`` with all its measured compute taking ``factor`` times as long."""
    known = machine.calibration
    assert known is not None
    return machine.replace(
        calibration=known.replace(
            matmuls=tuple(point.replace(seconds=factor * point.seconds) for point in known.matmuls),
            kernels=tuple(point.replace(seconds=factor * point.seconds) for point in known.kernels),
            attentions=tuple(
                point.replace(
                    forward_seconds=factor * point.forward_seconds, backward_seconds=factor * point.backward_seconds
                )
                for point in known.attentions
            ),
        )
    )


def predict_seconds(case: Case, machine: Machine) -> float:
    """Seconds of a step."""
    planner = Planner(model=MODELS[case.model], machine=machine, job=case.job)
    return planner.estimate(Layout.parse(case.layout)).step_time.seconds


def compute_factor(case: Case, machine: Machine, seconds: float) -> float:
    """How much slower the compute must be for the predicted step to take ``seconds``."""
    low, high = 1 / 16, 16.0
    for _ in range(30):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if predict_seconds(case, slow_down(machine, middle)) < seconds else (low, middle)
    return math.sqrt(low * high)


def grid(found: list[Row]) -> Grid:
    """All rows."""
    headings = (
        "layout",
        "link",
        "without limit",
        "measured",
        "spread",
        "predicted (compute scaled)",
        "error",
        "error of added time",
        "predicted (calibration alone)",
        "its error",
    )
    return Grid(
        headings,
        tuple(
            (
                row.case.name,
                row.wire,
                f"{1e3 * row.unshaped:.0f}",
                f"{1e3 * row.measured:.0f}",
                f"{row.noise:.1%}",
                f"{1e3 * row.network:.0f}",
                f"{row.error:+.1%}",
                "" if row.added_error is None else f"{row.added_error:+.1%}",
                f"{1e3 * row.whole:.0f}",
                f"{row.full_error:+.1%}",
            )
            for row in found
        ),
        words=("layout", "link"),
    )


def summary(found: list[Row]) -> list[str]:
    """Errors, regret and switches in a line each."""
    said = []
    added = [row.added_error for row in found if row.added_error is not None]
    for name, errors in (
        ("step, compute as measured", [row.error for row in found]),
        ("what the link adds", added),
        ("step, nothing measured", [row.full_error for row in found]),
    ):
        sizes = sorted(map(abs, errors))
        tenths = sizes[int(0.9 * (len(sizes) - 1))]
        said.append(
            f"{name}: {len(errors)} cases, error median {statistics.median(sizes):.1%}, "
            f"nine tenths within {tenths:.1%}, worst {sizes[-1]:.1%}, bias {statistics.mean(errors):+.1%}"
        )
    for wire in dict.fromkeys(row.wire for row in found):
        rivals = [
            row for row in found if row.wire == wire and (row.case.model, row.case.precision) == ("dense", "fp32")
        ]
        if len(rivals) > 1:
            best, pick = min(rivals, key=lambda row: row.measured), min(rivals, key=lambda row: row.network)
            said.append(
                f"{wire}: best {best.case.layout} {1e3 * best.measured:.0f} ms, picked {pick.case.layout} "
                f"{1e3 * pick.measured:.0f} ms, regret {pick.measured / best.measured - 1:.1%}"
            )
    return said


def list_switches(found: list[Row]) -> list[str]:
    """For pairs of layouts of one job whose order changes as the link slows: at what speed, predicted and measured."""
    curves: dict[str, dict[float, Row]] = {}
    for row in found:
        if row.wire in BITS and (row.case.model, row.case.precision, row.case.overlap) == ("dense", "fp32", True):
            curves.setdefault(row.case.layout, {})[BITS[row.wire]] = row
    said = []
    for one, other in combinations(curves, 2):
        speeds = sorted(curves[one].keys() & curves[other].keys(), reverse=True)
        measured, predicted = (
            _find_crossing([(bits, of(curves[one][bits]) / of(curves[other][bits])) for bits in speeds])
            for of in (lambda row: row.measured, lambda row: row.network)
        )
        if measured and predicted:
            said.append(
                f"{one} | {other} | {measured / 1e6:.0f} | {predicted / 1e6:.0f} | {predicted / measured - 1:+.0%}"
            )
        elif measured or predicted:
            said.append(f"{one} | {other} | {_bits(measured)} | {_bits(predicted)} | ")
    return said


def _find_crossing(ratios: list[tuple[float, float]]) -> float | None:
    """The speed at which a ratio of seconds passes 1, between two speeds in the logarithm; None: never clearly."""
    for (fast, before), (slow, after) in pairwise(ratios):
        if (before < 1) != (after < 1) and min(abs(math.log(before)), abs(math.log(after))) > CLEAR:
            share = math.log(before) / (math.log(before) - math.log(after))
            return math.exp(math.log(fast) + share * (math.log(slow) - math.log(fast)))
    return None


def _bits(found: float | None) -> str:
    return "none" if found is None else f"{found / 1e6:.0f}"


def report(folder: Path, *, quick: bool, markdown: Path | None) -> int:
    """Print the table; with ``markdown`` write it, and its picture next to it."""
    from rich.console import Console

    result = rows(folder)
    table, crossed = grid(result), list_switches(result)
    Console(width=200).print(table)
    print("\n".join([*summary(result), *crossed]))
    if markdown is not None:
        from tests.agree.network_picture import draw

        lines = [
            " | ".join(table.headings),
            "|".join("---" if head in table.words else "---:" for head in table.headings),
        ]
        body = [*lines, *(" | ".join(row) for row in table.rows)]
        switch = ["one layout | another | Mbit/s measured | predicted | difference", "---|---|---:|---:|---:", *crossed]
        parts = [
            [f"- {line}" for line in summary(result)],
            [f"| {line} |" for line in switch],
            [f"| {line} |" for line in body],
        ]
        markdown.write_text("\n\n".join("\n".join(part) for part in parts) + "\n")
        draw(result, markdown.with_suffix(".png"))
    errors = [abs(row.error) for row in result]
    return 0 if not quick or statistics.median(errors) <= QUICK_ERROR else 1
