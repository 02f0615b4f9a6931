"""Whole sessions, with real threads and sockets, wait in real time: most of them run once, in the whole suite."""

from pathlib import Path

import pytest

EVERYWHERE = {"test_shapes.py", "test_refusals.py", "test_integrity.py", "test_keys.py"}
"""Hand-overs, refusals, checksums and keys: enough to show that a package's own environment has what they need."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the others."""
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here and item.path.name not in EVERYWHERE:
            item.add_marker(pytest.mark.patient)
