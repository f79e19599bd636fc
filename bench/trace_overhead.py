"""What recording a timeline costs: the same decode workload with and without it, in turns, in one process.

python bench/trace_overhead.py --model default --rounds 9
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import timeit

from jaxserve import LLM, SamplingParams
from jaxserve.timeline.recorder import span
from jaxserve.timeline.trace import Recording


def step_ms(llm: LLM, batch: int, tokens: int) -> tuple[float, float]:
    """(milliseconds, milliseconds of CPU time) per token of each sequence."""
    prompts = [[1 + (row + i) % 64 for i in range(8)] for row in range(batch)]
    start, cpu = time.perf_counter(), time.process_time()
    llm.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True))
    return (time.perf_counter() - start) / tokens * 1e3, (time.process_time() - cpu) / tokens * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    batch, tokens = arguments.batch, arguments.tokens
    settings = {"max_running_requests": batch, "decode_batch_buckets": (batch,), "prefill_token_buckets": (8,)}
    with LLM(arguments.model, skip_warmup=True, context_length=8 + tokens, **settings) as llm:
        step_ms(llm, batch, tokens)
        times: dict[str, list[tuple[float, float]]] = {"off": [], "on": []}
        for number in range(arguments.rounds):
            for state in ("off", "on") if number % 2 else ("on", "off"):  # neither always goes first
                recording = Recording().start() if state == "on" else None
                times[state].append(step_ms(llm, batch, tokens))
                if recording is not None:
                    recording.records()
    idle_ns = min(timeit.repeat(lambda: span("plan", step=1), number=100_000, repeat=7)) * 1e4
    result = {"model": arguments.model, "batch": batch, "span_while_off_ns": round(idle_ns, 1)}
    for number, name in enumerate(("step_ms", "step_cpu_ms")):
        for state, values in times.items():
            each = sorted(value[number] for value in values)
            result[f"{name}_{state}"] = {"median": statistics.median(each), "least": each[0], "most": each[-1]}
    print(json.dumps(result, indent=1, default=float))


if __name__ == "__main__":
    main()
