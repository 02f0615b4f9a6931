"""What is told in a book is read without waiting for its owner, and believed only while it is told."""

import pytest

from kv_core.ids import Rank
from kv_core.spans import Span
from kv_testing.exchanges import hand_over
from kv_testing.growing import GrowingPrompt
from kv_testing.waiting import wait_for
from kv_testing.worlds import NUM_TOKENS, Switches, pair, state_of
from kv_transfer.direct.book import BookReader
from kv_transfer.direct.in_process import InProcessCaches, InProcessHub


@pytest.fixture
def doors():
    return InProcessHub()


def book_of(side):
    return side.cores[0]._room.direct.book


def reads(monkeypatch, run):
    """Calls `run` before each direct read."""
    read = InProcessCaches.read

    def first(self, what, into):
        run()
        read(self, what, into)

    monkeypatch.setattr(InProcessCaches, "read", first)


@pytest.mark.parametrize(("theirs", "ours"), [(1, 1), (2, 1), (1, 2)])
def test_an_owner_that_says_nothing_more_is_read_all_the_same(doors, theirs, ours):
    """No step of its processor lies between the order and the loaded blocks, once its caches are mapped."""
    faults = Switches()
    with pair(state_of(theirs), state_of(ours), prefill_faults=faults, direct=doors.door) as (p, d, _):
        hand_over(p, d, name="first")
        transfer = p.offer()
        wait_for(lambda: all(len(core._room.direct.book) == 1 for core in p.cores), what="told offers")
        faults.dropped = {"Ready", "Quiet", "Refuse", "Data"}
        d.order(p, transfer)
        assert all(received.ok for received in d.outcomes(others=[p]))
        assert d.misplaced() == 0
        faults.dropped = set()
        d.release(p, transfer)
        d.check_clean()
        p.check_clean()


def test_a_peer_that_is_introduced_again_is_read_once_and_asked(doors, monkeypatch):
    """Its Ask was to come a little later; an introduction in between says it now."""
    with pair(direct=doors.door) as (p, d, _):
        hand_over(p, d, name="first")
        # Not before: if the first offer is told by the time it is ordered, its Ask too would never come.
        monkeypatch.setattr("kv_transfer.receiver.ASK_LATER_S", 3600.0)
        receiver, num_reads = d.cores[0].loads.receiver, []

        def introduce():
            num_reads.append(1)
            assert p.cores[0].sender.num_sessions == 0, "asked before it was introduced again"
            (peer,) = d.cores[0].peers._peers.values()
            for _ in range(2):
                d.ranks[0]._reactor.post(lambda: receiver.peer_introduced(peer))
            wait_for(lambda: p.cores[0].sender.num_sessions == 1, what="the Ask")

        transfer = p.offer(request_id="p1")
        wait_for(lambda: len(book_of(p)) == 1, what="a told offer")
        reads(monkeypatch, introduce)
        d.order(p, transfer)
        assert d.outcome(others=[p]).ok
        assert (len(num_reads), d.misplaced()) == (1, 0)
        d.release(p, transfer)
        d.check_clean()
        p.check_clean()


def let_go_unheard(p, faults):
    """The offer ends, its blocks are used again, and no Ask came to hold them."""
    p.withdraw()
    wait_for(lambda: p.step() and p.sent, 10, "the end of the offer")
    for plane in p.world.caches[Rank(0)].planes:
        plane.fill_(7)


@pytest.mark.parametrize("believes", [False, True], ids=["as it is", "control: whatever was told is believed"])
def test_blocks_that_are_used_again_while_they_are_read_are_not_believed(doors, monkeypatch, believes):
    faults = Switches()
    with pair(decode_faults=faults, direct=doors.door) as (p, d, _):
        hand_over(p, d, name="first")
        p.sent.clear()
        faults.dropped = {"Ask"}
        reads(monkeypatch, lambda: let_go_unheard(p, faults))
        if believes:
            monkeypatch.setattr(BookReader, "stands", lambda *_: True)
        transfer = p.offer(request_id="p1")
        wait_for(lambda: len(book_of(p)) == 1, what="a told offer")
        monkeypatch.setattr(p, "withdraw", lambda: type(p).withdraw(p, "p1"))
        d.order(p, transfer)
        wait_for(lambda: d.step() is not None and len(d.received) == 2, 20, "the outcome")
        received = d.received[-1][1]
        assert received.ok == believes, received.reason
        assert d.misplaced(Span(0, 0)) > 0, "what was read is not what was offered"


def test_what_the_ask_held_counts_although_it_is_told_no_more(doors, monkeypatch):
    """Then the answer to the Close is the proof, as without a book."""
    with pair(direct=doors.door) as (p, d, _):
        hand_over(p, d, name="first")

        def withdrawn():
            wait_for(lambda: p.cores[0].sender.num_sessions, what="the Ask")
            p.withdraw("p1")
            wait_for(lambda: p.step() is not None and not len(book_of(p)), what="the end of the entry")

        reads(monkeypatch, withdrawn)
        transfer = p.offer(request_id="p1")
        d.order(p, transfer)
        received = d.outcome(others=[p])
        assert received.ok, received.reason
        assert d.misplaced() == 0
        p.check_clean()


def test_an_offer_is_told_from_its_completion_to_its_settlement(doors):
    with pair(direct=doors.door) as (p, _, _):
        book, prompt = book_of(p), GrowingPrompt(p).open(4)
        prompt.advance(NUM_TOKENS)
        wait_for(lambda: p.cores[0].sender.offers.num_growing == 1, what="a growing offer")
        assert len(book) == 0
        prompt.complete()
        wait_for(lambda: len(book) == 1, what="a told offer")
        p.withdraw()
        wait_for(lambda: p.step() == [(0, "p0")], what="the end of the offer")
        assert len(book) == 0


def test_a_rank_that_closes_tells_nothing_any_more(doors):
    with pair(direct=doors.door) as (p, _, _):
        book = book_of(p)
        p.offer()
        wait_for(lambda: len(book) == 1, what="a told offer")
        p.close()
        assert len(book) == 0
