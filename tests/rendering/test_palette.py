"""The colours, as people see them who lack one of the three kinds of cones."""

from __future__ import annotations

from itertools import combinations

import pytest

from fivefold.dry_run.memory.breakdown import CATEGORIES
from fivefold.rendering import memory, palette, pipeline
from fivefold.rendering.drawing.style import INKS, read_css
from fivefold.rendering.step_view import MEMORY_PARTS as PARTS

# Machado, Oliveira and Fernandes 2009, table 1: what is seen of linear red, green and blue at severity 1.
CONES = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no long": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no middle": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no short": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def linear(colour: str) -> list[float]:
    values = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]


def lab(colour: str, cones: str) -> tuple[float, float, float]:
    """CIE Lab under D65."""
    seen = [min(1.0, max(0.0, sum(a * b for a, b in zip(row, linear(colour), strict=True)))) for row in CONES[cones]]
    rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    x, y, z = (sum(a * b for a, b in zip(row, seen, strict=True)) for row in rows)
    x, y, z = (
        item ** (1 / 3) if item > 0.008856 else 7.787 * item + 16 / 116 for item in (x / 0.95047, y, z / 1.08883)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def contrast(one: str, other: str) -> float:
    """Of WCAG 2."""
    light, dark = sorted(
        (sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear(item), strict=True)) for item in (one, other)),
        reverse=True,
    )
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("cones", CONES)
@pytest.mark.parametrize("theme", [0, 1])
def test_any_two_colours_can_be_told_apart(theme: int, cones: str) -> None:
    colours = [pair[theme] for pair in palette.COLOURS.values()]
    for one, other in [*combinations(colours, 2), *(combinations(palette.SERIES, 2) if theme == 0 else ())]:
        distance = sum((a - b) ** 2 for a, b in zip(lab(one, cones), lab(other, cones), strict=True)) ** 0.5
        assert distance > 14, (one, other)


def test_text_has_enough_contrast_on_every_colour() -> None:
    for colour in (*palette.SERIES, palette.TEXT, palette.RULE):
        assert contrast(palette.choose_ink(colour), colour) >= 4.5, colour
    for theme in (0, 1):
        for name in ("text", "dim", "good", "bad"):
            assert contrast(INKS[name][theme], INKS["card"][theme]) >= 4.5, name


def test_page_report_and_charts_have_the_same_colours() -> None:
    sheet = read_css()
    for kind in (*pipeline.LOOKS, *memory.LOOKS, *PARTS):
        light, dark = palette.COLOURS[palette.KINDS[kind]]
        assert f".k-{kind} {{ fill: var(--{palette.KINDS[kind]}); }}" in sheet
        assert f"--{palette.KINDS[kind]}: light-dark({light}, {dark});" in sheet
        looks = pipeline.LOOKS.get(kind) or memory.LOOKS.get(kind) or (light,)
        assert light in looks


@pytest.mark.parametrize(
    "kinds",
    [
        {*PARTS, *memory.LOOKS} - {"states"},  # of parameters and optimizer together, as the chart over time sums them
        set(CATEGORIES),
        {"F", "messages", "bubble", "update", "data", "host"},  # of a step's time
        {*pipeline.LOOKS} - {"BW"},
    ],
)
def test_no_two_things_of_a_card_have_one_colour(kinds: set[str]) -> None:
    colours = [palette.KINDS[kind] for kind in kinds & palette.KINDS.keys()]
    assert len(colours) >= 5
    assert len({*colours}) == len(colours)
