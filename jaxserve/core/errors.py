"""Every error jaxserve raises on purpose.

JaxserveError
├── InvalidRequest       the client's fault; HTTP 4xx, carries the OpenAI error fields
├── ConfigError          a flag or combination of flags that cannot work; raised before any work starts
├── ModelLoadError       a checkpoint that is missing, damaged or not what its config says
├── CapacityError        the server is full; HTTP 429 or 503
├── FenceTimeout         a wait named a launch whose record never came
├── RaceError            two accesses to a shared row that nothing orders (race check only)
└── EngineDead           the step loop has stopped; nothing can be served any more
"""

from __future__ import annotations


class JaxserveError(Exception):
    """Base of all errors raised on purpose."""


class InvalidRequest(JaxserveError):
    """A request that cannot be served as asked.

    Attributes:
        message: what was wanted, what came, what to do.
        param: name of the offending request field, or None.
        code: short machine-readable reason, e.g. ``"context_length_exceeded"``.
        status: HTTP status (400 unless said otherwise).
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status


class ConfigError(JaxserveError):
    """A configuration that cannot work; the message names the flag to change."""


class ModelLoadError(JaxserveError):
    """A checkpoint that cannot be loaded; the message names the file or tensor."""


class CapacityError(JaxserveError):
    """The server holds as many requests as it was told to."""

    def __init__(self, message: str, *, retry_after_s: int = 1, status: int = 503):
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.status = status


class FenceTimeout(JaxserveError):
    """A wait ran out of time; the message gives the generation wanted and the generation found."""


class RaceError(JaxserveError):
    """The race check found two accesses to a shared row that nothing orders; the message names both."""


class EngineDead(JaxserveError):
    """The step loop stopped; the message says why, and requests in flight got it, too."""
