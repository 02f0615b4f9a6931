"""The scheduler side against a fake door: tokens announced, orders given, offers opened, released and settled."""

from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.ids import Incarnation, InstanceId, RequestId, TransferId
from kv_core.spans import Span
from kv_engine_adapter.handover import HandoverError, RemoteOffer, remote_offer
from kv_engine_adapter.known_peers import KnownPeers
from kv_engine_adapter.scheduler import FerryScheduler, Identity
from kv_testing.fake_door import FakeDoor, FakeRequest
from kv_transfer.orders import Settled

OFFER = {
    "do_remote_prefill": True,
    "transfer_id": "ab" * 16,
    "remote_host": "10.0.0.2",
    "remote_port": 7000,
    "remote_incarnation": "run-1",
    "unknown_key_of_a_router": [1, {"x": None}],
}
PEERS = KnownPeers.of(["10.0.0.0/24", "decode.example"])
COMMON: dict[str, Any] = {"tokens_per_block": 32, "peers": PEERS}


def consumer(name):
    return sha256(f"run-9/{name}".encode()).hexdigest()


@pytest.fixture
def door():
    return FakeDoor()


@pytest.fixture
def clock():
    return [100.0]


@pytest.fixture
def scheduler(door, clock):
    identity = Identity(InstanceId("engine"), Incarnation("run-9"), tensor_ranks=2, pipeline_stages=1)
    return FerryScheduler(
        identity, door, lease_s=30, patience_s=60, shares_prefixes=True, **COMMON, clock=lambda: clock[0]
    )


def decode(name="d1", num_tokens=70, params=OFFER, **more):
    return FakeRequest(RequestId(name), list(range(num_tokens)), params, **more)


def prefill(name="p1", num_tokens=70, **more):
    return FakeRequest(RequestId(name), list(range(num_tokens)), {"do_remote_decode": True}, **more)


@pytest.mark.parametrize(("num_tokens", "computed", "wanted"), [
    (1, 0, 0), (31, 0, 30), (32, 0, 31), (33, 0, 32), (33, 32, 0), (70, 32, 37), (64, 64, 0), (2, 0, 1),
])  # fmt: skip
def test_everything_but_the_last_prompt_token_is_announced(scheduler, num_tokens, computed, wanted):
    assert scheduler.num_external_tokens(decode(num_tokens=num_tokens), computed) == wanted


def test_asking_again_changes_nothing(scheduler, door):
    request = decode()
    assert [scheduler.num_external_tokens(request, 0) for _ in range(3)] == [69, 69, 69]
    assert scheduler.num_external_tokens(request, 64) == 5
    assert scheduler.take_orders().loads == ()
    assert door.releases == []


def test_a_load_is_ordered_once_and_released_once_all_ranks_are_done(scheduler, door):
    request = decode()
    wanted = scheduler.num_external_tokens(request, 32)
    scheduler.allocated(request, ((4, 9, 5),), wanted)
    scheduler.allocated(request, ((4, 9, 5, 6),), 0)
    (load,) = scheduler.take_orders().loads
    assert (load.tokens, load.tables, load.host, load.port) == (Span(32, 69), ((4, 9, 5),), "10.0.0.2", 7000)
    assert (load.transfer_id, load.incarnation) == ("ab" * 16, "run-1")
    assert load.prompt_key == request.prompt_key()
    assert scheduler.take_orders().loads == ()
    assert door.releases == []
    assert scheduler.gauges() == {"offers": 0, "loads": 1}
    scheduler.loads_over([request.request_id])
    scheduler.loads_over([request.request_id])
    assert door.releases == [("10.0.0.2", 7000, "ab" * 16, request.prompt_key(), consumer("d1"))]
    assert scheduler.num_external_tokens(request, 0) == 0, "after a failure the engine asks again; it must compute"
    assert scheduler.finished(request, ((4, 9, 5),), complete=True) == (False, None)
    assert len(door.releases) == 1
    assert scheduler.gauges() == {"offers": 0, "loads": 0}


