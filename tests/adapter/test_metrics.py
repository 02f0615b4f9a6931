"""Reports of ranks and steps add up to what happened."""

from kv_engine_adapter.metrics import Report, merged, report_of, summary, totals


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
