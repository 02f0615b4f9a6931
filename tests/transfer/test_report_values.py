"""Reports, their line, and their sums, by a clock that is turned by hand."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.ids import RequestId, TransferId
from kv_transfer.history import NUM_RECENT, History
from kv_transfer.reports import Direction, Leg, Marks, Path, Stages, TransferReport, latest, line_of
from kv_transfer.tally import BOUNDS_S, Tally, Way

TRANSFER = TransferId("7f3a90c1" + "0" * 24)
STAGES = Stages(0.0021, 0.00004, 0.001, 0.0044, 0.0018, 0.0)


def leg(peer="10.0.0.7:5601 rank 0", path=Path.STAGED, why="other host", num_bytes=12 << 20):
    return Leg(peer, path, why, num_bytes, 12, 3, STAGES)


def report(*legs, name="d0", ok=True, reason="", direction=Direction.LOAD, stages=STAGES):
    return TransferReport(direction, RequestId(name), TRANSFER, ok, reason, 496, 31, legs, stages)


times = st.none() | st.floats(0, 100)


@given(st.floats(0, 100), st.lists(times, min_size=5, max_size=5), st.floats(0, 200))
def test_stages_add_up_whatever_was_reached(begun, marks, took) -> None:
    stages = Marks(begun, *marks).stages(begun + took)
    assert min(stages) >= 0
    assert stages.total == pytest.approx(took, abs=1e-9)


@pytest.mark.parametrize("stage", range(6))
def test_a_delay_shows_in_its_own_stage(stage) -> None:
    ends = [10.0 + 0.001 * (n + 1) + (5.0 if n >= stage else 0.0) for n in range(6)]
    stages = Marks(10.0, *ends[:5]).stages(ends[5])
    assert [round(s, 6) for s in stages] == [5.001 if n == stage else 0.001 for n in range(6)]


@pytest.mark.parametrize("num_reached", range(6))
def test_a_transfer_that_ends_early_spent_the_rest_where_it_was(num_reached) -> None:
    marks = [float(n + 1) for n in range(num_reached)] + [None] * (5 - num_reached)
    stages = Marks(0.0, *marks).stages(30.0)
    assert list(stages) == [1.0] * num_reached + [30.0 - num_reached] + [0.0] * (5 - num_reached)


def test_a_whole_has_reached_what_its_last_leg_has() -> None:
    first, second = Marks(0.0, 1.0, 2.0, 2.0, 9.0, 10.0), Marks(0.0, 3.0, 4.0, 4.0, 5.0, 6.0)
    assert latest(0.0, [first, second]) == Marks(0.0, 3.0, 4.0, 4.0, 9.0, 10.0)
    assert latest(0.0, [first, Marks(0.0, 1.0)]) == Marks(0.0, 1.0)
    assert latest(0.0, []) == Marks(0.0)


def test_the_line_of_a_load() -> None:
    assert line_of(report(leg())) == (
        "load d0 (transfer 7f3a90c1) from 10.0.0.7:5601 rank 0: 31 blocks, 12.0 MiB, 12 chunks in 9.3 ms "
        "(prepare 2.1, gather 1.0, wire 4.4, scatter 1.8), staged: other host"
    )


def test_the_lines_of_others() -> None:
    legs = [leg(path=Path.DIRECT, why="same host"), leg("10.0.0.8:5601 rank 1", num_bytes=1 << 19)]
    assert line_of(report(*legs)) == (
        "load d0 (transfer 7f3a90c1) from 10.0.0.7:5601 rank 0 and 1 more: 31 blocks, 12.5 MiB, 24 chunks in 9.3 ms "
        "(prepare 2.1, gather 1.0, wire 4.4, scatter 1.8), staged: other host"
    )
    failed = report(legs[0], ok=False, reason="deadline of 30 s", stages=Stages(prepare=30.0), direction=Direction.SEND)
    assert line_of(failed) == (
        "send d0 (transfer 7f3a90c1) to 10.0.0.7:5601 rank 0: failed: deadline of 30 s; 31 blocks, 12.0 MiB, "
        "12 chunks in 30000.0 ms (prepare 30000.0), direct: same host"
    )
    assert line_of(report(stages=Stages())) == (
        "load d0 (transfer 7f3a90c1): 31 blocks, 0.0 MiB, 0 chunks in 0.0 ms, local: nothing to move"
    )


def test_one_line_a_second_says_how_many_there_were(caplog) -> None:
    now = [0.0]
    history = History(lambda: now[0])
    with caplog.at_level(logging.DEBUG, "kv_transfer.history"):
        for at in (0.0, 0.1, 0.9, 1.0, 3.0):
            now[0] = at
            history.add(report(leg(), name=f"d{at}"))
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in said] == ["INFO", "DEBUG", "DEBUG", "INFO", "INFO"]
    assert [text.split()[1] for _, text in said] == ["d0.0", "d0.1", "d0.9", "d1.0", "d3.0"]
    more = [text.endswith("(and 2 more since the last line)") for _, text in said]
    assert more == [False, False, False, True, False]
    assert said[1][1] == line_of(report(leg(), name="d0.1"))


def test_history_is_bounded_and_each_report_is_told_once() -> None:
    told = []
    history = History(lambda: 0.0, told.append)
    made = [report(leg(), name=f"d{number}") for number in range(NUM_RECENT + 10)]
    for each in made:
        history.add(each)
    assert history.recent == (), "not published yet"
    assert list(history.publish()) == made[10:]
    assert history.publish() is history.recent
    assert told == made


def test_sums_are_of_legs_and_failures_are_not_timed() -> None:
    tally = Tally()
    before = tally.snapshot()
    tally.add(report(leg(num_bytes=5), leg(path=Path.DIRECT, num_bytes=7)))
    tally.add(report(leg(num_bytes=1), ok=False, reason="aborted"))
    tally.add(report(ok=True))
    totals = tally.snapshot()
    assert totals.transfers == {
        ("load", "staged", "ok"): 1,
        ("load", "staged", "failed"): 1,
        ("load", "local", "ok"): 1,
    }
    assert totals.num_bytes == {("load", "staged"): 6, ("load", "direct"): 7}
    assert totals.chunks == {("load", "staged"): 24, ("load", "direct"): 12}
    assert totals.pieces[Way(Direction.LOAD, Path.DIRECT)] == 3
    wire = totals.seconds[Direction.LOAD, "wire"]
    assert sum(wire.counts) == 2
    assert wire.sum_s == pytest.approx(0.0088)
    assert wire.counts[BOUNDS_S.index(0.005)] == 2, "4.4 ms lie in the bucket up to 5"
    assert before.transfers == {}, "a snapshot stays as it is"


def test_a_bound_belongs_to_its_bucket() -> None:
    tally = Tally()
    for seconds in (BOUNDS_S[3], BOUNDS_S[-1] + 1):
        tally.add(report(stages=Stages(wire=seconds)))
    counts = tally.snapshot().seconds[Direction.LOAD, "wire"].counts
    assert (counts[3], counts[-1]) == (1, 1)
