"""Replay: no order beats the ceilings, an endless cache reaches them, every number reaches the table and the file."""

import csv
import json
from random import Random

import pytest

from kv_core.replay import BELADY, COLUMNS, Setting, load, main, parse_options, replay, row
from kv_core.retention import RangeRetention, RetentionConfig
from kv_core.tiers import Tier
from kv_core.trace import TraceRequest, ceiling_hits


def requests(count=80, seed=1):
    """Chains in a random tree of few branches, so that prefixes come back."""
    random, names, found = Random(seed), {(): 0}, []
    for number in range(count):
        path: tuple[int, ...] = ()
        blocks = []
        for _ in range(random.randint(1, 6)):
            path = (*path, random.choice([0, 0, 0, 1, 2]))
            blocks.append(names.setdefault(path, len(names)))
        found.append(TraceRequest(number * 100, tuple(blocks)))
    return found


def outcome(setting, **options):
    (found,) = replay(requests(), [setting], **options)
    return found


def test_an_endless_cache_reaches_the_ceiling():
    found = outcome(Setting("lru", 2000))
    assert found.num_hits == ceiling_hits(requests()) == found.num_ceiling
    assert found.num_refused == 0
    assert not found.moved


@pytest.mark.parametrize("device", [8, 12, 20, 40])
def test_nobody_beats_who_knows_the_future(device):
    lru, best = outcome(Setting("lru", device)), outcome(Setting(BELADY, device))
    assert 0 < lru.num_hits <= best.num_hits <= best.num_ceiling


def test_a_host_tier_finds_what_the_device_gave_up():
    alone, tiered = outcome(Setting("lru", 10)), outcome(Setting("lru", 10, host=200))
    assert tiered.num_hits > alone.num_hits
    assert tiered.moved[Tier.DEVICE, Tier.HOST] > 0 < tiered.moved[Tier.HOST, Tier.DEVICE]


def test_a_request_longer_than_the_cache_is_counted():
    found = outcome(Setting("lru", 4))
    assert found.num_refused == sum(len(one.blocks) + 1 > 4 for one in requests())


def test_retention_keeps_first_blocks():
    plain = outcome(Setting("lru", 9))
    kept = outcome(Setting("lru", 9), retention=RetentionConfig((RangeRetention(0, 2, 90),)))
    assert kept.num_hits != plain.num_hits


def test_progress_ends_at_the_end():
    seen: list[tuple[int, int]] = []
    outcome(Setting("lru", 50), progress=lambda _, done, total: seen.append((done, total)))
    assert seen[-1] == (80, 80)


def trace_file(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = (
        {"timestamp": one.at_ms, "input_length": 512 * len(one.blocks), "output_length": 1, "hash_ids": one.blocks}
        for one in requests()
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_command_prints_a_table_and_writes_a_file(tmp_path, capsys):
    file = tmp_path / "hits.csv"
    arguments = [str(trace_file(tmp_path)), "--device", "10,2000", "--order", "lru,belady", "--csv", str(file)]
    assert main([*arguments, "--keep", "0:1024:80"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 6
    assert table[2].split()[:2] == ["lru", "10"]
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    assert [one["order"] for one in rows] == ["lru", "belady", "lru", "belady"]
    assert tuple(rows[0]) == COLUMNS
    assert rows[2]["hit_rate"] == rows[2]["ceiling_rate"] == rows[3]["hit_rate"]


def test_the_table_says_what_moved_into_each_tier(tmp_path, capsys):
    path = str(trace_file(tmp_path))
    found = outcome(Setting("lru", 10, host=200))
    assert main([path, "--device", "10", "--host", "200", "--order", "lru", "--bytes-per-token", "1000000"]) == 0
    *_, device, host, disk, _ = capsys.readouterr().out.splitlines()[-1].split()
    gigabytes = [found.num_moved_into(tier) * 0.512 for tier in Tier]
    assert [float(device), float(host), float(disk)] == pytest.approx(gigabytes, abs=0.06)
    assert min(gigabytes[:2]) > 0 == gigabytes[2]


def test_bytes_of_a_row():
    found = outcome(Setting("lru", 10, host=200))
    told = dict(zip(COLUMNS, row(found, 1000), strict=True))
    assert told["device_to_host_bytes"] == str(found.moved[Tier.DEVICE, Tier.HOST] * 1000)
    assert told["hits"] == str(found.num_hits)


@pytest.mark.parametrize(
    "arguments", [["--device", "many"], ["--order", "best"], ["--keep", "1"], ["--tokens-per-block", "7"]]
)
def test_what_cannot_be_used_is_named(tmp_path, capsys, arguments):
    assert main([str(trace_file(tmp_path)), *arguments]) == 2
    assert "kv_core.replay: " in capsys.readouterr().err


def test_smaller_blocks_find_as_much(tmp_path):
    import argparse

    from kv_core.replay import add_arguments

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    path = str(trace_file(tmp_path))
    rates = []
    for size, device in ((512, 2000), (128, 8000)):
        options = parse_options(
            parser.parse_args([path, "--order", "lru", "--device", str(device), "--tokens-per-block", str(size)])
        )
        (found,) = replay(load(options), options.settings)
        rates.append(found.hit_rate)
    assert rates[0] == rates[1]
