"""jaxserve beside transformers on the same weights and dtype, in one run; and both beside the machine's limits.

Each engine lives in a process of its own and they take turns, so that neither a quiet moment of the machine nor the
other's thread pool favours one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from worker import Worker

from jaxserve.bench.machine import machine, sentence
from jaxserve.bench.serve_process import ServerUnderTest
from jaxserve.bench.table import median, spread, table
from jaxserve.engine.assembly import resolve_model_path
from jaxserve.models.loading.checkpoint import Checkpoint, open_checkpoint

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
BATCHES = (1, 8)
POOL_PAGES = 128  # of 16 tokens; times 1, 4, 16
IDLE_S = 10.0
BANDWIDTH_BYTES = 1 << 29
TEXT = (
    "The lighthouse stood at the end of a long stone pier. Every evening the keeper climbed two hundred stairs, "
    "cleaned the glass, filled the lamp with oil and wrote the weather into a heavy book. In winter the waves reached "
    "the lower windows, and the whole tower hummed like a bell. Ships that came from the north steered by its light "
    "alone. The keeper had counted them for thirty years: fishing boats, coal carriers, once a white yacht with red "
    "sails. He knew the engines by their sound and the captains by the way they greeted him. When the new harbour was "
    "built on the other side of the bay, fewer ships passed, and one day a letter arrived from the ministry. It said "
    "that the light would be turned off in the spring. He read it twice, put it into the book, and climbed the stairs "
    "as he always did. "
)


def prompts_for(checkpoint: Checkpoint, batch: int, length: int = PROMPT_TOKENS) -> list[list[int]]:
    """Different stretches of one text, all of one length."""
    ids = checkpoint.tokenizer.encode(TEXT * 3)
    return [ids[17 * row : 17 * row + length] for row in range(batch)]


def write_folder(checkpoint: Checkpoint, folder: Path) -> Path:
    """The checkpoint as transformers reads it, in float32: config and tensors, as jaxserve itself sees them."""
    tensors = {name: np.asarray(checkpoint.tensors[name], np.float32) for name in checkpoint.tensors}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **checkpoint.config, "dtype": "float32"}))
    return folder


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> list[int]:
    """Leading tokens that agree, per prompt."""
    return [
        next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
        for one, other in zip(ours, theirs, strict=True)
    ]


def compare(model: str, peers_python: str, rounds: int) -> dict[str, Any]:
    """Decode speed and time to first token of both, and memory bandwidth, in turns."""
    checkpoint = open_checkpoint(resolve_model_path(model))
    memory = {"num_bytes": BANDWIDTH_BYTES}
    with (
        tempfile.TemporaryDirectory() as temporary,
        Worker("jaxserve_worker.py", {"model": model, "dtype": "float32", "context_length": 1024}) as ours,
        Worker(
            "transformers_worker.py", {"folder": str(write_folder(checkpoint, Path(temporary)))}, peers_python
        ) as theirs,
        Worker("bandwidth_worker.py", {**memory, "library": "jax"}) as jax_memory,
        Worker("bandwidth_worker.py", {**memory, "library": "torch"}, peers_python) as torch_memory,
    ):
        found: dict[str, Any] = {"jaxserve": ours.opened, "transformers": theirs.opened, "bandwidth": [], "runs": []}
        for number in range(rounds + 1):  # the first is for warming up
            ways = {**jax_memory.ask(), **{f"{name} (2)": v for name, v in torch_memory.ask().items()}}
            if number:
                found["bandwidth"].append(ways)
            for batch in BATCHES:
                question = {"prompts": prompts_for(checkpoint, batch), "max_tokens": OUTPUT_TOKENS}
                pair = {"jaxserve": ours.ask(**question), "transformers": theirs.ask(**question)}
                same = agreement(pair["jaxserve"]["tokens"], pair["transformers"]["tokens"])
                if min(same) == 0:
                    raise RuntimeError(f"batch {batch}: the first tokens differ; leading tokens that agree: {same}")
                for engine, run in pair.items():
                    step = median(run["steps"])
                    if number:
                        found["runs"].append({
                            "engine": engine, "batch": batch, "step_s": step, "tokens_per_s": batch / step,
                            "first_token_s": min(run["first_tokens"]), "last_first_token_s": max(run["first_tokens"]),
                            "mean_first_token_s": sum(run["first_tokens"]) / batch,
                            "host_s": median(run["host"]) if "host" in run else None,
                            "agreeing_tokens": same, "weight_read_s": run.get("weight_read_s"),
                        })  # fmt: skip
                    print(f"round {number}: {engine} batch {batch}: {batch / step:.1f} tokens/s", file=sys.stderr)
    return found


def pool_sizes(model: str, rounds: int) -> list[dict[str, Any]]:
    """Step time against the size of the KV pool."""
    prompts = prompts_for(open_checkpoint(resolve_model_path(model)), 1)
    workers = {
        factor: Worker("jaxserve_worker.py", {"model": model, "context_length": 1024, "max_running_requests": 1,
                                              "num_pages": POOL_PAGES * factor})
        for factor in (1, 4, 16)
    }  # fmt: skip
    steps: dict[int, list[float]] = {factor: [] for factor in workers}
    for number in range(rounds + 1):
        for factor, worker in workers.items():
            run = worker.ask(prompts=prompts, max_tokens=OUTPUT_TOKENS)
            if number:
                steps[factor].append(median(run["steps"]))
    for worker in workers.values():
        worker.close()
    return [{"num_pages": POOL_PAGES * factor, "step_s": found} for factor, found in steps.items()]


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle_cpu(model: str) -> float:
    """Processor seconds a server uses in ``IDLE_S`` seconds without requests, after it has answered one."""
    with ServerUnderTest(model, ("--context-length", "1024", "--skip-warmup")) as server:
        server.until_ready()
        body = json.dumps({"model": "default", "prompt": "Hello", "max_tokens": 8}).encode()
        request = urllib.request.Request(f"{server.url}/v1/completions", body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=300).read()
        time.sleep(2)
        before = cpu_seconds(server.process.pid)
        time.sleep(IDLE_S)
        return cpu_seconds(server.process.pid) - before


def report(found: dict[str, Any]) -> str:
    """The tables."""
    runs, weight_bytes = found["compare"]["runs"], found["compare"]["jaxserve"]["weight_bytes"]
    ways = found["compare"]["bandwidth"]
    bandwidth = median([max(each.values()) for each in ways])  # the best way of each round

    def of(engine: str, batch: int, what: str) -> list[float]:
        return [run[what] for run in runs if run["engine"] == engine and run["batch"] == batch]

    rows, ratios = [], {}
    for batch in BATCHES:
        ratios[batch] = median(of("jaxserve", batch, "tokens_per_s")) / median(
            of("transformers", batch, "tokens_per_s")
        )
        for engine in ("jaxserve", "transformers"):
            step = median(of(engine, batch, "step_s"))
            rows.append([
                str(batch), engine,
                spread(of(engine, batch, "tokens_per_s")),
                spread(of(engine, batch, "step_s"), 1, 1e3),
                spread(of(engine, batch, "first_token_s"), 0, 1e3),
                spread(of(engine, batch, "last_first_token_s"), 0, 1e3),
                f"{weight_bytes / step / bandwidth:.0%}", f"{ratios[batch]:.2f}" if engine == "jaxserve" else "1",
            ])  # fmt: skip
    read = median(of("jaxserve", 1, "weight_read_s"))
    same = {b: min(min(r["agreeing_tokens"]) for r in runs if r["batch"] == b) for b in BATCHES}
    peer = found["compare"]["transformers"]
    text = [
        sentence(found["machine"]),
        f"jax {found['compare']['jaxserve']['jax']}, backend {found['compare']['jaxserve']['backend']}; transformers "
        f"{peer['transformers']}, torch {peer['torch']}, {peer['threads']} threads; float32, "
        f"{weight_bytes / 1e6:.0f} MB of weights; {PROMPT_TOKENS}-token prompts, {OUTPUT_TOKENS} greedy tokens. "
        "Medians (least-most) of rounds.",
        "Greedy tokens that agree before the first difference: "
        + ", ".join(f"at least {n} of {OUTPUT_TOKENS} at batch {b}" for b, n in same.items()) + ".",
        "",
        table(
            "jaxserve beside transformers",
            ["batch", "engine", "decode tokens/s", "step ms", "first token ms", "last first token ms",
             "share of bandwidth", "times transformers"],
            rows,
        ),
        table(
            "Memory bandwidth, 512 MiB read by all cores, GB/s",
            ["way", "median (least-most)"],
            [[name, spread([each[name] for each in ways], 1, 1e-9)] for name in ways[0]],
        ),
        f"Median of the best way of each round: {bandwidth / 1e9:.1f} GB/s; reading the weights once then takes "
        f"{weight_bytes / bandwidth * 1e3:.1f} ms, at most {bandwidth / weight_bytes:.1f} tokens/s at batch 1.\n",
        f"Reading the weights' own arrays once, with all cores: {read * 1e3:.1f} ms, "
        f"{weight_bytes / read / 1e9:.1f} GB/s; jaxserve's step at batch 1 reaches "
        f"{read / median(of('jaxserve', 1, 'step_s')):.0%} of that.\n",
        table(
            "Step time against KV pool size, batch 1",
            ["pages of 16 tokens", "step ms"],
            [[str(each["num_pages"]), spread(each["step_s"], 1, 1e3)] for each in found["pools"]],
        ),
        f"A server without requests used {found['idle_cpu_s']:.2f} s of processor time in {IDLE_S:.0f} s.\n",
    ]  # fmt: skip
    return "\n".join(text)


def run(model: str, peers_python: str, rounds: int) -> dict[str, Any]:
    """Measures everything this file is about."""
    return {
        "machine": machine(),
        "compare": compare(model, peers_python, rounds),
        "pools": pool_sizes(model, rounds),
        "idle_cpu_s": idle_cpu(model),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default")
    parser.add_argument("--peers-python", default=sys.executable, help="an interpreter with torch and transformers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None, help="where to write every number")
    arguments = parser.parse_args()
    found = run(arguments.model, arguments.peers_python, arguments.rounds)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    print(report(found))


if __name__ == "__main__":
    main()
