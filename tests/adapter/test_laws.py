"""`check()` notices what is broken: each law of the books of offers and loads, broken by hand."""

from typing import Any

import pytest

from kv_core.ids import RequestId, TransferId
from kv_core.keys import BlockKey
from kv_engine_adapter.early import EarlyOffers, EarlyTerms
from kv_engine_adapter.orders import AbandonOffer
from kv_engine_adapter.ports import ScheduledRequest
from kv_engine_adapter.twins import Twins
from kv_testing.booked import BookedTransceiver
from kv_testing.fake_door import FakeDoor, FakeRequest
from kv_transfer.orders import BlockTables, Offer

GROWING, WHOLE, ENDED = map(RequestId, ("growing", "whole", "ended"))
CHOSEN = TransferId("cd" * 16)
KEY = BlockKey(b"k" * 32)


class Books:
    """One prompt that grows at scheduler and worker, one that is whole, and two loads of it."""

    def __init__(self) -> None:
        self.early = EarlyOffers(FakeDoor(), EarlyTerms(600.0, 1, 4), ())
        params = {"do_remote_decode": True, "transfer_id": CHOSEN}
        for name in (GROWING, ENDED):
            self.early.announced(FakeRequest(name, list(range(12)), params))
        self.early.stepped([ScheduledRequest(GROWING, 0, 4, ((7,),))], ())
        self.early.stepped([ScheduledRequest(GROWING, 4, 4, ((8,),))], ())
        self.early.take_orders()
        self.early.aborted(ENDED)
        self.offering = BookedTransceiver().offering
        self.offering.open(Offer(CHOSEN, GROWING, KEY, BlockTables(12, ((7,),)), 4), is_troubled=False)
        self.offering.open(Offer(CHOSEN, WHOLE, KEY, BlockTables(4, ((9,),))), is_troubled=True)
        self.offering.advance(GROWING, 8, ((7, 8),))
        self.twins = Twins()
        for name in (GROWING, WHOLE):
            self.twins.begins(name, KEY)

    def check(self) -> None:
        for each in (self.early, self.offering, self.twins):
            each.check()

    @property
    def prompt(self) -> Any:
        return self.early._early[GROWING]

    @property
    def grown(self) -> Any:
        return self.offering.growing._growing[GROWING]


def early_without_terms(books: Books) -> None:
    books.early._terms = None


def ended_and_early(books: Books) -> None:
    books.early._ended.add(GROWING)


def told_beyond_the_prompt(books: Books) -> None:
    books.prompt.told = 13


def told_before_it_is_computed(books: Books) -> None:
    books.prompt.told = books.prompt.computed_by_step + 1


def ended_at_the_workers_alone(books: Books) -> None:
    books.early._abandoned.append(AbandonOffer(GROWING, "preempted"))


def under_another_name(books: Books) -> None:
    books.offering.growing._growing[WHOLE] = books.offering.growing._growing.pop(GROWING)


def growing_and_taken_back(books: Books) -> None:
    books.grown.standing.ended = "preempted"


def growing_although_whole(books: Books) -> None:
    books.offering.growing._growing[WHOLE] = type(books.grown)(
        Offer(CHOSEN, WHOLE, KEY, BlockTables(4, ((9,),))), 4, ((9,),), type(books.grown.standing)()
    )


def progress_goes_back(books: Books) -> None:
    books.grown.num_computed = 3


def progress_beyond_the_prompt(books: Books) -> None:
    books.grown.num_computed = 13


def another_block(books: Books) -> None:
    books.grown.by_group = ((6, 8),)


def growing_and_not_offered(books: Books) -> None:
    del books.offering._offered[GROWING]


def settled_and_not_offered(books: Books) -> None:
    books.offering._settled.add(ENDED)


def kept_back_and_not_offered(books: Books) -> None:
    books.offering._unopened.add(ENDED)


def abandoned_and_offered(books: Books) -> None:
    books.offering._abandoned[WHOLE] = False


def loaded_by_nobody(books: Books) -> None:
    books.twins._loading[KEY].clear()


BROKEN = {
    early_without_terms: "without terms nothing is early",
    ended_and_early: "what has ended is not early",
    told_beyond_the_prompt: "what is told is of the prompt",
    told_before_it_is_computed: "what is told is computed",
    ended_at_the_workers_alone: "what workers are told to end is given up",
    under_another_name: "an offer is kept under its request",
    growing_and_taken_back: "what grows stands",
    growing_although_whole: "what is computed when it is offered does not grow",
    progress_goes_back: "progress is of the prompt, and forward",
    progress_beyond_the_prompt: "progress is of the prompt, and forward",
    another_block: "an entry once given never changes",
    growing_and_not_offered: "what grows is offered",
    settled_and_not_offered: "what is settled is still offered",
    kept_back_and_not_offered: "what was kept from the sender is offered",
    abandoned_and_offered: "what was abandoned is over",
    loaded_by_nobody: "a prompt that is loading has a request",
}


@pytest.mark.parametrize("break_it", BROKEN, ids=lambda function: function.__name__)
def test_a_broken_law_is_named(break_it):
    books = Books()
    break_it(books)
    with pytest.raises(AssertionError, match=BROKEN[break_it]):
        books.check()


def test_nothing_is_broken_that_is_not_broken_by_hand():
    books = Books()
    assert books.prompt.told == 4
    assert len(books.offering.growing) == 1
    books.check()
    books.offering.abandon(GROWING, "preempted", comes_again=True)
    books.early.stepped((), [GROWING])
    books.twins.ends(WHOLE, KEY)
    books.check()
