"""Two instances in one process, joined by real sockets and an agent in memory, and a driver for each.

In:  the states of both sides, settings, faults.
Out: sides (`side.Side`), running, and ended whatever happens.
Law: everything that tests of worlds need can be had from here.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from kv_core.ids import Incarnation, InstanceId, Rank
from kv_testing.side import Callee, Door, Side
from kv_testing.switches import Switches, hang_until
from kv_testing.tagged import FORMS, World, make_world
from kv_testing.usual import ALL, FAST, NUM_TOKENS, PROMPT, SOON_S, fresh_id, state_of
from kv_transfer.agent.base import Agent
from kv_transfer.agent.loopback import LoopbackHub
from kv_transfer.config import TransferConfig
from kv_transfer.direct.base import DirectDoor
from kv_transfer.faults import Faults
from kv_transfer.instance import InstanceDoor
from kv_transfer.plan.cache_state import CacheState
from kv_transfer.pools import PagedCaches
from kv_transfer.transceiver import Transceiver

__all__ = [
    "ALL",
    "FAST",
    "NUM_TOKENS",
    "PROMPT",
    "SOON_S",
    "Callee",
    "Door",
    "Side",
    "Switches",
    "fresh_id",
    "hang_until",
    "make_side",
    "pair",
    "sides",
    "state_of",
]


def make_side(
    hub: LoopbackHub,
    name: str,
    state: CacheState,
    config: TransferConfig = FAST,
    faults: Mapping[int, Faults] | Faults | None = None,
    *,
    door_faults: Faults | None = None,
    num_tokens: int = NUM_TOKENS,
    ports: Sequence[int] = (),
    agents: Sequence[Agent] = (),
    device: str | None = None,
    direct: Callable[[PagedCaches], DirectDoor | None] = lambda _: None,
    world: World | None = None,
    on_news: Callable[[], None] = lambda: None,
) -> Side:
    """A running instance. `ports`: of the door, then of each rank; any free ones if empty.

    `direct` makes each rank's end of a direct path. `world`: its caches; else some in the first form of its order.
    `on_news`: see `Transceiver`.
    """
    incarnation = Incarnation(f"{name}-{secrets.token_hex(4)}")
    form = FORMS[state.layout.order][0] if state.layout.is_plain else "split BHD"
    world = world or make_world(state, num_tokens, form, seed=len(name))
    ranks = state.parallel.ranks
    on_device = {} if device is None else {rank: _moved(world.caches[rank], device) for rank in ranks}
    ports = list(ports) or [0] * (len(ranks) + 1)
    agents = tuple(agents) or tuple(hub.agent() for _ in ranks)
    with ExitStack() as undo:
        door = InstanceDoor(replace(config, port=ports[0]), InstanceId(name), incarnation, door_faults)
        undo.callback(door.close)
        transceivers = []
        for rank in ranks:
            undo.callback(agents[rank].close, 1.0)
            made = Transceiver(
                replace(config, port=ports[1 + rank]),
                InstanceId(name),
                incarnation,
                Rank(rank),
                state,
                on_device.get(rank, world.caches[rank]),
                agents[rank],
                faults.get(rank) if isinstance(faults, Mapping) else faults,
                direct(on_device.get(rank, world.caches[rank])),
                on_news=on_news,
            )
            undo.callback(made.close)
            transceivers.append(made)
        door.set_cards([transceiver.card for transceiver in transceivers])
        undo.pop_all()
    return Side(InstanceId(name), incarnation, world, door, tuple(transceivers), agents, on_device)


def _moved(caches: PagedCaches, device: str) -> PagedCaches:
    return replace(caches, planes=tuple(plane.to(device) for plane in caches.planes))


@contextmanager
def sides(*made: Side) -> Iterator[tuple[Side, ...]]:
    """Ends all of them, whatever happens."""
    try:
        yield made
    finally:
        for side in made:
            side.close()


@contextmanager
def pair(
    prefill: CacheState | None = None,
    decode: CacheState | None = None,
    *,
    config: TransferConfig = FAST,
    prefill_config: TransferConfig | None = None,
    prefill_faults: Faults | None = None,
    decode_faults: Faults | None = None,
    direct: Callable[[PagedCaches], DirectDoor | None] = lambda _: None,
) -> Iterator[tuple[Side, Side, LoopbackHub]]:
    """A prefill and a decode instance, and the hub of their agents."""
    hub = LoopbackHub()
    p = make_side(hub, "p", prefill or state_of(), prefill_config or config, prefill_faults, direct=direct)
    d = make_side(hub, "d", decode or state_of(), config, decode_faults, direct=direct)
    with sides(p, d):
        yield p, d, hub
