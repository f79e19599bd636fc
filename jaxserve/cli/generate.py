"""``jaxserve generate``: continue prompts offline and print the text."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from jaxserve.cli.flags import add_engine_flags, engine_config
from jaxserve.cli.loading import say_loading
from jaxserve.cli.sampling_flags import add_sampling_flags, sampling_fields
from jaxserve.cli.trace_flag import add_trace_flag, stopped_by_signals, trace_path
from jaxserve.core.errors import ConfigError, JaxserveError
from jaxserve.core.sampling_params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to continue; none or '-' reads stdin")
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's message; answer it")
    parser.add_argument("--json", action="store_true", help="one JSON object per output instead of text")
    parser.add_argument("--n", type=int, default=1, metavar="N", help="outputs per prompt")
    add_sampling_flags(parser)
    add_trace_flag(parser)
    add_engine_flags(parser, without=("seed",))  # --seed is the request's


def run(arguments: argparse.Namespace) -> int:
    """Prints outputs in the order of prompts; a single plain one is streamed."""
    params = SamplingParams(**({"max_tokens": 128} | sampling_fields(arguments)), n=arguments.n)
    # A one-shot command runs few of the programs.
    config = engine_config(arguments, skip_warmup=True, greedy_programs=params.takes_likeliest)
    prompts = _read_prompts(arguments.prompts)

    from jaxserve.engine.llm import LLM

    say_loading(config)
    with stopped_by_signals(), LLM(trace=trace_path(arguments), **dataclasses.asdict(config)) as llm:
        if len(prompts) == 1 and params.n == 1 and not arguments.json:
            _stream(llm, prompts[0], params, arguments.chat)
        else:
            _print_all(llm, prompts, params, arguments)
    return 0


def _read_prompts(given: list[str]) -> list[str]:
    if not given and sys.stdin.isatty():
        raise ConfigError('no prompt; try: jaxserve generate "Once upon a time"')
    read = [sys.stdin.read() if prompt == "-" else prompt for prompt in given or ["-"]]
    # a pipe ends in a newline that nobody meant
    return [text.rstrip("\n") if prompt == "-" else text for prompt, text in zip(given or ["-"], read, strict=True)]


def _stream(llm: Any, prompt: str, params: SamplingParams, chat: bool) -> None:
    deltas = llm.chat_stream(_message(prompt), params) if chat else llm.stream(prompt, params)
    for delta in deltas:
        sys.stdout.write(delta.text)
        sys.stdout.flush()
        if delta.finish_reason == "error":
            raise JaxserveError(delta.error or "generation failed")
    print()


def _print_all(llm: Any, prompts: list[str], params: SamplingParams, arguments: argparse.Namespace) -> None:
    outputs = llm.chat([_message(p) for p in prompts], params) if arguments.chat else llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        for one in output.outputs:
            if one.finish_reason == "error":
                raise JaxserveError(f"generation failed for {prompt!r}")
            if arguments.json:
                line = {"prompt": prompt, "index": one.index, "text": one.text, "token_ids": list(one.token_ids)}
                line |= {"finish_reason": one.finish_reason, "prompt_tokens": len(output.prompt_token_ids)}
                if one.speculation is not None:
                    line["speculation"] = one.speculation.as_dict()
                print(json.dumps(line, ensure_ascii=False), flush=True)
            else:
                print(f"--- {prompt!r}\n{one.text}", flush=True)


def _message(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]
