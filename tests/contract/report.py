"""Where a run keeps its lines: one of JSON for each case, written out at the end."""

import pytest

LINES: pytest.StashKey[list[str]] = pytest.StashKey()
