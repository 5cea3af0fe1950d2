from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fivefold.errors import RunFailure, UserError
from fivefold.rendering import charts
from fivefold.results.step_comparison import compare
from fivefold.step import Memory, Step

pytest.importorskip("altair")
pytest.importorskip("vl_convert")


def title(chart: Any) -> str:
    return str(chart.to_dict()["title"]["text"])


def values(chart: Any) -> list[dict[str, Any]]:
    spec = chart.to_dict()
    layers = spec.get("layer", [spec])
    return list(next(layer["data"]["values"] for layer in [spec, *layers] if "data" in layer))


def test_memory_bars_by_stage_and_by_step(small: Step, measured: Step, large: Step) -> None:
    chart = charts.draw_memory_bars(large)
    assert title(chart) == "Activations are 54% of the 41.00 GiB peak"
    bars = [value["bar"] for value in values(chart)]
    assert list(dict.fromkeys(bars)) == [f"stage {i}" for i in range(4)]
    assert sum(value["size"] for value in values(chart) if value["bar"] == "stage 0") == pytest.approx(41)
    bars = [value["bar"] for value in values(charts.draw_memory_bars([small, measured, small]))]
    assert list(dict.fromkeys(bars)) == [
        "dp2 zero1 mbs4, predicted",
        "dp2 zero1 mbs4, measured",
        "dp2 zero1 mbs4, predicted, again",
    ]


def test_the_comparison_chart_says_how_many_counts_are_exact(small: Step, measured: Step) -> None:
    rows = compare(small, measured)
    assert title(charts.compare_bars(rows)) == "10 of 10 counts are exact, estimates are within 3.8%"
    wrong = compare(small.replace(traffic=()), measured)
    chart = charts.compare_bars(wrong)
    assert title(chart).startswith("6 of 10 counts are exact")
    kinds = [value["kind"] for value in values(chart)]
    assert kinds.count("wrong count") == 4


def test_a_chart_without_data_is_a_one_line_error(small: Step) -> None:
    with pytest.raises(UserError, match="nothing to draw"):
        charts.compare_bars([])
    with pytest.raises(UserError, match="nothing to draw"):
        charts.draw_memory_bars([])
    with pytest.raises(UserError, match="nothing to draw"):
        charts.draw_memory_bars(small.replace(memory=Memory(peak_bytes=0, stages=())))


@pytest.mark.slow
@pytest.mark.parametrize(("suffix", "start"), [(".svg", b"<svg"), (".png", b"\x89PNG"), (".html", b"<!DOCTYPE html>")])
def test_charts_are_saved_by_suffix_and_completely(small: Step, tmp_path: Path, suffix: str, start: bytes) -> None:
    path = tmp_path / f"memory{suffix}"
    charts.save(charts.draw_memory_bars(small, subtitle="tiny"), path)
    content = path.read_bytes()
    assert content.startswith(start)
    assert len(content) > 2000
    assert b'src="http' not in content  # a page that needs no network


def test_a_chart_that_cannot_be_saved_is_a_one_line_error(small: Step, tmp_path: Path) -> None:
    chart = charts.draw_memory_bars(small)
    with pytest.raises(UserError, match=r"a chart is saved as \.svg, \.png, \.pdf or \.html, not \.gif"):
        charts.save(chart, tmp_path / "a.gif")
    (tmp_path / "file").touch()
    with pytest.raises(RunFailure, match="the chart cannot be written: File exists"):
        charts.save(chart, tmp_path / "file" / "a.svg")


@pytest.mark.parametrize("missing", ["altair", "vl_convert"])
def test_charts_without_the_extra_show_are_an_error(monkeypatch: pytest.MonkeyPatch, missing: str, small: Step) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UserError, match=r"charts need the extra show: pip install 'fivefold\[show\]'"):
        charts.draw_memory_bars(small)


def test_a_title_is_no_wider_than_its_chart() -> None:
    import altair as alt

    panel = alt.Chart(alt.Data(values=[])).mark_point().properties(width=150, height=50)
    title = charts.apply_style(alt.hconcat(panel, panel), title="long " * 20, subtitle="longer " * 40).to_dict()[
        "title"
    ]
    assert charts.find_width(alt.vconcat(alt.hconcat(panel, panel), panel).to_dict()) == 318
    assert all(len(line) * 17 * 0.6 <= 318 for line in title["text"])
    assert all(len(line) * 12 * 0.6 <= 318 for line in title["subtitle"])
    assert charts.apply_style(panel, title="short", subtitle="").to_dict()["title"]["text"] == "short"
