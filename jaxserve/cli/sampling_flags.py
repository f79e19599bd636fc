"""Sampling flags of ``generate`` and ``chat``."""

from __future__ import annotations

import argparse
from typing import Any

FIELDS = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "frequency_penalty",
    "presence_penalty", "repetition_penalty",
)  # fmt: skip


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """A flag that is not given leaves the default of ``SamplingParams``."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, metavar="N", help="most tokens to generate")
    group.add_argument("--min-tokens", type=int, metavar="N", help="no end before this many tokens")
    group.add_argument("--temperature", type=float, metavar="T", help="0 always takes the most likely token")
    group.add_argument("--top-p", type=float, metavar="P", help="smallest set of tokens reaching this probability")
    group.add_argument("--top-k", type=int, metavar="K", help="only the K most likely tokens")
    group.add_argument("--min-p", type=float, metavar="P", help="drop tokens below P times the most likely one")
    group.add_argument("--frequency-penalty", type=float, metavar="F", help="-2 to 2, per occurrence in the output")
    group.add_argument("--presence-penalty", type=float, metavar="F", help="-2 to 2, once for what the output holds")
    group.add_argument(
        "--repetition-penalty", type=float, metavar="R", help="above 1 disfavours what stands in prompt or output"
    )
    group.add_argument("--seed", type=int, metavar="N", help="makes sampling repeatable")
    group.add_argument("--stop", action="append", metavar="TEXT", help="text that ends the output; may be repeated")


def sampling_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields that were given, by their names in ``SamplingParams`` and in the API."""
    return {name: getattr(arguments, name) for name in FIELDS if getattr(arguments, name) is not None}
