"""``jaxserve bench compare`` with one way more: the same sizes in torch, a decode step as a replayed CUDA graph.

    python bench/compare_torch.py --peers-python PYTHON [--models NAME,NAME] [--batches N,N] --json FILE

Needs an interpreter with torch and transformers beside jaxserve's. On a CPU torch runs eagerly: so this runs anywhere.
On a GPU let XLA leave torch its memory: XLA_PYTHON_CLIENT_MEM_FRACTION=0.45.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from worker import Worker

from jaxserve.bench import compare, compare_report, models
from jaxserve.cli.parser import int_list

WAY = "torch"
ABSENT = ("held_up_fine_ms", "held_up_coarse_ms", "coarse_step_ms", "host_ms", "operations", "hlo", "calls",
          "captured")  # fmt: skip


def torch_cells(
    comparison: compare.Comparison, name: str, python: str, read: dict[int, float]
) -> tuple[dict[str, str], list[Any]]:
    """Versions of torch, and a cell per batch as ``compare.measure`` makes them.

    Args:
        read: batch -> share of the bandwidth that one step per second would be.
    """
    settings = {
        "config": dict(comparison.models[name]), "dtype": comparison.dtype, "prompt_tokens": comparison.prompt_tokens,
        "max_tokens": comparison.max_tokens, "seed": comparison.seed,
    }  # fmt: skip
    cells = []
    with Worker("torch_worker.py", settings, python) as worker:
        for batch in comparison.batches:
            found = worker.ask(prompts=compare.prompts_of(comparison, batch), rounds=comparison.rounds)
            seconds = float(np.median(found["step_ms"])) / 1e3
            cells.append(
                dict.fromkeys(ABSENT)
                | {
                    "model": name,
                    "way": WAY,
                    "mode": worker.opened["mode"],
                    "batch": batch,
                    "attention": worker.opened["attention"],
                    "step_ms": found["step_ms"],
                    "replay_ms": found["replay_ms"],
                    "tokens_per_s": batch / seconds,
                    "compile_s": found["capture_s"],
                    "graph_mib": found["graph_mib"],
                    "roofline": read[batch] / seconds,
                    "tokens_hash": found["tokens_hash"],
                    "distinct_tokens": found["distinct_tokens"],
                }
            )
        return {key: str(worker.opened[key]) for key in ("torch", "transformers")}, cells


def run(comparison: compare.Comparison, python: str) -> dict[str, Any]:
    """A result of ``compare.measure`` with torch's cells behind those of each model."""
    found = compare.measure(comparison, _say)
    for name in comparison.models:
        mine = [cell for cell in found["cells"] if cell["model"] == name]
        read = {cell["batch"]: cell["roofline"] * float(np.median(cell["step_ms"])) / 1e3 for cell in mine}
        if set(read) != set(comparison.batches):
            found["left_out"][f"{name}, {WAY}"] = (
                "jaxserve measured not every batch, so there is nothing to compare with"
            )
            continue
        try:
            versions, cells = torch_cells(comparison, name, python, read)
        except RuntimeError as error:
            found["left_out"][f"{name}, {WAY}"] = str(error)
            continue
        found["versions"] |= versions
        found["cells"] += cells
        for cell in cells:
            _say(f"{name}, {WAY} ({cell['mode']}), batch {cell['batch']}: {np.median(cell['step_ms']):.2f} ms a step, "
                 f"{np.median(cell['replay_ms']):.2f} when no token is fetched")  # fmt: skip
    return found


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", required=True, help="an interpreter with torch and transformers")
    parser.add_argument("--models", default="llama-3.1-8b", help="as of bench compare (%(default)s)")
    parser.add_argument("--batches", type=int_list, default=(1, 8, 64), metavar="N,N")
    parser.add_argument("--ways", default="xla,xla-cmdbuf")
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    known = {**models.COMPARED, **models.MODELS, "tiny-qwen3": models.TINY_QWEN3}
    unknown = [name for name in arguments.models.split(",") if name not in known]
    if unknown:
        parser.error(f"--models: unknown {', '.join(unknown)}; known are {', '.join(known)}")
    comparison = compare.Comparison(
        models={name: known[name] for name in arguments.models.split(",")}, ways=tuple(arguments.ways.split(",")),
        batches=tuple(arguments.batches), max_tokens=arguments.tokens, rounds=arguments.rounds,
        attention_backend=arguments.attention_backend, dtype=arguments.dtype,
    )  # fmt: skip
    found = run(comparison, arguments.peers_python)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(compare_report.whole(found))


if __name__ == "__main__":
    main()
