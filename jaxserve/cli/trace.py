"""``jaxserve trace``: run a short decode workload and write its timeline as a trace or a plot."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.cli.flags import add_engine_flags, engine_config
from jaxserve.cli.loading import say_loading
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError, JaxserveError

if TYPE_CHECKING:
    from jaxserve.timeline.device_records import DeviceRecords
    from jaxserve.timeline.recorder import HostRecords
    from jaxserve.timeline.step_view import StepView

PROMPT_TOKENS = 8
ROUNDS = 2
PLOT_SUFFIXES = (".png", ".svg", ".pdf", ".html")
HEADER = ("fence", "steps", "step ms", "rows in place ms", "rows held up ms", "hand-over us")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("-o", "--output", metavar="PATH", help="trace for Perfetto, .json or .json.gz")
    parser.add_argument("--plot", metavar="PATH", help="one step drawn for a paper: .png, .svg, .pdf or .html")
    parser.add_argument("--batch", type=int, default=4, metavar="N", help="sequences that decode together (default 4)")
    parser.add_argument("--steps", type=int, default=48, metavar="N", help="tokens of each (default 48)")
    parser.add_argument(
        "--fence", choices=("fine", "coarse", "both"), default="both", help="fences to run with (default both)"
    )
    # SUPPRESS, as for every engine flag: what is not given leaves no attribute
    parser.add_argument("--backend", dest="engine_attention_backend", default=argparse.SUPPRESS, metavar="NAME",
                        help="same as --attention-backend")  # fmt: skip
    add_engine_flags(parser, positional_model=True)


def run(arguments: argparse.Namespace) -> int:
    """Writes what was asked for, ``trace.json`` if nothing was, and prints the medians.

    Raises:
        ConfigError: flags that do not go together, or a path that cannot be written to.
        JaxserveError: no step could be drawn.
    """
    for name, low in (("batch", 1), ("steps", 8)):
        if getattr(arguments, name) < low:
            raise ConfigError(f"--{name} must be at least {low}, got {getattr(arguments, name)}")
    small = {"max_running_requests": arguments.batch, "decode_batch_buckets": (arguments.batch,),
             "prefill_token_buckets": (PROMPT_TOKENS,), "skip_warmup": True}  # fmt: skip
    config = engine_config(arguments, **small)
    if config.force_coarse_war_barrier or config.disable_overlap_schedule:
        raise ConfigError("a trace compares fences under overlap; choose the fence with --fence")
    if config.max_running_requests < arguments.batch:
        raise ConfigError(f"--batch {arguments.batch} needs --max-running-requests of at least as many")

    import jax

    from jaxserve.timeline.plot_image import check_matplotlib  # imports no matplotlib yet
    from jaxserve.timeline.trace import check_output_path, check_trace_path

    if jax.default_backend() != "cpu":
        raise ConfigError(
            "on a GPU neither the schedule stream nor executions are recorded yet; `serve --trace` records host and "
            "HTTP, JAX_PLATFORMS=cpu runs this command on the CPU"
        )
    plot = check_output_path(arguments.plot, "a plot", PLOT_SUFFIXES) if arguments.plot else None
    if plot is not None and plot.suffix != ".html":
        check_matplotlib()
    output = arguments.output or (None if plot else "trace.json")
    trace = check_trace_path(output) if output else None
    _trace(config, arguments, trace, plot)
    return 0


def _trace(config: EngineConfig, arguments: argparse.Namespace, trace: Path | None, plot: Path | None) -> None:
    from jaxserve.engine.llm import LLM
    from jaxserve.timeline.build import build_timeline
    from jaxserve.timeline.chrome_trace import write_chrome_trace
    from jaxserve.timeline.model import Timeline
    from jaxserve.timeline.step_view import median_step

    fences = ("fine", "coarse") if arguments.fence == "both" else (arguments.fence,)
    say_loading(config)
    with LLM(**dataclasses.asdict(config)) as llm:
        name = llm.engine.model_name
        _record(llm, arguments.batch, arguments.steps, fences[0])  # compiles
        rounds = [
            [_record(llm, arguments.batch, arguments.steps, fence) for fence in fences]
            for _ in range(ROUNDS if len(fences) > 1 else 1)  # in turns, as machines have moods
        ]
    if trace is not None:
        whole = Timeline()
        for records in rounds:
            for host, device in records:
                whole.extend(build_timeline(host, device))
        write_chrome_trace(whole, trace)
        print(f"wrote {trace}; open it at https://ui.perfetto.dev", file=sys.stderr)
    try:
        views = [median_step(*_joined(records)) for records in zip(*rounds, strict=True)]
    except JaxserveError as error:
        if plot is not None:
            raise
        print(f"no medians: {error}", file=sys.stderr)
        return
    print("\n".join(_table(views)))
    if plot is not None:
        _draw(views, name, arguments.batch, plot)
        print(f"wrote {plot}", file=sys.stderr)


def _record(llm: Any, batch: int, steps: int, fence: str) -> tuple[HostRecords, DeviceRecords]:
    """Host and device records of a decode workload behind one fence."""
    from jaxserve.core.sampling_params import SamplingParams
    from jaxserve.timeline.recorder import span
    from jaxserve.timeline.trace import Recording

    llm.engine.scheduler.barrier.force_coarse = fence == "coarse"
    params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True)
    prompts = [[1 + (row + i) % 64 for i in range(PROMPT_TOKENS)] for row in range(batch)]
    recording = Recording().start()
    with span(f"{fence} fence"):
        outputs = llm.generate(prompts, params)
    records = recording.records()
    _check(outputs)
    return records


def _joined(records: Sequence[tuple[HostRecords, DeviceRecords]]) -> tuple[HostRecords, DeviceRecords]:
    host, device = records[0]
    for later_host, later_device in records[1:]:
        host, device = host.followed_by(later_host), device.followed_by(later_device)
    return host, device


def _check(outputs: list[Any]) -> None:
    for output in outputs:
        for one in output.outputs:
            if one.finish_reason == "error":
                raise JaxserveError(f"generation failed: {one.error}")


def _table(views: list[StepView]) -> list[str]:
    rows: list[tuple[str, ...]] = [HEADER]
    for view in views:
        times = view.medians
        assert times is not None
        milliseconds = [f"{value / 1e6:.3f}" for value in (times.period, times.in_place, times.held)]
        rows.append((view.fence, str(view.num_steps), *milliseconds, f"{times.gap / 1e3:.1f}"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _draw(views: list[StepView], model: str, batch: int, plot: Path) -> None:
    from jaxserve.timeline.plot_html import render_html
    from jaxserve.timeline.plot_image import render_image
    from jaxserve.timeline.step_drawing import draw_steps

    steps = " and ".join(str(view.num_steps) for view in views)
    drawing = draw_steps(views, f"{model}, decode, batch {batch}, on the CPU; the most typical of {steps} steps")
    (render_html if plot.suffix == ".html" else render_image)(drawing, plot)
