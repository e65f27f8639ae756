"""The search page: a small web application for one person on their own machine.

    /                     the page
    /api/about            the run and the gallery in numbers
    /api/items            images to begin from: ?label=TEXT&seed=N&offset=N&limit=N
    /api/search           GET ?item=ID, or POST with an image in the form field "image"; ?k=N
    /thumb/ID             a small JPEG of an image of the gallery

Images are named by their number alone; nothing that comes with a request becomes a path. The network works in a thread, one
request at a time, while the page and its pictures are served on.
"""

import io
import threading
import time
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

# starlette would miss it only when the first form arrives
import python_multipart  # noqa: F401
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rankgrad.data.image_files import ImageDecoder, UnreadableImageError
from rankgrad.data.seeds import bits, permutation
from rankgrad.search.searcher import Searcher
from rankgrad.search.trained_model import Network
from rankgrad.search.uploads import KINDS, MOST_BYTES, MOST_PIXELS, RefusedError, embed_upload, too_large

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
# pixels of a thumbnail: its short side, and the most of its long side
THUMB, THUMB_LONG = 256, 640
# what a form adds around the file in it
FORM_BYTES = 10_000


class SearchPage:
    """What the page is asked and answers, without the web around it."""

    def __init__(self, network: Network, searcher: Searcher) -> None:
        self.network, self.searcher, self.gallery = network, searcher, searcher.gallery
        self.gallery.check_fits(network)
        self._decoder = ImageDecoder(self.gallery.items.table, THUMB, square=False)
        self._working = threading.Lock()
        # labels are looked through once per different one
        self._names, self._name_of = np.unique(np.array(self.gallery.items.labels), return_inverse=True)

    def about(self) -> dict[str, Any]:
        network = self.network
        return {
            "run": network.folder.resolve().name,
            "recipe": network.recipe.name,
            "trunk": network.recipe.trunk,
            "step": network.step,
            "checkpoint": network.checkpoint,
            "debug": network.debug,
            "gallery": self.gallery.about["source"],
            "images": len(self.gallery),
            "classes": len(self.gallery.class_sizes),
            "dim": self.gallery.embeddings.shape[1],
            "index": self.searcher.kind,
            "version": self.gallery.digest[:8],
            "most_bytes": MOST_BYTES,
            "most_pixels": MOST_PIXELS,
            "kinds": KINDS,
        }

    def items(self, label: str, seed: int, offset: int, limit: int) -> dict[str, Any]:
        """Images in an order that `seed` decides, those whose label contains `label`."""
        order = permutation(len(self.gallery), bits(seed, "page"))
        if label:
            wanted = np.array([label.casefold() in name.casefold() for name in self._names.tolist()], dtype=np.bool_)
            order = order[wanted[self._name_of[order]]]
        chosen = order[offset : offset + limit].tolist()
        return {"total": len(order), "offset": offset, "items": [self.item(row) for row in chosen]}

    def item(self, row: int) -> dict[str, Any]:
        items = self.gallery.items
        label = items.labels[row]
        return {
            "id": row,
            "label": label,
            "category": items.categories[row],
            "name": items.table.paths[row],
            "class_size": self.gallery.class_sizes.get(label, 0),
        }

    def search_from(self, row: int, k: int) -> dict[str, Any]:
        began = time.perf_counter()
        scores, rows = self.searcher.search_from(self._checked(row), k)
        query = self.item(row)
        found = self._found(scores, rows, query["label"])
        return {"query": query, "results": found, "seconds": round(time.perf_counter() - began, 4)}

    def search_with(self, content: bytes, k: int) -> dict[str, Any]:
        began = time.perf_counter()
        with self._working:
            embedding = embed_upload(self.network, content)
        scores, rows = self.searcher.search(embedding[None], k)
        found = self._found(scores[0], rows[0], "")
        return {"query": None, "results": found, "seconds": round(time.perf_counter() - began, 4)}

    def _found(self, scores: NDArray[np.float32], rows: NDArray[np.int64], label: str) -> list[dict[str, Any]]:
        """One entry per neighbour; `right` says whether it is of the query's class, None where nobody knows."""
        found: list[dict[str, Any]] = []
        for score, row in zip(scores.tolist(), rows.tolist(), strict=True):
            if row >= 0:
                item = self.item(row)
                right = item["label"] == label if label and item["label"] else None
                found.append({**item, "rank": len(found) + 1, "score": round(score, 4), "right": right})
        return found

    def thumb(self, row: int) -> bytes:
        """A JPEG without anything that its file says about camera, place or owner."""
        try:
            image = self._decoder.image(self._checked(row))
        except UnreadableImageError:
            raise RefusedError(404, f"The file of image {row} is no longer there or cannot be read.") from None
        image.thumbnail((THUMB_LONG, THUMB_LONG))
        image.info.clear()
        content = io.BytesIO()
        image.save(content, "JPEG", quality=85)
        return content.getvalue()

    def _checked(self, row: int) -> int:
        if not 0 <= row < len(self.gallery):
            raise RefusedError(404, f"There is no image {row}: the gallery has 0 to {len(self.gallery) - 1}.")
        return row


