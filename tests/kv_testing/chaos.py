"""Clients that ask without pause, and a troublemaker that kills, stops and deafens engines meanwhile.

In:  a fleet and a cast of its engines, questions with the answers that one engine gives alone, a seed, how long.
Out: `Log`: how every call ended, and everything that was done to whom.
Law: a call ends within `PATIENCE_S`. It ends with the right answer, or with an error that says something; an engine
     that is dead or stopped may be out of reach. Anything else is kept in `Log.wrong`.
"""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import httpx

from kv_testing.answers import TOLERANCE, Answer, Question, RefusedError, Verdict, ask, ask_by_hand, judge
from kv_testing.disk_trouble import FAULTS, faulty_disk, harm, lose_all
from kv_testing.servers import Fleet
from kv_testing.servers_hooks import lost_messages

PATIENCE_S = 90.0
"""Twice the deadline of a hand-over, and a stop besides."""
NUM_CLIENTS, BY_ROUTER, LEAVES = 5, 0.4, 0.15
CALM_S = (4.0, 16.0)
STOP_S = (1.0, 25.0)
LOSS_S, LOST_SHARE = (3.0, 10.0), 0.3
NUM_SALTS, ALONE = 6, 0.5
FAULT_S = (3.0, 15.0)


@dataclass(frozen=True, slots=True)
class Known:
    """A question, and what one engine alone answers."""

    question: Question
    alone: Sequence[Answer]


def wrong_about(answers: Sequence[Answer], known: Known) -> str | None:
    """Why these are not the answers that one engine alone gives."""
    for answer, alone in zip(answers, known.alone, strict=True):
        found = judge(answer, alone)
        if found.verdict is Verdict.WRONG or found.gap > TOLERANCE:
            return f"{known.question}: {found}"
    return None


