"""What can go wrong is explained to operators: every code, reason and refusal at the start has its row."""

import ast
from pathlib import Path

import pytest

from kv_transfer.config import TransferConfig
from kv_transfer.plan.sizing import staging_bytes
from kv_transfer.protocol.messages import RefuseCode

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/failures.md").read_text()
SIZING = " ".join((ROOT / "docs/sizing.md").read_text().split())
TRANSFER = ROOT / "packages/kv-transfer/src/kv_transfer"
VLLM = ROOT / "packages/kv-engine-adapter/src/kv_engine_adapter/vllm"


def messages(path, *callees):
    """The longest constant part of each message that is given to one of these, as the last positional argument."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        if getattr(node.func, "attr", getattr(node.func, "id", "")) in callees:
            texts = [
                each.value
                for each in ast.walk(node.args[-1])
                if isinstance(each, ast.Constant) and isinstance(each.value, str)
            ]
            if texts:
                yield max(texts, key=len).strip(" :;,'\"()=")


def unexplained(page, found):
    """The messages of which no row of the page has the beginning."""
    cells = [part for line in page.splitlines() if line.startswith("| `") for part in line.split("`")[1::2]]
    return [text for text in found if not any(cell in text or text in cell for cell in cells if len(cell) > 3)]


def test_every_code_has_its_row():
    missing = [code.value for code in RefuseCode if f"| `{code.value}` |" not in PAGE]
    assert not missing


@pytest.mark.parametrize(("path", "callees"), [
    (TRANSFER / "loads.py", ("_decide",)),
    (TRANSFER / "receiver.py", ("_fail_load",)),
    (VLLM / "setup.py", ("CallerError",)),
    (VLLM / "tiers.py", ("CallerError",)),
], ids=lambda each: getattr(each, "name", ""))  # fmt: skip
def test_every_reason_has_its_row(path, callees):
    found = list(messages(path, *callees))
    assert found, "the code gives no reasons any more: what is to be explained now?"
    assert not unexplained(PAGE, found)


def test_a_reason_without_a_row_is_noticed():
    assert unexplained(PAGE, ["the moon is in the way"]) == ["the moon is in the way"]


def test_the_example_of_sizing_is_what_the_code_says():
    a_token = 32 * 8 * 2 * 128 * 2
    assert f"= {a_token:,} bytes a token" in SIZING
    assert f"= {staging_bytes({0: a_token}, 15_000, 16) / 2**30:.2f} GiB" in SIZING


def test_the_settings_that_the_pages_name_exist():
    for name in ("lease_s", "max_lease_s", "max_wait_s", "renew_s", "request_deadline_s", "max_sessions", "curve_key"):
        assert f"`{name}`" in PAGE + SIZING or f'"{name}"' in SIZING
        assert name in TransferConfig.__dataclass_fields__
