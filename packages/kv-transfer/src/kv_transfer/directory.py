"""Where the ranks of other instances are.

In:  addresses of instance doors, as orders name them; the doors' answers.
Out: InstanceCards, from memory or asked for; or why there is none.
Law: every question ends by its deadline. A card is remembered until somebody finds it outdated, or an order is meant
     for another run of the instance; then it is asked for again.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kv_core.errors import CallerError
from kv_core.ids import Incarnation
from kv_transfer.protocol import codec
from kv_transfer.protocol.messages import InstanceCard, InstanceHello, InstanceRefused
from kv_transfer.room import Room
from kv_transfer.timers import Timer
from kv_transfer.wire import Link, Probe, UnusableAddress

Door = tuple[str, int]

MAX_CARDS: Final = 256
"""Cards that are remembered; doors are named by clients, and a card may be as long as a message."""


@dataclass(frozen=True, slots=True)
class NotFound:
    """There is no card, and why."""

    why: str


Answer = Callable[[InstanceCard | NotFound], None]


@dataclass(slots=True, eq=False)
class _Question:
    """Whoever waits for the card of one run (or any) of the instance at one door."""

    door: Door
    wanted: Incarnation | None
    link: Link
    pause_s: float
    waiting: list[tuple[float, Answer]] = field(default_factory=list)
    timer: Timer | None = None
    last_word: str = "its door does not answer"


class Directory:
    """Cards of instances by the address of their doors."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._cards: OrderedDict[Door, InstanceCard] = OrderedDict()
        self._questions: dict[tuple[Door, Incarnation | None], _Question] = {}
        self._by_link: dict[Link, _Question] = {}

    def known(self, door: Door, wanted: Incarnation | None) -> InstanceCard | None:
        """The card we remember, if it is of the run that is wanted."""
        card = self._cards.get(door)
        if card is None or wanted not in (None, card.incarnation):
            return None
        self._cards.move_to_end(door)
        return card

    def ask(self, door: Door, wanted: Incarnation | None, within_s: float, answer: Answer) -> None:
        """Ask the door for its card; the answer comes once, within that time."""
        question = self._questions.get((door, wanted))
        if question is None:
            try:
                codec.encode(InstanceHello(incarnation=wanted))
                link = self._room.wire.call(*door)
            except (CallerError, UnusableAddress) as error:
                answer(NotFound(str(error)))
                return
            question = _Question(door, wanted, link, self._room.config.nudge_s / 2)
            self._questions[door, wanted] = self._by_link[link] = question
            self._say(question)
        question.waiting.append((self._room.timers.clock() + within_s, answer))

    def forget(self, door: Door, incarnation: Incarnation) -> None:
        """This card has turned out to be outdated."""
        if (card := self._cards.get(door)) is not None and card.incarnation == incarnation:
            del self._cards[door]

    def owns(self, link: Link) -> bool:
        """Whether a link is one of our questions."""
        return link in self._by_link

    def answered(self, link: Link, card: InstanceCard) -> None:
        """A door told its card."""
        question = self._by_link[link]
        if question.wanted in (None, card.incarnation):
            self._remember(question.door, card)
            self._end(question, card)
        else:
            self._end(question, NotFound(f"another run answers: wanted={question.wanted}, got={card.incarnation}"))

    def refused(self, link: Link, refusal: InstanceRefused) -> None:
        """A door has no card for us, or not yet."""
        question = self._by_link[link]
        question.last_word = refusal.detail
        if refusal.code != "not_ready":
            # It tells the two incarnations from its own side.
            detail = f"ours={question.wanted}, theirs={refusal.incarnation}"
            self._end(question, NotFound(f"the order is for another run of the instance: {detail}"))

    def rejected(self, link: Link, why: str) -> None:
        """A door of our version could not take the question: it was hurt on its way, and will be asked again."""
        self._by_link[link].last_word = why

    def garbled(self, link: Link, why: str) -> None:
        """A door speaks another version, or no protocol of ours."""
        self._end(self._by_link[link], NotFound(why))

    def close(self) -> None:
        """Nobody waits any more."""
        for question in list(self._questions.values()):
            self._end(question, NotFound("closing"))

    def _remember(self, door: Door, card: InstanceCard) -> None:
        self._cards[door] = card
        self._cards.move_to_end(door)
        if len(self._cards) > MAX_CARDS:
            self._cards.popitem(last=False)

    def _say(self, question: _Question) -> None:
        """Ask, and again while somebody waits; find out whether anybody listens."""
        # Armed first: whatever goes wrong below, the next round comes.
        is_first = question.timer is None
        question.timer = self._room.timers.after(question.pause_s, lambda: self._say(question))
        question.pause_s = min(2 * question.pause_s, self._room.config.nudge_limit_s)
        now = self._room.timers.clock()
        late = [answer for end, answer in question.waiting if end <= now]
        question.waiting = [(end, answer) for end, answer in question.waiting if end > now]
        for answer in late:
            answer(NotFound(question.last_word))
        if late and not question.waiting:
            self._end(question, NotFound(question.last_word))
            return
        self._room.wire.send(question.link, InstanceHello(incarnation=question.wanted))
        if not is_first:
            self._room.wire.probe(*question.door, lambda probe: self._probed(question, probe))

    def _probed(self, question: _Question, outcome: Probe) -> None:
        if outcome == "refused":
            self._end(question, NotFound("nobody listens at its door"))

    def _end(self, question: _Question, card: InstanceCard | NotFound) -> None:
        if self._by_link.pop(question.link, None) is None:
            return
        del self._questions[question.door, question.wanted]
        self._room.wire.hang_up(question.link)
        if question.timer is not None:
            question.timer.cancel()
        for _, answer in question.waiting:
            answer(card)
