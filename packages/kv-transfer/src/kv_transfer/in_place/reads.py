"""Reads that are under way, from the order to their physical end.

In:  sessions whose blocks the sender has told; ends of reads (agent).
Out: for each session one report to the receiver: read, or why not.
Law: of the reactor's thread. A read holds the gate of its load's blocks from its post to its physical end, and for a
     grace beyond it if it ended badly: what was on its way may still land. So its load is never tried again: what is
     late could land on what is new. Runs are listed in the copy thread, after whatever still uses the blocks.
"""

from functools import partial
from typing import Protocol

from kv_core.errors import FerryError
from kv_kernels.layout import MappedPlanes
from kv_transfer.agent.base import LATE_BYTES_GRACE_S, Completion, Movement, Runs, Ticket
from kv_transfer.copies import Copier
from kv_transfer.direct.base import Read
from kv_transfer.direct.reads import Holding
from kv_transfer.in_place.caches import RemotePlanes, SharedCaches, check_dtypes, planes_of_kind
from kv_transfer.in_place.runs import run_bytes, runs_of
from kv_transfer.load import ReceiveSession
from kv_transfer.mover import Moved
from kv_transfer.peer import Peer
from kv_transfer.plan.compatibility import is_converted
from kv_transfer.plan.plan import Piece
from kv_transfer.room import Room


class ReadListener(Protocol):
    """Whoever began the read."""

    def blocks_read(self, session: ReceiveSession) -> None:
        """All that the session wants is in our blocks, and still to be proven."""

    def read_failed(self, session: ReceiveSession, why: str) -> None:
        """It is not, and will not be."""

    def read_over(self, session: ReceiveSession) -> None:
        """The agent touches our blocks no more for this session."""


class InPlaceReads:
    """All in-place reads of one rank."""

    def __init__(self, room: Room, copier: Copier, listener: ReadListener) -> None:
        self._room = room
        self._copier = copier
        self._listener = listener
        self._posted: dict[Ticket, ReceiveSession] = {}

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._posted

    def pays(self, peer: Peer, pieces: tuple[Piece, ...]) -> tuple[bool, str]:
        """Whether these pieces of the peer can be read in place, in runs that are long enough; why, if they could."""
        ours, theirs = self._room.shared, peer.planes
        if ours is None or theirs is None or is_converted(self._room.identity.state, peer.state):
            return False, ""
        least = self._room.config.least_run_bytes(ours.link_to(theirs))
        shortest = min(_shortest(ours, theirs, piece) for piece in pieces)
        return shortest >= least, f"runs of {shortest} bytes, in place from {least} on"

    def begin(self, session: ReceiveSession) -> None:
        """List the runs of what the sender has told, then read them."""
        peer, load, blocks, movement = session.peer, session.load, session.blocks, list[Runs]()
        ours, theirs = self._room.shared, peer.planes
        if ours is None or theirs is None or blocks is None:
            told = f"planes={theirs is not None}, blocks told={blocks is not None}"
            self._listener.read_failed(session, f"{peer} cannot be read in place: {told}")
            return

        def run() -> None:
            holding = Holding(peer.state, peer.key.rank, theirs.groups, blocks.first, blocks.by_group)
            for what in self._copier.reads(session.ask, load.order.tables, holding):
                movement.extend(_movement_of(what, ours, theirs))

        load.num_scatters += 1
        self._room.copies.submit(run, load.free, partial(self._listed, session, movement), load.gate)

    def drop(self, session: ReceiveSession) -> None:
        """The session has ended: take back what is not posted; the rest ends by itself."""
        for ticket in [ticket for ticket, posted in self._posted.items() if posted is session]:
            if self._room.agent.withdraw(ticket):
                del self._posted[ticket]
                self._leave(session)

    def completed(self, completion: Completion) -> None:
        """The agent reports the physical end of a read."""
        session = self._posted.pop(completion.ticket)
        if completion.outcome == "done":
            self._listener.blocks_read(session)
            self._leave(session)
        else:
            self._room.timers.after_running(LATE_BYTES_GRACE_S, partial(self._leave, session))
            self._listener.read_failed(session, completion.reason)

    def _listed(self, session: ReceiveSession, movement: Movement, moved: Moved) -> None:
        if moved.error is not None:
            self._listener.read_failed(session, str(moved.error))
            self._over(session)
            return
        if not session.load.is_open or not session.load.gate.enter():
            self._over(session)
            return
        session.begins_to_move(self._room.timers.clock())
        try:
            assert session.peer.agent_name is not None, "law: only an introduced peer is read"
            ticket = self._room.agent.read(session.peer.agent_name, movement)
        except FerryError as error:
            self._listener.read_failed(session, str(error))
            self._leave(session)
            return
        self._posted[ticket] = session

    def _leave(self, session: ReceiveSession) -> None:
        session.load.gate.leave()
        self._over(session)

    def _over(self, session: ReceiveSession) -> None:
        session.load.num_scatters -= 1
        self._listener.read_over(session)


def _movement_of(what: Read, ours: SharedCaches, theirs: RemotePlanes) -> list[Runs]:
    """The runs of every plane of one copy."""
    check_dtypes(ours.caches, theirs)
    found = []
    for kind in range(theirs.num_kinds):
        planes, remote = planes_of_kind(ours.caches, what.layers, kind), theirs.planes(what.layers, kind)
        to, of, lengths = (column.astype("uint64") for column in runs_of(what, MappedPlanes.of(planes), remote))
        memory, device_id = theirs.blob.memory, theirs.blob.device_id
        for plane, address in zip(planes, remote.addresses, strict=True):
            region = ours.region_of(plane)
            found.append(Runs(region, memory, device_id, plane.data_ptr() + to, address + of, lengths))
    return found


def _shortest(ours: SharedCaches, theirs: RemotePlanes, piece: Piece) -> int:
    """The length of the runs of whole blocks, over the planes of a layer."""
    first = type(piece.layers)(piece.layers.start, piece.layers.start + 1)
    return min(
        run_bytes(
            MappedPlanes.of(planes_of_kind(ours.caches, first, kind)), theirs.planes(first, kind), len(piece.heads)
        )
        for kind in range(theirs.num_kinds)
    )
