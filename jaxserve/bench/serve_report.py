"""Figures of a serving bench: rates, latencies, errors. Keys are those of vLLM's result files."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxserve.bench.serve_client import Answer
from jaxserve.bench.serve_load import Measured

# key -> (title, what it is)
LATENCIES = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency (between chunks)", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}


def figures(measured: Measured, percentiles: Sequence[float] = (99.0,)) -> dict[str, Any]:
    """Everything that can be said of a run; times in milliseconds, ``duration`` in seconds.

    Failed requests count in ``errors`` and in nothing else. A latency without a sample is None.
    """
    good = [answer for answer in measured.answers if answer.error is None]
    duration = max(measured.duration_s, 1e-9)
    prompt_tokens, output_tokens = sum(a.prompt_tokens for a in good), sum(a.output_tokens for a in good)
    errors = Counter(a.error for a in measured.answers if a.error is not None)
    found: dict[str, Any] = {
        "duration": measured.duration_s,
        "num_prompts": len(measured.answers),
        "completed": len(good),
        "failed": len(measured.answers) - len(good),
        "errors": dict(errors.most_common()),
        "error_examples": {kind: next(a.detail for a in measured.answers if a.error == kind) for kind in errors},
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "output_tokens_counted_by": "server" if all(a.counted for a in good) else "chunks with text",
        "request_throughput": len(good) / duration,
        "input_throughput": prompt_tokens / duration,
        "output_throughput": output_tokens / duration,
        "total_token_throughput": (prompt_tokens + output_tokens) / duration,
        "mean_concurrency": sum(a.e2e_s for a in good) / duration,
        "peak_concurrency": _peak(measured.answers),
        "client_cpu_s": measured.client_cpu_s,
        "late_ms": measured.late_s * 1e3,
    }
    samples: dict[str, list[float]] = {
        "ttft": [a.ttft_s for a in good],
        "tpot": [a.tpot_s for a in good if a.tpot_s is not None],
        "itl": [gap for a in good for gap in a.itls_s],
        "e2el": [a.e2e_s for a in good],
    }
    for name, seconds in samples.items():
        found |= _summary(name, [1e3 * s for s in seconds], percentiles)
    found |= _speculation(good)
    found["per_request"] = [_each(answer, measured.answers[0].sent_s) for answer in measured.answers]
    return found


def _summary(name: str, values: list[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {f"{way}_{name}_ms": None for way in ("mean", "median", *map(_percentile, percentiles))}
    found: dict[str, float | None] = {
        f"mean_{name}_ms": statistics.fmean(values),
        f"median_{name}_ms": statistics.median(values),
    }
    return found | {f"{_percentile(p)}_{name}_ms": float(np.percentile(values, p)) for p in percentiles}


def _percentile(percent: float) -> str:
    return f"p{percent:g}"


def _peak(answers: Sequence[Answer]) -> int:
    changes = sorted([(a.sent_s, 1) for a in answers] + [(a.ended_s, -1) for a in answers])
    peak = now = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


def _speculation(good: Sequence[Answer]) -> dict[str, float]:
    """Of servers that say in ``usage`` what became of drafts; empty for others."""
    told = [a for a in good if a.accepted is not None and a.counted]
    if not told:
        return {}
    accepted, rejected = sum(a.accepted or 0 for a in told), sum(a.rejected or 0 for a in told)
    tokens = sum(a.output_tokens for a in told)
    found: dict[str, float] = {"accepted_tokens": accepted, "drafted_tokens": accepted + rejected}
    # what was accepted came along with another token, so the rest is the number of steps
    found["accept_length"] = tokens / max(1, tokens - accepted)
    return found | {"accept_rate": accepted / max(1, accepted + rejected)}


def _each(answer: Answer, start_s: float) -> dict[str, Any]:
    failed = answer.error is not None
    return {
        "sent_s": answer.sent_s - start_s, "input_tokens": answer.prompt_tokens, "output_tokens": answer.output_tokens,
        "ttft_ms": None if failed else answer.ttft_s * 1e3, "e2el_ms": answer.e2e_s * 1e3,
        "itls_ms": [round(1e3 * gap, 3) for gap in answer.itls_s], "error": answer.error, "detail": answer.detail,
    }  # fmt: skip


def report(found: dict[str, Any]) -> str:
    """The figures as text; nothing is left out because it is bad."""
    settings = found["settings"]
    lines = [_rule("Serving Benchmark Result", "=")]

    def line(title: str, value: Any) -> None:
        lines.append(f"{title + ':':<46}{value:.2f}" if isinstance(value, float) else f"{title + ':':<46}{value}")

    line("Server", f"{settings['model']} at {settings['base_url']} ({settings['endpoint']})")
    line("Dataset", settings["dataset"])
    line("Request rate (req/s)", f"{settings['request_rate']}, burstiness {settings['burstiness']:g}")
    line("Maximum concurrency", settings["max_concurrency"] or "none")
    line("Successful requests", found["completed"])
    line("Failed requests", found["failed"])
    for kind, count in found["errors"].items():
        lines.append(f"  {count} x {kind}: {found['error_examples'][kind]}")
    line("Benchmark duration (s)", found["duration"])
    line("Total input tokens", found["total_input_tokens"])
    line("Total output tokens", found["total_output_tokens"])
    if found["output_tokens_counted_by"] != "server":
        lines.append("  the server sent no usage: output tokens are chunks with text, TPOT and tok/s may be too low")
    line("Request throughput (req/s)", found["request_throughput"])
    line("Input token throughput (tok/s)", found["input_throughput"])
    line("Output token throughput (tok/s)", found["output_throughput"])
    line("Total token throughput (tok/s)", found["total_token_throughput"])
    line("Concurrency, mean and peak", f"{found['mean_concurrency']:.2f}, {found['peak_concurrency']}")
    for name, (title, short) in LATENCIES.items():
        lines.append(_rule(title, "-"))
        keys = [key for key in found if key.endswith(f"_{name}_ms")]
        for key in keys:
            way = key.split("_")[0]
            value = found[key]
            line(f"{way.capitalize()} {short} (ms)", "no sample" if value is None else value)
    if "accept_length" in found:
        lines.append(_rule("Speculation", "-"))
        line("Accepted length (tokens per step)", found["accept_length"])
        line("Accepted share of drafts", found["accept_rate"])
        lines.append("A chunk may hold several tokens, so ITL is not TPOT here.")
    lines.append(_rule("Client", "-"))
    line("Processor time (s, of one core)", found["client_cpu_s"])
    line("Sent behind time at most (ms)", found["late_ms"])
    lines.append("=" * 60)
    return "\n".join(lines)


def _rule(title: str, mark: str) -> str:
    return f" {title} ".center(60, mark)
