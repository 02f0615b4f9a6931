"""Programs under a guard whose process ids have belonged to others before."""

import os
import signal
import sys

from kv_engine_adapter.cli.processes import ProcessGuard
from kv_testing.waiting import wait_for

SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]


class Everybody(dict[int, int]):
    """As if under every process id some program had ended before."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(range(1 << 22), -9))


def test_a_program_has_not_ended_because_another_one_of_its_number_has(tmp_path):
    with ProcessGuard() as guard:
        guard._ended = Everybody()
        program = guard.start(SLEEPS, env=os.environ, log=tmp_path / "log")
        assert program.exit_code() is None
        guard._ended[program.pid] = -9
        assert guard.adopted(program.pid, program.log).exit_code() is None
        program.kill()
        wait_for(lambda: program.exit_code() is not None)
        assert program.exit_code() == -signal.SIGKILL
        assert guard.adopted(program.pid, program.log).exit_code() == -signal.SIGKILL
