"""``jaxserve bench serve``, ``latency`` and ``throughput``, with flags that users of vLLM and SGLang know."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from jaxserve.cli.bench_files import PLOTS
from jaxserve.cli.flags import add_engine_flags, engine_config
from jaxserve.core.errors import ConfigError


def add_benches(benches: Any) -> None:
    """The three commands."""
    summary = "load on a server with the OpenAI API: requests a second, tokens a second, TTFT, TPOT, ITL, errors"
    serve = benches.add_parser("serve", help=summary, description=f"Measures {summary}.", rest="server_flags",
                               epilog="With --start, what stands behind -- goes to jaxserve serve.")  # fmt: skip
    serve.set_defaults(parser=serve, bench=run_serve)
    _add_server(serve)
    _add_dataset(serve)
    _add_load(serve)
    _add_files(serve)
    summary = "seconds that one batch takes from prompts to last tokens, without a server"
    latency = benches.add_parser("latency", help=summary, description=f"Measures {summary}.")
    latency.set_defaults(parser=latency, bench=run_latency)
    latency.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="prompts together (default %(default)s)"
    )
    latency.add_argument("--num-iters", type=int, default=5, metavar="N", help="measurements (default %(default)s)")
    latency.add_argument("--num-iters-warmup", type=int, default=1, metavar="N", help="rounds before (default 1)")
    summary = "tokens a second over many prompts that are there at once, without a server"
    throughput = benches.add_parser("throughput", help=summary, description=f"Measures {summary}.")
    throughput.set_defaults(parser=throughput, bench=run_throughput)
    throughput.add_argument("--num-prompts", type=int, default=32, metavar="N", help="(default %(default)s)")
    for offline in (latency, throughput):
        _add_lengths(offline)
        offline.add_argument("--bench-seed", type=int, default=0, metavar="N", help="draws the prompts (default 0)")
        _add_files(offline, plot=False)
        add_engine_flags(offline, positional_model=True)


def _add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="(default %(default)s)")
    group.add_argument("--start", metavar="MODEL", help="start jaxserve serve MODEL for this bench, on a free port")
    group.add_argument("--api-key", metavar="KEY", help="bearer token (also JAXSERVE_API_KEY)")
    group.add_argument("--model", "--served-model-name", metavar="NAME", help="name in the requests; by default the "
                       "first that the server lists")  # fmt: skip
    group.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    group.add_argument("--flush-cache", action="store_true", help="empty the server's prefix cache after the warm-ups")


def _add_lengths(group: Any) -> None:
    group.add_argument("--input-len", "--random-input-len", type=int, default=128, metavar="N",
                       help="tokens of a prompt (default %(default)s)")  # fmt: skip
    group.add_argument("--output-len", "--random-output-len", type=int, metavar="N",
                       help="tokens of an output; 128, or what a file says")  # fmt: skip
    group.add_argument("--range-ratio", "--random-range-ratio", type=float, default=0.0, metavar="F",
                       help="lengths vary by this share, 0 to less than 1 (default 0)")  # fmt: skip


def _add_dataset(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts")
    group.add_argument("--dataset-name", choices=("sharegpt", "random", "repeat", "jsonl"), default="random",
                       help="random tokens; repeat: random with shared beginnings; sharegpt: its JSON layout, or "
                       "without a file conversations made up with such lengths; jsonl: lines with prompt, "
                       "output_tokens")  # fmt: skip
    group.add_argument("--dataset-path", type=Path, metavar="FILE")
    group.add_argument("--num-prompts", type=int, default=100, metavar="N", help="(default %(default)s)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="draws prompts and pauses (default 0)")
    _add_lengths(group)
    group.add_argument("--num-prefixes", type=int, default=4, metavar="N", help="repeat: different beginnings")
    group.add_argument("--prefix-len", type=int, default=256, metavar="N", help="repeat: tokens of a beginning")
    group.add_argument("--tokenizer", metavar="MODEL", help="checkpoint whose tokenizer measures prompts; by default "
                       "that of --start; without one lengths are estimates")  # fmt: skip


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument("--request-rate", type=float, default=math.inf, metavar="R",
                       help="requests a second on average; inf, the default, is all at once")  # fmt: skip
    group.add_argument("--burstiness", type=float, default=1.0, metavar="F",
                       help="1 is a Poisson process, less comes in bursts, more is steadier (default 1)")  # fmt: skip
    group.add_argument("--max-concurrency", type=int, metavar="N", help="most requests open at a time")
    group.add_argument("--warmups", "--num-warmups", type=int, default=1, metavar="N", help="(default %(default)s)")
    group.add_argument("--timeout", type=float, default=3600.0, metavar="S", help="most seconds of one request")
    group.add_argument("--ready-timeout", type=float, default=600.0, metavar="S", help="wait so long while it loads")
    group.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True,
                       help="go on to the full output length; off for servers that do not know the field")  # fmt: skip
    group.add_argument("--temperature", type=float, default=0.0, metavar="F", help="(default 0)")
    group.add_argument("--extra-body", type=_json_object, default={}, metavar="JSON", help="more fields of every body")


def _add_files(parser: argparse.ArgumentParser, plot: bool = True) -> None:
    if plot:
        parser.add_argument("--percentiles", type=_numbers, default=(99.0,), metavar="P,P", help="(default 99)")
        parser.add_argument("--plot", type=Path, metavar="FILE", help=f"draw it: {', '.join(PLOTS)}; "
                            "needs jaxserve[plot]")  # fmt: skip
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every number, under the names vLLM's bench uses"
    )


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted numbers like 50,90,99, got {text!r}") from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"wanted a JSON object, got {text}")
    return value


def run_serve(arguments: argparse.Namespace) -> None:
    """``jaxserve bench serve``."""
    from jaxserve.bench import serve
    from jaxserve.bench.serve_report import report

    found = serve.run(_plan(arguments), _say)
    _write(arguments, found)  # failures too: they are a result
    serve.check(found)
    if arguments.plot:
        from jaxserve.bench.serve_plot import draw

        draw(found, arguments.plot)
    print(report(found))


def _plan(arguments: argparse.Namespace) -> Any:
    from jaxserve.bench.serve import Plan
    from jaxserve.bench.serve_load import Load
    from jaxserve.bench.serve_workload import Dataset

    if arguments.server_flags and arguments.start is None:
        raise ConfigError("flags behind -- go to the server of --start MODEL; give that, or leave them out")
    extra: dict[str, Any] = {"temperature": arguments.temperature}
    if arguments.ignore_eos:
        extra["ignore_eos"] = True
    key = arguments.api_key or os.environ.get("JAXSERVE_API_KEY")
    return Plan(
        base_url=arguments.base_url, start=arguments.start, server_flags=arguments.server_flags, api_key=key,
        model=arguments.model, tokenizer=arguments.tokenizer, endpoint=arguments.endpoint,
        dataset=Dataset(
            arguments.dataset_name, arguments.dataset_path, arguments.input_len, arguments.output_len,
            arguments.range_ratio, arguments.num_prefixes, arguments.prefix_len,
        ),
        load=Load(
            arguments.request_rate, arguments.burstiness, arguments.max_concurrency, arguments.warmups,
            arguments.timeout, arguments.ready_timeout, arguments.flush_cache, arguments.seed,
        ),
        num_prompts=arguments.num_prompts, seed=arguments.seed, extra=extra | arguments.extra_body,
        percentiles=arguments.percentiles,
    )  # fmt: skip


def run_latency(arguments: argparse.Namespace) -> None:
    """``jaxserve bench latency``."""
    from jaxserve.bench import offline

    found = offline.latency(
        engine_config(arguments), _lengths(arguments), arguments.batch_size, arguments.num_iters,
        arguments.num_iters_warmup, arguments.bench_seed, _say,
    )  # fmt: skip
    _write(arguments, found)
    print(offline.latency_report(found))


def run_throughput(arguments: argparse.Namespace) -> None:
    """``jaxserve bench throughput``."""
    from jaxserve.bench import offline

    found = offline.throughput(
        engine_config(arguments), _lengths(arguments), arguments.num_prompts, arguments.bench_seed, _say
    )
    _write(arguments, found)
    print(offline.throughput_report(found))


def _lengths(arguments: argparse.Namespace) -> Any:
    from jaxserve.bench.serve_workload import Dataset

    return Dataset("random", None, arguments.input_len, arguments.output_len, arguments.range_ratio)


def _write(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
