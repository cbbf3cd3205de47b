"""The page that shows people what speculation does: its files, and the routes that serve them."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Response

from jaxspec.common.errors import quoted
from jaxspec.server.refusal import Refusal

FOLDER = Path(__file__).with_name("static")
INDEX = "index.html"
# File of FOLDER -> its media type. No other file is served.
FILES = {
    INDEX: "text/html",
    "page.css": "text/css",
    "page.js": "text/javascript",
    "answer.js": "text/javascript",
    "elements.js": "text/javascript",
    "figures.js": "text/javascript",
    "stream.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
# The browser loads only files of this server, runs no script in a text, and shows the page in no frame.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
METHODS = ["GET", "HEAD"]

routes = APIRouter()


def served(name: str) -> Response:
    """Return the response with a file of the page."""
    return Response((FOLDER / name).read_bytes(), media_type=f"{FILES[name]}; charset=utf-8", headers=HEADERS)


@routes.api_route("/", methods=METHODS)
def page() -> Response:
    """Return the page."""
    return served(INDEX)


@routes.api_route("/page/{name}", methods=METHODS)
def page_file(name: str) -> Response:
    """Return a file that the page loads."""
    if name not in FILES:
        raise Refusal(404, f"the page has no file {quoted(name, 40)}")
    return served(name)
