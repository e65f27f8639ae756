"""The search page: a small web application for one person on their own machine.

    /                     the page
    /api/about            the run and the gallery in numbers
    /api/items            images to begin from: ?label=TEXT&seed=N&offset=N&limit=N
    /api/search           GET ?item=ID or ?link=TEXT, or POST with an image in the form field "image"; with ?k=N&label=TEXT
                          and ?box=LEFT,TOP,RIGHT,BOTTOM, shares of the image's width and height; for a gallery of texts
                          GET ?text=TEXT
    /thumb/ID             a small JPEG of an image of the gallery

Images are named by their number alone; nothing that comes with a request becomes a path. Uploads are decoded and embedded one
at a time in a thread of their own, thumbnails in a few others, so that neither holds up the rest. Every wait for a client has
a time limit.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import anyio

# starlette would miss it only when the first form arrives
import python_multipart  # noqa: F401
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rankgrad.search.search_service import MOST_BYTES, Box, RefusedError, SearchService, too_large

T = TypeVar("T")

PAGE = Path(__file__).parent / "page"
ASSETS = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src 'self' blob:; base-uri 'none'; object-src 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
NEIGHBOURS, MOST_NEIGHBOURS = 24, 100
SHOWN, MOST_SHOWN = 24, 96
# what a form adds around the file in it
FORM_BYTES = 10_000

# seconds that a client has for the head of a request, for reading what it was sent, and for an upload
HEAD_SECONDS, READ_SECONDS, UPLOAD_SECONDS = 10, 30, 60
# uploads that wait for the one at work; their bytes wait on disk
MOST_WAITING = 64
THUMB_THREADS = 4


def make_app(service: SearchService, *, hosts: list[str]) -> ASGIApp:
    """The application. `hosts` are the names it may be called by, which keeps other sites' scripts from reaching it."""
    assets = {path: (PAGE / name).read_bytes() for path, (name, _) in ASSETS.items()}
    uploads, thumbs = WorkQueue(threads=1, most=MOST_WAITING), WorkQueue(threads=THUMB_THREADS)

    async def asset(request: Request) -> Response:
        path = request.url.path
        return Response(assets[path], media_type=ASSETS[path][1], headers={"cache-control": "no-cache"})

    async def about(request: Request) -> Response:
        return _json(service.about())

    async def items(request: Request) -> Response:
        asked = request.query_params
        label = _label(asked)
        numbers = (
            _number(asked, "seed", 0, 2**32),
            _number(asked, "offset", 0, len(service.gallery)),
            _number(asked, "limit", SHOWN, MOST_SHOWN, least=1),
        )
        return _json(await run_in_threadpool(service.items, label, *numbers))

    async def search(request: Request) -> Response:
        asked = request.query_params
        k, label, box = _number(asked, "k", NEIGHBOURS, MOST_NEIGHBOURS, least=1), _label(asked), _box(asked)
        if request.method == "POST":
            async with _uploaded(request) as image:
                work = partial(service.search_with, k=k, label=label, box=box)
                return _json(await uploads.run(lambda: work(image.file.read(MOST_BYTES + 1))))
        if "text" in asked:
            return _json(await uploads.run(partial(service.search_text, asked["text"], k, label)))
        if "link" in asked:
            return _json(await run_in_threadpool(service.search_link, asked["link"], k, label))
        if "item" not in asked:
            raise RefusedError(400, "Say what to search from: ?item=ID, or send an image.")
        row = _number(asked, "item", 0, 2**63 - 1)
        if box is not None:
            return _json(await uploads.run(partial(service.search_part, row, box, k, label)))
        return _json(await run_in_threadpool(service.search_from, row, k, label))

    async def thumb(request: Request) -> Response:
        row = _row_in(request.path_params["row"])
        content = await thumbs.run(lambda: service.thumb(row))
        # the page puts the gallery's version into the address, so a cached one is never another gallery's
        return Response(content, media_type="image/jpeg", headers={"cache-control": "private, max-age=86400, immutable"})

    routes = [Route(path, asset) for path in ASSETS]
    routes += [
        Route("/api/about", about),
        Route("/api/items", items),
        Route("/api/search", search, methods=["GET", "POST"]),
        Route("/thumb/{row}", thumb),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)],
        exception_handlers={RefusedError: _refused, HTTPException: _http_error, 500: _failed},
    )
    # around everything, so that the answer to an error inside has the headers, too
    return SecurityHeaders(app)


