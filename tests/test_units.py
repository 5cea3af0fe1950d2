from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.units import ceil_div, show_bytes, show_count, show_flops, show_seconds


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (80 * 2**30, "80.00 GiB"),
        (5000 * 2**40, "5000.00 TiB"),
        (-1536, "-1.50 KiB"),
    ],
)
def test_bytes_are_printed_with_binary_units(count: int, text: str) -> None:
    assert show_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (0.5, "0.50"),
        (999, "999"),
        (1000, "1.00 k"),
        (999_999, "1.00 M"),
        (8_030_261_248, "8.03 B"),
        (1.5e13, "15.00 T"),
        (1.5e15, "1500.00 T"),
    ],
)
def test_counts_are_printed_with_decimal_units(count: float, text: str) -> None:
    assert show_count(count) == text


@pytest.mark.parametrize(
    ("flops", "text"), [(999, "999"), (8_030_261_248, "8.03 G"), (4.2e17, "420.00 P"), (4.2e18, "4.20 E")]
)
def test_flops_are_printed_with_si_prefixes(flops: float, text: str) -> None:
    assert show_flops(flops) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 µs"),
        (4.2e-5, "42.0 µs"),
        (0.00099999, "1.0 ms"),
        (0.0123, "12.3 ms"),
        (0.99999, "1.00 s"),
        (119.4, "119.40 s"),
        (119.999, "2 min 00 s"),
        (125, "2 min 05 s"),
        (7500, "2 h 05 min"),
    ],
)
def test_seconds_are_printed_in_a_fitting_unit(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_ceil_div_is_the_smallest_that_suffices(a: int, b: int) -> None:
    up = ceil_div(a, b)
    assert up * b >= a > (up - 1) * b
