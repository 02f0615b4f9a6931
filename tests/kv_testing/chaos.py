"""Clients that ask without pause, and a troublemaker that kills, stops and deafens engines meanwhile.

In:  a fleet, questions with the answers that one engine gives alone, a seed, how long.
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
from random import Random

import httpx

from kv_testing.answers import TOLERANCE, Answer, Question, RefusedError, Verdict, ask, ask_by_hand, judge
from kv_testing.servers import Fleet
from kv_testing.servers_hooks import lost_messages

PATIENCE_S = 90.0
"""Twice the deadline of a hand-over, and a stop besides."""
NUM_CLIENTS, BY_ROUTER, LEAVES = 5, 0.4, 0.15
PREFILLS, DECODES = ("P1", "Q1"), ("D1", "E1")
MORTAL = ("Q1", "E1")
"""Those that are killed. The others are stopped and deafened only, so that their memory can be watched."""
CALM_S = (4.0, 16.0)
STOP_S = (1.0, 25.0)
LOSS_S, LOST_SHARE = (3.0, 10.0), 0.3


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


@dataclass(slots=True)
class Log:
    """What has happened; `wrong` must stay empty."""

    calls: Counter[str] = field(default_factory=Counter)
    troubles: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Chaos:
    """One run. `ends_at` is a time of `time.monotonic`."""

    fleet: Fleet
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
            known = dice.choice(self.known)
            call = self._call(client, known.question, dice)
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
            if ended == "out of reach":
                await asyncio.sleep(0.5)

    async def _call(self, client: httpx.AsyncClient, question: Question, dice: Random) -> Sequence[Answer]:
        """Through the router, or as a router would; a salt of its own keeps earlier calls out of it."""
        salt = secrets.token_hex(8)
        if dice.random() < BY_ROUTER:
            return await ask(client, self.router, question, salt=salt)
        prefill, decode = (self.fleet.engines[dice.choice(names)].url for names in (PREFILLS, DECODES))
        return await ask_by_hand(client, prefill, decode, question, salt=salt)

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
            up = [name for name in (*PREFILLS, *DECODES) if name not in births or births[name].done()]
            kind, victim = dice.choice(("kill", "stop", "stop", "lose", "lose")), dice.choice(up)
            if kind == "kill" and victim not in MORTAL:
                continue
            self.log.troubles[f"{kind} {victim}"] += 1
            if kind == "kill":
                births[victim] = asyncio.create_task(self._kill(victim, dice.uniform(0.0, 3.0)))
            else:
                await {"stop": self._stop, "lose": self._lose}[kind](victim, dice)
        await asyncio.gather(*births.values())

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
