"""The in-place path: long runs are read by the agent where they lie, into blocks that are memory of our own."""

from dataclasses import replace

import pytest

from kv_testing.exchanges import hand_over
from kv_testing.waiting import wait_for
from kv_testing.worlds import FAST, pair
from kv_transfer.direct.in_process import InProcessHub
from kv_transfer.thresholds import IN_PLACE_RUN

ALWAYS = replace(FAST, own_blocks=True, in_place_run_bytes=1)
SHARED = replace(FAST, share_in_place=True)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (FAST, ALWAYS),
        (SHARED, replace(SHARED, in_place_run_bytes=1)),
        (SHARED, replace(ALWAYS, in_place_run_bytes=257)),
    ],
    ids=["sender does not share", "blocks of an engine", "runs too short"],
)
def test_whatever_else_is_staged(prefill, decode):
    """A whole block of all four heads is a run of 4 tokens * 4 heads * 4 floats."""
    with pair(config=decode, prefill_config=prefill) as (p, d, _):
        hand_over(p, d)
        assert (d.count("bytes_read_in_place"), p.count("bytes_out") > 0) == (0, True)


@pytest.mark.parametrize(("theirs", "is_read"), [("here", True), ("there", False), ("", False)])
def test_what_pays_depends_on_the_link(theirs, is_read, monkeypatch):
    """Unless it is set: through shared memory every run would pay here, over a network none does."""
    hosts = iter(["here", theirs])
    monkeypatch.setitem(IN_PLACE_RUN, "shared memory", replace(IN_PLACE_RUN["shared memory"], num_bytes=1))
    monkeypatch.setattr("kv_transfer.agent.loopback.host_id", lambda: next(hosts))
    with pair(config=replace(FAST, own_blocks=True)) as (p, d, _):
        hand_over(p, d)
        assert (d.count("bytes_read_in_place") > 0) == is_read
    assert not [*hosts]


def test_runs_that_are_just_long_enough_are_read_in_place():
    with pair(config=replace(ALWAYS, in_place_run_bytes=256), prefill_config=SHARED) as (p, d, _):
        hand_over(p, d)
        assert d.count("bytes_read_in_place") > 0


def test_what_is_mapped_is_not_read_by_the_agent():
    doors = InProcessHub()
    with pair(config=ALWAYS, direct=doors.door) as (p, d, _):
        hand_over(p, d)
        assert (d.count("bytes_read_in_place"), d.count("bytes_read_directly") > 0) == (0, True)


def test_a_card_that_cannot_be_read_leaves_all_to_staging(monkeypatch):
    monkeypatch.setattr("kv_transfer.in_place.caches.SharedCaches.card", lambda self: _card(b"no blob"))
    with pair(config=ALWAYS) as (p, d, _):
        hand_over(p, d)
        assert d.count("bytes_read_in_place") == 0


def test_blocks_that_were_given_up_during_the_read_prove_nothing(monkeypatch):
    """The sender's engine takes the offer back while it is read: what was read is not counted."""
    with pair(config=ALWAYS) as (p, d, hub):
        hand_over(p, d, name="first")
        hub.stop(p.agents[0].name)
        transfer = p.offer("taken")
        d.order(p, transfer, "taken")
        wait_for(lambda: d.cores[0].loads.receiver.reads._in_place._posted, 10, "the read")
        (session,) = p.cores[0].sender._sessions.values()
        p.ranks[0]._reactor.post(lambda: p.cores[0].sender.chunk_failed(session, "gone", "the engine took it back"))
        wait_for(lambda: d.step() is not None and not p.cores[0].sender._sessions, 10, "the end of the session")
        hub.resume(p.agents[0].name)
        received = d.outcome("taken", others=[p])
        assert not received.ok
        # Which of the two words comes first, the refusal or the answer to our Close, is a matter of time.
        assert "took it back" in received.reason or "is not proven" in received.reason
        d.release(p, transfer, "taken")
        hand_over(p, d, name="next")


def test_a_stopped_peer_keeps_the_blocks_it_may_still_fill_and_nothing_else():
    """A load is decided by its deadline, and told when no byte can come any more: here when the peer goes on."""
    with pair(config=replace(ALWAYS, request_deadline_s=1.0)) as (p, d, hub):
        hand_over(p, d, name="first")
        hub.stop(p.agents[0].name)
        transfer = p.offer("late")
        d.order(p, transfer, "late")
        wait_for(lambda: d.cores[0].loads._loads and not _load(d, "late").is_open, 10, "the deadline")
        d.step()
        assert [each for _, each in d.received if each.request_id == "late"] == [], "its blocks may still be written"
        hub.resume(p.agents[0].name)
        received = d.outcome("late", others=[p])
        assert "deadline" in received.reason
        d.release(p, transfer, "late")
        hand_over(p, d, name="next")


def test_a_dead_peer_gives_the_blocks_back_after_a_grace():
    with pair(config=replace(ALWAYS, request_deadline_s=1.0)) as (p, d, hub):
        hand_over(p, d, name="first")
        hub.stop(p.agents[0].name)
        d.order(p, p.offer("lost"), "lost")
        wait_for(lambda: d.cores[0].loads.receiver.reads._in_place._posted, 10, "the read")
        hub.kill(p.agents[0].name)
        received = d.outcome("lost", others=[p])
        assert "could not be read in place: the agent is gone" in received.reason
        p.close()
        d.check_clean()


def test_a_load_that_was_read_for_is_not_tried_again():
    """Its peer is dead, and a newer run might have the prompt; but what the dead one sent may still land."""
    with pair(config=ALWAYS) as (p, d, hub):
        hand_over(p, d, name="first")
        hub.stop(p.agents[0].name)
        d.order(p, p.offer("lost"), "lost")
        wait_for(lambda: d.cores[0].loads.receiver.reads._in_place._posted, 10, "the read")
        (session,) = d.cores[0].loads.receiver._sessions.values()
        d.ranks[0]._reactor.post(lambda: d.cores[0].peers.dead(session.peer, "a test says so"))
        assert "is dead: a test says so" in d.outcome("lost", others=[p]).reason
        d.check_clean()


def test_an_abort_ends_a_read():
    with pair(config=ALWAYS) as (p, d, hub):
        hand_over(p, d, name="first")
        hub.delay(d.agents[0].name, 0.3)
        transfer = p.offer("given up")
        d.order(p, transfer, "given up")
        wait_for(lambda: d.cores[0].loads.receiver.reads._in_place._posted, 10, "the read")
        d.abort("given up")
        assert "aborted" in d.outcome("given up", others=[p]).reason
        d.release(p, transfer, "given up")
        hub.delay(d.agents[0].name, 0.0)
        hand_over(p, d, name="next")


def _load(side, request_id):
    return side.cores[0].loads._loads[request_id]


def _card(blob):
    from kv_transfer.agent.cards import DirectCard

    return DirectCard(kind="in-place", host="loopback", blob=blob)
