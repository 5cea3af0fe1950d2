"""Errors and warnings of the Python API name its own arguments and functions."""

from __future__ import annotations

import warnings

import pytest

import fivefold as ff
from fivefold.api.documentation import use_python_words


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("raise --gbs, or use --set offload=optimizer", "raise gbs, or use offload=optimizer"),
        ("--risk 0.42 accepts 'dp8 zero3 mbs1'", "risk=0.42 accepts 'dp8 zero3 mbs1'"),
        ("add --gpu-counts 64-8192", "add gpu_counts=64-8192"),
        ("--exact searches without a work limit", "exact=True searches without a work limit"),
        ("unknown model 'x'; `fivefold models` lists all", "unknown model 'x'; ff.models() lists all"),
        (
            "drop it; fivefold search m h100 --tokens 15T; or --gbs",
            "drop it; fivefold search m h100 --tokens 15T; or gbs",
        ),
    ],
)
def test_options_of_a_message_become_keyword_arguments(message: str, expected: str) -> None:
    assert use_python_words(message) == expected


def test_an_error_names_the_argument() -> None:
    with pytest.raises(ff.UserError, match=r"^memory 'lots' is not a size"):
        ff.search("nano", "h100:2", memory="lots")
    with pytest.raises(ff.UserError, match=r"ff\.models\(\) lists all"):
        ff.predict("nanoo", "h100:2", "dp2")


def test_a_value_that_an_argument_does_not_have_is_an_error() -> None:
    with pytest.raises(ff.UserError, match=r"^by='speed' is not one of 'time', 'cost', 'memory'"):
        ff.search("nano", "h100:2", by="speed")
    with pytest.raises(ff.UserError, match=r"^batch='large' is not one of 'advised', 'job'"):
        ff.plan("nano", "h100:2", batch="large")


def test_a_warning_points_to_the_line_of_the_caller() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ff.predict("nano", "h100:4", "dp2", gbs=8)
    assert [warning.filename for warning in caught] == [__file__]
