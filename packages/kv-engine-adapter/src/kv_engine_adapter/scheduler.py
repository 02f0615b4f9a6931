"""The scheduler side of the connector: which tokens another engine holds, what is offered, who may free what.

In:  requests of the engine as `RequestView`, its block tables, the finished loads and sends of the workers.
Out: token counts for the engine's scheduler, `StepOrders` for the workers, messages to peers' doors.
Law: no call blocks or moves bytes; every load handed to the workers is given up only when they report it over;
     blocks of an offer stay with it until every worker reported the request as sent.

A decode request goes                       A prefill request goes
  match -> allocated -> (workers) -> over     finished -> offered -> settled -> (workers) -> over
"""

import enum
import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain

from kv_core.errors import CallerError
from kv_core.ids import Incarnation, InstanceId, RequestId, TransferId
from kv_core.keys import BlockKey
from kv_core.spans import Span
from kv_engine_adapter.early import EarlyOffers, EarlyTerms, chosen
from kv_engine_adapter.families import Families
from kv_engine_adapter.handover import OfferTicket, RemoteOffer, key_to_load, remote_offer, wants_load, wants_offer
from kv_engine_adapter.known_peers import KnownPeers
from kv_engine_adapter.metrics import Gauges, Report
from kv_engine_adapter.orders import LoadBlocks, OpenOffer, Pending, SettleOffer, StepOrders, Tables
from kv_engine_adapter.ports import Door, RequestView
from kv_engine_adapter.twins import Twins
from kv_transfer.orders import Errand

logger = logging.getLogger(__name__)


class Stage(enum.Enum):
    """How far a decode request is with its load."""

    MATCHED = enum.auto()
    LOADING = enum.auto()
    OVER = enum.auto()


@dataclass(slots=True)
class _Load:
    offer: RemoteOffer | None  # None: the hand-over was refused, there is nobody to tell
    prompt_key: BlockKey | None  # None: whatever the offer holds
    stage: Stage = Stage.MATCHED
    has_waited: bool = False  # for an equal prompt to be loaded
    needs_every_token: bool = False
    num_computed: int = 0  # tokens held here when it was last asked
    tables: Tables = ()


@dataclass(frozen=True, slots=True)
class Identity:
    """Who we are towards peers."""

    instance: InstanceId
    incarnation: Incarnation
    tensor_ranks: int
    pipeline_stages: int


