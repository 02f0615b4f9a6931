"""The worker side over a stand-in for the transceiver: every end is reported once, with what an engine needs of it."""

import pytest

from kv_core.ids import Rank, RequestId, TransferId
from kv_core.keys import BlockKey
from kv_core.spans import Span
from kv_engine_adapter.orders import AbandonOffer, GrowOffer, LoadBlocks, OpenOffer, SettleOffer, StepOrders
from kv_transfer.orders import LoadTimes, Progress, Received
from kv_transfer.reports import Direction, Leg, Path, Stages, TransferReport
from kv_transfer.status import Status

worker_module = pytest.importorskip("kv_engine_adapter.worker")

KEY, TRANSFER = BlockKey(b"k" * 32), TransferId("ab" * 16)


class FakeCard:
    rank = Rank(1)


class FakeTransceiver:
    card = FakeCard()

    def __init__(self):
        self.calls = []
        self.progress = Progress((), ())
        self.gauges, self.counters = {}, {}

    def offer(self, offer):
        self.calls.append(("offer", offer))

    def advance(self, *args):
        self.calls.append(("advance", args))

    def complete(self, request_id):
        self.calls.append(("complete", request_id))

    def abandon(self, *args, comes_again):
        self.calls.append(("abandon", (*args, comes_again)))

    def settle(self, *args):
        self.calls.append(("settle", args))

    def receive(self, order):
        self.calls.append(("receive", order))

    def abort(self, request_id):
        self.calls.append(("abort", request_id))

    def poll(self):
        progress, self.progress = self.progress, Progress((), ())
        return progress

    def status(self):
        return Status(dict(self.gauges), dict(self.counters))

    def close(self):
        self.calls.append(("close", None))


def report(name, ok=True, direction=Direction.LOAD, path=Path.STAGED):
    leg = Leg("10.0.0.7:5601 rank 0", path, "", 1000, 4, 2, Stages(0.1, 0.0, 0.0, 0.3, 0.1))
    reason = "" if ok else "peer is gone"
    return TransferReport(direction, RequestId(name), TRANSFER, ok, reason, 59, 4, (leg,), leg.stages)


@pytest.fixture
def transceiver():
    return FakeTransceiver()


@pytest.fixture
def worker(transceiver):
    # Blocks of the scheduler are two blocks of the tensors.
    halves = lambda tables: tuple(tuple(2 * block + i for block in ids for i in (0, 1)) for ids in tables)  # noqa: E731
    return worker_module.FerryWorker(transceiver, halves, 32)


def load(name="d1"):
    return LoadBlocks(RequestId(name), TRANSFER, KEY, Span(40, 99), ((7, 8, 9, 10),), "127.0.0.1", 5600, None)


def received(name, ok):
    return Received(RequestId(name), ok, "" if ok else "peer is gone", 1000 if ok else 0, 1, 1, LoadTimes(total_s=0.5))


def test_orders_become_calls_and_an_offer_opens_before_it_settles(worker, transceiver):
    offer = OpenOffer(RequestId("p1"), TRANSFER, KEY, 70, ((1, 2, 3),))
    end = SettleOffer(RequestId("p1"), TRANSFER, "released")
    worker.run(StepOrders((offer,), (end,), (load(),), (RequestId("d0"),)))
    assert [name for name, _ in transceiver.calls] == ["offer", "settle", "receive", "abort"]
    assert transceiver.calls[0][1].tables.by_group == ((2, 3, 4, 5, 6, 7),)
    assert transceiver.calls[2][1].tokens == Span(40, 99)
    assert transceiver.calls[2][1].tables.by_group == ((14, 15, 16, 17, 18, 19, 20, 21),)


def test_every_end_is_reported_once_and_a_failed_load_is_received_too(worker, transceiver, caplog):
    worker.run(StepOrders(loads=(load("good"), load("bad"))))
    transceiver.progress = Progress((RequestId("p1"),), (received("good", True), received("bad", False)))
    ended = worker.poll()
    assert (ended.sent, ended.received, ended.failed) == ({"p1"}, {"good", "bad"}, {"bad"})
    assert "peer is gone" in caplog.text
    again = worker.poll()
    assert (again.sent, again.received, again.failed) == (set(), set(), set())


