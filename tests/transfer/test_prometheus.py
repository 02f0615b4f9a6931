"""The collector over the totals of real transfers; needs prometheus_client."""

from typing import Any

import pytest

from kv_testing.worlds import NUM_TOKENS, fresh_id, pair, state_of

pytestmark = pytest.mark.prometheus

ROW_BYTES = 4 * 4 * 2 * 4 * 4
"""Of one token: layers, heads, K and V, elements, bytes of each."""


@pytest.fixture
def registry():
    from prometheus_client import CollectorRegistry

    return CollectorRegistry()


def test_a_scrape_tells_what_has_moved(registry) -> None:
    from kv_transfer.prometheus import TransferCollector

    with pair(state_of(2)) as (p, d, _):
        registry.register(TransferCollector({"0": d.ranks[0].status, "p1": p.ranks[1].status}))
        for number in range(3):
            transfer = p.offer(f"p{number}")
            d.order(p, transfer, f"d{number}")
            assert d.outcome(f"d{number}", others=[p]).ok
            d.release(p, transfer, f"d{number}")
        d.order(p, fresh_id(), "bad", prompt_key=b"another")
        d.abort("bad")
        assert not d.outcome("bad", others=[p]).ok
        for side in (p, d):
            side.check_clean()
        load = {"rank": "0", "direction": "load", "path": "staged"}
        value = registry.get_sample_value
        assert value("kvferry_transfers_total", {**load, "outcome": "ok"}) == 3
        assert value("kvferry_transfer_bytes_total", load) == 3 * NUM_TOKENS * ROW_BYTES == d.count("bytes_in")
        assert value("kvferry_transfer_chunks_total", load) == d.count("chunks_in")
        assert value("kvferry_transfer_pieces_total", load) >= 6
        sent = {"rank": "p1", "direction": "send", "path": "staged"}
        assert value("kvferry_transfer_bytes_total", sent) == 3 * NUM_TOKENS * ROW_BYTES / 2
        assert value("kvferry_events_total", {"rank": "p1", "event": "bytes_out"}) == 3 * NUM_TOKENS * ROW_BYTES / 2
        whole = {"rank": "0", "direction": "load", "stage": "total"}
        assert value("kvferry_transfer_seconds_count", whole) == 3
        assert value("kvferry_transfer_seconds_bucket", {**whole, "le": "+Inf"}) == 3
        seconds = [each.times.total_s for _, each in d.received if each.ok]
        assert value("kvferry_transfer_seconds_sum", whole) == pytest.approx(sum(seconds))
        stages = ("prepare", "queue", "gather", "wire", "scatter", "finish")
        parts = [value("kvferry_transfer_seconds_sum", {**whole, "stage": stage}) for stage in stages]
        assert sum(parts) == pytest.approx(sum(seconds))
        assert value("kvferry_open", {"rank": "0", "what": "sessions"}) == 0


def test_labels_are_words_of_our_own(registry) -> None:
    """However many peers and requests there are, there is no series for each."""
    from kv_transfer.prometheus import TransferCollector
    from kv_transfer.reports import Direction, Path, Stages

    with pair(state_of(2)) as (p, d, _):
        registry.register(TransferCollector({"0": d.ranks[0].status}))
        for number in range(6):
            transfer = p.offer(f"p{number}")
            d.order(p, transfer, f"d{number}")
            assert d.outcome(f"d{number}", others=[p]).ok
        allowed: dict[str, Any] = {
            "rank": {"0"},
            "direction": set(Direction),
            "path": set(Path),
            "outcome": {"ok", "failed"},
            "stage": {*Stages._fields, "total"},
        }
        num_series = 0
        for metric in registry.collect():
            for sample in metric.samples:
                num_series += 1
                for name, words in allowed.items():
                    assert sample.labels.get(name, "0" if name == "rank" else next(iter(words))) in words, sample
                assert not any("127.0.0.1" in str(text) for text in sample.labels.values()), sample
        assert num_series < 400


def test_registering_asks_nobody(registry) -> None:
    from kv_transfer.prometheus import TransferCollector

    def ask():
        raise AssertionError("asked")

    registry.register(TransferCollector({"0": ask}))
