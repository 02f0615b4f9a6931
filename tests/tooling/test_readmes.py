"""The Python examples in the READMEs of the packages run as printed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
READMES = [ROOT / "kernels/README.md", *sorted((ROOT / "packages").glob("*/README.md"))]
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_the_examples_of_a_package_run(readme):
    examples = EXAMPLE.findall(readme.read_text())
    assert examples, f"{readme} shows no usage"
    ended = subprocess.run([sys.executable, "-c", "".join(examples)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_no_package_is_forgotten():
    assert len(READMES) == 4
