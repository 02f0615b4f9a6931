"""How vLLM sets the connector up: whose handshake it is, which ports it takes; requests of vLLM that no key names."""

import threading
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from kv_core.errors import CallerError
from kv_core.ids import Incarnation, InstanceId, Rank
from kv_engine_adapter.config import FerryConfig
from kv_engine_adapter.known_peers import KnownPeers
from kv_engine_adapter.scheduler import FerryScheduler, Identity
from kv_testing.fake_door import FakeDoor
from kv_testing.worlds import FAST, make_side, pair, state_of
from kv_transfer.agent.loopback import LoopbackHub
from kv_transfer.wire import CannotListen

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm]

OFFER = {"do_remote_prefill": True, "transfer_id": "ab" * 16, "remote_host": "10.0.0.2", "remote_port": 7000}
NUM_TOKENS = 70


@pytest.fixture
def connector():
    from kv_engine_adapter.vllm.connector import FerryConnector

    made = object.__new__(FerryConnector)
    made._scheduler, made._scheduler_setup = None, Mock()
    return made


def stranger():
    """What another connector's worker tells: under MultiConnector every child is handed it."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

    class TheirHandshake(KVConnectorHandshakeMetadata):
        pass

    return TheirHandshake()


def handshake(card, worker=None):
    from kv_engine_adapter.vllm.connector import FerryHandshake

    return FerryHandshake(card, Incarnation("run-1"), worker)


def test_of_all_handshakes_ours_alone_are_read(connector):
    connector.set_xfer_handshake_metadata({0: handshake("card 0", "worker 0"), 1: stranger(), 2: handshake("card 2")})
    connector._scheduler_setup.start.assert_called_once_with(["card 0", "card 2"], "run-1", ["worker 0"])
    assert connector._scheduler is connector._scheduler_setup.start.return_value


def test_another_connectors_handshake_in_place_of_ours_is_an_error_that_says_what_to_change(connector):
    with pytest.raises(CallerError, match=r"\['TheirHandshake'\]\): list FerryConnector first"):
        connector.set_xfer_handshake_metadata({0: stranger(), 1: stranger()})
    connector._scheduler_setup.start.assert_not_called()
    assert connector._scheduler is None


def test_no_handshake_at_all_starts_nothing_and_is_no_error(connector):
    connector.set_xfer_handshake_metadata({})
    connector._scheduler_setup.start.assert_not_called()


def ports(first, engine, num_ranks=4):
    """Of the door, then of each rank."""
    from kv_engine_adapter.vllm.setup import _door_settings, _rank_settings

    parallel = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_index=engine)
    config = SimpleNamespace(parallel_config=parallel)
    ferry = FerryConfig(transfer=replace(FAST, port=first), peers=KnownPeers.of([]))
    ranks = [_rank_settings(ferry, config, Rank(rank)).port for rank in range(num_ranks)]
    return [_door_settings(ferry, config).port, *ranks]


def test_every_rank_of_every_data_parallel_engine_has_a_port_of_its_own():
    assert (ports(7000, engine=0), ports(7000, engine=1)) == ([*range(7000, 7005)], [*range(7005, 7010)])


def test_port_0_stays_any_free_port():
    assert ports(0, engine=0) == ports(0, engine=1) == [0] * 5


def request_of_vllm(params, lora_name=None):
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

    lora = lora_name and LoRARequest(lora_name, 1, "nowhere")
    sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": params})
    return Request("r-1", list(range(NUM_TOKENS)), sampling, None, lora_request=lora)


@pytest.fixture
def door():
    return FakeDoor()


@pytest.fixture
def scheduler(door):
    identity = Identity(InstanceId("engine"), Incarnation("run-9"), 1, 1)
    peers = KnownPeers.of(["10.0.0.0/24"])
    return FerryScheduler(
        identity, door, lease_s=30, patience_s=60, shares_prefixes=True, tokens_per_block=32, peers=peers
    )


@pytest.mark.parametrize(("lora_name", "num_loaded"), [(None, NUM_TOKENS - 1), ("poet", 0)])
def test_a_request_with_a_lora_adapter_loads_nothing(scheduler, lora_name, num_loaded):
    """It is computed here; without the adapter the same request is loaded."""
    from kv_engine_adapter.vllm.translate import RequestView

    view = RequestView(request_of_vllm(OFFER, lora_name))
    wanted = scheduler.num_external_tokens(view, 0)
    assert wanted == num_loaded
    scheduler.allocated(view, ((1, 2, 3),), wanted)
    assert len(scheduler.take_orders().loads) == bool(num_loaded)
    assert scheduler.gauges()["loads"] == bool(num_loaded)
    scheduler.finished(view, ((1, 2, 3),), complete=True)
    scheduler.loads_over([view.request_id])
    assert scheduler.gauges() == {"offers": 0, "loads": 0}


@pytest.mark.parametrize(("lora_name", "is_offered"), [(None, True), ("poet", False)])
def test_a_prefill_with_a_lora_adapter_is_not_offered(scheduler, door, lora_name, is_offered):
    from kv_engine_adapter.vllm.translate import RequestView

    view = RequestView(request_of_vllm({"do_remote_decode": True}, lora_name))
    assert scheduler.num_external_tokens(view, 0) == 0
    keeps, params = scheduler.finished(view, ((1, 2, 3),), complete=True)
    assert (keeps, params is not None, len(door.offers)) == (is_offered, is_offered, is_offered)
    assert len(scheduler.take_orders().offers) == is_offered


def test_a_port_in_use_is_named_with_its_setting_and_leaves_no_thread():
    with pair() as (running, _, _hub):
        before = _threads()
        for taken in ([running.door.address[1], 0], [0, running.ranks[0].card.port]):
            with pytest.raises(CannotListen, match=rf"port={max(taken)} \(setting port\)"):
                make_side(LoopbackHub(), "second", state_of(), ports=taken)
        assert before
        assert _threads() <= before


def _threads():
    """Those of the library: the agents belong to the test, which made them."""
    return {each for each in threading.enumerate() if not each.name.startswith("agent-")}
