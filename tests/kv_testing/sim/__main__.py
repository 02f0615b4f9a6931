"""Play one schedule again: `python -m kv_testing.sim SEED`, with every message of the session layer's log."""

import logging
import sys

from kv_testing.sim.schedule import run

logging.basicConfig(level=logging.DEBUG, format="%(levelname)s %(name)s: %(message)s")
print(run(int(sys.argv[1])))
