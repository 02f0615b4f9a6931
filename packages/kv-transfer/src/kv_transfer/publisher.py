"""Tells complete offers in the book that readers of our caches see.

In:  offers that begin and cease to take readers (offers.Listener).
Out: entries of the book, once the blocks are filled.
Law: of the reactor's thread. What has ceased to take readers is never told.
"""

from functools import partial

from kv_core.spans import Span
from kv_transfer.direct.book import Book
from kv_transfer.lanes import Lane
from kv_transfer.mover import Moved
from kv_transfer.offers import HeldOffer
from kv_transfer.room import Room


class Publisher:
    """Nothing at all where our caches cannot be mapped."""

    def __init__(self, room: Room) -> None:
        self._room = room

    def listed(self, held: HeldOffer) -> None:
        """The prompt is complete; the work that fills its blocks may still be queued."""
        if (book := self._book) is None:
            return
        filled = held.growth.filled(Span(0, held.offer.num_tokens))
        if filled is None or filled.query():  # type: ignore[no-untyped-call]
            self._tell(book, held)
        else:
            self._room.copies.submit(lambda: None, filled, partial(self._filled, book, held), lane=Lane.OUT)

    def unlisted(self, held: HeldOffer) -> None:
        """It takes no new reader."""
        if (book := self._book) is not None:
            book.withdraw(held.offer.request_id)

    def _filled(self, book: Book, held: HeldOffer, moved: Moved) -> None:
        if moved.error is None:
            self._tell(book, held)

    def _tell(self, book: Book, held: HeldOffer) -> None:
        if not held.is_settled:
            is_told = book.publish(held.offer.request_id, held.pair, held.growth.tables)
            self._room.counters.add("offers_told" if is_told else "offers_untold")

    @property
    def _book(self) -> Book | None:
        return None if self._room.direct is None else self._room.direct.book