def test_a_prompt_held_here_already_is_released_without_a_load(scheduler, door):
    request = decode(num_tokens=33)
    assert scheduler.num_external_tokens(request, 32) == 0
    scheduler.allocated(request, ((1, 2),), 0)
    assert scheduler.take_orders().loads == ()
    assert len(door.releases) == 1


@pytest.mark.parametrize("matched", [True, False])
def test_a_request_that_ends_before_it_got_blocks_releases_the_offer(scheduler, door, matched):
    request = decode()
    if matched:
        scheduler.num_external_tokens(request, 0)
    assert scheduler.finished(request, ((),), complete=False) == (False, None)
    assert [release[2] for release in door.releases] == ["ab" * 16]
    assert scheduler.take_orders().aborts == ()


def test_a_request_that_ends_while_loading_is_aborted_and_released_when_the_workers_are_quiet(scheduler, door):
    request = decode()
    scheduler.allocated(request, ((1, 2, 3),), scheduler.num_external_tokens(request, 0))
    scheduler.take_orders()
    assert scheduler.finished(request, ((1, 2, 3),), complete=False) == (False, None)
    assert scheduler.take_orders().aborts == ("d1",)
    assert door.releases == []
    assert scheduler.gauges()["loads"] == 1
    scheduler.loads_over([request.request_id])
    assert len(door.releases) == 1
    assert scheduler.gauges()["loads"] == 0


def test_an_offer_is_held_from_the_announcement_of_its_request_on(scheduler, door):
    """Its turn may come after the lease: until then, and until its release, the offer is kept from ending."""
    request = decode()
    scheduler.announced(request)
    assert door.holds == [("10.0.0.2", 7000, "ab" * 16, request.prompt_key(), consumer("d1"))]
    assert scheduler.num_external_tokens(request, 0)
    assert (len(door.holds), door.releases) == (1, [])
    scheduler.finished(request, (), complete=False)
    assert door.releases == door.holds


def test_what_asks_for_no_offer_holds_none(scheduler, door):
    scheduler.announced(prefill())
    scheduler.announced(decode(params=OFFER | {"remote_port": -1}))
    assert door.holds == []


def test_a_rejected_request_releases_the_offer_whatever_its_prompt(scheduler, door):
    rejected = FakeRequest(RequestId("x"), [0], OFFER, is_rejected=True)
    assert scheduler.finished(rejected, ((),), complete=False) == (False, None)
    assert door.releases == [("10.0.0.2", 7000, "ab" * 16, None, consumer("x"))]


def test_equal_prompts_wait_for_one_load(scheduler, door):
    first, second, other = decode("a"), decode("b"), decode("c", num_tokens=50)
    scheduler.allocated(first, ((1, 2, 3),), scheduler.num_external_tokens(first, 0))
    assert scheduler.num_external_tokens(second, 0) is None
    assert scheduler.num_external_tokens(other, 0) == 49
    scheduler.loads_over(["a"])
    assert scheduler.num_external_tokens(second, 64) == 0, "its full blocks are a local hit now, the rest is computed"
    scheduler.allocated(second, ((1, 2, 9),), 0)
    assert [release[4] for release in door.releases] == [consumer("a"), consumer("b")]


def test_equal_prompts_do_not_wait_without_a_prefix_cache(door):
    identity = Identity(InstanceId("engine"), Incarnation("run-9"), 1, 1)
    scheduler = FerryScheduler(identity, door, lease_s=30, patience_s=60, shares_prefixes=False, **COMMON)
    first, second = decode("a"), decode("b")
    scheduler.allocated(first, ((1, 2, 3),), scheduler.num_external_tokens(first, 0) or 0)
    assert scheduler.num_external_tokens(second, 0) == 69


def test_those_who_waited_for_a_failed_load_compute(scheduler, door):
    first, second = decode("a"), decode("b")
    scheduler.allocated(first, ((1, 2, 3),), scheduler.num_external_tokens(first, 0))
    assert scheduler.num_external_tokens(second, 0) is None
    scheduler.loads_over(["a"], failed={"a"})
    assert scheduler.num_external_tokens(second, 0) == 0
    assert sorted(release[4] for release in door.releases) == sorted([consumer("a"), consumer("b")])


