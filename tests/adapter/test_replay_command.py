"""`kvferry replay`: its picture, its progress and what it refuses. The numbers are tested with kv_core."""

import io
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from kv_core.replay import Outcome, Setting
from kv_engine_adapter.cli import main as command
from kv_engine_adapter.cli.replay import Bar, main, picture

TRACE = Path(__file__).resolve().parents[2] / "tools" / "data" / "mooncake_synthetic_trace.jsonl"


def outcome(order, device, hits, host=0):
    return Outcome(Setting(order, device, host), 10, 0, 100, hits, 64, {}, 0.1)


OUTCOMES = [
    outcome("lru", 1000, 20),
    outcome("lru", 4000, 40),
    outcome("s3-fifo", 1000, 30),
    outcome("lru", 1000, 50, 9),
]


def test_the_picture_has_a_curve_for_each_order():
    root = ET.fromstring(picture(OUTCOMES, "a <trace>"))
    name = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{name}polyline")) == 3
    texts = [element.text for element in root.findall(f"{name}text")]
    assert {"lru", "s3-fifo", "lru + 9 host", "no bound: 64.0", "Prefix hits, a <trace>"} <= set(texts)
    for dot in root.findall(f"{name}circle"):
        assert 0 <= float(dot.get("cx", "-1")) <= float(root.get("width", "0"))
        assert 0 <= float(dot.get("cy", "-1")) <= float(root.get("height", "0"))


def test_a_trace_gives_a_table_a_file_and_a_picture(tmp_path, capsys):
    plot, file = tmp_path / "hits.svg", tmp_path / "hits.csv"
    options = ["--requests", "300", "--device", "500,2000", "--order", "lru,s3-fifo,belady"]
    assert main([str(TRACE), *options, "--csv", str(file), "--plot", str(plot)]) == 0
    told = capsys.readouterr()
    assert len(told.out.splitlines()) == 2 + 6
    assert told.err == "", "progress is for terminals"
    assert len(file.read_text().splitlines()) == 1 + 6
    root = ET.fromstring(plot.read_text())
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 3, "a curve for each order"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_drawn_on_a_terminal_only():
    terminal, file = Terminal(), io.StringIO()
    for out in (terminal, file):
        bar = Bar(out, 2)
        for setting in ("one", "two"):
            for done in (0, 5, 10):
                bar(setting, done, 10)
    assert " 25%  one" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert file.getvalue() == ""


@pytest.mark.parametrize("arguments", [["--order", "best"], ["--device", "x"], ["--keep", "1:2"], []])
def test_what_cannot_be_used_is_named(tmp_path, capsys, arguments):
    assert main([str(tmp_path / "none.jsonl"), *arguments]) == 2
    assert "kvferry replay: " in capsys.readouterr().err


def test_the_command_finds_its_subcommands(capsys):
    assert command.main([]) == 0
    assert "replay" in capsys.readouterr().out
    assert command.main(["wish"]) == 2
    assert "'wish'" in capsys.readouterr().err
    assert command.main(["replay", "none.jsonl"]) == 2
