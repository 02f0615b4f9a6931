"""The way of a chunk at the receiver: from granted staging into the engine's blocks.

In:  sessions that may take memory; Data of their chunks; ends of scatters (mover).
Out: Grants; for each chunk one report to the receiver: scattered, or bad.
Law: only memory that is there is granted, and only for what is computed: waiting is back-pressure and never deadlock,
     and who waits for a prompt to be computed keeps no memory from others. The engine's blocks are
     written by our own scatter alone, after the bytes are verified. What is granted and not accounted for goes to
     quarantine when its session ends.

Sessions take turns for memory (turns). What one instance holds of the arena, granted or in quarantine, is at most its
share (`Arena.has_share`): one that is stopped keeps no memory from the others.

     wait --> grant --> Data --> verify, scatter (mover) --> scattered
                 |
                 +--> doubt: quarantine --> Data, or Quiet or death and a grace --> free
"""

from functools import partial
from typing import Protocol

from kv_transfer.copies import Copier
from kv_transfer.load import ReceiveSession
from kv_transfer.mover import Moved, Skipped
from kv_transfer.peer import Peer
from kv_transfer.peers import Peers
from kv_transfer.protocol.messages import Data, Grant
from kv_transfer.quarantine import Quarantine
from kv_transfer.room import Room
from kv_transfer.staging import Arena, StagingLease
from kv_transfer.turns import Turn, Turns


class ArrivalListener(Protocol):
    """Whoever opened the sessions."""

    def chunk_scattered(self, session: ReceiveSession) -> None:
        """One more chunk is in the engine's blocks."""

    def chunk_bad(self, session: ReceiveSession, why: str) -> None:
        """A chunk is not what was planned or sent."""

    def chunk_over(self, session: ReceiveSession) -> None:
        """A copy for this session has ended, well or badly."""


class Arrivals:
    """All chunks that come in; of the reactor's thread."""

    def __init__(self, room: Room, peers: Peers, arena: Arena, copier: Copier, listener: ArrivalListener) -> None:
        self._room = room
        self._peers = peers
        self._arena = arena
        self._copier = copier
        self._listener = listener
        self._turns: Turns[ReceiveSession] = Turns(self._serve)
        self._quarantine = Quarantine(room, arena, on_freed=self.pump)

    def wait(self, session: ReceiveSession) -> None:
        """This session may take memory from now on, as long as it has chunks to come."""
        self._turns.join(session)
        self.pump()

    def pump(self) -> None:
        """Grant memory, while there is any."""
        self._turns.pump()

    def remind(self, session: ReceiveSession) -> None:
        """Say all grants again that are not accounted for."""
        for seq in session.granted:
            self._say_grant(session, seq)

    def take(self, session: ReceiveSession, data: Data) -> None:
        """The chunk is here: have it verified and scattered."""
        lease, chunk, load = session.granted.pop(data.seq), session.chunks[data.seq], session.load
        load.stamps.arrived = now = self._room.timers.clock()
        session.arrives(now)
        if data.num_bytes != chunk.num_bytes or (session.ask.checksum and data.checksum is None):
            lease.release()
            stated = f"ours=({chunk.num_bytes}, wanted), theirs=({data.num_bytes}, {data.checksum})"
            self._listener.chunk_bad(session, f"chunk {data.seq} is not as planned in (bytes, checksum): {stated}")
            self.pump()
            return
        load.num_scatters += 1
        job = self._copier.scatter(
            session.name,
            chunk,
            load.order.tables,
            session.peer.state,
            lease.slice.tensor,
            data.checksum,
            lambda: load.is_open,
        )
        self._room.copies.submit(job, load.free, partial(self._scattered, session, data.seq, lease), load.gate)
        self.wait(session)

    def doubt(self, session: ReceiveSession) -> None:
        """Whatever is granted and not accounted for may be written at any time: keep it from everybody."""
        for seq, lease in session.granted.items():
            self._quarantine.keep(lease, session.writer(seq))
        session.doubted.update(session.granted)
        session.granted.clear()

    def settle(self, session: ReceiveSession, data: Data) -> None:
        """A chunk in doubt is accounted for."""
        session.doubted.discard(data.seq)
        self._quarantine.free([session.writer(data.seq)])

    def settle_all(self, session: ReceiveSession) -> None:
        """The sender has said that it will write no more for this session."""
        self.doubt(session)
        self._quarantine.free_later([session.writer(seq) for seq in session.doubted])

    def peer_died(self, peer: Peer) -> None:
        """Nothing is sent any more to what this peer may have written."""
        self._quarantine.free_later(self._quarantine.writers_of(peer.key))

    def _serve(self, session: ReceiveSession) -> Turn:
        seq = session.next_seq
        if seq is None or len(session.granted) >= self._room.config.chunks_in_flight:
            # It comes back when a chunk of it has arrived, or more is computed.
            return Turn.OVER
        num_bytes, owner = session.chunks[seq].num_bytes, session.peer.run
        if not self._arena.has_share(num_bytes, owner):
            return Turn.HAS_SHARE
        lease = self._arena.lease(num_bytes, owner)
        if lease is None:
            return Turn.NO_ROOM
        self._grant(session, seq, lease)
        return Turn.SERVED

    def _grant(self, session: ReceiveSession, seq: int, lease: StagingLease) -> None:
        stamps, now = session.load.stamps, self._room.timers.clock()
        stamps.granted = stamps.granted or now
        session.begins_to_move(now)
        session.ungranted.grant(seq)
        session.granted[seq] = lease
        self._say_grant(session, seq)

    def _say_grant(self, session: ReceiveSession, seq: int) -> None:
        granted = session.granted[seq].slice.remote
        self._peers.tell(session.peer, Grant(session=session.name, seq=seq, slice=granted))

    def _scattered(self, session: ReceiveSession, seq: int, lease: StagingLease, moved: Moved) -> None:
        """A chunk is in the engine's blocks, or is not and never will be."""
        lease.release()
        load, chunk = session.load, session.chunks[seq]
        load.num_scatters -= 1
        load.stamps.scatter_s += moved.seconds
        if moved.error is not None:
            self._room.counters.add("chunks_skipped" if isinstance(moved.error, Skipped) else "chunks_bad")
            self._listener.chunk_bad(session, f"chunk {seq} of {session.peer}: {moved.error}")
        elif load.is_open:
            session.is_moved(1, chunk.num_bytes, self._room.timers.clock())
            session.scattered.reach(seq)
            self._room.counters.add("bytes_in", chunk.num_bytes)
            self._room.counters.add("chunks_in")
            self._listener.chunk_scattered(session)
        self._listener.chunk_over(session)
        self.pump()