class FerryScheduler:
    """One engine's offers and loads, as its scheduler sees them."""

    def __init__(
        self,
        identity: Identity,
        door: Door,
        *,
        lease_s: float,
        patience_s: float,
        shares_prefixes: bool,
        tokens_per_block: int,
        peers: KnownPeers,
        run_now: Callable[[StepOrders], None] | None = None,
        early: EarlyTerms | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`shares_prefixes`: the engine keeps a prefix cache, so equal prompts wait for one load, not repeat it.

        `patience_s`: how long an idle engine is kept stepping for what its workers have open.
        `run_now` reaches a worker that shares our process: such an engine may stop stepping when its last request
        ends (offline use), and an offer that waits for a step would never be seen.
        `early`: see `EarlyOffers`.
        """
        self._identity = identity
        self._door = door
        self._lease_s = lease_s
        self._patience_s = patience_s
        self._run_now = run_now
        self._shares_prefixes = shares_prefixes
        self._tokens_per_block = tokens_per_block
        self._peers = peers
        self._clock = clock
        self._loads: dict[RequestId, _Load] = {}
        # Loads whose request has ended; the workers still have to say that they are quiet.
        self._orphans: dict[RequestId, _Load] = {}
        self._twins = Twins()
        self._offered: dict[RequestId, TransferId] = {}
        self._families = Families(lease_s, clock)
        self._pending = Pending()
        self.early = EarlyOffers(door, early, self._offered)
        self._worker_gauges: Gauges = {}
        self._worker_change = clock()
        self._num_refused = 0
        self._last_gauges: dict[str, float] = {}

    # -- decode side ---------------------------------------------------------------------------------------------

    def announced(self, request: RequestView) -> None:
        """A new request, which may wait long for its turn: the offer it comes with is held meanwhile."""
        self._load_of(request)

    def num_external_tokens(self, request: RequestView, num_computed_tokens: int) -> int | None:
        """Prompt tokens a peer holds beyond `num_computed_tokens`; `None`: an equal prompt is loading, ask again.

        Never counts the last prompt token: the engine computes it to get its first logits.
        """
        self._load_of(request)
        return self.num_known_tokens(request.request_id, request.num_prompt_tokens, num_computed_tokens)

    def knows(self, request_id: RequestId) -> bool:
        """Whether the request wants a load, and was announced."""
        return request_id in self._loads

    def num_known_tokens(self, request_id: RequestId, num_prompt_tokens: int, num_computed_tokens: int) -> int | None:
        """The same of a request that was announced. Asked for all that wait, in every step."""
        load = self._loads.get(request_id)
        if load is None or load.stage is Stage.OVER or load.needs_every_token:
            return 0
        load.num_computed = num_computed_tokens
        wanted = max(0, num_prompt_tokens - 1 - num_computed_tokens)
        if wanted and self._shares_prefixes and self._twins.is_loading(load.prompt_key, request_id):
            load.has_waited = True
            return None
        # Why: what an equal prompt left to fetch is less than a block, cheaper to compute than to ask for.
        return 0 if load.has_waited and wanted < self._tokens_per_block else wanted

    def allocated(self, request: RequestView, tables: Tables, num_external_tokens: int) -> None:
        """The engine gave blocks for the tokens we announced, or (0) decided that it needs none of them."""
        load = self._loads.get(request.request_id)
        if load is None or load.stage is not Stage.MATCHED:
            return
        if num_external_tokens == 0:
            self._release(request.request_id, load)
            return
        assert load.offer is not None, "a refused hand-over is never matched"
        assert load.prompt_key is not None, "a rejected request is never scheduled"
        load.stage, load.tables = Stage.LOADING, tables
        self._twins.begins(request.request_id, load.prompt_key)
        self._pending.loads.append(
            LoadBlocks(
                request_id=request.request_id,
                transfer_id=load.offer.transfer_id,
                prompt_key=load.prompt_key,
                tokens=Span(load.num_computed, load.num_computed + num_external_tokens),
                tables=tables,
                host=load.offer.host,
                port=load.offer.port,
                incarnation=load.offer.incarnation,
            )
        )

    def loads_over(
        self,
        request_ids: Iterable[RequestId],
        failed: Collection[RequestId] = (),
        failed_blocks: Collection[int] = (),
    ) -> None:
        """Every worker rank reported these loads over, well or badly: the peer may free its blocks.

        Requests that waited for a load that failed do not try the same offer again, each for a deadline of its own:
        they are computed here. Engines that cannot name failed requests name the blocks that were not loaded.
        """
        for request_id in request_ids:
            load = self._orphans.pop(request_id, None) or self._loads.get(request_id)
            if load is not None and load.stage is Stage.LOADING:
                self._release(request_id, load)
                if request_id in failed or not set(failed_blocks).isdisjoint(chain(*load.tables)):
                    self._give_up_waiting(load)

    def _give_up_waiting(self, failed: _Load) -> None:
        for request_id, load in self._loads.items():
            if load.stage is Stage.MATCHED and (load.offer, load.prompt_key) == (failed.offer, failed.prompt_key):
                self._release(request_id, load)

    def _load_of(self, request: RequestView) -> _Load | None:
        known = self._loads.get(request.request_id)
        if known is not None or not wants_load(request.params):
            return known
        assert request.params is not None
        try:
            offer = remote_offer(request.params, self._peers)
            load = _Load(offer, None if request.is_rejected else key_to_load(request))
        except CallerError as error:
            logger.warning("kvferry: request %s is computed here: %s", request.request_id, error)
            self._num_refused += 1
            load = _Load(None, None, Stage.OVER)
        load.needs_every_token = request.needs_every_token
        self._loads[request.request_id] = load
        self._hold(request.request_id, load)
        return load

    def _hold(self, request_id: RequestId, load: _Load) -> None:
        if (offer := load.offer) is not None:
            self._door.hold(self._errand(request_id, offer, load.prompt_key))

    def _release(self, request_id: RequestId, load: _Load) -> None:
        if load.prompt_key is not None:
            self._twins.ends(request_id, load.prompt_key)
        load.stage = Stage.OVER
        offer = load.offer
        assert offer is not None, "a refused hand-over has no offer"
        self._door.release(self._errand(request_id, offer, load.prompt_key))

    def _errand(self, request_id: RequestId, offer: RemoteOffer, prompt_key: BlockKey | None) -> Errand:
        """What is said of an offer, in the name of our request. Why a digest: clients choose the length of its id."""
        consumer = sha256(f"{self._identity.incarnation}/{request_id}".encode()).hexdigest()
        return Errand(offer.host, offer.port, offer.transfer_id, prompt_key, consumer, offer.incarnation)

    # -- prefill side --------------------------------------------------------------------------------------------

    def finished(
        self, request: RequestView, tables: Tables, *, complete: bool
    ) -> tuple[bool, dict[str, object] | None]:
        """A request ended, `complete` if with its whole prompt computed. Answers (keep blocks, tell the client).

        Law: blocks are kept exactly if the request was offered; the workers then report it as sent once.
        """
        load = self._loads.pop(request.request_id, None) or self._load_of(request)
        self._loads.pop(request.request_id, None)
        if load is not None:
            self._forsake(request.request_id, load)
            return False, None
        prompt_key = self._key_to_offer(request) if complete and any(tables) and wants_offer(request.params) else None
        if prompt_key is None:
            self.early.aborted(request.request_id)
            return False, None
        return self._offer(request, prompt_key, tables)

    def _key_to_offer(self, request: RequestView) -> BlockKey | None:
        """Under which a request that has finished is offered; `None`, and the reason in the log, if it is not."""
        key = request.prompt_key()
        if isinstance(key, str):
            why = key
        elif request.request_id in self._offered:
            why = "its id is on offer already"
        elif not (why := self.early.objection(request.request_id, key)):
            return key
        logger.warning("kvferry: request %s is not offered: %s", request.request_id, why)
        return None

    def _forsake(self, request_id: RequestId, load: _Load) -> None:
        """A decode request ended: stop what still runs for it; the offer is released once the workers are quiet."""
        if load.stage is Stage.MATCHED:
            self._release(request_id, load)
        elif load.stage is Stage.LOADING:
            self._pending.aborts.append(request_id)
            assert load.prompt_key is not None, "a rejected request is never scheduled"
            self._twins.ends(request_id, load.prompt_key)
            self._orphans[request_id] = load

    def _offer(
        self, request: RequestView, prompt_key: BlockKey, tables: Tables
    ) -> tuple[bool, dict[str, object] | None]:
        transfer_id = self.early.completed(request.request_id)
        if transfer_id is None:
            transfer_id = chosen(request) or self._families.transfer_id(request.family)
            self._door.open_offer(transfer_id, request.request_id, prompt_key, self._lease_s)
        self._offered[request.request_id] = transfer_id
        self._pending.offers.append(
            OpenOffer(request.request_id, transfer_id, prompt_key, request.num_prompt_tokens, tables)
        )
        if self._run_now is not None:
            self._run_now(self.take_orders())
        host, port = self._door.address
        ticket = OfferTicket(
            transfer_id=transfer_id,
            request_id=request.request_id,
            instance=self._identity.instance,
            incarnation=self._identity.incarnation,
            host=host,
            port=port,
            num_tokens=request.num_prompt_tokens,
            tensor_ranks=self._identity.tensor_ranks,
            pipeline_stages=self._identity.pipeline_stages,
        )
        return True, ticket.as_params()

    def sends_over(self, request_ids: Iterable[RequestId]) -> None:
        """Every worker rank reported these requests as sent; the engine frees their blocks."""
        for request_id in request_ids:
            self._offered.pop(request_id, None)

    # -- every step ----------------------------------------------------------------------------------------------

    def take_orders(self) -> StepOrders:
        """What the workers have to do from now on; each order is given once."""
        settled = tuple(
            SettleOffer(end.request_id, end.transfer_id, self.early.reason_of(end.request_id, end.reason))
            for end in self._door.poll_settled()
            if end.request_id in self._offered or self.early.settled(end.request_id)
        )
        pending, self._pending = self._pending, Pending()
        orders = tuple(pending.offers), settled, tuple(pending.loads), tuple(pending.aborts)
        return StepOrders(*orders, *self.early.take_orders())

    def workers_report(self, gauges: Gauges) -> None:
        """What the workers now have open, by rank."""
        if any(self._worker_gauges.get(source) != values for source, values in gauges.items()):
            self._worker_gauges.update(gauges)
            self._worker_change = self._clock()

    def has_work(self) -> bool:
        """Whether the engine should go on stepping without requests, so that the end of what is open is seen.

        Not for ever: a region that a stopped peer may still write is freed without a step of the engine.
        """
        if self._pending.aborts or self._pending.loads or self._pending.offers or self.early.has_orders:
            return True
        is_open = any(any(values.values()) for values in self._worker_gauges.values())
        return is_open and self._clock() - self._worker_change < self._patience_s

    def gauges(self) -> dict[str, float]:
        """Offers and loads now open, for metrics and tests."""
        loading = sum(load.stage is Stage.LOADING for load in self._loads.values())
        return {"offers": len(self._offered), "loads": loading + len(self._orphans)}

    def take_report(self) -> Report | None:
        """Counters since the last report and present gauges; `None` when nothing changed."""
        gauges = self.gauges()
        if not self._num_refused and gauges == self._last_gauges:
            return None
        counters: dict[str, float] = {"handovers_refused": self._num_refused} if self._num_refused else {}
        self._num_refused, self._last_gauges = 0, gauges
        return Report(counters=counters, gauges={"scheduler": gauges})

    def close(self) -> None:
        """Close the door to the peers; open offers end with the engine."""
        self._door.close()
