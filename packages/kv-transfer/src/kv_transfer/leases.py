"""Offers of one instance, each held for one consumer until a deadline.

In:  offers as they open, renewals and releases by consumers, the time.
Out: offers that are settled, each once, with the reason.
Law: an offer is settled by one release, by the end of its lease, or by its engine, whichever comes first; one consumer
     settles at most one offer of a pair, however often it repeats itself. A pair is (transfer id, prompt key). Renewals
     hold a lease up to a limit from its opening, and only those of consumers that have settled nothing. A release that
     comes before its offer is remembered for a while, and settles the offer as it opens: a consumer that has given up
     does not come back for it.

No I/O and no clock; of one thread.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from kv_core.ids import RequestId, TransferId
from kv_transfer.orders import Settled

Pair = tuple[TransferId, bytes]

MAX_EARLY: Final = 4096
"""Releases of unknown pairs that are remembered; the oldest are forgotten first."""


@dataclass(slots=True)
class _Lease:
    """Until when an offer waits, and until when at most."""

    end: float
    limit: float


@dataclass(slots=True)
class _Offers:
    """Offers of one pair, oldest first, with each lease; and who has settled one already."""

    leases: dict[RequestId, "_Lease"] = field(default_factory=dict)
    consumers: set[str] = field(default_factory=set)
    forget_at: float = 0.0


class LeaseBook:
    """All open offers of an instance, and for a while those that were."""

    def __init__(self, remember_s: float, early_s: float) -> None:
        """`remember_s`: how long a pair whose offers are all settled is still known; `early_s`: how long a release of
        an unknown one is."""
        self._remember_s = remember_s
        self._early_s = early_s
        self._pairs: dict[Pair, _Offers] = {}
        self._pair_of: dict[RequestId, Pair] = {}
        self._early: OrderedDict[tuple[TransferId, bytes | None, str], float] = OrderedDict()  # until when

    def __len__(self) -> int:
        """Number of open offers."""
        return len(self._pair_of)

    def knows(self, pair: Pair) -> bool:
        """Whether there is an offer of this pair, or was one a while ago."""
        return pair in self._pairs

    def open(
        self, pair: Pair, request_id: RequestId, now: float, lease_end: float, limit: float | None = None
    ) -> Settled | None:
        """One more offer, which may be settled already; a request has one at a time.

        `limit`: what renewals can reach (nothing, if None).
        """
        assert request_id not in self._pair_of, "law: a request has one offer at a time"
        offers = self._pairs.setdefault(pair, _Offers())
        offers.leases[request_id] = _Lease(lease_end, lease_end if limit is None else max(lease_end, limit))
        self._pair_of[request_id] = pair
        if (consumer := self._take_early(pair, now)) is None:
            return None
        offers.consumers.add(consumer)
        return self._settle(request_id, "released", now)

    def renew(self, transfer_id: TransferId, prompt_key: bytes | None, consumer: str, end: float) -> bool:
        """Offers of this pair, or of all pairs of the transfer, wait until `end`; False if there is none to wait."""
        pairs = self._pairs_of(transfer_id) if prompt_key is None else [(transfer_id, prompt_key)]
        found = [self._pairs[pair] for pair in pairs if pair in self._pairs]
        leases = [lease for offers in found if consumer not in offers.consumers for lease in offers.leases.values()]
        for lease in leases:
            lease.end = max(lease.end, min(end, lease.limit))
        return bool(leases)

    def restart(self, request_id: RequestId, end: float, limit: float) -> None:
        """The lease of an open offer begins only now: its prompt is computed. Nothing happens if it is not open."""
        if request_id in self._pair_of:
            self._pairs[self._pair_of[request_id]].leases[request_id] = _Lease(end, max(end, limit))

    def release(
        self, transfer_id: TransferId, prompt_key: bytes | None, consumer: str, now: float
    ) -> tuple[bool, Settled | None]:
        """Whether the pair is known; and the offer that this consumer settles, the oldest, if there is one left.

        Without a prompt key the transfer's only pair is meant; if it has several, nothing is settled but by its lease.
        """
        pairs = self._pairs_of(transfer_id) if prompt_key is None else [(transfer_id, prompt_key)]
        if len(pairs) > 1:
            return True, None
        offers = self._pairs.get(pairs[0]) if pairs else None
        if offers is None:
            self._remember_early((transfer_id, prompt_key, consumer), now)
            return False, None
        if consumer in offers.consumers or not offers.leases:
            return True, None
        offers.consumers.add(consumer)
        return True, self._settle(next(iter(offers.leases)), "released", now)

    def withdraw(self, request_id: RequestId, reason: str, now: float) -> Settled | None:
        """The engine's own end of an offer; None if it is not open."""
        return self._settle(request_id, reason, now) if request_id in self._pair_of else None

    def expire(self, now: float) -> list[Settled]:
        """Offers whose lease has ended; and forgets pairs that are long settled."""
        ended = [
            request_id for request_id, pair in self._pair_of.items() if self._pairs[pair].leases[request_id].end <= now
        ]
        settled = [self._settle(request_id, "expired", now) for request_id in ended]
        for pair in [pair for pair, offers in self._pairs.items() if not offers.leases and offers.forget_at <= now]:
            del self._pairs[pair]
        return settled

    def _remember_early(self, release: tuple[TransferId, bytes | None, str], now: float) -> None:
        self._early[release] = now + self._early_s
        self._early.move_to_end(release)
        if len(self._early) > MAX_EARLY:
            self._early.popitem(last=False)

    def _take_early(self, pair: Pair, now: float) -> str | None:
        """The consumer that has released an offer of this pair before there was one, the first of them."""
        while self._early and next(iter(self._early.values())) <= now:
            self._early.popitem(last=False)
        for release in self._early:
            if release[0] == pair[0] and release[1] in (None, pair[1]):
                del self._early[release]
                return release[2]
        return None

    def _pairs_of(self, transfer_id: TransferId) -> list[Pair]:
        return [pair for pair in self._pairs if pair[0] == transfer_id]

    def _settle(self, request_id: RequestId, reason: str, now: float) -> Settled:
        pair = self._pair_of.pop(request_id)
        offers = self._pairs[pair]
        del offers.leases[request_id]
        offers.forget_at = now + self._remember_s
        return Settled(pair[0], request_id, reason)

    def check(self) -> None:
        """Proves that both indices agree."""
        listed = {request_id: pair for pair, offers in self._pairs.items() for request_id in offers.leases}
        assert listed == self._pair_of, f"indices disagree: by pair={listed}, by request={self._pair_of}"