class WorkQueue:
    """Work in a few threads of its own, refused where too much is waiting already."""

    def __init__(self, *, threads: int, most: int | None = None) -> None:
        self._pool: Executor = ThreadPoolExecutor(threads)
        self._most, self._waiting = most, 0

    async def run(self, work: Callable[[], T]) -> T:
        if self._most is not None and self._waiting > self._most:
            raise RefusedError(503, "The server is busy with other searches. Try again in a few seconds.")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._waiting -= 1


class SecurityHeaders:
    """Adds the security headers to every answer, and refuses what another site's page asks for."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif _is_cross_site(Headers(scope=scope)) and scope["path"] != "/":
            answer = _json({"error": "This page answers only itself."}, 403)
            await answer(scope, receive, send_with_headers)
        else:
            await self.app(scope, receive, send_with_headers)


class TimedProtocol(H11Protocol):
    """uvicorn's HTTP, which closes connections that do not send a request or do not read an answer in time."""

    _head_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_head_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def on_response_complete(self) -> None:
        self._stop_head_timer()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read_timer = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_read_timer()
        super().connection_lost(exc)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None


def _is_cross_site(headers: Mapping[str, str]) -> bool:
    """Whether another site's page sent the request; following a link to the page itself is no harm."""
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return True
    origin = headers.get("origin")
    if origin is None:
        return False
    try:
        return urlsplit(origin).netloc.lower() != headers.get("host", "").lower()
    except ValueError:
        return True


@contextlib.asynccontextmanager
async def _uploaded(request: Request) -> AsyncIterator[UploadFile]:
    """The file in the form field "image", read no further than the limit and no longer than `UPLOAD_SECONDS`."""
    stated = request.headers.get("content-length", "0")
    if not stated.isascii() or not stated.isdigit() or len(stated) > 15 or int(stated) > MOST_BYTES + FORM_BYTES:
        raise too_large()
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise RefusedError(415, 'Send the image as the field "image" of a form (multipart/form-data).')
    try:
        with anyio.fail_after(UPLOAD_SECONDS):
            form = await MultiPartParser(request.headers, _limited(request), max_files=1, max_fields=0).parse()
    except TimeoutError:
        raise RefusedError(408, f"The upload took longer than {UPLOAD_SECONDS} seconds.") from None
    except TooLargeError:
        raise too_large() from None
    except (MultiPartException, KeyError):
        raise RefusedError(400, "The form cannot be read: it must hold one image and nothing else.") from None
    try:
        image = form.get("image")
        if not isinstance(image, UploadFile):
            raise RefusedError(400, 'The form has no file in the field "image".')
        yield image
    finally:
        await form.close()


class TooLargeError(MultiPartException):
    """A `MultiPartException`, because on those the parser closes its temporary files."""


async def _limited(request: Request) -> AsyncGenerator[bytes, None]:
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > MOST_BYTES + FORM_BYTES:
                raise TooLargeError("larger than the limit")
            yield chunk
    except ClientDisconnect:
        raise MultiPartException("disconnected") from None


def _number(given: Mapping[str, str], name: str, default: int, most: int, *, least: int = 0) -> int:
    text = given.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
        raise RefusedError(400, f"{name} must be a whole number from {least} to {most}.")
    return int(text)


def _label(given: Mapping[str, str]) -> str:
    return given.get("label", "").strip()[:200]


def _box(given: Mapping[str, str]) -> Box | None:
    if "box" not in given:
        return None
    if not re.fullmatch(r"([01](\.[0-9]{1,6})?,){3}[01](\.[0-9]{1,6})?", given["box"]):
        raise RefusedError(400, "box must be four numbers from 0 to 1: left, top, right and bottom.")
    left, top, right, bottom = map(float, given["box"].split(","))
    if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
        raise RefusedError(400, "box must have its left edge before its right and its top above its bottom, inside the image.")
    return left, top, right, bottom


def _row_in(text: str) -> int:
    """The number at the end of an address."""
    if not (text.isascii() and text.isdigit()):
        raise HTTPException(404)
    if len(text) > 18:
        raise RefusedError(404, "There is no image with such a number.")
    return int(text)


def _json(content: Mapping[str, Any], status: int = 200) -> JSONResponse:
    return JSONResponse(dict(content), status, headers={"cache-control": "no-store"})


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return _json({"error": error.sentence}, error.status)


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _json({"error": f"{error.detail}."}, error.status_code)


def _failed(request: Request, error: Exception) -> Response:
    return _json({"error": "The search failed; the terminal says why."}, 500)
