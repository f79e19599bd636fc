"""What ``make bench`` runs: both benchmarks, one JSON file, and their tables last."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import peers

from jaxserve.bench import fence, fence_report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default")
    parser.add_argument("--peers-python", default=sys.executable, help="an interpreter with torch and transformers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("build/bench.json"), help="every number (%(default)s)")
    arguments = parser.parse_args()
    found = {
        "peers": peers.run(arguments.model, arguments.peers_python, arguments.rounds),
        "fence": fence.measure(fence.Sweep(), lambda message: print(message, file=sys.stderr)),
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(found, indent=1))
    print(peers.report(found["peers"]))
    print(fence_report.summary(found["fence"]))
    print(f"every number: {arguments.json}")


if __name__ == "__main__":
    main()
