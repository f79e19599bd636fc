"""Serves the page: static files, read once, under a path that changes when they do."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

router = APIRouter()
PREFIX = "/playground/"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FILES = {path.name: path.read_bytes() for path in sorted((Path(__file__).parent / "static").iterdir())}
VERSION = hashlib.sha256(b"\0".join(part for name in _FILES for part in (name.encode(), _FILES[name]))).hexdigest()[:16]
_INDEX = _FILES.pop("index.html").replace(b"{version}", VERSION.encode())
# Everything from this server and nothing inline; and no text can become HTML, whatever the scripts do with it.
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


@router.head("/", include_in_schema=False)
@router.get("/", include_in_schema=False)
async def index(request: Request) -> Response:
    """The page, for browsers. Whoever does not ask for HTML is told that there is no such path."""
    if "text/html" not in request.headers.get("accept", ""):
        raise HTTPException(404)
    return _answer(request, _INDEX, ".html", "no-cache", {"vary": "accept"})


@router.head(PREFIX + "{version}/{name}", include_in_schema=False)
@router.get(PREFIX + "{version}/{name}", include_in_schema=False)
async def static_file(request: Request, version: str, name: str) -> Response:
    """A file of the page. Another version's path gets today's file, not to be kept."""
    if name not in _FILES:
        raise HTTPException(404)
    keep = "public, max-age=31536000, immutable" if version == VERSION else "no-cache"
    return _answer(request, _FILES[name], Path(name).suffix, keep, {})


def _answer(request: Request, body: bytes, suffix: str, keep: str, more: dict[str, str]) -> Response:
    headers = {**_HEADERS, **more, "etag": f'"{VERSION}"', "cache-control": keep}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=_TYPES[suffix])
