from __future__ import annotations

from benchmarks.published.table import Summary, markdown, table
from tests.printed import to_text

ROWS = [
    Summary(
        source="vtrain",
        quantity="time",
        cases=938,
        bias=0.031,
        median=0.06,
        mean=0.079,
        worst=-0.41,
        left_out=0.11,
        half=0.52,
        most=0.9,
        groups=9,
        tau=0.81,
        regret=0.012,
    ),
    Summary(source="bloom_prequel", quantity="peak", cases=28, bias=-0.05, median=0.04, mean=0.05, worst=0.2),
]


def test_the_table_of_errors_has_a_row_per_source_and_quantity() -> None:
    lines = to_text(table(ROWS), width=100).splitlines()
    assert " ".join(lines[0].split()) == "source of cases bias median mean worst left out 50 % 90 % τ regret"
    assert " ".join(lines[2].split()) == "vtrain time 938 +3.1% 6.0% 7.9% -41% 11.0% 52% 90% 0.81 1.2%"
    assert lines[3].split()[-2:] == ["–", "–"]


def test_table_by_another_field_is_headed_by_its_name() -> None:
    assert to_text(table(ROWS, first="chip"), width=100).split()[0] == "chip"
    assert markdown(ROWS, first="chip").startswith("| chip | of |")


def test_the_table_of_errors_counts_excluded_rows_by_rule() -> None:
    text = to_text(table(ROWS, excluded=[("vtrain", "no mbs"), ("vtrain", "no mbs"), ("nemo", "oom")]), width=100)
    assert ["vtrain", "2", "no", "mbs"] in [line.split() for line in text.splitlines()]
    assert ["nemo", "1", "oom"] in [line.split() for line in text.splitlines()]


def test_markdown_is_a_table() -> None:
    lines = markdown(ROWS).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert lines[1].startswith("| --- | --- | ---: |")
    assert lines[2] == "| vtrain | time | 938 | +3.1% | 6.0% | 7.9% | -41% | 11.0% | 52% | 90% | 0.81 | 1.2% |"