@dataclass(frozen=True, slots=True)
class Cast:
    """Who plays. With a `disk`, which all of them share, its files are harmed and it fails now and then, prompts come
    again under few salts, and some are asked of one engine alone."""

    prefills: tuple[str, ...]
    decodes: tuple[str, ...]
    mortal: tuple[str, ...]
    """Those that are killed. The others are stopped and deafened only, so that their memory can be watched."""
    disk: Path | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return self.prefills + self.decodes

    @property
    def survivors(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in self.mortal)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of trouble, each as often as it is named."""
        usual = ("kill", "stop", "stop", "lose", "lose")
        return usual if self.disk is None else (*usual, "harm", "harm", *FAULTS, "clear")


@dataclass(slots=True)
class Log:
    """What has happened; `wrong` must stay empty."""

    calls: Counter[str] = field(default_factory=Counter)
    routed: Counter[str] = field(default_factory=Counter)
    """Those of them that went through the router."""
    troubles: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Chaos:
    """One run. `ends_at` is a time of `time.monotonic`."""

    fleet: Fleet
    cast: Cast
    router: str
    known: Sequence[Known]
    dice: Random
    ends_at: float
    log: Log = field(default_factory=Log)

    async def run(self) -> None:
        """Until the time has come; every engine runs again afterwards."""
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as client:
            clients = [self._ask_on(client, Random(self.dice.random())) for _ in range(NUM_CLIENTS)]
            await asyncio.gather(self._trouble(Random(self.dice.random())), *clients)

    async def _ask_on(self, client: httpx.AsyncClient, dice: Random) -> None:
        while time.monotonic() < self.ends_at:
            known, by_router = dice.choice(self.known), dice.random() < BY_ROUTER
            call = self._call(client, known.question, dice, by_router=by_router)
            began = time.monotonic()
            try:
                if dice.random() < LEAVES:
                    await asyncio.wait_for(call, dice.uniform(0.0, 2.0))
                    ended = "answered before the client left"
                else:
                    ended = self._judged(await call, known)
            except TimeoutError:
                ended = "the client left"
            except RefusedError as refused:
                ended = self._refused(refused)
            except httpx.TimeoutException as silent:
                self.log.wrong.append(f"no end after {time.monotonic() - began:.0f} s: {silent!r}")
                ended = "hangs"
            except httpx.TransportError as gone:
                ended = "out of reach"
                self.log.errors[type(gone).__name__] += 1
            self.log.calls[ended] += 1
            self.log.routed[ended] += by_router
            if ended == "out of reach":
                await asyncio.sleep(0.5)

    async def _call(
        self, client: httpx.AsyncClient, question: Question, dice: Random, *, by_router: bool
    ) -> Sequence[Answer]:
        """Through the router, as a router would, or of one engine alone where there are tiers.

        A salt of its own keeps earlier calls out of it; with tiers salts come again, and so does what was kept.
        """
        has_tiers = self.cast.disk is not None
        salt = f"{dice.randrange(NUM_SALTS)}" if has_tiers else secrets.token_hex(8)
        if by_router:
            return await ask(client, self.router, question, salt=salt)
        prefill, decode = (self._url(dice.choice(names)) for names in (self.cast.prefills, self.cast.decodes))
        if has_tiers and dice.random() < ALONE:
            return await ask(client, dice.choice((prefill, decode)), question, salt=salt)
        return await ask_by_hand(client, prefill, decode, question, salt=salt)

    def _url(self, name: str) -> str:
        return self.fleet.engines[name].url

    def _judged(self, answers: Sequence[Answer], known: Known) -> str:
        if why := wrong_about(answers, known):
            self.log.wrong.append(why)
        return "wrong" if why else "right"

    def _refused(self, refused: RefusedError) -> str:
        if not refused.message.strip():
            self.log.wrong.append(f"an error that says nothing: {refused}")
        self.log.errors[str(refused)[:100]] += 1
        return "refused"

    async def _trouble(self, dice: Random) -> None:
        """One after the other; an engine that was killed comes back meanwhile."""
        births: dict[str, asyncio.Task[None]] = {}
        while time.monotonic() < self.ends_at:
            await asyncio.sleep(dice.uniform(*CALM_S))
            for birth in births.values():
                if birth.done():
                    birth.result()  # an engine that does not come back ends the run
            up = [name for name in self.cast.names if name not in births or births[name].done()]
            kind, victim = dice.choice(self.cast.kinds), dice.choice(up)
            if kind == "kill" and victim not in self.cast.mortal:
                continue
            if kind == "kill":
                self.log.troubles[f"kill {victim}"] += 1
                births[victim] = asyncio.create_task(self._kill(victim, dice.uniform(0.0, 3.0)))
            elif kind in ("stop", "lose"):
                self.log.troubles[f"{kind} {victim}"] += 1
                await {"stop": self._stop, "lose": self._lose}[kind](victim, dice)
            else:
                await self._disk(kind, victim, dice)
        await asyncio.gather(*births.values())

    async def _disk(self, kind: str, victim: str, dice: Random) -> None:
        """The disk that all share loses or spoils files; or it fails one engine for a while."""
        assert self.cast.disk is not None
        if kind == "harm":
            self.log.troubles["files harmed"] += await asyncio.to_thread(harm, self.cast.disk, dice)
        elif kind == "clear":
            self.log.troubles["disk cleared"] += 1
            await asyncio.to_thread(lose_all, self.cast.disk)
        else:
            self.log.troubles[f"disk {kind} for {victim}"] += 1
            with faulty_disk(self.fleet.hooks(victim), FAULTS[kind]):
                await asyncio.sleep(dice.uniform(*FAULT_S))

    async def _kill(self, victim: str, dead_s: float) -> None:
        self.fleet.engines[victim].program.kill()
        await asyncio.sleep(dead_s)
        await asyncio.to_thread(self.fleet.restart, victim)

    async def _stop(self, victim: str, dice: Random) -> None:
        engine = self.fleet.engines[victim]
        engine.stop()
        try:
            await asyncio.sleep(dice.uniform(*STOP_S))
        finally:
            engine.resume()

    async def _lose(self, victim: str, dice: Random) -> None:
        with lost_messages(self.fleet.hooks(victim), LOST_SHARE):
            await asyncio.sleep(dice.uniform(*LOSS_S))
