"""The ledger against a naive model: for every ticket, what waits, what moves and why it failed."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_transfer.agent.ledger import Ledger
from kv_transfer.agent.pieces import Piece, cut
from kv_transfer.regions import host_region

REGION = host_region(1024, pinned=False)
PEERS = ["d0", "d1", "d2"]
LIMIT = 2


def pieces_of(num_pieces: int) -> tuple[Piece, ...]:
    whole = REGION.slice(0, num_pieces)
    return cut("write", [(whole, whole.remote)], 1)


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(LIMIT)
        self.open: dict = {}  # ticket -> [num_waiting, num_moving, failure]
        self.expected: list = []
        self.withdrawn: set = set()

    def settle(self) -> None:
        for ticket, (waiting, moving, failure) in list(self.open.items()):
            if not waiting and not moving:
                self.expected.append((ticket, "error" if failure else "done", failure))
                del self.open[ticket]

    def fail(self, ticket, reason: str) -> None:
        state = self.open[ticket]
        state[0], state[2] = 0, state[2] or reason

    def pick(self, data, tickets):
        return data.draw(st.sampled_from(sorted(tickets, key=lambda ticket: ticket.number)))

    @rule(peer=st.sampled_from(PEERS), num_pieces=st.integers(1, 5))
    def submit(self, peer: str, num_pieces: int) -> None:
        ticket = self.ledger.submit(peer, pieces_of(num_pieces), [REGION])
        assert ticket.num_bytes == num_pieces
        self.open[ticket] = [num_pieces, 0, ""]

    @rule()
    def post(self) -> None:
        moving = {peer: sum(state[1] for t, state in self.open.items() if t.peer == peer) for peer in PEERS}
        may = {t for t, state in self.open.items() if state[0] and moving[t.peer] < LIMIT}
        assert self.ledger.can_post() == bool(may)
        due = self.ledger.next_piece()
        assert (due is None) == (not may)
        if due is not None:
            assert due[0] in may
            self.open[due[0]][0] -= 1
            self.open[due[0]][1] += 1

    @precondition(lambda self: any(state[1] for state in self.open.values()))
    @rule(data=st.data(), failure=st.sampled_from(["", "broken"]))
    def end(self, data, failure: str) -> None:
        ticket = self.pick(data, [t for t, state in self.open.items() if state[1]])
        self.ledger.ended(ticket, failure)
        self.open[ticket][1] -= 1
        if failure:
            self.fail(ticket, failure)
        self.settle()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def withdraw(self, data) -> None:
        ticket = self.pick(data, self.open)
        untouched = self.open[ticket][0] == ticket.num_bytes
        assert self.ledger.withdraw(ticket) == untouched
        if untouched:
            del self.open[ticket]
            self.withdrawn.add(ticket)
        elif self.open[ticket][0]:
            self.fail(ticket, "withdrawn")
            self.settle()

    @rule(peer=st.sampled_from(PEERS))
    def lose_peer(self, peer: str) -> None:
        self.ledger.drop_peer(peer, "peer removed")
        for ticket, state in self.open.items():
            if ticket.peer == peer:
                self.fail(ticket, "peer removed")
                state[1] = 0
        self.settle()

    @rule()
    def stop_posting(self) -> None:
        self.ledger.drop_waiting("closed")
        for ticket, state in self.open.items():
            if state[0]:
                self.fail(ticket, "closed")
        self.settle()

    @rule()
    def take(self) -> None:
        taken = [(c.ticket, c.outcome, c.reason) for c in self.ledger.take_completions()]
        assert sorted(taken, key=lambda c: c[0].number) == sorted(self.expected, key=lambda c: c[0].number)
        assert not self.withdrawn & {ticket for ticket, _, _ in taken}
        assert not any(self.ledger.withdraw(ticket) for ticket, _, _ in taken)
        self.expected.clear()

    @invariant()
    def agrees(self) -> None:
        self.ledger.check()
        assert self.ledger.num_open == len(self.open)
        assert self.ledger.num_completions == len(self.expected)
        assert self.ledger.uses(REGION) == bool(self.open)


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedgerAgainstNaiveModel = LedgerMachine.TestCase


def test_tickets_and_peers_take_turns() -> None:
    ledger = Ledger(max_posts_per_peer=100)
    long, short = (ledger.submit("d0", pieces_of(num), [REGION]) for num in (3, 2))
    other = ledger.submit("d1", pieces_of(2), [REGION])
    order = []
    while (due := ledger.next_piece()) is not None:
        order.append(due[0])
    assert order == [long, other, short, other, long, short, long]


def test_a_stuck_peer_takes_no_turn_from_others() -> None:
    ledger = Ledger(max_posts_per_peer=1)
    ledger.submit("stuck", pieces_of(5), [REGION])
    fine = ledger.submit("fine", pieces_of(3), [REGION])
    posted = []
    while (due := ledger.next_piece()) is not None:
        posted.append(due[0].peer)
        if due[0] == fine:
            ledger.ended(fine)
    assert sorted(posted) == ["fine", "fine", "fine", "stuck"]


def test_only_a_moving_piece_ends() -> None:
    ledger = Ledger(1)
    ticket = ledger.submit("d0", pieces_of(2), [REGION])
    with pytest.raises(AssertionError, match="only a moving piece ends"):
        ledger.ended(ticket)
    ledger.check()
