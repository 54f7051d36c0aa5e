"""Static pages: the playground and the API documentation, without external resources."""

from __future__ import annotations

from importlib.resources import files

from starlette.responses import Response
from starlette.routing import Route

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PARTS = ("playground.css", "playground.js", "docs.css", "docs.js", "style.css")
_PAGES = {"/": "index.html", "/docs": "docs.html", **{f"/{name}": name for name in _PARTS}}
_MEDIA = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
OPEN_PAGES = frozenset(_PAGES)  # served without a key: they contain no data


def routes() -> list[Route]:
    return [Route(path, _page(name), methods=["GET"]) for path, name in _PAGES.items()]


def _page(name: str) -> Response:
    content = files("coordinator.api.http").joinpath("page", name).read_bytes()
    headers = {
        "Content-Security-Policy": _POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(content, media_type=_MEDIA[name.rpartition(".")[2]], headers=headers)
