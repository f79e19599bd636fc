"""Latency of one batch and throughput of many prompts, through ``LLM`` and without a server."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxserve.bench.machine import machine, sentence
from jaxserve.bench.serve_workload import Dataset, Prompt, Tokens, make_prompts
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.llm import LLM

Say = Callable[[str], None]


def _open(config: EngineConfig, say: Say) -> LLM:
    say(f"loading {config.model}")
    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return LLM(**settings)


def _generate(llm: LLM, prompts: list[Prompt]) -> tuple[float, int, int]:
    """(seconds, prompt tokens, output tokens)."""
    params = [SamplingParams(temperature=0.0, max_tokens=prompt.max_tokens, ignore_eos=True) for prompt in prompts]
    start = time.perf_counter()
    outputs = llm.generate([prompt.content for prompt in prompts], params)
    seconds = time.perf_counter() - start
    made = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    return seconds, sum(len(output.prompt_token_ids) for output in outputs), made


def _prompts(llm: LLM, dataset: Dataset, count: int, seed: int) -> list[Prompt]:
    dataset = dataclasses.replace(dataset, context_length=llm.engine.context_length)
    return make_prompts(dataset, count, seed, Tokens(llm.engine.tokenizer), as_text=False)


def latency(config: EngineConfig, dataset: Dataset, batch: int, rounds: int, warmups: int, seed: int,
            say: Say) -> dict[str, Any]:  # fmt: skip
    """Seconds of ``rounds`` batches of ``batch`` prompts; every round has prompts of its own.

    Raises:
        ConfigError: a count below 1.
    """
    if min(batch, rounds) < 1 or warmups < 0:
        raise ConfigError(f"--batch-size and --num-iters must be at least 1, got {batch} and {rounds}")
    conditions = machine()
    with _open(config, say) as llm:
        seconds = []
        for number in range(warmups + rounds):
            took, _, tokens = _generate(llm, _prompts(llm, dataset, batch, seed + number))
            say(f"round {number + 1}: {took:.3f} s, {tokens} tokens")
            seconds.append(took)
    seconds = seconds[warmups:]
    lengths = {"batch_size": batch, "input_len": dataset.input_len, "output_len": dataset.output_len or 128}
    found = {"avg_latency": float(np.mean(seconds)), "latencies": seconds, "machine": conditions}
    return found | lengths | {"percentiles": {str(p): float(np.percentile(seconds, p)) for p in (10, 50, 90, 99)}}


def latency_report(found: dict[str, Any]) -> str:
    """As text."""
    lines = [sentence(found["machine"]),
             f"batch {found['batch_size']}, {found['input_len']} tokens in, {found['output_len']} out",
             f"Avg latency: {found['avg_latency']:.3f} s"]  # fmt: skip
    return "\n".join(lines + [f"{p}% percentile latency: {s:.3f} s" for p, s in found["percentiles"].items()])


def throughput(config: EngineConfig, dataset: Dataset, count: int, seed: int, say: Say) -> dict[str, Any]:
    """Tokens a second over ``count`` prompts, after one round of warm-up with two of them.

    Raises:
        ConfigError: a count below 1.
    """
    if count < 1:
        raise ConfigError(f"--num-prompts must be at least 1, got {count}")
    conditions = machine()
    with _open(config, say) as llm:
        _generate(llm, _prompts(llm, dataset, min(2, count), seed + 1))
        say(f"{count} prompts")
        seconds, prompt_tokens, output_tokens = _generate(llm, _prompts(llm, dataset, count, seed))
    return {
        "elapsed_time": seconds, "num_requests": count, "total_num_tokens": prompt_tokens + output_tokens,
        "requests_per_second": count / seconds, "tokens_per_second": (prompt_tokens + output_tokens) / seconds,
        "output_tokens_per_second": output_tokens / seconds, "machine": conditions,
    }  # fmt: skip


def throughput_report(found: dict[str, Any]) -> str:
    """As text."""
    return (
        f"{sentence(found['machine'])}\n{found['num_requests']} requests in {found['elapsed_time']:.2f} s\n"
        f"Throughput: {found['requests_per_second']:.2f} requests/s, {found['tokens_per_second']:.2f} total tokens/s, "
        f"{found['output_tokens_per_second']:.2f} output tokens/s"
    )