@pytest.mark.parametrize(("change", "named"), [
    ({"transfer_id": None}, "transfer_id"), ({"transfer_id": "1"}, "transfer_id"), ({"transfer_id": 7}, "transfer_id"),
    ({"remote_host": "10.9.9.9"}, "remote_host"), ({"remote_host": "evil.example"}, "remote_host"),
    ({"remote_port": "1" * 5000}, "remote_port"), ({"remote_port": "\u0661"}, "remote_port"),
    ({"remote_host": None}, "remote_host"), ({"remote_host": "x" * 1000}, "remote_host"),
    ({"remote_port": 0}, "remote_port"), ({"remote_port": True}, "remote_port"),
    ({"remote_port": 70000}, "remote_port"), ({"remote_incarnation": 3}, "remote_incarnation"),
])  # fmt: skip
def test_unusable_parameters_are_computed_here_and_the_field_is_named(scheduler, door, caplog, change, named):
    request = decode(params=OFFER | change)
    assert scheduler.num_external_tokens(request, 0) == 0
    assert f"kv_transfer_params.{named}" in caplog.text
    scheduler.allocated(request, ((1, 2, 3),), 0)
    scheduler.finished(request, ((1, 2, 3),), complete=True)
    assert (door.releases, scheduler.take_orders().loads) == ([], ())
    assert scheduler.take_report() == {
        "counters": {"handovers_refused": 1},
        "gauges": {"scheduler": {"offers": 0, "loads": 0}},
    }


def test_block_ids_of_a_client_are_not_read(scheduler):
    request = decode(params=OFFER | {"remote_block_ids": [[99]]})
    scheduler.allocated(request, ((1, 2, 3),), scheduler.num_external_tokens(request, 0))
    (load,) = scheduler.take_orders().loads
    assert load.tables == ((1, 2, 3),)


def test_a_finished_prefill_is_offered_and_kept_until_sent(scheduler, door):
    request = prefill()
    keep, params = scheduler.finished(request, ((3, 4, 5),), complete=True)
    assert keep
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    assert (params["remote_host"], params["remote_port"]) == ("10.0.0.1", 5600)
    assert (params["remote_block_ids"], params["remote_num_tokens"]) == ([], 70)
    (offer,) = scheduler.take_orders().offers
    assert (offer.request_id, offer.tables, offer.num_tokens) == ("p1", ((3, 4, 5),), 70)
    assert door.offers == [(params["transfer_id"], "p1", request.prompt_key())]
    door.settled = [Settled(TransferId("f" * 32), RequestId("stranger"), "released"),
                    Settled(params["transfer_id"], RequestId("p1"), "expired")]  # fmt: skip
    (end,) = scheduler.take_orders().settled
    assert (end.request_id, end.reason) == ("p1", "expired")
    assert scheduler.gauges()["offers"] == 1
    scheduler.sends_over(["p1"])
    scheduler.sends_over(["p1"])
    assert scheduler.gauges()["offers"] == 0


@pytest.mark.parametrize(("blocks", "complete"), [(((),), True), (((3, 4),), False), ((), False)])
def test_nothing_is_offered_without_blocks_or_without_the_whole_prompt(scheduler, door, blocks, complete):
    assert scheduler.finished(prefill(), blocks, complete=complete) == (False, None)
    assert door.offers == []


def test_a_request_without_hand_over_is_none_of_our_business(scheduler, door):
    request = FakeRequest(RequestId("r"), [1, 2, 3])
    assert scheduler.num_external_tokens(request, 0) == 0
    scheduler.allocated(request, ((1,),), 0)
    assert scheduler.finished(request, ((1,),), complete=True) == (False, None)
    assert (door.offers, door.releases) == ([], [])


def test_one_client_call_has_one_transfer_id_and_no_two_calls_share_it(scheduler, door, clock):
    names = [("p1", "call-1"), ("p2", "call-1"), ("p3", "call-2")]
    ids = [scheduler.finished(prefill(name, family=family), ((1,),), complete=True)[1]["transfer_id"]
           for name, family in names]  # fmt: skip
    assert ids[0] == ids[1] != ids[2]
    clock[0] += 31
    later = scheduler.finished(prefill("p4", family="call-1"), ((1,),), complete=True)[1]["transfer_id"]
    assert later not in ids
    assert all(len(transfer_id) == 32 for transfer_id in ids)


