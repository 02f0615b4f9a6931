"""Reports of ranks and steps add up to what happened."""

from kv_engine_adapter.metrics import (
    COUNTERS,
    GAUGES,
    MAX_SAMPLES,
    SECONDS,
    TRANSFERS,
    Report,
    label_values,
    labelled,
    merged,
    report_of,
    summary,
    totals,
)
from kv_transfer.reports import Direction, Path, Stages


def report(source, counters, **gauges):
    return Report(counters=counters, gauges={source: gauges})


def test_counters_add_and_the_newest_gauge_of_a_source_wins():
    first = merged(report("rank0", {"loads": 1}, sessions=2), report("rank1", {"loads": 1, "sends": 3}, sessions=1))
    assert first["counters"] == {"loads": 2, "sends": 3}
    assert totals(first["gauges"]) == {"sessions": 3}
    later = merged(first, report("rank0", {}, sessions=0))
    assert totals(later["gauges"]) == {"sessions": 1}, "rank 1 did not report and keeps its value"


def test_merging_changes_neither_report():
    ours, theirs = report("rank0", {"loads": 1}, sessions=2), report("rank0", {"loads": 1}, sessions=5)
    merged(ours, theirs)
    assert ours == report("rank0", {"loads": 1}, sessions=2)


def test_an_empty_report_is_neutral():
    ours = report("rank0", {"loads": 1}, sessions=2)
    assert merged(ours, report_of({})) == merged(report_of({}), ours) == ours


def test_the_summary_has_a_mean_only_when_something_was_loaded():
    assert summary(report_of({}))["mean load ms"] == 0
    line = summary(report("rank0", {"loads": 4, "load_seconds": 0.02, "bytes_received": 5e6}, quarantined=1))
    assert (line["mean load ms"], line["MB received"], line["quarantined regions"]) == (5.0, 5.0, 1)


def test_samples_are_joined_and_bounded():
    ours, theirs = report("rank0", {}), report("rank1", {})
    ours["samples"], theirs["samples"] = {"seconds|load|wire": [0.1]}, {"seconds|load|wire": [0.2], "x": [1.0]}
    assert merged(ours, theirs)["samples"] == {"seconds|load|wire": [0.1, 0.2], "x": [1.0]}
    assert merged(ours, report("rank1", {}))["samples"] == ours["samples"]
    assert "samples" not in merged(report("rank0", {}), report("rank1", {}))
    theirs["samples"] = {"x": [1.0] * MAX_SAMPLES}
    assert len(merged(theirs, theirs)["samples"]["x"]) == MAX_SAMPLES


def test_there_are_few_series_and_no_name_twice():
    num_series = sum(len(label_values(name)) for name in (*TRANSFERS, "seconds"))
    num_ways, num_stages = len(Direction) * len(Path), len(Stages._fields) + 1
    assert num_series == (2 + 1 + 1) * num_ways + len(Direction) * num_stages < 100
    names = [metric.name for metric in (*COUNTERS.values(), *GAUGES.values(), *TRANSFERS.values(), SECONDS)]
    assert len(set(names)) == len(names)
    keys = [labelled(name, *values) for name in (*TRANSFERS, "seconds") for values in label_values(name)]
    assert len(set(keys)) == num_series