def make_app(page: SearchPage, *, hosts: list[str]) -> Starlette:
    """The application. `hosts` are the names it may be called by, which keeps other sites' scripts from reaching it."""
    assets = {path: (PAGE / name).read_bytes() for path, (name, _) in ASSETS.items()}

    async def asset(request: Request) -> Response:
        path = request.url.path
        return Response(assets[path], media_type=ASSETS[path][1], headers={"cache-control": "no-cache"})

    async def about(request: Request) -> Response:
        return _json(page.about())

    async def items(request: Request) -> Response:
        asked = request.query_params
        label = asked.get("label", "").strip()[:200]
        numbers = (
            _number(asked, "seed", 0, 2**32),
            _number(asked, "offset", 0, len(page.gallery)),
            _number(asked, "limit", SHOWN, MOST_SHOWN, least=1),
        )
        return _json(await run_in_threadpool(page.items, label, *numbers))

    async def search(request: Request) -> Response:
        k = _number(request.query_params, "k", NEIGHBOURS, MOST_NEIGHBOURS, least=1)
        if request.method == "POST":
            work = partial(page.search_with, await _uploaded(request), k)
        elif "item" in request.query_params:
            work = partial(page.search_from, _number(request.query_params, "item", 0, 2**63 - 1), k)
        else:
            raise RefusedError(400, "Say what to search from: ?item=ID, or send an image.")
        return _json(await run_in_threadpool(work))

    async def thumb(request: Request) -> Response:
        content = await run_in_threadpool(page.thumb, request.path_params["row"])
        # the page puts the gallery's version into the address, so what is kept is never another gallery's
        return Response(content, media_type="image/jpeg", headers={"cache-control": "private, max-age=86400, immutable"})

    routes = [Route(path, asset) for path in ASSETS]
    routes += [
        Route("/api/about", about),
        Route("/api/items", items),
        Route("/api/search", search, methods=["GET", "POST"]),
        Route("/thumb/{row:int}", thumb),
    ]
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(Guard),
            Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False),
        ],
        exception_handlers={RefusedError: _refused, HTTPException: _http_error, 500: _failed},
    )


class Guard:
    """Puts the security headers on every answer, and refuses what another site's page asks for."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif _from_elsewhere(dict(scope["headers"])) and scope["path"] != "/":
            answer = _json({"error": "This page answers only itself."}, 403)
            await answer(scope, receive, send_guarded)
        else:
            await self.app(scope, receive, send_guarded)


def _from_elsewhere(headers: Mapping[bytes, bytes]) -> bool:
    # browsers say so; following a link to the page itself is no harm
    return headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin")


async def _uploaded(request: Request) -> bytes:
    """The content of the form field "image", read no further than the limit."""
    stated = request.headers.get("content-length", "0")
    if not stated.isascii() or not stated.isdigit() or int(stated) > MOST_BYTES + FORM_BYTES:
        raise too_large()
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise RefusedError(415, 'Send the image as the field "image" of a form (multipart/form-data).')
    try:
        parser = MultiPartParser(request.headers, _limited(request), max_files=1, max_fields=0)
        form = await parser.parse()
    except TooLargeError:
        raise too_large() from None
    except (MultiPartException, KeyError):
        raise RefusedError(400, "The form cannot be read: it must hold one image and nothing else.") from None
    try:
        image = form.get("image")
        if not isinstance(image, UploadFile):
            raise RefusedError(400, 'The form has no file in the field "image".')
        return await image.read(MOST_BYTES + 1)
    finally:
        await form.close()


class TooLargeError(MultiPartException):
    """Of the parser's own kind, because at those it closes its temporary files."""


async def _limited(request: Request) -> AsyncGenerator[bytes, None]:
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > MOST_BYTES + FORM_BYTES:
                raise TooLargeError("larger than the limit")
            yield chunk
    except ClientDisconnect:
        raise MultiPartException("broken off") from None


def _number(asked: Mapping[str, str], name: str, default: int, most: int, *, least: int = 0) -> int:
    text = asked.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
        raise RefusedError(400, f"{name} must be a whole number from {least} to {most}.")
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
