"""``jaxserve check-programs``: compile every program of a configuration and prove where its shared reads end."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxserve.cli.flags import add_engine_flags, engine_config
from jaxserve.cli.parser import int_list

if TYPE_CHECKING:
    from jaxserve.testing.program_report import ProgramReport
    from jaxserve.testing.thunk_sequence import GraphUse

HEADER = ("program", "reads end", "marker", "late reads", "donated", "pool copies", "instr.", "seconds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument(
        "--target", choices=("cpu", "h100"), default="cpu", help="h100 needs no GPU, only the CUDA plugin of jax"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per program instead of the table")
    parser.add_argument(
        "--verify-tokens", type=int_list, default=(), metavar="N,N", help="also verify programs of these sizes"
    )
    add_engine_flags(parser, positional_model=True)


def run(arguments: argparse.Namespace) -> int:
    """Prints a row per program; 1 if anything is wrong with one of them.

    Raises:
        ConfigError: settings that cannot work, or a target that cannot be compiled for here.
        ModelLoadError: the model's configuration.
    """
    config = engine_config(arguments)

    from jaxserve.testing.configuration_programs import ConfigurationPrograms  # imports jax

    checked = ConfigurationPrograms(config, arguments.target, arguments.verify_tokens)
    reports = []
    rows = _Rows([program.name for program in checked.programs()])
    if not arguments.json:
        print(rows.line(HEADER))
    for report in checked.reports():  # as they come: a large model compiles for minutes
        reports.append(report)
        print(json.dumps(as_json(report)) if arguments.json else rows.line(_cells(report)), flush=True)
    if not arguments.json:
        print(_summary(reports))
    return 1 if any(report.violations for report in reports) else 0


def as_json(report: ProgramReport) -> dict:
    """A report as JSON values; ``violations`` is empty when everything is proven."""
    fields = dataclasses.asdict(report)
    return fields | {
        "ends": report.ends.name if report.ends else None,
        "seconds": round(report.seconds, 3),
        "violations": list(report.violations),
    }


class _Rows:
    def __init__(self, names: Sequence[str]):
        self._widths = [max(map(len, (*names, HEADER[0]))), 11, 19, 10, 11, 11, 6, 7]

    def line(self, cells: Sequence[str]) -> str:
        left = [cell.ljust(width) for cell, width in zip(cells[:5], self._widths, strict=False)]
        right = [cell.rjust(width) for cell, width in zip(cells[5:], self._widths[5:], strict=True)]
        return "  ".join([*left, *right]).rstrip()


def _cells(report: ProgramReport) -> tuple[str, ...]:
    return (
        report.name,
        report.ends.name if report.ends else "-",
        report.marker or "-",
        str(len(report.late_reads)),
        ", ".join(report.donated) or "-",
        str(report.pool_copies),
        str(report.instructions),
        f"{report.seconds:.1f}",
    )


def _graph_lines(name: str, graphs: GraphUse) -> list[str]:
    lines = [f"{name}: {' | '.join(graphs.order)}"]
    if graphs.calls_inside:
        lines.append(f"  custom calls inside graphs: {', '.join(graphs.calls_inside)}")
    if graphs.splits:
        lines.append(f"  graphs split at {', '.join(graphs.splits)}")
    if graphs.blocking:
        lines.append(f"  the dispatching thread waits for the device at {', '.join(graphs.blocking)}")
    return lines


def _summary(reports: Sequence[ProgramReport]) -> str:
    lines = [""]
    for report in reports:
        if report.graphs is not None:
            lines += _graph_lines(report.name, report.graphs)
    if len(lines) > 1:
        lines.append("")
    wrong = [report for report in reports if report.violations]
    lines += [f"VIOLATION {report.name}: {violation}" for report in wrong for violation in report.violations]
    if wrong:
        lines.append(f"{len(wrong)} of {len(reports)} programs are wrong")
    else:
        lines.append(f"{len(reports)} programs proven: no shared read behind a fence, donated memory is reused")
    return "\n".join(lines)
