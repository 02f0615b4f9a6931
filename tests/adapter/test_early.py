"""Prompts offered while they are computed: what is told after which step, and what ends it."""

from typing import Any

import pytest

from kv_core.ids import Incarnation, InstanceId, RequestId, TransferId
from kv_engine_adapter.early import EarlyTerms
from kv_engine_adapter.known_peers import KnownPeers
from kv_engine_adapter.orders import AbandonOffer
from kv_engine_adapter.ports import ScheduledRequest
from kv_engine_adapter.scheduler import FerryScheduler, Identity
from kv_testing.booked import LEASE_S, LeasedDoor
from kv_testing.fake_door import FakeDoor, FakeRequest
from kv_transfer.orders import Settled

CHOSEN = TransferId("cd" * 16)
P = RequestId("p1")
NUM_TOKENS = 70
COMMON: dict[str, Any] = {"tokens_per_block": 32, "peers": KnownPeers.of(["10.0.0.0/24"]), "shares_prefixes": True}


@pytest.fixture
def door():
    return FakeDoor()


@pytest.fixture
def scheduler(door):
    return make(door)


TERMS = EarlyTerms(lease_s=600.0, num_groups=1, tokens_per_block=32)


def make(door, early=TERMS):
    identity = Identity(InstanceId("engine"), Incarnation("run-9"), tensor_ranks=2, pipeline_stages=1)
    return FerryScheduler(identity, door, lease_s=30, patience_s=60, early=early, **COMMON)


def prefill(transfer_id: object = CHOSEN, name=P, **more):
    params = {"do_remote_decode": True, "transfer_id": transfer_id}
    return FakeRequest(name, list(range(NUM_TOKENS)), params, **more)


def step(scheduler, num_computed=None, num_scheduled=0, blocks=(), *, preempted=(), may_load=False):
    """One step of the engine, with its orders."""
    scheduled = [] if num_computed is None else [ScheduledRequest(P, num_computed, num_scheduled, blocks)]
    scheduler.early.stepped(scheduled, preempted, may_load=may_load)
    scheduler.early.check()
    return scheduler.take_orders()


def told(orders):
    return [(each.num_computed, each.tables) for each in orders.growing]


def begun(scheduler, request=None):
    """It comes, and its first step computes 32 of 70 tokens; what is ordered by then."""
    scheduler.early.announced(request or prefill())
    return step(scheduler, 0, 32, ((5,),))


def test_a_step_is_told_with_the_orders_of_the_next(scheduler, door):
    request = prefill()
    first = begun(scheduler, request)
    assert told(first) == [(0, ((),))], "nothing is computed before the step has run"
    (opened,) = first.growing
    assert (opened.transfer_id, opened.prompt_key, opened.num_tokens) == (CHOSEN, request.prompt_key(), NUM_TOKENS)
    assert door.offers == [(CHOSEN, P, request.prompt_key())]
    assert told(step(scheduler, 32, 32, ((8,),))) == [(32, ((5, 8),))]
    assert told(step(scheduler, 64, 6, ((2,),))) == [(64, ((5, 8, 2),))]
    assert told(step(scheduler, 70, 1)) == [(70, ((5, 8, 2),))]
    assert told(step(scheduler, 71, 1)) == [], "answers are not of the prompt"
    kept, ticket = scheduler.finished(request, ((5, 8, 2),), complete=True)
    assert (kept, ticket["transfer_id"]) == (True, CHOSEN)
    orders = scheduler.take_orders()
    assert [(each.request_id, each.transfer_id) for each in orders.offers] == [(P, CHOSEN)]
    assert (orders.abandoned, door.restarted, len(door.offers)) == ((), [P], 1)


def test_blocks_behind_the_prompt_are_not_told(scheduler):
    """They may be gone when the request has finished, and a table that was told does not shrink."""
    request = prefill()
    scheduler.early.announced(request)
    step(scheduler, 0, NUM_TOKENS, ((5, 8, 2),))
    assert told(step(scheduler, NUM_TOKENS, 30, ((9,),))) == [(NUM_TOKENS, ((5, 8, 2),))]
    assert scheduler.finished(request, ((5, 8, 2),), complete=True)[0]
    assert [each.tables for each in scheduler.take_orders().offers] == [((5, 8, 2),)]


