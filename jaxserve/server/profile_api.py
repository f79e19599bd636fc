"""``POST /start_profile`` and ``POST /stop_profile``: a timeline of the running server, in the folder it was given."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.core.errors import ConfigError, InvalidRequest
from jaxserve.server.body import parse_fields, parse_json, read_body
from jaxserve.server.json_response import json_response
from jaxserve.server.wire import WireModel

if TYPE_CHECKING:
    from jaxserve.timeline.trace import Trace

router = APIRouter()


class ProfileRequest(WireModel):
    """``output_dir``: a folder in the server's ``--profile-dir``; by default that folder itself."""

    output_dir: str | None = None


class Profiling:
    """The one profile a server records at a time. Only the server's event loop touches it."""

    def __init__(self, folder: str | None):
        self._folder = None if folder is None else Path(folder).resolve()
        self._trace: Trace | None = None
        self._numbers = itertools.count(1)

    def start(self, output_dir: str | None) -> Path:
        """Records from here on; returns where ``stop`` will write.

        Raises:
            InvalidRequest: the server has no folder for it, the one asked for lies elsewhere, or it records already.
        """
        if self._folder is None:
            raise InvalidRequest(
                "this server writes no profiles; start it with --profile-dir DIR", code="profiling_disabled"
            )
        folder = (self._folder / (output_dir or "")).resolve()
        if not folder.is_relative_to(self._folder):  # clients may not choose where on the disk we write
            raise InvalidRequest(
                f"output_dir must lie in the server's --profile-dir, got {output_dir!r}",
                param="output_dir", code="invalid_value",
            )  # fmt: skip
        from jaxserve.timeline.trace import Trace  # imports jax

        name = f"jaxserve-{time.strftime('%Y%m%d-%H%M%S')}-{next(self._numbers)}.json.gz"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._trace = Trace(folder / name).start()
        except (ConfigError, OSError) as error:
            raise InvalidRequest(f"cannot start a profile: {error}", code="profiling_failed", status=409) from None
        return self._trace.path

    async def stop(self) -> Path:
        """Writes the profile; returns where. Raises InvalidRequest if none is being recorded."""
        trace, self._trace = self._trace, None
        if trace is None:
            raise InvalidRequest(
                "no profile is being recorded; POST /start_profile first", code="no_profile", status=409
            )
        await asyncio.to_thread(trace.close)
        return trace.path


def add_profiling(app: FastAPI, folder: str | None) -> None:
    """The endpoints; without a folder they refuse."""
    app.state.profiling = Profiling(folder)
    app.include_router(router)


async def _body(request: Request) -> ProfileRequest:
    raw = await read_body(request, request.app.state.settings.max_body_bytes)
    return parse_fields(ProfileRequest, parse_json(raw)) if raw.strip() else ProfileRequest()


@router.post("/start_profile")
async def start_profile(request: Request) -> Response:
    """Begins a timeline. The body may be empty, or ``{"output_dir": "folder in --profile-dir"}``."""
    request.app.state.lifecycle.engine()  # only a server that serves has something to show
    body = await _body(request)
    return _answer(request.app.state.profiling.start(body.output_dir), "recording")


@router.post("/stop_profile")
async def stop_profile(request: Request) -> Response:
    """Ends and writes it."""
    return _answer(await request.app.state.profiling.stop(), "written")


def _answer(path: Path, status: str) -> Response:
    answer: dict[str, Any] = {"status": status, "path": str(path)}
    return json_response(answer)
