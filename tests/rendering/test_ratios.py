from __future__ import annotations

import pytest

from fivefold.rendering import ratios
from fivefold.results.balance import Axis, Degree, Ratios, Sizing
from tests.printed import to_text

TWO = Degree(degree=2, token="tp2", link="NVLink 4", flops_per_byte=8192.0, balance=2198.0, overlaps=True)
FOUR = Degree(degree=4, token="tp4", link="NVLink 4", flops_per_byte=2000.0, balance=2198.0, overlaps=False)
WHY = "tp4 offers 2,000, NVLink 4 asks for 2,198"


def row(*degrees: Degree, axis: str = "tp", largest: int = 1, reason: str = WHY) -> Axis:
    return Axis(
        axis=axis,
        sends="output",
        overlapped_with="projection",
        formula="2·N·H / (w·(tp−1))",
        degrees=degrees,
        largest=largest,
        reason=reason,
    )


FOUND = Ratios(
    model="small", machine="h100", layout="dp1 zero0 mbs1", sequence=4096, global_batch=8, precision="bf16",
    peak_flops=989e12, balances={"NVLink 4": 2197.8, "NIC": 19780.0},
    axes=(row(TWO, FOUR, largest=2), row(FOUR, axis="pp"), row(axis="cp", reason="no room")),
    sizing=(Sizing(link="NIC", ffn=2048, topk=8, ffn_alone=13187, ffn_layer=11345, topk_layer=None),),
)  # fmt: skip


def test_ratios_have_one_row_for_each_message() -> None:
    lines = to_text(ratios.render_page(FOUND), width=120).splitlines()
    assert "2,198 (NVLink 4), 19,780 (NIC)" in "\n".join(lines)
    cells = {line.split()[0]: line.split()[3] for line in lines if line.startswith(("tp ", "pp ", "cp "))}
    assert cells == {"tp": "tp2", "pp": "none", "cp": "–"}
    assert any(line.endswith(WHY) for line in lines)
    assert lines[-1].split() == ["NIC", "2,048", "13,187", "11,345", "8", "any"]


def test_every_degree_is_listed_under_its_formula() -> None:
    text = to_text(ratios.render_degrees(FOUND), width=120)
    assert "2·N·H / (w·(tp−1))" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["tp2", "8,192", "2,198", "NVLink", "4", "yes"] in rows
    assert ["tp4", "2,000", "2,198", "NVLink", "4", "no"] in rows
    assert "no room" in text


def test_a_dense_model_has_no_experts_to_size() -> None:
    assert "Experts" not in to_text(ratios.render_page(FOUND.replace(sizing=())))


@pytest.mark.parametrize("width", [1, 24, 80])
def test_ratios_are_printed_at_any_width(width: int) -> None:
    for page in (ratios.render_page(FOUND), ratios.render_degrees(FOUND)):
        assert max(map(len, to_text(page, width=width).splitlines())) <= width
