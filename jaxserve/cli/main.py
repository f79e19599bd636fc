"""``jaxserve COMMAND``: finds the command, runs it, turns expected errors into one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from jaxserve.cli import bench, chat, check_lossless, check_programs, collect_env, generate, serve, trace, train_draft
from jaxserve.cli.parser import Parser
from jaxserve.core.errors import ConfigError, InvalidRequest, JaxserveError
from jaxserve.server.version import version

COMMANDS = {
    "serve": serve,
    "generate": generate,
    "chat": chat,
    "trace": trace,
    "check-programs": check_programs,
    "check-lossless": check_lossless,
    "bench": bench,
    "train-draft": train_draft,
    "collect-env": collect_env,
}


def build_parser() -> Parser:
    """The whole command line."""
    parser = Parser(prog="jaxserve", description="Serves Flax language models on JAX/XLA.")
    parser.add_argument("--version", action="version", version=f"jaxserve {version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").splitlines()[0].split(": ", 1)[1]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
    command = commands.add_parser("version", help="print the version")
    command.set_defaults(run=lambda arguments: print(version()) or 0, parser=command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; the exit code is 2 for a bad flag or request, 1 for anything else that went wrong."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # models write characters that not every terminal has
    arguments = build_parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (ConfigError, InvalidRequest) as error:
        return _complain(arguments.parser.prog, error, 2)
    except JaxserveError as error:
        return _complain(arguments.parser.prog, error, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `jaxserve ... | head`
        # the interpreter flushes stdout once more on its way out
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _complain(prog: str, error: Exception, code: int) -> int:
    print(f"{prog}: error: {error}", file=sys.stderr)
    return code
