"""The direct path between processes: their caches are on one GPU, or on two of which each sees its own."""

from dataclasses import replace

import pytest
import torch

from kv_testing.engine_process import EngineProcess, make_nixl_side
from kv_testing.waiting import wait_for
from kv_testing.worlds import FAST, Switches, sides, state_of
from kv_transfer.direct.cuda_ipc import CudaCaches

pytestmark = [
    pytest.mark.nixl,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

PATIENT = replace(FAST, request_deadline_s=30.0)
GPUS = [pytest.param(0, marks=pytest.mark.gpu), pytest.param(1, marks=pytest.mark.multi_gpu)]


def _decode(config=PATIENT, tp=1):
    return make_nixl_side(
        "d", state_of(tp, tokens_per_block=8, order="token_major"), config, None, Switches(), "cuda:0"
    )


def _hand_over(p, d, request_id):
    transfer = p.ask("offer", f"p-{request_id}")
    d.order(p, transfer, request_id)
    received = d.outcomes(request_id, 30)
    d.release(p, transfer, request_id)
    return received


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_blocks_are_read_from_the_other_process(gpu, p_tp, d_tp):
    with EngineProcess("p", None, tp=p_tp, gpu=gpu) as p, sides(_decode(tp=d_tp)) as (d,):
        for number in range(3):
            received = _hand_over(p, d, f"d{number}")
            assert all(each.ok for each in received), received
            assert d.misplaced() == 0
        d.check_clean()
        wait_for(lambda: not p.ask("open"), what="the prefill engine to be idle")
        assert d.count("bytes_read_directly") == d.count("bytes_in") > 0


@pytest.mark.gpu
def test_control_a_read_from_other_blocks_is_seen(monkeypatch):
    read = CudaCaches.read

    def elsewhere(self, what, into):
        turned = what.source.block_ids[1:] + what.source.block_ids[:1]
        read(self, replace(what, source=replace(what.source, block_ids=turned)), into)

    monkeypatch.setattr(CudaCaches, "read", elsewhere)
    with EngineProcess("p", None, gpu=0) as p, sides(_decode()) as (d,):
        assert all(each.ok for each in _hand_over(p, d, "d0"))
        assert d.misplaced() > 0


@pytest.mark.parametrize("gpu", GPUS)
def test_the_mapping_of_a_killed_engine_is_closed_and_its_successor_is_read(gpu):
    with sides(_decode()) as (d,):
        with EngineProcess("p", None, gpu=gpu) as p:
            assert all(each.ok for each in _hand_over(p, d, "d0"))
            assert d.cores[0].measure().gauges["mappings"] == 1
            p.kill()
            wait_for(lambda: not d.cores[0].measure().gauges["mappings"], 5, "the end of the mapping")
        with EngineProcess("p", None, gpu=gpu) as again:
            assert all(each.ok for each in _hand_over(again, d, "d1"))
            assert d.misplaced() == 0
            d.check_clean()


@pytest.mark.gpu
def test_one_process_cannot_map_itself_and_stages():
    """The driver refuses; the load is carried all the same."""
    p = make_nixl_side("p", state_of(), PATIENT, None, Switches(), "cuda:0")
    with sides(p, _decode()) as (p, d):
        transfer = p.offer()
        d.order(p, transfer)
        assert d.outcome(others=[p]).ok
        assert d.misplaced() == 0
        assert (d.count("maps_failed"), d.count("bytes_read_directly")) == (1, 0)
