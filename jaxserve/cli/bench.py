"""``jaxserve bench``: measure on this machine what the documentation claims."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxserve.cli import bench_serve
from jaxserve.cli.bench_files import PLOTS, check_files
from jaxserve.cli.parser import int_list
from jaxserve.core.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    benches = parser.add_subparsers(title="benches", metavar="BENCH", required=True)
    summary = "four ways to bring control rows to the device: upload, functional update, in place behind either fence"
    fence = benches.add_parser("fence", help=summary, description=f"Measures {summary}.")
    fence.set_defaults(parser=fence, bench=run_fence)
    fence.add_argument("--quick", action="store_true", help="about a minute instead of about a quarter of an hour")
    fence.add_argument("--model", metavar="MODEL", help="take this checkpoint's sizes instead of smollm2-135m's; "
                       "'default', a Hugging Face folder, or a .gguf file")  # fmt: skip
    fence.add_argument(
        "--models", type=_names, metavar="NAME,NAME", help="only these: tiny, small, medium, smollm2-135m"
    )
    fence.add_argument("--sizes", type=_sizes, metavar="SxP,SxP", help="shared rows: S slots of P pages, like 64x512")
    _add_common(fence)
    summary = "speculation beside plain decoding, on text that repeats itself and on text that does not"
    spec = benches.add_parser("spec", help=summary, description=f"Measures {summary}.")
    spec.set_defaults(parser=spec, bench=run_spec)
    spec.add_argument("--quick", action="store_true", help="some two minutes instead of some ten")
    spec.add_argument("--model", metavar="MODEL", help="'default', a Hugging Face folder, or a .gguf file")
    spec.add_argument("--kinds", type=_commas, metavar="KIND,KIND", help="of text: code edit, JSON records, "
                      "summary with quotes, open text")  # fmt: skip
    spec.add_argument(
        "--ways",
        type=_commas,
        metavar="WAY,WAY",
        help="plain first: plain, NGRAM, relay, NGRAM-tree, EAGLE3, "
        "EAGLE3-tree, or ALGORITHM=FOLDER with a draft model of your own",
    )
    _add_common(spec)
    summary = "how programs reach the device: kernel by kernel, or as graphs, over models and batches"
    compare = benches.add_parser("compare", help=summary, description=f"Compares {summary}.")
    compare.set_defaults(parser=compare, bench=run_compare)
    compare.add_argument("--quick", action="store_true", help="tiny models, seconds on a laptop")
    compare.add_argument("--models", type=_names, metavar="NAME,NAME", help="only these: llama-3.1-8b, qwen3-8b, "
                         "tiny, tiny-qwen3, small, medium, smollm2-135m")  # fmt: skip
    compare.add_argument(
        "--ways", type=_commas, metavar="WAY,WAY", help="xla, xla-cmdbuf, xla-cmdbuf-inside, cuda-graph"
    )
    compare.add_argument("--attention-backend", metavar="NAME", help="a registered backend, or auto")
    compare.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), help="auto: bfloat16 on GPU")
    compare.add_argument("--seed", type=int, metavar="N", help="of the prompts")
    compare.add_argument("--from", dest="from_file", type=Path, metavar="FILE", help="measure again what this result "
                         "of an earlier run measured; other flags change it")  # fmt: skip
    _add_common(compare)
    bench_serve.add_benches(benches)


def _add_common(bench: argparse.ArgumentParser) -> None:
    bench.add_argument("--batches", type=int_list, metavar="N,N", help="sequences that decode together")
    bench.add_argument("--rounds", type=int, metavar="N", help="measurements of each way")
    bench.add_argument("--tokens", type=int, metavar="N", help="tokens of each sequence")
    bench.add_argument("--max-seconds", type=float, metavar="S", help="begin nothing more after this")
    bench.add_argument("--json", type=Path, metavar="FILE", help="write every number")
    bench.add_argument("--table", type=Path, metavar="FILE", help="write a Markdown table of every way")
    bench.add_argument("--plot", type=Path, metavar="FILE", help=f"draw it: {', '.join(PLOTS)}; needs jaxserve[plot]")


def _commas(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.replace(",", " ").split())


def _sizes(text: str) -> tuple[tuple[int, int], ...]:
    try:
        sizes = [part.lower().split("x") for part in text.replace(",", " ").split()]
        return tuple((int(slots), int(pages)) for slots, pages in sizes)
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted sizes like 8x64,512x8192, got {text!r}") from None


def run(arguments: argparse.Namespace) -> int:
    """Measures, writes what was asked for, and prints a summary.

    Raises:
        ConfigError: a value out of range, or a file that could not be written later.
        JaxserveError: the ways disagree about tokens.
    """
    check_files(arguments)
    arguments.bench(arguments)
    return 0


def run_fence(arguments: argparse.Namespace) -> None:
    """``jaxserve bench fence``."""
    from jaxserve.bench import fence, fence_report  # imports jax

    found = fence.measure(_sweep(arguments), _say)
    _write(arguments, found, fence_report.whole)
    if arguments.plot:
        from jaxserve.bench.fence_plot import draw

        draw(found, arguments.plot)
    print(fence_report.summary(found))


def run_spec(arguments: argparse.Namespace) -> None:
    """``jaxserve bench spec``."""
    from jaxserve.bench import speculation, speculation_report  # imports jax

    sweep = speculation.QUICK if arguments.quick else speculation.Sweep()
    sweep = dataclasses.replace(sweep, **_given(arguments, ("model", "kinds", "ways")))
    if arguments.ways is None:
        sweep = dataclasses.replace(sweep, ways=speculation.ways_with_heads(sweep.model, sweep.ways))
    found = speculation.measure(sweep, _say)
    _write(arguments, found, speculation_report.whole)
    if arguments.plot:
        from jaxserve.bench.speculation_plot import draw

        draw(found, arguments.plot)
    print(speculation_report.whole(found))


def run_compare(arguments: argparse.Namespace) -> None:
    """``jaxserve bench compare``."""
    from jaxserve.bench import compare, compare_report, models  # imports jax

    known = {**models.COMPARED, **models.MODELS, "tiny-qwen3": models.TINY_QWEN3}
    comparison = compare.Comparison()
    if arguments.from_file is not None:
        comparison = compare.from_json(_read_json(arguments.from_file))
    elif arguments.quick:
        comparison = compare.Comparison(
            models={name: known[name] for name in ("tiny", "tiny-qwen3")}, batches=(1, 4), max_tokens=24, rounds=2
        )
    changes = _given(arguments, ("ways", "attention_backend", "dtype", "seed"))
    if arguments.models is not None:
        unknown = [name for name in arguments.models if name not in known]
        if unknown or not arguments.models:
            raise ConfigError(f"--models: unknown {', '.join(unknown)}; known are {', '.join(known)}")
        changes["models"] = {name: known[name] for name in arguments.models}
    found = compare.measure(dataclasses.replace(comparison, **changes), _say)
    _write(arguments, found, compare_report.whole)
    if arguments.plot:
        from jaxserve.bench.compare_plot import draw

        draw(found, arguments.plot)
    print(compare_report.summary(found))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--from {path}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--from {path}: wanted a result of bench compare")
    return found


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _write(arguments: argparse.Namespace, found: dict[str, Any], as_table: Callable[[dict[str, Any]], str]) -> None:
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if arguments.table:
        arguments.table.write_text(as_table(found), encoding="utf-8")


def _given(arguments: argparse.Namespace, own: tuple[str, ...] = ()) -> dict[str, Any]:
    """Fields of a sweep that flags change."""
    fields = {"batches": "batches", "rounds": "rounds", "max_tokens": "tokens", "max_seconds": "max_seconds"}
    fields |= {name: name for name in own}
    values = {field: getattr(arguments, flag) for field, flag in fields.items()}
    return {field: value for field, value in values.items() if value is not None}


def _sweep(arguments: argparse.Namespace) -> Any:
    from jaxserve.bench import fence, models
    from jaxserve.engine.assembly import resolve_model_path

    sweep = fence.QUICK if arguments.quick else fence.Sweep()
    chosen = dict(sweep.models)
    if arguments.model is not None:
        name, config = models.config_of(resolve_model_path(arguments.model))
        chosen = {n: c for n, c in chosen.items() if n != "smollm2-135m"} | {name: config}
        if arguments.models is not None:
            chosen |= {name: config}
    if arguments.models is not None:
        known = models.MODELS | chosen
        unknown = [name for name in arguments.models if name not in known]
        if unknown or not arguments.models:
            raise ConfigError(f"--models: unknown {', '.join(unknown)}; known are {', '.join(known)}")
        chosen = {name: known[name] for name in arguments.models}
    changes: dict[str, Any] = {"models": chosen} | _given(arguments)
    if arguments.sizes is not None:
        changes["sizes"] = tuple(fence.TableSize(*size) for size in arguments.sizes)
    return dataclasses.replace(sweep, **changes)
