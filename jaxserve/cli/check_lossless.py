"""``jaxserve check-lossless``: compare speculation, overlap and fences with plain decoding, token for token."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.cli.flags import add_engine_flags, engine_config
from jaxserve.core.errors import ConfigError

if TYPE_CHECKING:
    from jaxserve.testing.lossless_report import Comparison, LosslessReport

HEADER = ("way", "batch", "greedy", "sampled", "controlled", "tokens", "drafts", "accepted", "logprob gap")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="texts, one a line, or .jsonl: objects with a "
                        "prompt; by default some that repeat themselves and some that don't")  # fmt: skip
    parser.add_argument("--max-tokens", type=int, default=32, metavar="N", help="of each output (default 32)")
    parser.add_argument("--draws", type=int, default=2000, metavar="N",
                        help="sampled tokens for the chi-square test, 0: none (default 2000)")  # fmt: skip
    parser.add_argument("--tie-margin", type=float, metavar="NATS",
                        help="a token that plain decoding preferred by less is a tie (default 0.0001)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="the report as one JSON object instead of the table")
    add_engine_flags(parser, positional_model=True)


def run(arguments: argparse.Namespace) -> int:
    """Prints a row per way and batch; 1 if one of them differs from plain decoding.

    Raises:
        ConfigError: a flag or a prompt file that cannot work.
        ModelLoadError, InvalidRequest: the model, or a prompt that does not fit it.
    """
    # Few of the programs are run, and the algorithm is what most people ask about.
    config = engine_config(arguments, skip_warmup=True, speculative_algorithm="NGRAM")
    _check_numbers(arguments)
    prompts = _default_prompts() if arguments.prompts is None else read_prompts(arguments.prompts)

    from jaxserve.testing.lossless import TIE_MARGIN, Draws, examine_lossless  # imports jax

    report = examine_lossless(
        config, prompts, max_tokens=arguments.max_tokens, draws=Draws(arguments.draws),
        tie_margin=TIE_MARGIN if arguments.tie_margin is None else arguments.tie_margin,
        progress=lambda message: print(message, file=sys.stderr, flush=True),
    )  # fmt: skip
    print(json.dumps(as_json(report), indent=1) if arguments.json else as_text(report))
    return 1 if report.violations else 0


def _check_numbers(arguments: argparse.Namespace) -> None:
    for flag, value, least in (("--max-tokens", arguments.max_tokens, 2), ("--draws", arguments.draws, 0)):
        if value < least:
            raise ConfigError(f"{flag} must be at least {least}, got {value}")
    margin = arguments.tie_margin
    if margin is not None and not (math.isfinite(margin) and margin >= 0):
        raise ConfigError(f"--tie-margin must be a number of nats >= 0, got {margin}")


def _default_prompts() -> list[str]:
    from jaxserve.bench.texts import KINDS

    return [prompt for kind in KINDS.values() for prompt in kind.prompts[:2]]


def read_prompts(path: Path) -> list[str]:
    """Prompts of a file: lines that are not blank, or the ``prompt`` of the object in each line of a ``.jsonl`` file.

    Raises:
        ConfigError: it cannot be read, is not what its name says, or holds none.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path} cannot be read: {error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(f"--prompts {path} holds no prompts; write one a line")
    if path.suffix.lower() != ".jsonl":
        return [line for _, line in numbered]
    return [_prompt(line, f"--prompts {path}, line {number}") for number, line in numbered]


def _prompt(line: str, place: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place}: is not JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str) or not record["prompt"]:
        raise ConfigError(f'{place}: wanted an object with a string "prompt", got {line[:80]}')
    return record["prompt"]


def as_json(report: LosslessReport) -> dict:
    """A report as JSON values; ``violations`` is empty when nothing differs."""
    return dataclasses.asdict(report) | {"violations": report.violations, "notes": report.notes}


def as_text(report: LosslessReport) -> str:
    """A table and what it comes to."""
    from jaxserve.bench.table import table

    pairs: dict[tuple[str, int], dict[str, Comparison]] = {}
    for each in report.comparisons:
        pairs.setdefault((each.way, each.batch), {})[each.kind] = each
    rows = [_cells(way, batch, kinds) for (way, batch), kinds in pairs.items()]
    lines = [table("Against plain decoding, one prompt at a time", HEADER, rows)]
    for drawn in report.distributions:
        top_k = f", top_k {drawn.top_k}" if drawn.top_k else ""
        lines.append(
            f"{drawn.way}: {drawn.num_draws} tokens drawn at temperature {drawn.temperature:g}{top_k}: chi-square "
            f"{drawn.statistic:.1f} with {drawn.degrees} degrees of freedom, p = {drawn.p_value:.2g}"
        )
    lines += report.notes
    lines += [f"DIFFERS {violation}" for violation in report.violations]
    margin = f"ties below {report.tie_margin:g} nats"
    if report.violations:
        lines.append(f"{len(report.violations)} differences ({margin})")
    else:
        lines.append(f"lossless: every token is that of plain decoding ({margin})")
    return "\n".join(lines)


def _cells(way: str, batch: int, kinds: dict[str, Comparison]) -> list[str]:
    verdicts = [_verdict(kinds[kind]) if kind in kinds else "-" for kind in ("greedy", "sampled", "controlled")]
    num_tokens = sum(each.num_tokens for each in kinds.values())
    drafted = [each.num_drafted for each in kinds.values() if each.num_drafted is not None]
    accepted = [each.num_accepted for each in kinds.values() if each.num_accepted is not None]
    gap = max(each.logprob_gap for each in kinds.values())
    counts = [str(sum(drafted)) if drafted else "-", str(sum(accepted)) if accepted else "-"]
    return [way, str(batch), *verdicts, str(num_tokens), *counts, f"{gap:.1e}"]


def _verdict(each: Comparison) -> str:
    wrong = len(each.differences) - each.num_ties
    if wrong:
        return f"{wrong} DIFFER"
    return f"equal, {each.num_ties} ties" if each.num_ties else "equal"
