"""Servers beside each other under one load: jaxserve, llama.cpp's llama-server, vLLM, transformers with a fixed batch.

    python bench/peers_served.py --llama-server PATH --llama-model F32.gguf --vllm-python PYTHON --peers-python PYTHON

Same weights in float32, same prompts (random tokens), same client (``jaxserve bench serve``), one after the other in
every round. transformers has no server: it gets all prompts of a round as one batch, which is the best case for it. A
peer that is not given is left out. llama-server: build llama.cpp with -DGGML_NATIVE=ON, and
``llama-quantize --allow-requantize MODEL.gguf F32.gguf F32``. vLLM: an environment with its CPU build.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers import write_folder
from worker import Worker

from jaxserve.bench.machine import machine, sentence
from jaxserve.bench.serve import Plan, load_tokenizer, run
from jaxserve.bench.serve_load import Load
from jaxserve.bench.serve_process import ServerUnderTest, end_with_parent
from jaxserve.bench.serve_workload import Dataset, Tokens, make_prompts
from jaxserve.bench.table import median, spread, table
from jaxserve.engine.assembly import resolve_model_path
from jaxserve.models.loading.checkpoint import Checkpoint, open_checkpoint

KEYS = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "median_itl_ms", "p99_itl_ms")
QUIET_S = 1.0
START_S = 600.0


def llama_server(binary: str, model: str, clients: int, tokens: int) -> contextlib.AbstractContextManager[str]:
    """One slot for each client, all cores, no prompt cache; gives the URL."""
    cores = str(len(os.sched_getaffinity(0)))
    command = [binary, "-m", model, "-np", str(clients), "-c", str(clients * tokens), "-t", cores, "-tb", cores,
               "--no-cache-prompt", "--no-webui"]  # fmt: skip
    return _serving(command, {})


def vllm(python: str, folder: Path, clients: int, tokens: int) -> contextlib.AbstractContextManager[str]:
    """All cores, no prompt cache, compiled as it likes it; gives the URL."""
    cores = sorted(os.sched_getaffinity(0))
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--dtype", "float32",
               "--max-model-len", str(tokens), "--max-num-seqs", str(clients),
               "--no-enable-prefix-caching"]  # fmt: skip
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
                "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}  # fmt: skip
    return _serving(command, settings)


@contextlib.contextmanager
def _serving(command: list[str], environment: dict[str, str]) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, **environment}, preexec_fn=end_with_parent,
    )  # fmt: skip
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                if urllib.request.urlopen(url + "/health", timeout=5).status == 200:
                    break
            if process.poll() is not None:
                raise RuntimeError(f"{command[0]} ended with code {process.returncode}; run it by hand to see why")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} was not ready after {START_S:.0f} s; run it by hand to see why")
            time.sleep(0.2)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All rounds; the first is for warming up and not kept."""
    dataset = Dataset(input_len=arguments.input_len, output_len=arguments.output_len)
    room = arguments.input_len + arguments.output_len + 64
    load = Load(max_concurrency=arguments.clients, warmups=0)
    body = {"ignore_eos": True, "temperature": 0.0}
    found: dict[str, Any] = {"machine": machine(), "settings": vars(arguments), "rounds": []}
    with contextlib.ExitStack() as open_now:
        flags = ("--dtype", "float32", "--context-length", str(room), "--max-running-requests", str(arguments.clients),
                 *arguments.flags)  # fmt: skip
        urls = {"jaxserve": open_now.enter_context(ServerUnderTest(arguments.model, flags)).url}
        for name, more in arguments.variant:
            server = ServerUnderTest(arguments.model, (*flags, *shlex.split(more)))
            urls[f"jaxserve, {name}"] = open_now.enter_context(server).url
        if arguments.llama_server:
            server = llama_server(arguments.llama_server, arguments.llama_model, arguments.clients, room)
            urls["llama-server"] = open_now.enter_context(server)
        transformers = None
        if arguments.vllm_python or arguments.peers_python:
            checkpoint = open_checkpoint(resolve_model_path(arguments.model))
            folder = write_folder(checkpoint, Path(open_now.enter_context(tempfile.TemporaryDirectory())))
        if arguments.vllm_python:
            _write_tokenizer(checkpoint, folder)
            urls["vLLM"] = open_now.enter_context(vllm(arguments.vllm_python, folder, arguments.clients, room))
        if arguments.peers_python:
            worker = Worker("transformers_worker.py", {"folder": str(folder)}, arguments.peers_python)
            transformers = open_now.enter_context(worker)
        tokens = Tokens(load_tokenizer(arguments.model))
        for number in range(arguments.rounds + 1):
            one: dict[str, Any] = {}
            for name, url in urls.items():
                plan = Plan(url, tokenizer=arguments.model, dataset=dataset, load=load, extra=body, seed=number,
                            num_prompts=arguments.num_prompts)  # fmt: skip
                time.sleep(QUIET_S)
                result = run(plan)
                if result["failed"]:
                    raise RuntimeError(f"{name}: {result['errors']} {result['error_examples']}")
                one[name] = {key: value for key, value in result.items() if key not in ("machine", "per_request")}
            if transformers is not None:
                prompts = make_prompts(dataset, arguments.clients, number, tokens, as_text=False)
                answer = transformers.ask(prompts=[p.content for p in prompts], max_tokens=arguments.output_len)
                one["transformers"] = _of_batch(answer, arguments.output_len)
            said = ", ".join(f"{name} {result['output_throughput']:.1f}" for name, result in one.items())
            print(f"round {number}: output tokens/s: {said}", file=sys.stderr, flush=True)
            if number:
                found["rounds"].append(one)
    return found


