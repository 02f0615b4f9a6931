"""What is told of each load and each session, over real threads: what moved, by which path, and where its time went.

A stage is delayed by half a second; it is then the longest of its report by far, whatever else a machine does.
"""

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from kv_core.spans import Span
from kv_testing.hangs import planted
from kv_testing.waiting import wait_for
from kv_testing.worlds import FAST, NUM_TOKENS, Side, Switches, fresh_id, make_side, pair, sides, state_of
from kv_transfer.agent.loopback import LoopbackHub
from kv_transfer.direct.book import BookReader
from kv_transfer.direct.in_process import InProcessHub
from kv_transfer.reports import Direction, Path, TransferReport

ROW_BYTES = 4 * 4 * 2 * 4 * 4
"""Of one token: layers, heads, K and V, elements, bytes of each."""
DELAY_S = 0.5


def _report(side: Side, direction: Direction, num: int = 1, rank: int = 0) -> TransferReport:
    """The last of so many reports of this direction."""

    def found() -> list[TransferReport]:
        return [each for each in side.ranks[rank].status().reports if each.direction is direction]

    return wait_for(lambda: found() if len(found()) >= num else [], what="the report")[-1]


def _longest(report: TransferReport) -> str:
    stage, seconds = max(report.stages._asdict().items(), key=lambda each: each[1])
    assert seconds > 0.8 * DELAY_S
    return stage


def test_a_load_and_its_sends_add_up() -> None:
    with pair(state_of(2)) as (p, d, _):
        transfer = p.offer()
        d.order(p, transfer, tokens=Span(3, NUM_TOKENS))
        received = d.outcome(others=[p])
        d.release(p, transfer)
        load = _report(d, Direction.LOAD)
        assert (load.name, load.transfer_id, load.ok, load.reason) == ("d0", transfer, True, "")
        assert (load.num_tokens, load.num_blocks) == (NUM_TOKENS - 3, 10)
        assert (load.num_bytes, load.num_chunks) == (received.num_bytes, received.num_chunks)
        assert load.num_bytes == (NUM_TOKENS - 3) * ROW_BYTES == d.count("bytes_in")
        assert load.stages.total == pytest.approx(received.times.total_s, abs=1e-6)
        assert (load.path, load.why) == (Path.STAGED, "no direct path here")
        assert [leg.peer for leg in load.legs] == [
            f"127.0.0.1:{each.card.port} rank {each.card.rank}" for each in p.ranks
        ]
        for leg in load.legs:
            assert leg.stages.total == pytest.approx(load.stages.total, abs=1e-6)
        sends = [_report(p, Direction.SEND, rank=rank) for rank in range(2)]
        for send, leg in zip(sends, load.legs, strict=True):
            assert (send.name, send.ok, send.path) == ("p0", True, Path.STAGED)
            assert (send.num_bytes, send.num_chunks, send.num_pieces) == (leg.num_bytes, leg.num_chunks, leg.num_pieces)
            assert send.stages.scatter == 0.0
            assert send.stages.total > 0
        assert sum(send.num_bytes for send in sends) == load.num_bytes == p.count("bytes_out")


def test_every_report_is_told_once_when_polled() -> None:
    with pair() as (p, d, _):
        told: list[TransferReport] = []
        for number in range(3):
            transfer = p.offer(f"p{number}")
            d.order(p, transfer, f"d{number}")

            def has_come(number: int = number) -> bool:
                p.step()
                told.extend(d.ranks[0].poll().reports)
                return len(told) > number

            wait_for(has_come, what="the report")
        assert [report.name for report in told] == ["d0", "d1", "d2"]
        assert d.ranks[0].poll().reports == ()


def _later(condition: Callable[[], Any], do: Callable[[], Any]) -> None:
    """Do something `DELAY_S` after this has come true."""

    def run() -> None:
        wait_for(condition)
        time.sleep(DELAY_S)
        do()

    threading.Thread(target=run, daemon=True).start()


@contextmanager
def _late_offer(p: Side, d: Side, hub: LoopbackHub) -> Iterator[str]:
    transfer = fresh_id()
    _later(lambda: p.ranks[0].status().gauges["parked"], lambda: p.offer(transfer_id=transfer))
    yield transfer


@contextmanager
def _late_memory(p: Side, d: Side, hub: LoopbackHub) -> Iterator[str]:
    core = d.cores[0]
    held = []

    def take() -> None:
        arena = core._arenas[1]
        held.append(arena.lease(arena.max_lease_bytes, "somebody"))

    def give_back() -> None:
        held.pop().release()
        core.loads.receiver.arrivals.pump()

    d.ranks[0]._reactor.post(take)
    sessions = core.loads.receiver._sessions
    is_ready = lambda: any(each.marks.ready for each in list(sessions.values()))  # noqa: E731
    _later(is_ready, lambda: d.ranks[0]._reactor.post(give_back))
    yield p.offer()


@contextmanager
def _slow_wire(p: Side, d: Side, hub: LoopbackHub) -> Iterator[str]:
    hub.delay(p.agents[0].name, DELAY_S)
    yield p.offer()


@contextmanager
def _slow_copies(side: Side) -> Iterator[None]:
    with planted(side.cores[0].sender.passages._copier._summer, "checksum") as plant:
        plant._do = lambda: time.sleep(DELAY_S)
        yield


@contextmanager
def _slow_gather(p: Side, d: Side, hub: LoopbackHub) -> Iterator[str]:
    with _slow_copies(p):
        yield p.offer()


