"""Static pages: the playground and the API documentation, without external resources."""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGES = {
    "/": ("index.html", "text/html"),
    "/playground.css": ("playground.css", "text/css"),
    "/playground.js": ("playground.js", "text/javascript"),
    "/docs": ("docs.html", "text/html"),
    "/docs.css": ("docs.css", "text/css"),
    "/docs.js": ("docs.js", "text/javascript"),
    "/style.css": ("style.css", "text/css"),
}
OPEN_PAGES = frozenset(_PAGES)  # served without a key: they contain no data


def routes() -> list[Route]:
    return [_route(path, name, media) for path, (name, media) in _PAGES.items()]


def _route(path: str, name: str, media: str) -> Route:
    content = files("coordinator.api.http").joinpath("page", name).read_bytes()
    headers = {
        "Content-Security-Policy": _POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    async def page(request: Request) -> Response:
        return Response(content, media_type=media, headers=headers)

    return Route(path, page)
