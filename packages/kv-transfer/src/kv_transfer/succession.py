"""A session whose offer was taken back by its engine, and an equal offer with which it goes on.

In:  a session that is being served; the offers that are left.
Out: the session, bound to another offer of its pair; or nothing, and it is to fail.
Law: equal prompts have equal caches, so chunks may come from either. What was read of the offer that is gone is judged
     by the offer it was read of. A receiver that was told the very blocks reads them without asking: it cannot go on.
"""

from kv_transfer.admission import unserved
from kv_transfer.offers import OfferBook
from kv_transfer.room import Room
from kv_transfer.send_session import SendSession


def is_handed_on(session: SendSession, offers: OfferBook, room: Room) -> bool:
    """Whether the session is bound to another offer now, which may be computed less far."""
    other = offers.find(session.pair, session.ask.tokens.stop)
    if other is None or session.is_invited or unserved(session, room, other):
        return False
    assert session.held is not None, "law: only what is offered is served"
    offers.free(session.held)
    offers.hold(other)
    session.held = other
    return True