def test_what_was_there_before_the_first_step_is_told_after_it(scheduler):
    """Another connector may still be loading it."""
    scheduler.early.announced(prefill())
    assert told(step(scheduler, 32, 16, ((5, 8),))) == [(0, ((),))]
    assert told(step(scheduler, 48, 22, ((2,),))) == [(48, ((5, 8, 2),))]


AHEAD = TERMS._replace(num_in_flight=2)
"""An engine that schedules a step before it knows how the one before has ended."""


def test_a_prefix_that_another_connector_loads_in_a_step_is_told_when_the_outcome_of_it_is_known(door):
    scheduler = make(door, early=AHEAD)
    scheduler.early.announced(prefill())
    step(scheduler, 32, 16, ((5, 8),), may_load=True)
    assert told(step(scheduler, 48, 16)) == [], "scheduled before it is known whether block 5 was loaded"
    assert told(step(scheduler, 64, 6, ((2,),))) == [(64, ((5, 8, 2),))]


def test_a_prompt_without_a_prefix_does_not_wait_for_the_loads_of_others(door):
    scheduler = make(door, early=AHEAD)
    scheduler.early.announced(prefill())
    step(scheduler, 0, 32, ((5,),), may_load=True)
    assert told(step(scheduler, 32, 32, ((8,),), may_load=True)) == [(32, ((5, 8),))]


def test_a_prefix_that_was_found_after_its_load_is_told_at_once(door):
    scheduler = make(door, early=AHEAD)
    for _ in range(2):
        step(scheduler, may_load=True)
    step(scheduler)
    step(scheduler)
    scheduler.early.announced(prefill())
    step(scheduler, 32, 16, ((5, 8),))
    assert told(step(scheduler, 48, 22, ((2,),))) == [(48, ((5, 8, 2),))]


def test_a_prefix_is_found_while_it_is_loaded_for_somebody_else(door):
    """Its blocks are in the engine's cache as soon as they are to be loaded."""
    scheduler = make(door, early=AHEAD)
    step(scheduler, may_load=True)
    scheduler.early.announced(prefill())
    step(scheduler, 32, 16, ((5, 8),))
    scheduler.early.blocks_lost({5})
    orders = step(scheduler, 48, 22, ((2,),))
    assert told(orders) == []
    assert [each.request_id for each in orders.abandoned] == [P]


@pytest.mark.parametrize("terms", [TERMS, AHEAD])
def test_blocks_that_another_connector_could_not_load_end_it(door, terms):
    """Whoever shares them is not computed again from there: to the engine they are whoever's was first."""
    scheduler, request = make(door, early=terms), prefill()
    scheduler.early.announced(request)
    step(scheduler, 32, 16, ((5, 8),), may_load=True)
    scheduler.early.blocks_lost({7})
    assert step(scheduler, 48, 1).abandoned == (), "nobody's"
    scheduler.early.blocks_lost({5, 7})
    orders = step(scheduler, 32, 16)
    assert orders.abandoned == (AbandonOffer(P, "another connector could not load its blocks", True),)
    assert told(orders) == told(step(scheduler, 48, 22, ((2,),))) == [], "it is offered when it has finished"
    assert scheduler.finished(request, ((5, 8, 2),), complete=True)[0]
    assert [each.transfer_id for each in scheduler.take_orders().offers] == [CHOSEN]


def test_a_step_without_the_request_tells_nothing_of_it(scheduler):
    begun(scheduler)
    assert told(step(scheduler)) == []
    assert told(step(scheduler, 32, 38, ((8, 2),))) == [(32, ((5, 8, 2),))]


def test_a_prompt_of_one_step_is_told_at_its_end(scheduler):
    request = prefill()
    scheduler.early.announced(request)
    assert told(step(scheduler, 0, NUM_TOKENS, ((5, 8, 2),))) == [(0, ((),))]
    assert scheduler.finished(request, ((5, 8, 2),), complete=True)[0]
    assert [each.num_tokens for each in scheduler.take_orders().offers] == [NUM_TOKENS]


def test_a_preempted_prompt_is_given_up_and_offered_when_it_has_finished(scheduler, door):
    request = prefill()
    begun(scheduler, request)
    orders = step(scheduler, preempted=[P, "somebody else"])
    assert orders.abandoned == (AbandonOffer(P, "preempted", True),)
    scheduler.early.announced(request)
    assert told(step(scheduler, 0, 70, ((9, 1, 3),))) == [], "it is not read again while it is computed"
    assert scheduler.finished(request, ((9, 1, 3),), complete=True)[0]
    (offer,) = scheduler.take_orders().offers
    assert (offer.transfer_id, offer.tables) == (CHOSEN, ((9, 1, 3),))
    assert (len(door.offers), door.restarted, door.withdrawn) == (1, [P], [])


