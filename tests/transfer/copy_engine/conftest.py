"""Every way to move files, for the suite that all of them pass."""

import pytest

from kv_transfer.agent.nixl_files import NixlFiles
from kv_transfer.file_mover import PlainFiles


@pytest.fixture(params=["plain", pytest.param("posix", marks=pytest.mark.nixl)])
def mover(request):
    """A mover of host memory; closed twice after the test."""
    mover = PlainFiles() if request.param == "plain" else NixlFiles("POSIX")
    yield mover
    mover.close()
    mover.close()
