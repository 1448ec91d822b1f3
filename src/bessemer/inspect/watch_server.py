"""The server of the live page: the page's files, what is new of each run, one rank's details, Prometheus' text.

    GET /                 the page                      GET /metrics   figures for Prometheus
    GET /page.css, .js    what it is made of            GET /runs      names of the runs
    GET /poll?run=0&...   what is new (`Seen`): "BWF1", length of the JSON (uint32), JSON, the frame of all ranks
    GET /rank?run=0&rank=7   one rank

It only reads. Nobody is asked for a name on this computer; who listens elsewhere must give a secret.
"""

from __future__ import annotations

import base64
import binascii
import errno
import hmac
import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from bessemer.core.errors import RequestError
from bessemer.inspect.watch_page import CSP, page, script, style
from bessemer.inspect.watch_prometheus import CONTENT_TYPE, exposition
from bessemer.inspect.watch_run import RunWatch, Seen

__all__ = ["LOOPBACK", "MAGIC", "application", "listen", "serve"]

MAGIC = b"BWF1"
LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
"""This computer, as an address to listen on and as browsers name it."""
_HEADERS = {"Content-Security-Policy": CSP, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store"}  # fmt: skip


def application(runs: Sequence[RunWatch], *, hosts: Sequence[str] = LOOPBACK, secret: str = "") -> Starlette:
    """The server of `runs`. hosts: names by which it may be called, so that a page of another site that gets its name
    to point here reads nothing. secret: the password that a browser or Prometheus must give (any user's name)."""

    def run_of(request: Request) -> RunWatch:
        number = _number(request, "run")
        if not 0 <= number < len(runs):
            raise ValueError(f"run = {number}, there are {len(runs)}")
        return runs[number]

    def poll(request: Request) -> Response:
        run = run_of(request)
        seen = Seen(
            generation=_number(request, "generation", -1),
            rows=_number(request, "rows"),
            events=_number(request, "events"),
            reading=_number(request, "reading", -1),
            place=_number(request, "place", -1),
            ranks=_number(request, "ranks", 1) != 0,
        )
        run.look()
        told, frame = run.told(seen)
        return Response(packed(told, frame), media_type="application/octet-stream")

    def rank(request: Request) -> Response:
        found = run_of(request).detail(_number(request, "rank"))
        return JSONResponse(found) if found is not None else JSONResponse({"error": "no such rank"}, 404)

    def prometheus(_request: Request) -> Response:
        for run in runs:
            run.look()
        return Response(exposition(runs), media_type=CONTENT_TYPE)

    routes = [
        Route("/", lambda _: Response(page(), media_type="text/html")),
        Route("/page.css", lambda _: Response(style(), media_type="text/css")),
        Route("/page.js", lambda _: Response(script(), media_type="text/javascript")),
        Route("/runs", lambda _: JSONResponse([run.name for run in runs])),
        Route("/poll", poll),
        Route("/rank", rank),
        Route("/metrics", prometheus),
    ]
    middleware = [Middleware(_Guard, secret=secret), Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))]
    return Starlette(routes=routes, middleware=middleware, exception_handlers={ValueError: _refused})


def packed(told: dict[str, Any], frame: bytes) -> bytes:
    """One answer: JSON padded so that the frame behind it begins at a multiple of 8 bytes."""
    text = json.dumps(told, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-len(text) % 8)
    return MAGIC + struct.pack("<I", len(text)) + text + frame


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. RequestError `port-taken` or `watch-address` says what to type instead."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(64)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            text = f"another program listens on port {port} of {host}"
            raise RequestError(text, code="port-taken", fix="--port 0, which takes a free one and prints it") from error
        text = f"can't listen on {host}, port {port}: {error.strerror}"
        fix = "--host 127.0.0.1 --port 0" if error.errno != errno.EACCES else "--port 0, or one above 1023"
        raise RequestError(text, code="watch-address", fix=fix) from error
    return sock


def serve(app: ASGIApp, sock: socket.socket) -> None:
    """Serves until SIGINT or SIGTERM."""
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=2)
    uvicorn.Server(config).run([sock])


class _Guard:
    """Asks for the secret where there is one, and sends the headers that keep a page to itself."""

    def __init__(self, app: ASGIApp, secret: str) -> None:
        self._app, self._secret = app, secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(k.lower().encode(), v.encode()) for k, v in _HEADERS.items()]
            await send(message)

        if self._secret and not _knows(Headers(scope=scope).get("authorization", ""), self._secret):
            ask = {"WWW-Authenticate": 'Basic realm="bessemer watch", charset="UTF-8"'}
            answer = PlainTextResponse("the run's secret, please", 401, headers=ask)
            await answer(scope, receive, with_headers)
            return
        await self._app(scope, receive, with_headers)


def _knows(header: str, secret: str) -> bool:
    kind, _, value = header.partition(" ")
    try:
        _, _, given = base64.b64decode(value, validate=True).partition(b":")
    except binascii.Error:
        return False
    return kind.lower() == "basic" and hmac.compare_digest(given, secret.encode())


def _number(request: Request, name: str, default: int = 0) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"{name} = {text!r} is no whole number") from error


def _refused(_request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 400)