def _write_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    checkpoint.tokenizer.backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def _of_batch(answer: dict[str, Any], output_len: int) -> dict[str, float]:
    first, steps = max(answer["first_tokens"]), answer["steps"]
    ms = sorted(1e3 * step for step in steps)
    return {"output_throughput": len(answer["tokens"]) * output_len / (first + sum(steps)),
            "median_ttft_ms": 1e3 * first, "p99_ttft_ms": 1e3 * first, "median_tpot_ms": 1e3 * sum(steps) / len(steps),
            "median_itl_ms": median(ms), "p99_itl_ms": ms[int(0.99 * (len(ms) - 1))]}  # fmt: skip


def report(found: dict[str, Any]) -> str:
    """The table."""
    settings, rounds = found["settings"], found["rounds"]
    rows = []
    for name in rounds[0]:
        columns = [[one[name][key] for one in rounds] for key in KEYS]
        ratio = median([one["jaxserve"]["output_throughput"] / one[name]["output_throughput"] for one in rounds])
        rows.append([name, *(spread(column) for column in columns), f"{ratio:.2f}"])
    title = "{num_prompts} requests a round, {clients} at a time, {input_len} tokens in, {output_len} out, float32"
    title = title.format(**settings)
    head = ["engine", "output tok/s", "TTFT ms", "TTFT p99", "TPOT ms", "ITL ms", "ITL p99", "jaxserve / it"]
    return f"{sentence(found['machine'])}\nMedians (least-most) of {len(rounds)} rounds.\n\n{table(title, head, rows)}"


def _named(text: str) -> tuple[str, str]:
    name, equals, flags = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"wanted NAME=FLAGS, got {text!r}")
    return name, flags


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--variant", action="append", default=[], type=_named, metavar="NAME=FLAGS",
                        help="jaxserve once more, with these flags too")  # fmt: skip
    parser.add_argument("--llama-server", metavar="PATH", help="llama.cpp's server; left out without")
    parser.add_argument("--llama-model", metavar="FILE", help="the same weights as F32 .gguf")
    parser.add_argument("--vllm-python", metavar="PYTHON", help="an interpreter with vLLM; left out without")
    parser.add_argument("--peers-python", metavar="PYTHON", help="an interpreter with torch and transformers")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--num-prompts", type=int, default=8, help="requests of a round")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments, flags = parser.parse_known_args()
    arguments.flags = flags
    if bool(arguments.llama_server) != bool(arguments.llama_model):
        parser.error("--llama-server and --llama-model go together")
    found = measure(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")
    print(report(found))


if __name__ == "__main__":
    main()
