"""Copy orders and what they wait for; places of blocks; generations."""

from array import array

import pytest

from kv_core.errors import CallerError
from kv_core.pool import BlockPool
from kv_core.tiers import CopyLog, Place, Tier

DEVICE, HOST = (lambda slot: Place(64, Tier.DEVICE, slot)), (lambda slot: Place(64, Tier.HOST, slot))


def test_an_order_waits_for_readers_and_writers_of_its_places():
    log = CopyLog()
    log.copy(DEVICE(0), HOST(0), 4)
    log.copy(DEVICE(0), HOST(1), 4)
    log.copy(HOST(0), DEVICE(0), 4)
    log.copy(DEVICE(5), HOST(0), 4)
    assert [order.after for order in log.take()] == [(), (), (0, 1), (0, 2)]
    assert log.take() == ()


def test_equal_slots_of_other_tiers_and_windows_are_other_places():
    log = CopyLog()
    log.copy(DEVICE(0), HOST(0), 4)
    log.copy(Place(8, Tier.HOST, 0), Place(8, Tier.DEVICE, 0), 4)
    assert [order.after for order in log.take()] == [(), ()]


def test_what_is_done_is_not_waited_for():
    log = CopyLog()
    log.copy(DEVICE(0), HOST(0), 4)
    log.copy(DEVICE(1), HOST(1), 4)
    log.done(1)
    log.copy(HOST(0), DEVICE(2), 4)
    log.copy(HOST(1), DEVICE(3), 4)
    assert [order.after for order in log.take()][2:] == [(), (1,)]


def test_a_copy_onto_itself_is_refused():
    with pytest.raises(CallerError):
        CopyLog().copy(DEVICE(0), DEVICE(0), 4)


def test_ids_and_slots_are_a_permutation():
    pool = BlockPool(64, (2, 2, 1))
    assert [pool.place(block_id)[1:] for block_id in range(5)] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    pool.swap(0, 3)
    assert pool.place(0) == Place(64, Tier.HOST, 1)
    assert pool.slots(array("i", [3, 1])) == array("i", [0, 1])
    pool.check()
    with pytest.raises(CallerError, match=r"0..4, theirs=5"):
        pool.place(5)


def test_generations_count_from_the_first_question():
    pool = BlockPool(64, (3, 0, 0))
    assert pool.generation(1) == 0
    pool.given_up(array("i", [0, 1]))
    pool.given_up(array("i", [2]))
    assert [pool.generation(block_id) for block_id in range(3)] == [0, 1, 0]
