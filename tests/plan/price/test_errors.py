from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.layout.spec import Layout
from fivefold.machine import catalog as machines
from fivefold.model import catalog as models
from fivefold.plan.price.errors import expected_error

TABLE = """chip,shape,kind,quantity,sources,cases,error
*,*,*,time,3,30,0.3
*,*,dense,time,2,20,0.2
*,pipeline,dense,time,2,20,0.15
h100,pipeline,dense,time,1,10,0.1
*,*,*,peak,1,5,0.05
"""


@pytest.mark.parametrize(
    ("model", "machine", "layout", "error"),
    [
        ("llama3-8b", "h100:16", "dp8 pp2", 0.1),
        ("llama3-8b", "a100:16", "dp8 pp2", 0.15),
        ("llama3-8b", "h100:16", "dp16", 0.2),
        ("mixtral-8x7b", "h100:16", "dp8 pp2", 0.3),
    ],
)
def test_the_narrowest_class_counts(tmp_path: Path, model: str, machine: str, layout: str, error: float) -> None:
    path = tmp_path / "errors.csv"
    path.write_text(TABLE)
    chips = machines.resolve(machine, local=path)

    def expected(quantity: str) -> float | None:
        return expected_error(
            model=models.resolve(model),
            machine=chips,
            layout=Layout.parse(layout),
            quantity=quantity,  # type: ignore[arg-type]
            path=path,
        )

    assert expected("time") == error
    assert expected("peak") == 0.05


def test_nothing_is_published_of_cpus_and_nothing_without_a_table(tmp_path: Path) -> None:
    path = tmp_path / "errors.csv"
    path.write_text(TABLE)
    model, layout = models.resolve("llama3-8b"), Layout(dp=8)
    gpus = machines.resolve("h100:8", local=path)
    cpus = gpus.replace(backend="gloo")
    assert expected_error(model=model, machine=cpus, layout=layout, quantity="time", path=path) is None
    assert expected_error(model=model, machine=gpus, layout=layout, quantity="time", path=tmp_path / "no") is None
