"""`python -m kv_engine_adapter.cli`: the same as `kvferry`."""

import sys

from kv_engine_adapter.cli.main import main

sys.exit(main())
