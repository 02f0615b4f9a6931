"""Offers of one rank: the blocks that peers may read, and who still reads them.

In:  offers, settlements by the instance door, readers that begin and end.
Out: which offer serves an ask; which requests are over.
Law: a request is over once, and only after it is settled and its last reader has ended: blocks are never freed under
     a reader, and settling never cuts one off. A settled offer takes no new reader. A growing offer is not over before
     it is complete; abandoned, it serves nobody, and is forgotten at once: its blocks are its engine's again. If it
     comes again its askers may wait for it, until it is settled.

No I/O and no clock; of one thread. A pair is (transfer id, prompt key).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kv_core.errors import CallerError
from kv_core.ids import RequestId, TransferId
from kv_transfer.growth import HeldGrowth, Standing, Step
from kv_transfer.orders import Offer
from kv_transfer.plan.frontier import Frontier
from kv_transfer.tombstones import Tombstones

if TYPE_CHECKING:
    import torch

Pair = tuple[TransferId, bytes]


@dataclass(slots=True, eq=False)
class HeldOffer:
    """One offer, and what of it may be read."""

    offer: Offer
    growth: HeldGrowth
    num_readers: int = 0
    is_settled: bool = False

    @property
    def pair(self) -> Pair:
        return self.offer.transfer_id, self.offer.prompt_key


class Listener(Protocol):
    """Whoever wants to know which complete offers take readers."""

    def listed(self, held: HeldOffer) -> None:
        """This one does, from now on."""

    def unlisted(self, held: HeldOffer) -> None:
        """It does not, from now on; perhaps it never did."""


class OfferBook:
    """All offers that are not over."""

    def __init__(self, remember_s: float, listener: Listener | None = None) -> None:
        """`remember_s`: how long late askers are told that an offer is gone, rather than to wait for it."""
        self._listener = listener
        self._by_request: dict[RequestId, HeldOffer] = {}
        self._by_pair: dict[Pair, list[HeldOffer]] = {}
        self._gone: Tombstones[Pair, str] = Tombstones(remember_s)
        self._returning: dict[RequestId, Pair] = {}
        """Abandoned, and to be offered anew or settled."""
        self._early: Tombstones[tuple[TransferId, RequestId], str] = Tombstones(remember_s)

    def __len__(self) -> int:
        """Number of offers that are not over."""
        return len(self._by_request)

    @property
    def num_growing(self) -> int:
        """Offers whose prompt is being computed."""
        return sum(held.growth.is_growing for held in self._by_request.values())

    def add(
        self, offer: Offer, filled: "torch.cuda.Event | None", now: float, standing: Standing | None = None
    ) -> bool:
        """One more offer; False if it is over already, because it was settled before it came.

        `filled` is the event after which its blocks hold what is computed (CUDA).
        """
        if offer.request_id in self._by_request:
            raise CallerError(f"the request is offered already: request={offer.request_id}")
        is_growing = offer.num_computed is not None
        computed = offer.num_tokens if offer.num_computed is None else offer.num_computed
        self._returning.pop(offer.request_id, None)
        growth = HeldGrowth(offer.tables, [Step(Frontier(computed), filled)], is_growing, standing or Standing())
        held = HeldOffer(offer, growth)
        reason = self._early.word((offer.transfer_id, offer.request_id))
        if reason is not None:
            self._gone.bury(held.pair, reason, now)
            held.is_settled = True
            if not is_growing:
                return False
            self._by_request[offer.request_id] = held
            return True
        self._by_request[offer.request_id] = held
        self._by_pair.setdefault(held.pair, []).append(held)
        self._tell_if_complete(held)
        return True

    def get(self, request_id: RequestId) -> HeldOffer | None:
        """The offer of this request, if it is not over."""
        return self._by_request.get(request_id)

    def complete(self, request_id: RequestId) -> bool:
        """A growing offer has all of its prompt, and is as any other; True if the request is over with that."""
        held = self._by_request.get(request_id)
        if held is None:
            return False
        held.growth.is_growing = False
        self._tell_if_complete(held)
        return self._is_over(held)

    def abandon(self, request_id: RequestId, reason: str, now: float, *, comes_again: bool = False) -> HeldOffer | None:
        """A growing offer ends without its prompt; None if it is not known any more."""
        held = self._by_request.pop(request_id, None)
        if held is not None and not held.is_settled:
            held.is_settled = True
            if comes_again:
                self._returning[request_id] = held.pair
            self._unlist(held, reason, now)
        return held

    def settle(self, transfer_id: TransferId, request_id: RequestId, reason: str, now: float) -> bool:
        """No new reader from now on; True if the request is over with that."""
        if self._is_awaited(transfer_id, request_id):
            self._gone.bury(self._returning.pop(request_id), reason, now)
            return False
        held = self._by_request.get(request_id)
        if held is None or held.offer.transfer_id != transfer_id:
            self._early.bury((transfer_id, request_id), reason, now)
            return False
        if held.is_settled:
            return False
        held.is_settled = True
        self._unlist(held, reason, now)
        return self._is_over(held)

    def find(self, pair: Pair, num_tokens: int) -> HeldOffer | None:
        """An offer of this pair that serves new readers and has most of so many tokens computed.

        The longest, if none will ever have so many.
        """
        offers = self._by_pair.get(pair, ())
        fitting = [held for held in offers if held.offer.num_tokens >= num_tokens]
        furthest = max(fitting, key=lambda held: min(held.growth.num_computed, num_tokens), default=None)
        return furthest or max(offers, key=lambda held: held.offer.num_tokens, default=None)

    def why_gone(self, pair: Pair) -> str | None:
        """How the last offer of this pair ended; None if there never was one, or there is one now or soon."""
        return None if pair in self._by_pair or pair in self._returning.values() else self._gone.word(pair)

    def hold(self, held: HeldOffer) -> None:
        """One more reader."""
        assert not held.is_settled, "law: a settled offer takes no new reader"
        held.num_readers += 1

    def free(self, held: HeldOffer) -> bool:
        """One reader less; True if the request is over with that."""
        assert held.num_readers > 0, "law: a reader ends once"
        held.num_readers -= 1
        return self._is_over(held)

    def is_current(self, held: HeldOffer) -> bool:
        """Whether what was read of it is still what was offered."""
        return self._by_request.get(held.offer.request_id) is held and not held.growth.standing.ended

    def settle_all(self, reason: str, now: float) -> list[RequestId]:
        """Settles whatever is left, and abandons what grows; answers which requests are over with that."""
        for request_id in [request_id for request_id, held in self._by_request.items() if held.growth.is_growing]:
            self.abandon(request_id, reason, now)
        self._returning.clear()
        ends = [(held.offer.transfer_id, request_id) for request_id, held in self._by_request.items()]
        return [request_id for transfer_id, request_id in ends if self.settle(transfer_id, request_id, reason, now)]

    def check(self) -> None:
        """Proves that both indices agree and nobody who is over is listed."""
        listed = [held for offers in self._by_pair.values() for held in offers]
        serving = [held for held in self._by_request.values() if not held.is_settled]
        assert sorted(map(id, listed)) == sorted(map(id, serving)), "law: an offer is listed exactly while it serves"
        assert not self._returning.keys() & self._by_request.keys(), "law: what is awaited is not there"
        waiting = [held.num_readers or held.growth.is_growing for held in self._by_request.values() if held.is_settled]
        assert all(waiting), "law: over is gone"

    def _tell_if_complete(self, held: HeldOffer) -> None:
        if self._listener is not None and not (held.growth.is_growing or held.is_settled):
            self._listener.listed(held)

    def _unlist(self, held: HeldOffer, reason: str, now: float) -> None:
        """It takes no new reader."""
        if self._listener is not None:
            self._listener.unlisted(held)
        offers = self._by_pair[held.pair]
        offers.remove(held)
        if not offers:
            del self._by_pair[held.pair]
            self._gone.bury(held.pair, reason, now)

    def _is_awaited(self, transfer_id: TransferId, request_id: RequestId) -> bool:
        pair = self._returning.get(request_id)
        return pair is not None and pair[0] == transfer_id

    def _is_over(self, held: HeldOffer) -> bool:
        # One that was abandoned never stopped growing.
        if held.is_settled and held.num_readers == 0 and not held.growth.is_growing:
            del self._by_request[held.offer.request_id]
            return True
        return False
