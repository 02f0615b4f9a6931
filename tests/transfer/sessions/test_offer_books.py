"""The books of a door and of a sender: what is on offer, who has it, and when that ends; without threads or sockets."""

from hypothesis import given
from hypothesis import strategies as st

from kv_core.ids import RequestId, TransferId
from kv_transfer.leases import MAX_EARLY, LeaseBook
from kv_transfer.offers import OfferBook
from kv_transfer.orders import BlockTables, Offer, Settled

PAIR = (TransferId("a" * 32), b"k")

ACTIONS = st.one_of(
    st.tuples(st.just("open"), st.integers(0, 5), st.integers(1, 9)),
    st.tuples(st.just("renew"), st.integers(0, 3), st.integers(1, 30)),
    st.tuples(st.just("release"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("withdraw"), st.integers(0, 5), st.just(0)),
    st.tuples(st.just("wait"), st.integers(1, 4), st.just(0)),
)


class Naive:
    """Open offers, oldest first, each with the end of its lease; who has settled one; who has released one before
    there was any, and until when that counts."""

    def __init__(self):
        self.now, self.offers, self.limits = 0.0, dict[str, float](), dict[str, float]()
        self.consumers, self.early = set[str](), dict[str, float]()

    def open(self, book, number, more):
        name, now = f"r{number}", self.now
        if name in self.offers:
            return
        settled = book.open(PAIR, RequestId(name), now, now + more, now + 20)
        first = next((consumer for consumer, until in self.early.items() if until > now), None)
        assert settled == (None if first is None else Settled(PAIR[0], RequestId(name), "released"))
        if first is None:
            self.offers[name], self.limits[name] = now + more, now + 20
        else:
            del self.early[first]
            self.consumers.add(first)

    def renew(self, book, number, more):
        waits = f"c{number}" not in self.consumers
        assert book.renew(*PAIR, f"c{number}", self.now + more) == (waits and bool(self.offers))
        for name, end in self.offers.items() if waits else ():
            self.offers[name] = max(end, min(self.now + more, self.limits[name]))

    def release(self, book, number, _):
        consumer = f"c{number}"
        known, settled = book.release(*PAIR, consumer, self.now)
        assert known or not self.offers
        expected = None
        if not known:
            self.early.pop(consumer, None)
            self.early[consumer] = self.now + 5
        elif self.offers and consumer not in self.consumers:
            self.consumers.add(consumer)
            expected = next(iter(self.offers))
            del self.offers[expected]
        assert settled == (expected and Settled(PAIR[0], RequestId(expected), "released"))

    def withdraw(self, book, number, _):
        settled = book.withdraw(RequestId(f"r{number}"), "why", self.now)
        assert (settled is not None) == (self.offers.pop(f"r{number}", None) is not None)

    def wait(self, book, number, _):
        self.now += number
        expired = {settled.request_id for settled in book.expire(self.now)}
        assert expired == {name for name, end in self.offers.items() if end <= self.now}
        self.offers = {name: end for name, end in self.offers.items() if end > self.now}
        if not book.knows(PAIR):
            self.consumers.clear()


@given(st.lists(ACTIONS, max_size=40))
def test_a_lease_book_settles_each_offer_once(actions):
    book, naive = LeaseBook(remember_s=3, early_s=5), Naive()
    for kind, number, more in actions:
        getattr(naive, kind)(book, number, more)
        assert len(book) == len(naive.offers)
        book.check()


def test_a_renewal_reaches_no_further_than_the_limit():
    book = LeaseBook(remember_s=10, early_s=5)
    book.open(PAIR, RequestId("r"), 0, 5, 8)
    book.open((PAIR[0], b"another prompt"), RequestId("other"), 0, 5)
    assert book.renew(*PAIR, "c", 30)
    assert not book.renew(PAIR[0], b"a third prompt", "c", 30)
    assert book.renew(PAIR[0], None, "c", 30), "all pairs of the transfer"
    assert [each.request_id for each in book.expire(5)] == ["other"], "opened without a limit: no renewal holds it"
    assert book.expire(7.9) == []
    assert [each.request_id for each in book.expire(8)] == ["r"]
    assert not book.renew(*PAIR, "c", 30), "an ended lease is never renewed"


def test_a_release_without_a_prompt_key_means_the_only_pair():
    book = LeaseBook(remember_s=10, early_s=5)
    book.open(PAIR, RequestId("r"), 0, 5)
    book.open(PAIR, RequestId("sibling"), 0, 5)
    assert book.release(PAIR[0], None, "c", 1) == (True, Settled(PAIR[0], RequestId("r"), "released"))
    assert book.release(PAIR[0], None, "c", 1) == (True, None)
    book.open((PAIR[0], b"another prompt"), RequestId("other"), 0, 5)
    assert book.release(PAIR[0], None, "d", 1) == (True, None), "which one is meant cannot be known"
    assert book.release(TransferId("b" * 32), None, "d", 1) == (False, None)
    assert len(book) == 2


def test_a_release_that_comes_first_settles_the_offer_as_it_opens():
    """A consumer that gave up before the prompt was offered leaves no offer that waits for its lease."""
    book = LeaseBook(remember_s=10, early_s=5)
    assert book.release(*PAIR, "c", 0) == (False, None)
    assert book.release(*PAIR, "c", 1) == (False, None), "said again until it is answered"
    assert book.open(PAIR, RequestId("r"), 2, 9) == Settled(PAIR[0], RequestId("r"), "released")
    assert book.open(PAIR, RequestId("sibling"), 2, 9) is None, "one consumer settles one offer"
    assert book.release(*PAIR, "c", 3) == (True, None)
    other = (PAIR[0], b"another prompt")
    assert book.release(*other, "d", 0) == (False, None)
    assert book.open(other, RequestId("late"), 5, 9) is None, "it was too long ago"
    unknown = TransferId("b" * 32)
    assert book.release(unknown, None, "e", 0) == (False, None)
    assert book.open((unknown, b"any prompt"), RequestId("only"), 1, 9) == Settled(
        unknown, RequestId("only"), "released"
    )
    book.check()


def test_what_is_remembered_of_strangers_is_bounded():
    book = LeaseBook(remember_s=10, early_s=5)
    for number in range(MAX_EARLY + 1):
        book.release(TransferId(f"{number:032x}"), b"k", "c", 0)
    assert book.open((TransferId(f"{0:032x}"), b"k"), RequestId("first"), 1, 9) is None
    assert book.open((TransferId(f"{1:032x}"), b"k"), RequestId("second"), 1, 9) is not None


def test_a_pair_is_forgotten_after_a_while():
    book = LeaseBook(remember_s=10, early_s=5)
    book.open(PAIR, RequestId("r"), 0, 5)
    assert book.release(*PAIR, "c", 1)[1] == Settled(PAIR[0], RequestId("r"), "released")
    assert book.release(*PAIR, "c", 2) == (True, None)
    book.expire(10.9)
    assert book.release(*PAIR, "c", 2) == (True, None)
    book.expire(11)
    assert book.release(*PAIR, "c", 11) == (False, None)


def _offer(number, num_tokens=8):
    return Offer(PAIR[0], RequestId(f"r{number}"), PAIR[1], BlockTables(num_tokens, ((0, 1),)))


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "settle", "read", "end"]), st.integers(0, 3)),
        max_size=40,
    )
)
def test_an_offer_book_never_frees_under_a_reader_and_frees_once(actions):
    book, readers, over = OfferBook(100), [], []
    added, settled = set(), set()
    for kind, number in actions:
        request_id = f"r{number}"
        if kind == "add" and request_id not in added:
            added.add(request_id)
            if not book.add(_offer(number), None, 0):
                over.append(request_id)
        elif kind == "settle":
            settled.add(request_id)
            if book.settle(PAIR[0], RequestId(request_id), "x", 0):
                over.append(request_id)
        elif kind == "read" and (held := book.find(PAIR, 8)) is not None:
            assert held.offer.request_id not in settled
            book.hold(held)
            readers.append(held)
        elif kind == "end" and readers:
            held = readers.pop(number % len(readers))
            assert held.offer.request_id not in over, "freed under a reader"
            if book.free(held):
                over.append(held.offer.request_id)
        book.check()
    read = {held.offer.request_id for held in readers}
    assert sorted(over) == sorted((added & settled) - read)
    serving = added - settled
    assert (book.find(PAIR, 8) is not None) == bool(serving)
    assert (book.why_gone(PAIR) is None) == bool(serving or not added & settled)


def test_the_offer_with_enough_tokens_is_found():
    book = OfferBook(100)
    assert book.add(_offer(0, 4), None, 0)
    assert book.add(_offer(1, 8), None, 0)
    found = [book.find(PAIR, num_tokens) for num_tokens in (4, 8, 9)]
    # For 9 the longest, so that a refusal can name its length.
    assert [held and held.offer.request_id for held in found] == ["r0", "r1", "r1"]