def test_an_idle_engine_steps_until_its_workers_have_nothing_open_but_not_for_ever(scheduler, clock):
    assert not scheduler.has_work()
    scheduler.workers_report({"rank0": {"sessions": 1, "quarantined": 0}, "rank1": {"sessions": 0}})
    assert scheduler.has_work()
    scheduler.workers_report({"rank1": {"sessions": 0}})
    assert scheduler.has_work()
    clock[0] += 61
    assert not scheduler.has_work(), "a stopped peer must not keep us busy"
    scheduler.workers_report({"rank0": {"sessions": 0, "quarantined": 1}})
    assert scheduler.has_work()
    scheduler.workers_report({"rank0": {"sessions": 0, "quarantined": 0}})
    assert not scheduler.has_work()


def test_a_worker_in_the_same_process_learns_of_an_offer_at_once(door):
    ran = []
    identity = Identity(InstanceId("engine"), Incarnation("run-9"), 1, 1)
    scheduler = FerryScheduler(
        identity, door, lease_s=30, patience_s=60, shares_prefixes=True, **COMMON, run_now=ran.append
    )
    scheduler.finished(prefill(), ((3, 4, 5),), complete=True)
    assert [offer.request_id for orders in ran for offer in orders.offers] == ["p1"]
    assert scheduler.take_orders().offers == (), "each order is given once"


def test_an_idle_engine_steps_for_orders_not_yet_given(scheduler):
    scheduler.finished(prefill(), ((1,),), complete=True)
    assert scheduler.has_work()
    scheduler.take_orders()
    assert not scheduler.has_work()


def test_what_a_prefill_answers_is_what_a_decode_understands(scheduler, door):
    _, params = scheduler.finished(prefill(), ((3, 4, 5),), complete=True)
    request = decode(params=params)
    scheduler.allocated(request, ((7, 8, 9),), scheduler.num_external_tokens(request, 0))
    (load,) = scheduler.take_orders().loads
    assert (load.transfer_id, load.host, load.port) == (params["transfer_id"], "10.0.0.1", 5600)
    assert (load.incarnation, load.prompt_key) == ("run-9", door.offers[0][2])


def test_failed_blocks_stand_for_failed_requests_where_the_engine_names_no_others(scheduler, door):
    first, second = decode("a"), decode("b")
    scheduler.allocated(first, ((1, 2, 3),), scheduler.num_external_tokens(first, 0))
    assert scheduler.num_external_tokens(second, 0) is None
    scheduler.loads_over(["a"], failed_blocks={3, 77})
    assert scheduler.num_external_tokens(second, 0) == 0


def test_a_request_that_needs_every_token_computed_loads_none_and_releases(scheduler, door):
    request = decode(needs_every_token=True)
    assert scheduler.num_external_tokens(request, 0) == 0
    scheduler.allocated(request, ((1, 2, 3),), 0)
    assert len(door.releases) == 1


def test_the_engine_may_take_fewer_tokens_than_announced(scheduler):
    request = decode()
    scheduler.num_external_tokens(request, 32)
    scheduler.allocated(request, ((1, 2),), 32)
    (load,) = scheduler.take_orders().loads
    assert load.tokens == Span(32, 64)


def test_an_id_on_offer_is_not_offered_twice(scheduler, door):
    assert scheduler.finished(prefill(), ((1,),), complete=True)[0]
    assert scheduler.finished(prefill(), ((2,),), complete=True) == (False, None)
    assert len(door.offers) == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*OFFER, "other"]), json_values), st.booleans())
def test_whatever_a_client_sends_is_an_offer_or_a_named_refusal(params, mixed):
    try:
        offer = remote_offer({**OFFER, **params} if mixed else params, PEERS)
    except HandoverError:
        return
    assert isinstance(offer, RemoteOffer)
    assert PEERS.allows(offer.host)
