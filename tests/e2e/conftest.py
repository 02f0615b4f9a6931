"""What every end-to-end test shares: the running fleet, a client, fresh prompts, the tally of answers."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Generator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from model.make_tiny import SHAPES, make_tiny

from kv_testing.answers import Prompt, Tally
from kv_testing.servers import ROLES, TRANSPORTS, Fleet, running_fleet
from kv_testing.servers_hooks import complaints

Answered = TypeVar("Answered")
Run = Callable[[Callable[[httpx.AsyncClient], Coroutine[Any, Any, Answered]]], Answered]
CLIENT_TIMEOUT_S = 90.0
# Token ids that any tokenizer of the tiny models has, special tokens left out.
ORDINARY_TOKENS = range(16, 500)


@pytest.fixture(scope="session")
def models() -> dict[str, Path]:
    groups = {
        kind: make_tiny(0, shape=SHAPES[kind])
        for kind in ("hybrid", "windows", "chunks", "latent", "codes", "rescaled")
    }
    return {"tiny": make_tiny(0), "other": make_tiny(1), **groups}


@pytest.fixture(scope="session", params=list(TRANSPORTS))
def fleet(
    request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """The engines over one transport. pytest runs all tests of one transport before the next fleet starts."""
    folder = tmp_path_factory.mktemp(f"fleet-{request.param}")
    names = {name for item in request.session.items for name in _wanted(item, request.param)} & set(ROLES)
    with running_fleet(request.param, models, folder, names) as fleet:
        yield fleet


def _wanted(item: pytest.Item, transport: str) -> set[str]:
    """The engines a test will use: those of its pair and the one that answers alone, or those its module names."""
    is_ours = item.path.is_relative_to(Path(__file__).parent)
    if not is_ours or not isinstance(item, pytest.Function) or "fleet" not in item.fixturenames:
        return set()
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if params.get("fleet", transport) != transport:
        return set()
    pair = params.get("pair")
    return {*pair, "P1"} if isinstance(pair, tuple) else set(item.module.ENGINES)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Show with a failed test what the engines had to say: a client is often told "internal error" alone."""
    report = yield
    fleet = getattr(item, "funcargs", {}).get("fleet")
    if report.failed and fleet is not None:
        said = {name: complaints(engine) for name, engine in fleet.engines.items()}
        report.sections += [(f"log of {name}", "\n".join(lines)) for name, lines in said.items()]
    return report


@pytest.fixture(autouse=True)
def nobody_dies(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that passed has not quietly lost an engine."""
    yield
    if "fleet" in request.fixturenames:
        request.getfixturevalue("fleet").check()


@pytest.fixture(scope="session")
def tally() -> Iterator[Tally]:
    tally = Tally()
    yield tally
    print(f"\nanswers: {tally}")
    tally.check()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Seeded by the test's name, so that no two tests share a prompt and every run repeats."""
    return random.Random(request.node.nodeid)


@pytest.fixture
def fresh_prompt(rng: random.Random) -> Callable[[int], Prompt]:
    """A prompt of so many tokens that no engine has seen."""
    return lambda num_tokens: tuple(rng.choice(ORDINARY_TOKENS) for _ in range(num_tokens))


@pytest.fixture
def run() -> Run[Any]:
    """Run a coroutine function that talks to servers."""

    def run(talk: Callable[[httpx.AsyncClient], Coroutine[Any, Any, Answered]]) -> Answered:
        async def session() -> Answered:
            async with httpx.AsyncClient(timeout=CLIENT_TIMEOUT_S, limits=httpx.Limits(max_connections=200)) as client:
                return await talk(client)

        return asyncio.run(session())

    return run
