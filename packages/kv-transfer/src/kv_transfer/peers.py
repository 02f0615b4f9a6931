"""Who we talk to: introductions, signs of life, deaths.

In:  cards of ranks that we want to ask; greetings at our door; the time; probes.
Out: Peers, each one rank of one run of another instance; and news of them to the listeners.
Law: a peer is dead when it is silent and nobody listens at its address, or when its address answers as another run.
     Silence alone is never death: a stopped peer may still write. A dead peer is never heard of again; a restarted one
     is another peer, since its incarnation differs.

     meet() --- Hello ---> HelloReply: introduced ---> (Rejected "stranger": Hello again)
                   |-----> HelloRefused: refused, for reasons
     a Hello at our door, answered by HelloReply: introduced as well; that peer is reached by its route
"""

import logging
from collections.abc import Sequence
from typing import Final, TypeVar

from kv_core.errors import CallerError, CapacityError, FerryError
from kv_core.ids import Incarnation, InstanceId, Rank
from kv_transfer.agent.cards import DirectCard
from kv_transfer.peer import Listener, Peer, PeerKey
from kv_transfer.plan.compatibility import Reason, reasons
from kv_transfer.protocol import codec
from kv_transfer.protocol.errors import ProtocolError, UnexpectedMessage
from kv_transfer.protocol.messages import (
    MAX_REASONS,
    Hello,
    HelloRefused,
    HelloReply,
    Message,
    Ping,
    RankCard,
    clipped,
)
from kv_transfer.room import Room
from kv_transfer.wire import Link, Probe, Route, UnusableAddress

logger = logging.getLogger(__name__)


Introduction = TypeVar("Introduction", Hello, HelloReply)

MAX_PEERS: Final = 1 << 14
MAX_PARTED: Final = 1024
"""Most agents of forgotten peers that our agent still knows."""