def test_a_preempted_prompt_that_is_aborted_after_all_ends_at_the_door(scheduler, door):
    """Workers hear of it as of any settlement, and so do those who wait for it to come again."""
    request = prefill()
    begun(scheduler, request)
    step(scheduler, preempted=[P])
    assert scheduler.finished(request, (), complete=False) == (False, None)
    assert (scheduler.take_orders().abandoned, door.withdrawn) == ((), [(P, "aborted")])
    door.settled.append(Settled(CHOSEN, P, "aborted"))
    assert [each.reason for each in scheduler.take_orders().settled] == ["aborted"]


def test_a_preempted_prompt_whose_consumer_is_gone_is_not_offered(scheduler, door):
    request = prefill()
    begun(scheduler, request)
    step(scheduler, preempted=[P])
    door.settled.append(Settled(CHOSEN, P, "released"))
    assert len(step(scheduler).settled) == 1
    assert scheduler.finished(request, ((9, 1, 3),), complete=True) == (False, None)
    orders = scheduler.take_orders()
    assert (orders.offers, orders.abandoned, door.withdrawn, len(scheduler.early)) == ((), (), [], 0)


def test_progress_that_goes_back_ends_it(scheduler):
    begun(scheduler)
    step(scheduler, 32, 32, ((8,),))
    orders = step(scheduler, 0, 32)
    assert orders.abandoned == (AbandonOffer(P, "computed again: told=32, computed now=0", True),)
    assert told(step(scheduler, 32, 32)) == []


def test_an_aborted_prompt_ends_at_workers_and_door(scheduler, door):
    request = prefill()
    begun(scheduler, request)
    assert scheduler.finished(request, ((5,),), complete=False) == (False, None)
    assert scheduler.has_work(), "the engine steps once more, to tell it"
    assert scheduler.take_orders().abandoned == (AbandonOffer(P, "aborted"),)
    assert door.withdrawn == [(P, "aborted")]
    door.settled.append(Settled(CHOSEN, P, "aborted"))
    assert [each.request_id for each in scheduler.take_orders().settled] == [P], "workers wait for that as well"
    door.settled.append(Settled(CHOSEN, P, "aborted"))
    assert scheduler.take_orders().settled == ()
    assert (scheduler.gauges()["offers"], len(scheduler.early)) == (0, 0)


def test_a_release_while_it_is_computed_is_passed_on(scheduler, door):
    request = prefill()
    begun(scheduler, request)
    door.settled.append(Settled(CHOSEN, P, "released"))
    assert [each.request_id for each in step(scheduler, 32, 38, ((8, 2),)).settled] == [P]
    assert scheduler.finished(request, ((5, 8, 2),), complete=True)[0], "kept until the workers report it as sent"
    assert [each.request_id for each in scheduler.take_orders().offers] == [P]
    scheduler.sends_over([P])
    assert scheduler.gauges()["offers"] == 0


@pytest.mark.parametrize("wrong", ["not hex", "ab", 5, "CD" * 16])
def test_an_id_that_is_none_is_not_used_and_told_once(scheduler, caplog, wrong):
    request = prefill(wrong)
    assert begun(scheduler, request).growing == ()
    scheduler.early.announced(request)
    assert caplog.records == []
    assert scheduler.finished(request, ((5, 8, 2),), complete=True)[0]
    assert len(caplog.records) == 1
    assert scheduler.take_orders().offers[0].transfer_id not in (wrong, CHOSEN)


def test_an_offer_waits_for_its_prompt_and_its_lease_begins_with_the_end_of_it():
    door = LeasedDoor()
    scheduler, request = make(door), prefill()
    scheduler.early.announced(request)
    door.now += TERMS.lease_s - 1
    assert door.book.expire(door.now) == [], "longer than any lease"
    step(scheduler, 0, NUM_TOKENS, ((5, 8, 2),))
    assert scheduler.finished(request, ((5, 8, 2),), complete=True)[0]
    door.now += LEASE_S - 1
    assert door.book.expire(door.now) == []
    door.now += 1
    assert [each.request_id for each in door.book.expire(door.now)] == [P]


