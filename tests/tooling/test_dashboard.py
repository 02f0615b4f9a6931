"""The Grafana dashboard shows series that there are, and all that an operator should watch."""

import json
import re

from docs import dashboard

from kv_engine_adapter import metrics

COUNTERS = [*metrics.COUNTERS.values(), *(metric for metric in metrics.TRANSFERS.values())]
SERIES = {
    **{f"{metric.name}_total": metric for metric in COUNTERS},
    **{metric.name: metric for metric in metrics.GAUGES.values()},
    **{f"{metrics.SECONDS.name}_{suffix}": metrics.SECONDS for suffix in ("bucket", "sum", "count")},
}
LABELS_OF_ALL = {"model_name", "instance", "engine", "le"}


def expressions():
    return [target["expr"] for panel in json.loads(dashboard.FILE.read_text())["panels"] for target in panel["targets"]]


def test_the_file_is_what_the_tool_writes():
    assert dashboard.FILE.read_text() == dashboard.text()


def test_every_series_shown_is_one_of_ours_and_none_of_ours_is_left_out():
    shown = {name for expression in expressions() for name in re.findall(r"kvferry:\w+", expression)}
    assert shown <= set(SERIES)
    told_otherwise = {"kvferry:load_seconds_total"}  # a sum that the histogram tells as well
    assert {SERIES[name].name for name in shown} == {
        metric.name for name, metric in SERIES.items() if name not in told_otherwise
    }


def test_labels_in_use_are_labels_of_the_series():
    for expression in expressions():
        for name, chosen in re.findall(r"(kvferry:\w+)\{([^}]*)\}", expression):
            assert set(re.findall(r"(\w+)[=!]", chosen)) <= LABELS_OF_ALL | set(SERIES[name].labels)
        grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
        known = {label for name in re.findall(r"kvferry:\w+", expression) for label in SERIES[name].labels}
        assert grouped <= LABELS_OF_ALL | known, expression


def test_panels_do_not_lie_on_each_other_and_tell_what_they_mean():
    panels = json.loads(dashboard.FILE.read_text())["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["description"] and panel["targets"] for panel in panels)
