"""A traced step as a row like the planner's: what comes one after another, with the messages in each."""

from __future__ import annotations

import pytest

from fivefold.results.spans import RankStep, Span


def test_a_rank_of_a_trace_has_the_messages_of_each_pipeline_action() -> None:
    spans = (
        Span("step", "step 4", 0.0, 1.0),
        Span("data", "data", 0.0, 0.1, within=0),
        Span("wait", "pp p2p", 0.1, 0.2, own=0.1, within=0),  # before an action, so in none
        Span("F", "F0.0", 0.2, 0.6, 0.0, (), 0, 0, within=0),
        Span("call", "attention.qkv", 0.2, 0.5, within=3),
        Span("post", "tp all_gather", 0.2, 0.25, own=0.05, within=4),
        Span("wait", "tp all_gather", 0.25, 0.4, own=0.15, within=4),
        Span("op", "attention.q", 0.4, 0.5, within=4),
        Span("wait", "dp all_gather", 0.5, 0.6, own=0.1, within=3),
        Span("update", "gradient norm", 0.6, 1.0, within=0),
        Span("wait", "world all_reduce", 0.6, 0.7, own=0.1, within=9),
    )
    step = RankStep(4, 0.0, spans, ())
    assert [action.name for action in step.actions()] == ["F0.0"]
    data, action, update = step.row()
    assert (data.name, data.messages, data.axes) == ("data", 0.0, ())
    assert (action.name, action.messages, action.axes) == ("F0.0", pytest.approx(0.3), ("tp", "dp"))
    assert (update.name, update.messages, update.axes) == ("gradient norm", pytest.approx(0.1), ("world",))
