"""`kvferry bench paths`: what it concludes, and one small run."""

import json
import multiprocessing
import time

import pytest

from kv_engine_adapter.cli import bench
from kv_engine_adapter.cli.bench import main, threshold
from kv_transfer.thresholds import CHUNK, DEVICE_POST, IN_PLACE_RUN


def figures(**faster):
    """In place is faster or not, by KiB."""
    return {int(kib[1:]): {"staged": 1.0, "in place": 1.5 if is_faster else 0.5} for kib, is_faster in faster.items()}


@pytest.mark.parametrize(
    ("measured", "wanted"),
    [
        (figures(_4=False, _16=True, _64=True), 16),
        (figures(_64=True, _4=True, _16=True), 4),
        (figures(_4=True, _16=False, _64=True), 64),
        (figures(_4=True, _16=True, _64=False), None),
        (figures(_4=False), None),
    ],
)
def test_a_threshold_holds_for_every_longer_run(measured, wanted):
    assert threshold(measured) == wanted


def test_the_table_says_where_its_numbers_are_from():
    for found in (*IN_PLACE_RUN.values(), *CHUNK.values(), DEVICE_POST):
        assert found.num_bytes > 0
        assert found.date
        assert found.evidence
        assert bool(found.machine) == bool(found.command)
        assert found.command or found.evidence.startswith("chosen, not measured")


@pytest.mark.nixl
@pytest.mark.patient
def test_a_small_run_tells_figures_and_a_setting(capfd):
    assert main(["paths", "--mib", "4", "--kib", "4", "--repeats", "1"]) == 0
    told = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert set(told["gbps"]["4"]) == {"staged", "in place"}
    assert all(gbps > 0 for gbps in told["gbps"]["4"].values())
    assert told["in_place_run_bytes"] in (None, 4096)
    assert told["command"].startswith("kvferry bench paths")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--kib", "1"], "--kib"),
        (["--kib", "4", "3"], "--kib"),
        (["--repeats", "0"], "--repeats"),
        (["--mib", "-1"], "--mib"),
        (["--device", "cuda", "--gpus", "0"], "--gpus"),
        (["--device", "cuda", "--gpus", "0,1,2"], "--gpus"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(capsys, words, named):
    with pytest.raises(SystemExit) as end:
        main(["paths", *words])
    assert end.value.code == 2
    assert f"argument {named}" in capsys.readouterr().err


def hang(pipe, *_):
    """Stands for a measurement; in the process that was to make it."""
    time.sleep(600)


def test_a_measurement_that_hangs_is_given_up_and_its_process_ended(monkeypatch, capsys):
    monkeypatch.setattr(bench, "_measure", hang)
    monkeypatch.setattr(bench, "MEASURE_S", 0.2)
    monkeypatch.setattr(bench, "END_S", 0.1)
    assert main(["paths", "--mib", "4", "--kib", "4", "--repeats", "1"]) == 2
    assert "staged at 4 KiB did not end in 0.2 s" in capsys.readouterr().err
    assert multiprocessing.active_children() == []