@contextmanager
def _slow_scatter(p: Side, d: Side, hub: LoopbackHub) -> Iterator[str]:
    with _slow_copies(d):
        yield p.offer()


@pytest.mark.parametrize(
    ("delay", "of_load", "of_send"),
    [
        (_late_offer, "prepare", "prepare"),
        (_late_memory, "queue", "queue"),
        (_slow_gather, "wire", "gather"),
        (_slow_wire, "wire", "wire"),
        (_slow_scatter, "scatter", "finish"),
    ],
)
def test_a_delayed_stage_shows_in_its_own_field(delay, of_load, of_send) -> None:
    """Seen from the receiver, gathering is a part of the wire; seen from the sender, scattering is a wait for Close."""
    # One chunk, so that stages do not overlap.
    with pair(config=replace(FAST, chunk_bytes=1 << 16)) as (p, d, hub), delay(p, d, hub) as transfer:
        d.order(p, transfer)
        received = d.outcome(others=[p])
        assert received.ok
        d.release(p, transfer)
        load, send = _report(d, Direction.LOAD), _report(p, Direction.SEND)
        assert (load.num_chunks, send.num_chunks) == (1, 1)
        assert load.stages.total == pytest.approx(received.times.total_s, abs=1e-6)
        assert (_longest(load), _longest(send)) == (of_load, of_send)


def test_a_direct_read_and_its_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """The read is the wire; what comes after it is the wait for the owner's word, where its book cannot be seen."""
    monkeypatch.setattr(BookReader, "find", lambda *_: None)
    hub, faults, direct = LoopbackHub(), Switches(), InProcessHub()
    p = make_side(hub, "p", state_of(), faults=faults, direct=direct.door)
    d = make_side(hub, "d", state_of(), direct=direct.door)
    with sides(p, d):
        transfer = p.offer()
        faults.dropped.add("Quiet")
        _later(lambda: faults.num_said["Quiet"], faults.dropped.clear)
        d.order(p, transfer)
        assert d.outcome(others=[p]).ok
        d.release(p, transfer)
        load, send = _report(d, Direction.LOAD), _report(p, Direction.SEND)
        assert (load.path, load.why) == (Path.DIRECT, "same host")
        assert (send.path, send.ok) == (Path.DIRECT, True)
        assert load.num_bytes == send.num_bytes == NUM_TOKENS * ROW_BYTES == d.count("bytes_read_directly")
        assert load.num_chunks == send.num_chunks
        assert load.stages.wire > 0
        assert _longest(load) == "finish"


@pytest.mark.parametrize(
    ("which", "why"),
    [("card", "its caches cannot be mapped"), ("host", "other host"), ("map", "mapping failed: no such caches")],
)
def test_why_it_was_staged(which, why) -> None:
    hub, direct, elsewhere = LoopbackHub(), InProcessHub(), InProcessHub()
    doors = []

    def theirs(caches):
        door = (elsewhere if which == "host" else direct).door(caches)
        doors.append(door)
        return None if which == "card" else door

    p = make_side(hub, "p", state_of(), direct=theirs)
    d = make_side(hub, "d", state_of(), direct=direct.door)
    with sides(p, d):
        if which == "map":
            doors[0].withdraw()
        transfer = p.offer()
        d.order(p, transfer)
        assert d.outcome(others=[p]).ok
        load = _report(d, Direction.LOAD)
        assert load.path is Path.STAGED
        assert load.why.startswith(why)


def test_nothing_to_move_is_local() -> None:
    with pair() as (p, d, _):
        d.order(p, p.offer(), tokens=Span(5, 5))
        assert d.outcome(others=[p]).ok
        load = _report(d, Direction.LOAD)
        assert (load.path, load.why, load.legs, load.num_bytes) == (Path.LOCAL, "nothing to move", (), 0)


def test_what_fails_is_told_with_its_reason_and_was_warned_of(caplog) -> None:
    """The time it took lies in the stage it failed in."""
    with caplog.at_level(logging.DEBUG, "kv_transfer"), pair() as (p, d, _):
        d.order(p, fresh_id(), "never")
        time.sleep(DELAY_S)
        d.abort("never")
        assert not d.outcome("never").ok
        load = _report(d, Direction.LOAD)
        assert (load.ok, load.reason, load.num_bytes) == (False, "aborted by the engine", 0)
        assert _longest(load) == "prepare"
        send = _report(p, Direction.SEND)
        assert (send.ok, send.name) == (False, "unknown")
        assert "cancelled by its receiver: aborted by the engine" in send.reason
        assert d.ranks[0].status().totals.transfers == {("load", "staged", "failed"): 1}
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "request never was not loaded: aborted by the engine" in warnings
    lines = [record.getMessage() for record in caplog.records if record.name == "kv_transfer.history"]
    assert any(
        re.match(r"load never .*: failed: aborted by the engine; 10 blocks, 0\.0 MiB, 0 chunks", line) for line in lines
    )


def test_what_has_ended_can_be_read_after_the_end() -> None:
    with pair() as (p, d, _):
        transfer = p.offer()
        d.order(p, transfer)
        assert d.outcome(others=[p]).ok
        for side in (d, p):
            side.ranks[0].close()
        assert [report.name for report in d.ranks[0].status().reports] == ["d0"]
        assert d.ranks[0].status().totals.num_bytes == {("load", "staged"): NUM_TOKENS * ROW_BYTES}
