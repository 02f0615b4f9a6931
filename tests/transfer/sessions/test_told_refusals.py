"""Rows of docs/decisions/peer-refusals.md about memory, and about what two engines say to each other when it cannot be.

Every test is named after its row, as in `test_peer_refusals.py`.
"""

import msgspec
import pytest
import torch
import zmq

from kv_core.errors import CallerError
from kv_core.ids import Rank
from kv_core.spans import Span
from kv_testing.exchanges import hand_over, small_state
from kv_testing.worlds import fresh_id, pair
from kv_transfer.direct.cuda_ipc import CudaDoor
from kv_transfer.plan.cache_state import BlockLayout, Share
from kv_transfer.pools import PagedCaches

# -- memory ------------------------------------------------------------------------------------------------------------


TOKEN_MAJOR = {"layout": BlockLayout("token_major")}


def caches_on(*devices, share=None):
    """A layer on each of these devices."""
    layers = [(torch.zeros(2, 4, 4, 4, device=device),) * 2 for device in devices]
    return PagedCaches.of_layers(share or Share(Rank(0), Span(0, len(devices)), Span(0, 4)), layers, 4)


@pytest.mark.parametrize("devices", [("cpu", "meta"), ("meta", "cpu", "cpu")])
def test_row_16_layers_on_two_devices_are_refused(devices):
    with pytest.raises(CallerError, match=f"planes differ: one=.* on {devices[1]}, first=.* on {devices[0]}"):
        caches_on(*devices)


def test_row_19_a_memory_that_we_do_not_know_is_refused():
    """Each rank has one kind of memory, and it is one that staging can lie in."""
    state = small_state(fields=TOKEN_MAJOR)
    caches = caches_on(*["meta"] * 4)
    with pytest.raises(CallerError, match="kind of memory: caches=meta, stated=one of cpu, cuda"):
        caches.check(state, state.share_of(Rank(0)))


def test_row_41_memory_of_which_the_driver_exports_no_handle_is_staged():
    """As that of PyTorch's expandable segments: no registration pins the cache, only staging is registered."""
    with pair(small_state(), small_state(tp=2), direct=lambda caches: CudaDoor(caches, None)) as (p, d, _):
        hand_over(p, d)
        assert (d.count("bytes_read_directly"), p.count("bytes_out") > 0) == (0, True)
        registered = {region for side in (p, d) for agent in side.agents for region in vars(agent)["_regions"]}
        assert registered == {arena.region for side in (p, d) for arena in side.arenas}


# -- what two engines say to each other --------------------------------------------------------------------------------


def test_row_13_what_does_not_fit_is_told_with_both_values():
    other = msgspec.structs.replace(small_state(), fingerprint="other weights")
    with pair(other, small_state()) as (p, d, _):
        d.order(p, fresh_id())
        assert "fingerprint differs: ours=model, theirs=other weights" in d.outcome(others=[p]).reason


def test_row_13_another_run_of_the_instance_is_told_by_both_names():
    with pair(small_state(), small_state()) as (p, d, _):
        d.order(p, p.offer(), incarnation="an earlier run")
        reason = d.outcome(others=[p]).reason
        assert "an earlier run" in reason
        assert p.incarnation in reason
        p.withdraw()


@pytest.mark.parametrize("garbage", [b"", b"kf\x01\x00\x80", b"GET / HTTP/1.1", b"\x80\x04pickle", b"kf" + bytes(4000)])
def test_row_13_what_cannot_be_read_costs_nothing(garbage):
    """Sent to the doors of both: they answer, count, and hand over as before."""
    with pair(small_state(), small_state()) as (p, d, _), zmq.Context() as context:
        for host, port in (p.door.address, (p.ranks[0].card.host, p.ranks[0].card.port)):
            with context.socket(zmq.DEALER) as caller:
                caller.linger = 0
                caller.connect(f"tcp://{host}:{port}")
                caller.send(garbage)
                assert caller.poll(20_000), "no answer"
        hand_over(p, d)
