"""docs/wire.md says what the code does: versions, messages, gauges, and both state tables, line by line."""

import re
from pathlib import Path

import pytest

from kv_testing.messages import SAMPLES
from kv_transfer.protocol import codec
from kv_transfer.protocol.session import RECEIVER, SENDER
from kv_transfer.status import OPEN

DOC = (Path(__file__).parents[3] / "docs" / "wire.md").read_text()


def table_lines(table):
    """One line for each pair of a state table."""
    return [
        f"| {state.name} | {event.name} | {following.name} | {', '.join(action.name for action in actions)} |"
        for state, row in table.items()
        for event, (following, actions) in row.items()
    ]


@pytest.mark.parametrize(("title", "table"), [("Sender", SENDER), ("Receiver", RECEIVER)])
def test_the_state_tables_are_the_codes(title, table):
    section = DOC.split(f"### {title}\n")[1].split("\n### ")[0].split("\n## ")[0]
    lines = [line for line in section.splitlines() if re.match(r"\| [A-Z]", line)]
    assert lines == table_lines(table)


def test_the_history_ends_with_the_current_version():
    versions = re.findall(r"^\| (\d+) \|", DOC.split("## History")[1].split("\n## ")[0], re.MULTILINE)
    assert versions[-1] == str(codec.WIRE_VERSION)
    assert versions == [str(number + 1) for number in range(len(versions))]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_every_message_and_field_is_told(sample):
    name, tag = type(sample).__name__, type(sample).__struct_config__.tag
    line = next(line for line in DOC.splitlines() if line.startswith(f"| `{name}` |"))
    assert f"`{tag}`" in line
    fields = line.split("|")[3]
    assert re.findall(r"`(\w+)`", fields) == list(sample.__struct_fields__)


@pytest.mark.parametrize("gauge", OPEN)
def test_every_gauge_is_told(gauge):
    assert f"`{gauge}`" in DOC
