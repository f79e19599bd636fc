"""A server process with a tiny checkpoint, started as users start it: ``serve_tiny.py FOLDER [flag ...]``."""

from __future__ import annotations

import sys
from pathlib import Path

from jaxserve.cli.main import main

if __name__ == "__main__":
    few = [
        "--page-size", "4", "--num-pages", "512", "--max-running-requests", "4", "--chunked-prefill-size", "64",
        "--prefill-token-buckets", "64", "--decode-batch-buckets", "4", "--skip-warmup",
    ]  # fmt: skip
    sys.exit(main(["serve", str(Path(sys.argv[1])), "--port", "0", *few, *sys.argv[2:]]))
