"""``jaxserve chat``: talk to a model, in this process or on a server (--url)."""

from __future__ import annotations

import argparse
import contextlib
import sys

from jaxserve.cli.answerers import Answerer, LocalAnswerer, Messages, RemoteAnswerer
from jaxserve.cli.flags import add_engine_flags, engine_config, given_engine_flags
from jaxserve.cli.sampling_flags import add_sampling_flags, sampling_fields
from jaxserve.cli.trace_flag import add_trace_flag, stopped_by_signals, trace_path
from jaxserve.core.errors import ConfigError, JaxserveError

HELP = "Ctrl-C stops an answer, Ctrl-D leaves; /clear forgets the conversation, /help shows this"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("--url", help="talk to a running server, like http://localhost:8000")
    parser.add_argument("--api-key", metavar="KEY", help="the server's key (also JAXSERVE_API_KEY)")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_flags(parser)
    add_trace_flag(parser)
    add_engine_flags(parser, positional_model=True, without=("seed",))  # --seed is the request's


def run(arguments: argparse.Namespace) -> int:
    """Reads lines, prints answers as they come."""
    fields = sampling_fields(arguments)
    answerer: Answerer
    if arguments.url:
        wrong = [name for name in given_engine_flags(arguments) if name != "--model"]
        wrong += ["--trace"] if arguments.trace is not None else []
        if wrong:
            raise ConfigError(f"{', '.join(wrong)} cannot change a running server; leave out --url or the flag")
        model = getattr(arguments, "engine_model", arguments.model_argument)
        answerer = RemoteAnswerer(arguments.url, fields, model, arguments.api_key)
    else:
        answerer = LocalAnswerer(engine_config(arguments, skip_warmup=True), fields, trace_path(arguments))
    try:
        with stopped_by_signals():
            talk(answerer, arguments.system)
    finally:
        answerer.close()
    return 0


def talk(answerer: Answerer, system: str | None = None) -> None:
    """The conversation. An answer that was stopped stays in it as far as it came; a failed one does not."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives input() arrow keys and history
    beginning: Messages = [{"role": "system", "content": system}] if system else []
    messages = list(beginning)
    # a script that pipes questions in wants answers only
    prompt = "> " if sys.stdin.isatty() else ""
    if prompt:
        print(f"{answerer.name}. {HELP}")
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            if prompt:
                print()
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D leaves)")
            continue
        if line in ("/exit", "/quit"):
            return
        if line == "/clear":
            messages = list(beginning)
        elif line.startswith("/"):
            print(HELP)
        elif line:
            messages.append({"role": "user", "content": line})
            answer = _print_answer(answerer, messages)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def _print_answer(answerer: Answerer, messages: Messages) -> str | None:
    pieces: list[str] = []
    answering = answerer.answer(messages)
    try:
        for piece in answering:
            pieces.append(piece)
            print(piece, end="", flush=True)
        print()
    except KeyboardInterrupt:
        print(" [stopped]")
    except JaxserveError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return None
    finally:
        answering.close()
    return "".join(pieces)
