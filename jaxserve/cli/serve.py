"""``jaxserve serve``: serve a model over HTTP with the OpenAI API."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

from jaxserve.cli.flags import add_engine_flags, engine_config
from jaxserve.cli.program_reports import graph_splits
from jaxserve.cli.trace_flag import add_trace_flag, trace_path
from jaxserve.core.errors import ConfigError
from jaxserve.server.engine_protocol import EngineLike
from jaxserve.server.settings import ServerSettings

if TYPE_CHECKING:
    from jaxserve.timeline.trace import Trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    defaults = ServerSettings()
    http = parser.add_argument_group("http")
    http.add_argument(
        "--host", default=defaults.host, help="address to listen on (default %(default)s); 0.0.0.0 for all"
    )
    http.add_argument(
        "--port", type=int, default=defaults.port, help="TCP port (default %(default)s); 0 for a free one"
    )
    http.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="bearer token clients must send; may be repeated (also JAXSERVE_API_KEY, which ps does not show)",
    )
    http.add_argument(
        "--cors-origin",
        "--allowed-origins",
        action="append",
        metavar="ORIGIN",
        help="origin whose pages may call the server, * for all; may be repeated",
    )
    http.add_argument(
        "--max-body-bytes",
        type=int,
        default=defaults.max_body_bytes,
        metavar="N",
        help="longest request body (default %(default)s)",
    )
    http.add_argument(
        "--drain-timeout",
        type=float,
        default=defaults.drain_timeout_s,
        metavar="S",
        help="seconds running requests may go on after a stop signal (default %(default)s)",
    )
    http.add_argument(
        "--program-report",
        type=Path,
        metavar="FILE",
        help="what check-programs --target h100 --json printed: /metrics then shows each program's graph splits",
    )
    http.add_argument("--access-log", action="store_true", help="log every request")
    http.add_argument("--profile-dir", metavar="DIR", help="let POST /start_profile write timelines to this folder")
    text = parser.add_argument_group("text of outputs")
    text.add_argument(
        "--tool-call-parser", metavar="NAME", help="how the model writes tool calls: hermes, llama3_json, mistral, "
        "qwen, pythonic, or a registered name; without it tool_choice auto is refused",
    )  # fmt: skip
    text.add_argument(
        "--reasoning-parser", metavar="NAME", help="how the model reasons: deepseek_r1, qwen3, or a registered name"
    )
    text.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="a jinja chat template that replaces the model's own"
    )
    text.add_argument(
        "--trust-request-chat-template", action="store_true", help="let requests bring chat templates of their own"
    )
    text.add_argument(
        "--is-embedding", action="store_true", help="answer /v1/embeddings, by the last hidden state of a text"
    )
    text.add_argument(
        "--embedding-pooling", choices=("last", "mean"), help="the same, by the last or the mean hidden state"
    )
    http.add_argument(
        "--log-format", choices=("text", "json"), default=defaults.log_format, help="json: one object a line"
    )
    add_trace_flag(parser)
    add_engine_flags(parser, positional_model=True)


def server_settings(arguments: argparse.Namespace) -> ServerSettings:
    """The HTTP settings.

    Raises:
        ConfigError: a value out of range.
    """
    keys = list(arguments.api_key or [])
    if not keys and "JAXSERVE_API_KEY" in os.environ:
        if not os.environ["JAXSERVE_API_KEY"]:
            # an empty variable is more likely a deployment mistake than a wish to serve everybody
            raise ConfigError("JAXSERVE_API_KEY is set but empty; unset it to serve without a key")
        keys = [os.environ["JAXSERVE_API_KEY"]]
    return ServerSettings(
        host=arguments.host,
        port=arguments.port,
        api_keys=tuple(keys),
        cors_origins=tuple(arguments.cors_origin or ()),
        max_body_bytes=arguments.max_body_bytes,
        drain_timeout_s=arguments.drain_timeout,
        access_log=arguments.access_log,
        profile_dir=arguments.profile_dir,
        tool_call_parser=arguments.tool_call_parser,
        reasoning_parser=arguments.reasoning_parser,
        chat_template=_read_template(arguments.chat_template),
        trust_request_chat_template=arguments.trust_request_chat_template,
        log_format=arguments.log_format,
        embedding_pooling=arguments.embedding_pooling or ("last" if arguments.is_embedding else None),
    )


def _read_template(path: Path | None) -> str | None:
    if path is None:
        return None
    from jaxserve.text.chat_template import template_mistake

    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path} cannot be read: {error}") from error
    if (mistake := template_mistake(source)) is not None:
        raise ConfigError(f"--chat-template {path} is not a jinja template: {mistake}")
    return source


def run(arguments: argparse.Namespace) -> int:
    """Serves until a signal; the port is taken before anything is loaded."""
    config = engine_config(arguments)
    settings = server_settings(arguments)
    path = trace_path(arguments)
    splits = graph_splits(arguments.program_report) if arguments.program_report is not None else {}

    from jaxserve.server.launch import ServerProcess  # fastapi and uvicorn take half a second

    traces: list[Trace] = []

    def load() -> EngineLike:
        from jaxserve.engine.async_engine import AsyncEngine

        engine = AsyncEngine.from_config(config, lambda message: print(message, flush=True))
        if splits:
            engine.metrics.set_graph_splits(splits)
        if path is not None:
            from jaxserve.timeline.trace import Trace

            traces.append(Trace(path).start())
        return cast(EngineLike, engine)

    def write_trace() -> None:
        for trace in traces:
            trace.close()
            print(f"wrote {trace.path}", flush=True)

    def announce(engine: EngineLike, url: str) -> None:
        print(how_to_use(engine, url, bool(settings.api_keys)), flush=True)

    server = ServerProcess(load, settings, announce, write_trace)
    print(f"listening on {server.url}, loading {config.model!r} ({server.url}/health/ready turns 200)", flush=True)
    return server.run()


def how_to_use(engine: EngineLike, url: str, needs_key: bool) -> str:
    """What a user types next."""
    from jaxserve.server.model_names import served_name

    name = served_name(engine)
    header = ' -H "Authorization: Bearer $JAXSERVE_API_KEY"' if needs_key else ""
    key = 'os.environ["JAXSERVE_API_KEY"]' if needs_key else '"none"'
    preamble = "import os; " if needs_key else ""
    return f"""
ready: {name}, context {engine.context_length} tokens, at {url}/v1

  curl {url}/v1/chat/completions{header} -H 'Content-Type: application/json' \\
    -d '{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'

  {preamble}from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key={key})
  messages = [{{"role": "user", "content": "Hello!"}}]
  print(client.chat.completions.create(model="{name}", messages=messages).choices[0].message.content)

  jaxserve chat --url {url}

Ctrl-C stops the server."""
