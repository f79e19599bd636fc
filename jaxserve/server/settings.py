"""How the HTTP side is set up; the engine has its own configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxserve.core.errors import ConfigError
from jaxserve.text.reasoning import reasoning_parser
from jaxserve.text.tool_calls.registry import tool_call_parser

MIB = 1 << 20


@dataclass(frozen=True)
class ServerSettings:
    """HTTP settings, checked on construction.

    Attributes:
        host: address to listen on; 127.0.0.1 serves this machine only.
        port: TCP port; 0 takes a free one.
        api_keys: accepted bearer tokens; none means that everybody may ask.
        cors_origins: origins whose web pages may call the server; ``*`` for all.
        max_body_bytes: longest request body.
        drain_timeout_s: how long running requests may go on after a stop signal.
        access_log: log each request.
        tool_call_parser: name of the notation the model writes tool calls in; None: ``tool_choice: "auto"`` is refused.
        reasoning_parser: name of the notation it reasons in; None: reasoning stays in the text.
        chat_template: jinja source that replaces the model's own.
        trust_request_chat_template: let requests bring templates of their own, which can take any amount of time.
        log_format: ``text``, or ``json`` for one object a line.
        embedding_pooling: what ``/v1/embeddings`` makes of the hidden states of a text: ``last`` or ``mean``; None
            refuses it.
        profile_dir: folder that ``/start_profile`` writes timelines to; None refuses them.

    Raises:
        ConfigError: a value out of range; the message names the flag.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 32 * MIB
    drain_timeout_s: float = 5.0
    access_log: bool = False
    profile_dir: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    log_format: str = "text"
    embedding_pooling: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be in [0, 65535], got {self.port}")
        if self.max_body_bytes < 1:
            raise ConfigError(f"--max-body-bytes must be >= 1, got {self.max_body_bytes}")
        if not 0 <= self.drain_timeout_s <= 3600:
            raise ConfigError(f"--drain-timeout must be in [0, 3600] seconds, got {self.drain_timeout_s}")
        if self.profile_dir is not None and not Path(self.profile_dir).is_dir():
            raise ConfigError(f"--profile-dir must be a folder, got {self.profile_dir!r}; make it first")
        if self.tool_call_parser is not None:
            tool_call_parser(self.tool_call_parser)
        if self.reasoning_parser is not None:
            reasoning_parser(self.reasoning_parser)
        if self.log_format not in ("text", "json"):
            raise ConfigError(f"--log-format must be text or json, got {self.log_format!r}")
        if self.embedding_pooling not in (None, "last", "mean"):
            raise ConfigError(f"--embedding-pooling must be last or mean, got {self.embedding_pooling!r}")
        if any(not key or not key.isascii() or key != key.strip() for key in self.api_keys):
            raise ConfigError("--api-key must be non-empty ASCII without spaces around it")
