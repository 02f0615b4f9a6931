"""Versions of vLLM, models and switches crossed: in every cell a prompt is handed over and answered right.

A common run takes cells in which every two values meet, `make test-matrix` all. Each cell has two engines of its own,
and is judged by an engine of the installed vLLM without a connector.
"""

import re
from contextlib import contextmanager

import httpx
import pytest

from kv_engine_adapter.cli.engines import EngineConfig, wait_ready
from kv_engine_adapter.cli.processes import ProcessGuard
from kv_testing.answers import Question, ask, ask_by_hand, largest_move
from kv_testing.cells import BLOCK, CELLS, CHECKPOINTS, INSTALLED, OTHERS, REFUSED, cover, hooks_beside, pairs
from kv_testing.servers import DEADLINE_S, IS_OURS, START_S, wait_until
from kv_testing.servers_hooks import KEY, bytes_received, corrupt_block, open_things, usage
from kv_testing.stem import start_stem

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nixl,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not IS_OURS, reason="counts our bytes and needs the test hooks of our connector"),
]
COVER = cover(CELLS)
NUM_TOKENS = 6 * BLOCK + 9
KNOWN = 2 * BLOCK
NOTICEABLE = 0.01
DRAFTS = "vllm:spec_decode_num_draft_tokens_total"


def _cells(cells):
    return [pytest.param(it, marks=() if it in COVER else pytest.mark.matrix, id=str(it)) for it in cells]


@pytest.fixture(scope="module")
def stand(models, tmp_path_factory):
    with ProcessGuard() as guard:
        yield Stand(guard, models, tmp_path_factory.mktemp("matrix"))


class Stand:
    """Where the engines of a cell run, beside one that answers alone for each model."""

    def __init__(self, guard, models, folder):
        self._models, self._folder, self._alone = models, folder, {}
        self._stems = {
            version: start_stem(guard, None if version == INSTALLED else version, folder)
            for version in sorted({cell.vllm for cell in CELLS})
        }

    @contextmanager
    def pair(self, cell):
        """A prefill and a decode engine of this cell, and the one that answers alone."""
        ours = [self._start(cell, side) for side in ("prefill", "decode")]
        try:
            wait_ready([*ours, self._judge(cell.model)], timeout_s=START_S)
            yield (*ours, self._judge(cell.model))
        finally:
            for engine in ours:
                engine.program.kill()

    def refused(self, it):
        """An engine that is to be refused."""
        return self._started(it.vllm, f"{it.vllm}-{it.model}", it.model, extra_arguments=it.asked)

    def hooks(self, engine):
        return hooks_beside(self._folder / engine.name)

    def _start(self, cell, side):
        stored = self._folder / f"{cell}-{side}"
        stored.mkdir()
        hooks_beside(stored).mkdir()
        options = {"connector_options": {"test_hooks_dir": str(hooks_beside(stored))}}
        cores = ("0",) if side == "prefill" else ("1",)
        return self._started(
            cell.vllm, stored.name, cell.model, cores=cores, extra_arguments=cell.arguments(stored), **options
        )

    def _judge(self, model):
        if model not in self._alone:
            codes = {"extra_arguments": ("--kv-cache-dtype", "fp8_e4m3")} if model == "codes" else {}
            self._alone[model] = self._started(
                INSTALLED, f"alone-{model}", model, cores=("1",), connector=None, **codes
            )
        return self._alone[model]

    def _started(self, version, name, model, **options):
        config = EngineConfig(name=name, model=self._models[CHECKPOINTS.get(model, model)], **options)
        return self._stems[version].start_engine(config, self._folder)


@pytest.mark.parametrize("cell", _cells((*CELLS, *OTHERS)))
def test_a_cell(stand, run, tally, fresh_prompt, record_property, cell):
    with stand.pair(cell) as (prefill, decode, judge):
        for engine in (prefill, decode):
            _check_settings(engine, cell)

        def moved(question):
            before = bytes_received(decode)
            answers = run(lambda client: ask_by_hand(client, prefill.url, decode.url, question))
            tally.demand_right(answers, run(lambda client: ask(client, judge.url, question)))
            return bytes_received(decode) - before

        first = Question((fresh_prompt(NUM_TOKENS),), num_answer_tokens=24)
        num_bytes = moved(first)
        assert num_bytes == cell.num_bytes(NUM_TOKENS, 0)
        record_property("bytes", int(num_bytes))
        if cell.speculates:
            drafts = decode.metrics().get(DRAFTS, 0)
            record_property("drafts", int(drafts))
            assert drafts > 0, "nothing was speculated"
        # The decode engine has computed how the second prompt begins.
        prompt = fresh_prompt(NUM_TOKENS)
        run(lambda client: ask(client, decode.url, Question((prompt[: KNOWN + 1],))))
        assert moved(Question((prompt,))) == cell.num_bytes(NUM_TOKENS, KNOWN if cell.keeps_prefixes else 0)
        _check_control(stand, run, fresh_prompt, (prefill, decode, judge))
        if cell.is_child and not cell.keeps_prefixes and not cell.chunks_prompts:
            _check_other_child(run, tally, decode, judge, first)
        ours = (prefill, decode)
        waited = wait_until(lambda: not any(open_things(it) or usage(it) for it in ours), timeout_s=DEADLINE_S)
        assert waited < DEADLINE_S, [(it.name, open_things(it), usage(it)) for it in ours]


def _check_settings(engine, cell):
    """The engine says of itself that it is of this cell."""
    assert httpx.get(f"{engine.url}/version").json()["version"].startswith(cell.vllm)
    log = engine.program.log.read_text()
    for name, value in (("prefix_caching", cell.keeps_prefixes), ("chunked_prefill", cell.chunks_prompts)):
        assert set(re.findall(rf"\benable_{name}=(\w+), ", log)) == {str(value)}, name


def _check_control(stand, run, fresh_prompt, engines):
    """A block that is spoilt on its way is heard in the answer."""
    prefill, decode, judge = engines
    question = Question((fresh_prompt(NUM_TOKENS),), num_answer_tokens=1)
    with corrupt_block(stand.hooks(decode), 4, KEY):
        (answer,) = run(lambda client: ask_by_hand(client, prefill.url, decode.url, question))
    (alone,) = run(lambda client: ask(client, judge.url, question))
    assert largest_move(answer, alone) > NOTICEABLE


def _check_other_child(run, tally, decode, judge, question):
    """What ours has received the other child has stored, and serves when the prompt comes again."""
    before = bytes_received(decode)
    assert "Inject KV cache" not in decode.program.log.read_text()
    answers = run(lambda client: ask(client, decode.url, question))
    tally.demand_right(answers, run(lambda client: ask(client, judge.url, question)))
    assert "Inject KV cache" in decode.program.log.read_text()
    assert bytes_received(decode) == before


@pytest.mark.matrix
@pytest.mark.parametrize("refusal", REFUSED, ids=lambda it: f"{it.vllm}-{it.model}")
def test_what_is_left_out_is_refused(stand, refusal):
    engine = stand.refused(refusal)
    try:
        said = wait_until(lambda: refusal.words in engine.program.log.read_text(), timeout_s=START_S)
        assert said < START_S, engine.program.log_tail()
    finally:
        engine.program.kill()


def test_every_two_values_meet_in_the_cover():
    assert {pair for cell in COVER for pair in pairs(cell)} == {pair for cell in CELLS for pair in pairs(cell)}
    assert len(COVER) < len(CELLS) / 5
