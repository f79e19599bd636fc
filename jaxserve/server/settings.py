"""How the HTTP side is set up; the engine has its own configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxserve.core.errors import ConfigError

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

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be in [0, 65535], got {self.port}")
        if self.max_body_bytes < 1:
            raise ConfigError(f"--max-body-bytes must be >= 1, got {self.max_body_bytes}")
        if not 0 <= self.drain_timeout_s <= 3600:
            raise ConfigError(f"--drain-timeout must be in [0, 3600] seconds, got {self.drain_timeout_s}")
        if self.profile_dir is not None and not Path(self.profile_dir).is_dir():
            raise ConfigError(f"--profile-dir must be a folder, got {self.profile_dir!r}; make it first")
        if any(not key or not key.isascii() or key != key.strip() for key in self.api_keys):
            raise ConfigError("--api-key must be non-empty ASCII without spaces around it")
