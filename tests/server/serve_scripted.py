"""A server process with a scripted engine: ``serve_scripted.py PORT LOAD_S STEP_S DRAIN_S``. Prints ``ready URL``."""

from __future__ import annotations

import sys
import time

from scripted_engine import ScriptedEngine

from jaxserve.core.errors import JaxserveError
from jaxserve.server.launch import ServerProcess
from jaxserve.server.settings import ServerSettings


def main() -> int:
    port, load_s, step_s, drain_s = int(sys.argv[1]), *map(float, sys.argv[2:5])

    def load() -> ScriptedEngine:
        print("loading", flush=True)
        time.sleep(load_s)
        return ScriptedEngine(script="x" * 10, step_s=step_s, context_length=4096)

    settings = ServerSettings(port=port, drain_timeout_s=drain_s)
    try:
        server = ServerProcess(load, settings, lambda engine, url: print(f"ready {url}", flush=True))
        print(f"listening {server.url}", flush=True)
        return server.run()
    except JaxserveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
