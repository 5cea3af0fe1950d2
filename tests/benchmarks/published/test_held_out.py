"""Half of a new source's rows are kept out of every fit; printed collectives are scored next to steps."""

from __future__ import annotations

from zlib import crc32

import pytest

from benchmarks import published
from benchmarks.published import case, cases_of, reader, run
from benchmarks.published.case import Case, Excluded, Message, rows
from benchmarks.published.intervals import learn
from benchmarks.published.score import Score, score, score_message, summarise
from fivefold.layout.mesh import RankGroup
from fivefold.layout.stages import list_stage_layers
from fivefold.planner.time.network import Network

HALVED = ("nccl_logs", "prime_rl", "nanotron_bench", "paddlenlp", "flagperf", "xtuner", "nemo_automodel")


def messages() -> dict[str, Message]:
    return {item.row: item for item in reader("nccl_logs")() if isinstance(item, Message)}


def has_empty_end(case: Case) -> bool:
    return 0 in map(len, list_stage_layers(case.model, case.layout))


@pytest.mark.parametrize("source", HALVED)
def test_the_half_of_a_row_depends_only_on_the_row(source: str) -> None:
    """CRC-32 of the row's id, even: whatever the row says, about as many on either side; and all read late."""
    results = [item for item in reader(source)() if not isinstance(item, Excluded)]
    assert results
    early = {"nemo_automodel-0004", "nemo_automodel-0005", "nemo_automodel-0010"}
    late = {result.row for result in results if source == "nemo_automodel"} - early
    late |= {result.row for result in results if isinstance(result, Case) and has_empty_end(result)}
    for result in results:
        row = result.row.removesuffix(" reserved")  # a second figure of the row
        assert result.held_out == (crc32(row.encode()) % 2 == 0 or result.row in late), row
    halves = [case.is_held_out(row["row_id"]) for row in rows(source)]
    assert 0.25 < sum(halves) / len(halves) < 0.75


def test_other_sources_have_no_held_out_rows() -> None:
    assert not any(item.held_out for item in reader("simumax_b200")() if isinstance(item, Case))


def test_a_held_out_row_is_scored_separately_and_not_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, *_) = (item for item in reader("simumax_b200")() if isinstance(item, Case))
    figures, _ = published.predict_case(one)
    seen = [item for _ in range(6) for item in score(one, figures)]
    unseen = [item.replace(held_out=True) for item in seen]
    assert [item.held_out for item in score(one._replace(held_out=True), figures)] == [True] * (len(seen) // 6)
    assert {row.quantity for row in summarise([*unseen, *seen])} == {"time", "time, held out", "peak", "peak, held out"}
    assert learn(unseen) == ()
    assert learn([*unseen, *seen]) == learn(seen) != ()
    both = iter([one._replace(held_out=True), one])
    monkeypatch.setattr(published, "reader", lambda source: lambda: both)
    assert list(cases_of(["any"])) == [one]


def test_a_composed_row_is_scored_separately_and_not_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, *_) = (item for item in reader("simumax_b200")() if isinstance(item, Case))
    made = one._replace(composed=True, memory_bytes=None)
    figures, _ = published.predict_case(one)
    (scored,) = score(made, figures, {"time": 2.0})
    assert (scored.quantity, scored.left_out) == ("composed", 2.0)
    assert learn([scored]) == ()
    both = iter([made, one])
    monkeypatch.setattr(published, "reader", lambda source: lambda: both)
    assert list(cases_of(["any"])) == [one]


def test_a_message_is_priced_over_all_ranks_of_its_machine() -> None:
    result = messages()
    assert {item.collective for item in result.values()} == {"all_reduce"}
    assert {item.machine.ranks for item in result.values()} == {16, 32, 64, 128, 256}
    one = result["nccl_logs-0082"]
    nics = {item.machine.links[-1].bandwidth for item in result.values()}
    assert nics >= {50e9 / 8, 100e9 / 8, 400e9 / 8}  # of p4de, four cards a node and p5
    read = [row for row in rows("nccl_logs") if row["row_id"] in result]
    latencies = {row["network"]: result[row["row_id"]].machine.links[-1].latency_seconds for row in read}
    assert latencies["EFA, p4de.24xlarge"] == pytest.approx(75e-6)
    assert latencies["EFA, p5.48xlarge"] == pytest.approx(20e-6)
    assert latencies["InfiniBand"] == 4e-6
    scored: Score = score_message(one)
    assert scored.measured == one.seconds
    assert scored.predicted == Network(one.machine).seconds("all_reduce", one.payload, RankGroup(one.machine.ranks, 1))


def test_a_bandwidth_that_nccl_tests_prints_is_that_of_the_seconds() -> None:
    """busbw = bytes / seconds · 2 (n - 1) / n (NVIDIA/nccl-tests:doc/PERFORMANCE.md): the rows were copied right."""
    printed = {row["row_id"]: float(row["busbw_gbps"] or 0) for row in rows("nccl_logs")}
    for row, message in messages().items():
        if printed[row] > 1:
            ranks = message.machine.ranks
            bus = message.payload / message.seconds * 2 * (ranks - 1) / ranks / 1e9
            assert bus == pytest.approx(printed[row], rel=0.01), row


def test_messages_of_the_nccl_efa_source_are_held_out_and_have_the_printed_bandwidth() -> None:
    printed = {row["row_id"]: float(row["busbw_gbps"]) for row in rows("nccl_efa")}
    read = [item for item in reader("nccl_efa")() if isinstance(item, Message)]
    assert len(read) == len(printed) == 115
    assert {item.collective for item in read} == {"all_gather", "all_reduce", "all_to_all"}
    for item in read:
        assert item.held_out
        turns = 2 if item.collective == "all_reduce" else 1
        bus = item.payload / item.seconds * turns * (item.machine.ranks - 1) / item.machine.ranks / 1e9
        assert bus == pytest.approx(printed[item.row], rel=0.01), item.row


def test_forced_choices_of_nccl_are_left_out() -> None:
    report = run(["nccl_logs"])
    assert {refusal.rule for refusal in report.excluded} == {
        "NCCL's choice of algorithm, protocol or channels was overridden"
    }
    forced = {row["row_id"] for row in rows("nccl_logs") if "TCPXO" in row["network"] or row["gpus"] == "1024"}
    assert {refusal.row for refusal in report.excluded} == forced
    assert [row.quantity for row in report.summaries] == ["message", "message, held out"]