class Peers:
    """All peers of one rank."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._listeners: Sequence[Listener] = ()
        self._peers: dict[PeerKey, Peer] = {}
        self._by_link: dict[Link, Peer] = {}
        self._by_route: dict[Route, Peer] = {}
        self._by_agent: dict[str, Peer] = {}
        self._parted: dict[str, None] = {}
        """Agents of peers that were forgotten alive, oldest first: our agent still knows them."""

    def __len__(self) -> int:
        return len(self._peers)

    def start(self, listeners: Sequence[Listener]) -> None:
        """Begin to watch."""
        self._listeners = listeners
        self._watch()

    # -- being introduced --------------------------------------------------------------------------------------------

    def meet(self, instance: InstanceId, incarnation: Incarnation, card: RankCard) -> Peer:
        """The peer with this card, called and greeted. Raises UnusableAddress."""
        peer = self._peers.get(PeerKey(incarnation, card.rank))
        if peer is None:
            peer = self._peers[PeerKey(incarnation, card.rank)] = self._new(instance, incarnation, card)
        if peer.link is None:
            self._call(peer)
        if not peer.is_introduced and peer.hello is None:
            self._greet(peer, self._room.config.nudge_s)
        return peer

    def greeted(self, route: Route, hello: Hello) -> None:
        """Somebody introduces himself at our door."""
        if why := self._unfit(hello):
            self._turn_away(route, why)
            return
        key = PeerKey(hello.incarnation, hello.card.rank)
        peer = self._peers.get(key) or self._new(hello.instance, hello.incarnation, hello.card)
        if why := self._accept(peer, hello):
            self._turn_away(route, why)
            return
        if key not in self._peers:
            self._peers[key] = peer
            self._suspect_at(hello.card, key)
        self._bind(peer, route)
        self._room.wire.reply(route, self._answer_to_hello())

    def answered(self, link: Link, reply: HelloReply) -> None:
        """A peer that we called introduces itself."""
        peer = self.at_link(link)
        if reply.incarnation != peer.key.incarnation or reply.card.rank != peer.key.rank:
            self.dead(peer, f"its address answers as {reply.incarnation}, rank {reply.card.rank}")
            return
        why = self._unfit(reply) or self._accept(peer, reply)
        if why:
            self._refuse(peer, "; ".join(map(str, why)))
            return
        self._stop_greeting(peer)
        peer.is_introduced, peer.direct = True, reply.direct
        if self._room.shared is not None:
            peer.planes = self._room.shared.planes_of(reply.in_place, peer.state, peer.key.rank)
        for listener in self._listeners:
            listener.peer_introduced(peer)

    def refused(self, link: Link, refusal: HelloRefused) -> None:
        """A peer that we called does not want us. Its reasons are told from its side."""
        ours = [f"{reason.field} differs: ours={reason.theirs}, theirs={reason.ours}" for reason in refusal.reasons]
        self._refuse(self.at_link(link), clipped("; ".join(ours)))

    def garbled(self, link: Link, error: ProtocolError) -> None:
        """A peer speaks another version: nothing can come of it."""
        self._refuse(self.at_link(link), str(error))

    def stranger(self, link: Link) -> None:
        """A peer has forgotten us: greet it again."""
        peer = self.at_link(link)
        peer.is_introduced = False
        if peer.hello is None:
            self._greet(peer, self._room.config.nudge_s)

    # -- talking -----------------------------------------------------------------------------------------------------

    def at_link(self, link: Link) -> Peer:
        """Whom we call by this link; raises UnexpectedMessage if nobody (any more)."""
        peer = self._by_link.get(link)
        if peer is None:
            raise UnexpectedMessage("a message from a peer that we have forgotten")
        peer.heard_at = self._room.timers.clock()
        return peer

    def at_route(self, route: Route) -> Peer | None:
        """Who calls from there, if he has introduced himself."""
        peer = self._by_route.get(route)
        if peer is not None:
            peer.heard_at = self._room.timers.clock()
        return peer

    def tell(self, peer: Peer, message: Message) -> None:
        """Say something to a peer whom we call."""
        if peer.link is not None:
            self._room.wire.send(peer.link, message)

    def answer(self, peer: Peer, message: Message) -> None:
        """Say something to a peer who calls us."""
        if peer.route is not None:
            self._room.wire.reply(peer.route, message)

    def pong(self, peer: Peer, incarnation: Incarnation, rank: Rank | None) -> None:
        """Whoever is at the peer's address has told who he is."""
        if (incarnation, rank) != peer.key:
            self.dead(peer, f"its address answers as {incarnation}, rank {rank}")

    # -- living and dying --------------------------------------------------------------------------------------------

    def dead(self, peer: Peer, why: str) -> None:
        """Nothing of this peer will come any more."""
        if self._peers.get(peer.key) is not peer:
            return
        logger.warning("%s is dead: %s", peer, why)
        self._room.counters.add("peers_died")
        self._forget(peer, is_dead=True)
        for listener in self._listeners:
            listener.peer_died(peer, why)

    def close(self) -> None:
        """Forget everybody."""
        for peer in list(self._peers.values()):
            self._forget(peer)

    def _watch(self) -> None:
        # Armed first: whatever goes wrong below, the next round comes.
        self._room.timers.after(self._room.config.peer_timeout_s / 2, self._watch)
        config, now = self._room.config, self._room.timers.clock()
        # Why the least: whoever was heard of since then needs nothing, wanted or not.
        silent_s = min(config.peer_timeout_s / 2, config.peer_idle_s)
        for peer in [each for each in self._peers.values() if now - each.heard_at > silent_s]:
            silence = now - peer.heard_at
            if any(listener.wants(peer) for listener in self._listeners):
                if silence > config.peer_timeout_s / 2:
                    self._sound(peer, silence)
            elif silence > config.peer_idle_s:
                self._forget(peer)

    def _sound(self, peer: Peer, silence: float) -> None:
        """Ask for a sign of life, at last at its own address."""
        self.answer(peer, Ping())
        if silence > self._room.config.peer_timeout_s:
            self._suspect(peer)
        else:
            self.tell(peer, Ping())

    def _suspect(self, peer: Peer) -> None:
        # Whoever called us can only be known dead or restarted at his own address.
        if peer.link is None:
            try:
                self._call(peer)
            except UnusableAddress:
                self._room.counters.add("peers_unreachable")
                return
        self.tell(peer, Ping())
        if not peer.is_probed:
            peer.is_probed = True
            asked_at = self._room.timers.clock()
            self._room.wire.probe(peer.card.host, peer.card.port, lambda probe: self._probed(peer, probe, asked_at))

    def _suspect_at(self, card: RankCard, key: PeerKey) -> None:
        """A new run calls from an address that an earlier one had: see whether that is still there."""
        for peer in list(self._peers.values()):
            if peer.key != key and (peer.card.host, peer.card.port) == (card.host, card.port):
                self._suspect(peer)

    def _probed(self, peer: Peer, outcome: Probe, asked_at: float) -> None:
        peer.is_probed = False
        if outcome == "refused" and peer.heard_at < asked_at:
            self.dead(peer, "it is silent, and nobody listens at its address")

    def _new(self, instance: InstanceId, incarnation: Incarnation, card: RankCard) -> Peer:
        return Peer(PeerKey(incarnation, card.rank), instance, card, self._room.timers.clock())

    def _call(self, peer: Peer) -> None:
        peer.link = self._room.wire.call(peer.card.host, peer.card.port)
        self._by_link[peer.link] = peer

    def _bind(self, peer: Peer, route: Route) -> None:
        if peer.route is not None:
            self._by_route.pop(peer.route, None)
        peer.route = route
        self._by_route[route] = peer
        peer.heard_at = self._room.timers.clock()

    def _greet(self, peer: Peer, pause_s: float) -> None:
        """Hello, again and again while somebody wants the peer."""
        self.tell(peer, self._introduction(Hello))

        def again() -> None:
            peer.hello = None
            if any(listener.wants(peer) for listener in self._listeners):
                self._greet(peer, min(2 * pause_s, self._room.config.nudge_limit_s))

        peer.hello = self._room.timers.after(pause_s, again)

    def _answer_to_hello(self) -> HelloReply:
        """With how to read our caches, if anybody can, and if that fits into a message of ours: else all is staged."""
        direct = self._room.direct.card() if self._room.direct else None
        in_place = self._room.shared.card() if self._room.shared else None
        reply = self._introduction(HelloReply, direct=direct, in_place=in_place)
        try:
            codec.encode(reply, self._room.config.max_message_bytes)
        except (CallerError, CapacityError) as error:
            logger.warning("peers are not told how to read our caches: %s", error)
            return self._introduction(HelloReply, direct=None, in_place=None)
        return reply

    def _introduction(self, kind: type[Introduction], **more: DirectCard | None) -> Introduction:
        return kind(
            instance=self._room.identity.instance,
            incarnation=self._room.identity.incarnation,
            card=self._room.identity.card,
            agent=self._room.identity.agent,
            **more,
        )

    def _unfit(self, them: Hello | HelloReply) -> list[Reason]:
        """Why we cannot exchange with them; told from our side."""
        identity = self._room.identity
        found = list(reasons(identity.state, them.card.state))
        if them.agent.kind != self._room.agent.kind:
            found.append(Reason("agent", self._room.agent.kind, them.agent.kind))
        if them.card.rank >= them.card.state.parallel.num_ranks:
            found.append(Reason("rank", f"0..{them.card.state.parallel.num_ranks - 1}", str(them.card.rank)))
        if len(self._peers) >= MAX_PEERS and PeerKey(them.incarnation, them.card.rank) not in self._peers:
            found.append(Reason("peers", f"at most {MAX_PEERS}", "one more"))
        return found[:MAX_REASONS]

    def _accept(self, peer: Peer, them: Hello | HelloReply) -> list[Reason]:
        """Let our agent know theirs; its objection, if it has one."""
        if peer.card != them.card:
            return [Reason("card", clipped(str(peer.card)), clipped(str(them.card)))]
        # One agent speaks for one peer: else the death of a pretender would cut off the real one.
        if self._by_agent.get(them.agent.name, peer) is not peer or peer.agent_name not in (None, them.agent.name):
            return [Reason("agent", "one agent for each peer", them.agent.name)]
        try:
            self._room.agent.add_peer(them.agent)
        except FerryError as error:
            return [Reason("agent", self._room.agent.name, clipped(str(error)))]
        peer.agent_name = them.agent.name
        self._by_agent[them.agent.name] = peer
        self._parted.pop(them.agent.name, None)
        return []

    def _turn_away(self, route: Route, why: list[Reason]) -> None:
        identity = self._room.identity
        self._room.counters.add("hellos_refused")
        refusal = HelloRefused(instance=identity.instance, incarnation=identity.incarnation, reasons=tuple(why))
        self._room.wire.reply(route, refusal)

    def _refuse(self, peer: Peer, why: str) -> None:
        self._stop_greeting(peer)
        self._room.counters.add("peers_refused")
        for listener in self._listeners:
            listener.peer_refused(peer, why)

    def _stop_greeting(self, peer: Peer) -> None:
        if peer.hello is not None:
            peer.hello.cancel()
            peer.hello = None

    def _forget(self, peer: Peer, *, is_dead: bool = False) -> None:
        self._stop_greeting(peer)
        del self._peers[peer.key]
        if peer.link is not None:
            del self._by_link[peer.link]
            self._room.wire.hang_up(peer.link)
        if peer.route is not None:
            self._by_route.pop(peer.route, None)
        if peer.agent_name is not None:
            del self._by_agent[peer.agent_name]
            self._part_from(peer.agent_name, is_dead=is_dead)

    def _part_from(self, agent_name: str, *, is_dead: bool) -> None:
        """Our agent forgets the dead, and of the living the oldest when they are too many.

        Why not all: UCX never closes a connection that both ends survive, so each time that two agents forget and meet
        each other again would cost one file handle or two on either side (tests/transfer/agent/test_nixl_processes.py).
        """
        self._parted[agent_name] = None
        if not is_dead and len(self._parted) <= MAX_PARTED:
            return
        gone = agent_name if is_dead else next(iter(self._parted))
        del self._parted[gone]
        try:
            self._room.agent.remove_peer(gone)
        except FerryError as error:
            # Its tickets end with the agent, which is closed or failing; nobody else may be kept from the news.
            logger.warning("the agent did not forget %s: %s", gone, error)
