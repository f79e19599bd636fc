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


def step_ms(llm: LLM, batch: int, tokens: int) -> float:
    """Milliseconds per token of each sequence."""
    prompts = [[1 + (row + i) % 64 for i in range(8)] for row in range(batch)]
    start = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True))
    return (time.perf_counter() - start) / tokens * 1e3


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
        times: dict[str, list[float]] = {"off": [], "on": []}
        entries = 0
        for number in range(arguments.rounds):
            for state in ("off", "on") if number % 2 else ("on", "off"):  # neither always goes first
                recording = Recording().start() if state == "on" else None
                times[state].append(step_ms(llm, batch, tokens))
                if recording is not None:
                    _, device = recording.records()
                    entries = len(device.operations) // tokens
    off, on = (statistics.median(times[state]) for state in ("off", "on"))
    idle_ns = min(timeit.repeat(lambda: span("plan", step=1), number=100_000, repeat=7)) * 1e4
    result = {
        "model": arguments.model, "batch": batch, "step_ms_off": round(off, 4), "step_ms_on": round(on, 4),
        "ratio": round(on / off, 4), "off_spread": [round(min(times["off"]), 4), round(max(times["off"]), 4)],
        "on_spread": [round(min(times["on"]), 4), round(max(times["on"]), 4)],
        "stream_operations_per_step": entries, "span_while_off_ns": round(idle_ns, 1),
    }  # fmt: skip
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
