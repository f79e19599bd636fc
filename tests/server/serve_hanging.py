"""A server process whose first step never comes back: ``serve_hanging.py FOLDER [flag ...]``."""

from __future__ import annotations

import sys
import threading

from jaxserve.cli.main import main
from jaxserve.runner.worker import TargetWorker


def hang(*arguments: object) -> None:
    threading.Event().wait()


if __name__ == "__main__":
    TargetWorker.execute = hang  # type: ignore[assignment]
    sys.exit(main(["serve", sys.argv[1], "--port", "0", "--num-pages", "64", "--skip-warmup", *sys.argv[2:]]))
