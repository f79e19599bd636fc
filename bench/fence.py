"""One engine, four ways to bring a step's control rows to the device: step time, and how long row writes stood still.

upload      every table is a fresh device array each step
functional  every table is updated by a small program that makes a new one
coarse      rows are written in place, behind the end of the whole execution
fine        rows are written in place, behind the read-done marker
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from machine import machine, sentence
from peers import prompts_for
from table import median, spread, table
from worker import Worker

from jaxserve.engine.assembly import resolve_model_path
from jaxserve.models.loading.checkpoint import open_checkpoint

WAYS: dict[str, dict[str, Any]] = {
    "upload": {"shared_updates": "upload"},
    "functional": {"shared_updates": "functional"},
    "coarse": {"shared_updates": "shared", "force_coarse_war_barrier": True},
    "fine": {"shared_updates": "shared"},
}
CONTEXTS = (1024, 8192)
PAGE_SIZES = (16, 1)
BATCHES = (1, 8)
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 48
POOL_TOKENS = 2048


def measure(model: str, context: int, page_size: int, rounds: int) -> list[dict[str, Any]]:
    """All ways and batches at one block-table width, the ways taking turns."""
    checkpoint = open_checkpoint(resolve_model_path(model))
    common = {
        "model": model, "context_length": context, "page_size": page_size, "num_pages": POOL_TOKENS // page_size,
        "max_running_requests": max(BATCHES), "decode_batch_buckets": BATCHES, "chunked_prefill_size": PROMPT_TOKENS,
        "prefill_token_buckets": [PROMPT_TOKENS],
    }  # fmt: skip
    workers = {way: Worker("jaxserve_worker.py", {**common, **settings}) for way, settings in WAYS.items()}
    found = []
    for number in range(rounds + 1):  # the first is for warming up
        for batch in BATCHES:
            tokens = {}
            for way, worker in workers.items():
                run = worker.ask(prompts=prompts_for(checkpoint, batch, PROMPT_TOKENS), max_tokens=OUTPUT_TOKENS)
                tokens[way] = run["tokens"]
                if number:
                    found.append({
                        "context": context, "page_size": page_size, "table_width": context // page_size, "batch": batch,
                        "way": way, "step_s": median(run["steps"]), "host_s": median(run["host"]),
                        "wait_s": run["wait"], "write_delay_s": median(run["write_delays"] or [0.0]),
                        "bytes": run["bytes"], "fences": run["fences"],
                    })  # fmt: skip
            if any(each != tokens["fine"] for each in tokens.values()):
                raise RuntimeError(f"the ways disagree about greedy tokens at batch {batch}")
        print(f"block-table width {context // page_size}: round {number} of {rounds}", file=sys.stderr)
    for worker in workers.values():
        worker.close()
    return found


def report(found: dict[str, Any]) -> str:
    """The table."""
    rows = []
    for context in CONTEXTS:
        for page_size in PAGE_SIZES:
            for batch in BATCHES:
                for way in WAYS:
                    runs = [
                        r for r in found["runs"]
                        if (r["context"], r["page_size"], r["batch"], r["way"]) == (context, page_size, batch, way)
                    ]  # fmt: skip
                    in_place = way in ("coarse", "fine")
                    rows.append([
                        str(context // page_size), str(page_size), str(batch), way,
                        spread([r["step_s"] for r in runs], 1, 1e3), spread([r["host_s"] for r in runs], 2, 1e3),
                        spread([r["wait_s"] for r in runs], 1, 1e3) if in_place else "-",
                        spread([r["write_delay_s"] for r in runs], 2, 1e3) if in_place else "-",
                    ])  # fmt: skip
    head = ["table width", "page size", "batch", "way", "step ms", "host ms (plan, launch)", "stream in waits ms",
            "row writes held up ms"]  # fmt: skip
    return sentence(found["machine"]) + "\n\n" + table("Four ways to update control rows, per decode step", head, rows)


def run(model: str, rounds: int) -> dict[str, Any]:
    """Measures every combination."""
    start = machine()
    runs = [each for context in CONTEXTS for size in PAGE_SIZES for each in measure(model, context, size, rounds)]
    return {"machine": start, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None, help="where to write every number")
    arguments = parser.parse_args()
    found = run(arguments.model, arguments.rounds)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    print(report(found))


if __name__ == "__main__":
    main()