def test_a_prompt_that_waits_too_long_says_for_what(caplog):
    door = LeasedDoor()
    scheduler = make(door)
    begun(scheduler)
    step(scheduler, 32, 32, ((8,),))
    door.now += TERMS.lease_s
    door.settled += door.book.expire(door.now)
    (end,) = step(scheduler).settled
    assert end.reason == "it was not computed in time: max_wait_s=600 s are over, computed=[0, 32) of [0, 70)"
    assert [end.reason[len("it was not computed in time: ") :] in each.getMessage() for each in caplog.records] == [
        True
    ]


def test_a_request_that_is_aborted_before_its_turn_ends_at_once(scheduler, door):
    request = prefill()
    scheduler.early.announced(request)
    assert scheduler.finished(request, ((),), complete=False) == (False, None)
    orders = scheduler.take_orders()
    assert (told(orders), orders.abandoned) == ([(0, ((),))], (AbandonOffer(P, "aborted"),)), "in this order"
    assert door.withdrawn == [(P, "aborted")]


def test_without_an_id_nothing_is_early(scheduler, door):
    request = prefill(None)
    assert begun(scheduler, request).growing == ()
    assert door.offers == []


def test_an_engine_that_gives_up_blocks_meanwhile_offers_under_the_id_at_the_end(door):
    scheduler, request = make(door, early=None), prefill()
    assert begun(scheduler, request).growing == ()
    assert scheduler.finished(request, ((5, 8, 2),), complete=True)[0]
    assert scheduler.take_orders().offers[0].transfer_id == CHOSEN


def test_a_decode_request_is_never_early(scheduler, door):
    scheduler.early.announced(FakeRequest(P, [1, 2], {"do_remote_prefill": True, "transfer_id": CHOSEN}))
    assert (door.offers, len(scheduler.early)) == ([], 0)


def test_a_request_that_is_loaded_as_well_is_never_early(scheduler, door):
    """It ends as a load, and nobody would take its blocks back from the workers."""
    load = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 5000}
    request = FakeRequest(P, list(range(NUM_TOKENS)), load | {"do_remote_decode": True, "transfer_id": CHOSEN})
    assert begun(scheduler, request).growing == ()
    assert scheduler.finished(request, ((5, 8, 2),), complete=True) == (False, None)
    assert (door.offers, len(scheduler.early), scheduler.take_orders().offers) == ([], 0, ())


def test_an_id_that_is_on_offer_is_not_offered_early(scheduler, door):
    request = prefill()
    begun(scheduler, request)
    assert scheduler.finished(request, ((5, 8, 2),), complete=True)[0]
    scheduler.take_orders()
    assert begun(scheduler, prefill()).growing == (), "workers would be told of two offers of one request"
    assert scheduler.finished(prefill(), ((9, 1, 3),), complete=True) == (False, None)
    assert (len(door.offers), len(scheduler.early)) == (1, 0)


@pytest.mark.parametrize("is_settled", [False, True])
def test_an_id_whose_offer_is_ending_is_not_offered(scheduler, door, is_settled):
    """The orders that end it would end the new one."""
    request = prefill()
    begun(scheduler, request)
    if is_settled:
        door.settled.append(Settled(CHOSEN, P, "released"))
        scheduler.take_orders()
    scheduler.finished(request, ((5,),), complete=False)
    scheduler.early.announced(prefill())
    assert [each.request_id for each in scheduler.take_orders().abandoned] == [P]
    assert (len(door.offers), len(scheduler.early)) == (1, 0)
    if not is_settled:
        assert scheduler.finished(prefill(), ((9, 1, 3),), complete=True) == (False, None)
        door.settled.append(Settled(CHOSEN, P, "aborted"))
        assert len(scheduler.take_orders().settled) == 1
    assert begun(scheduler, prefill()).growing, "now it is free"


def test_a_prompt_that_has_changed_since_it_was_offered_is_not_offered(scheduler, door):
    """Sessions of streamed input have a longer one in the end."""
    begun(scheduler)
    longer = FakeRequest(P, list(range(NUM_TOKENS + 1)), prefill().params)
    assert scheduler.finished(longer, ((5, 8, 2),), complete=True) == (False, None)
    assert scheduler.take_orders().abandoned == (AbandonOffer(P, "aborted"),)
    assert door.withdrawn == [(P, "aborted")]