def test_failed_blocks_are_those_of_the_wanted_tokens_told_once(worker, transceiver):
    worker.run(StepOrders(loads=(load(),)))
    transceiver.progress = Progress((), (received("d1", False),))
    worker.poll()
    assert worker.take_failed_blocks() == {8, 9, 10}, "block 0 held tokens that were here already"
    assert worker.take_failed_blocks() == set()


def test_a_report_is_made_only_when_something_changed(worker, transceiver):
    transceiver.gauges = {"sessions": 1, "leases": 2}
    first = worker.take_report()
    assert first["gauges"] == {"rank1": {"sessions": 1, "leases": 2, "quarantined": 0, "threads_troubled": 0}}
    assert worker.take_report() is None
    worker.run(StepOrders(loads=(load(),)))
    transceiver.progress = Progress((), (received("d1", True),))
    transceiver.counters = {"bytes_out": 77}
    transceiver.gauges = {}
    worker.poll()
    second = worker.take_report()
    assert second["counters"] == {"loads": 1, "load_seconds": 0.5, "bytes_received": 1000, "bytes_sent": 77}
    assert second["gauges"] == {"rank1": {"sessions": 0, "leases": 0, "quarantined": 0, "threads_troubled": 0}}
    assert worker.take_report() is None


def test_what_transfers_moved_and_how_long_their_stages_took(worker, transceiver):
    """Of those that failed only what they moved."""
    ends = (
        report("d1"),
        report("d2", path=Path.DIRECT),
        report("d3", ok=False),
        report("p1", direction=Direction.SEND),
    )
    transceiver.progress = Progress((), (), ends)
    worker.poll()
    told = worker.take_report()
    assert told["counters"] == {
        "transfers|load|staged|ok": 1,
        "transfers|load|direct|ok": 1,
        "transfers|load|staged|failed": 1,
        "transfers|send|staged|ok": 1,
        "transfer_bytes|load|staged": 2000,
        "transfer_bytes|load|direct": 1000,
        "transfer_bytes|send|staged": 1000,
        "transfer_chunks|load|staged": 8,
        "transfer_chunks|load|direct": 4,
        "transfer_chunks|send|staged": 4,
    }
    assert told["samples"]["seconds|load|wire"] == [0.3, 0.3]
    assert told["samples"]["seconds|send|total"] == [pytest.approx(0.5)]
    transceiver.counters = {"bytes_out": 1}
    assert "samples" not in worker.take_report(), "each is told once"


def grown(num_computed, tables):
    return GrowOffer(RequestId("p1"), TRANSFER, KEY, 70, num_computed, tables)


def test_a_prompt_that_grows_is_offered_advanced_and_completed(worker, transceiver):
    worker.hear(StepOrders(growing=(grown(0, ((1,),)),)))
    worker.hear(StepOrders(growing=(grown(32, ((1, 2),)),)))
    worker.run(StepOrders(offers=(OpenOffer(RequestId("p1"), TRANSFER, KEY, 70, ((1, 2, 3),)),)))
    (_, offer), *rest = transceiver.calls
    assert (offer.num_computed, offer.num_tokens, offer.tables.by_group) == (0, 70, ((2, 3),))
    halves = ((2, 3, 4, 5, 6, 7),)
    assert rest == [
        ("advance", ("p1", 32, ((2, 3, 4, 5),))), ("advance", ("p1", 70, halves)), ("complete", "p1"),
    ]  # fmt: skip


def test_a_prompt_that_was_given_up_is_offered_anew_when_it_has_finished(worker, transceiver):
    worker.hear(StepOrders(growing=(grown(0, ((1,),)),)))
    worker.run_now(StepOrders(abandoned=(AbandonOffer(RequestId("p1"), "preempted", True),)))
    worker.run_now(StepOrders(offers=(OpenOffer(RequestId("p1"), TRANSFER, KEY, 70, ((4, 5, 6),)),)))
    assert transceiver.calls[1] == ("abandon", ("p1", "preempted", True))
    name, offer = transceiver.calls[2]
    assert (name, offer.num_computed, offer.tables.by_group) == ("offer", None, ((8, 9, 10, 11, 12, 13),))
