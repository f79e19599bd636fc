"""How log lines look: text, or one JSON object a line."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

import orjson

ACCESS_LOG = "jaxserve.access"
_EXTRA = "http"  # attribute of access records: their parts


class JsonFormatter(logging.Formatter):
    """``{"time", "level", "logger", "message"}``; access records also have ``request_id``, ``method``, ``path``,
    ``status`` and ``seconds``, records of exceptions have ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, _EXTRA, {}),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(fields, default=str).decode()


def formatter(log_format: str) -> logging.Formatter:
    """The formatter for ``text`` or ``json``."""
    if log_format == "json":
        return JsonFormatter()
    return logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")


def log_request(request_id: str, method: str, path: str, status: int, seconds: float) -> None:
    """One answered request. The query is left out: it may hold what nobody should read."""
    log = logging.getLogger(ACCESS_LOG)
    if log.isEnabledFor(logging.INFO):
        parts = {
            "request_id": request_id, "method": method, "path": path, "status": status, "seconds": round(seconds, 6),
        }  # fmt: skip
        log.info("%s %s %d %.3f s, %s", method, path, status, seconds, request_id, extra={_EXTRA: parts})
