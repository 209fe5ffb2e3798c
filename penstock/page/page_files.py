"""Serves the page's own files. Only known paths are served: none is made from a request."""

from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from aiohttp import web

KINDS = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain",
}


@cache
def page_files() -> dict[str, tuple[bytes, str]]:
    """Return every file's content and type by its path."""
    return dict(_within(files("penstock.page") / "static", ""))


def _within(folder: Traversable, prefix: str) -> "list[tuple[str, tuple[bytes, str]]]":
    found = []
    for entry in folder.iterdir():
        path = f"{prefix}/{entry.name}"
        if entry.is_dir():
            found += _within(entry, path)
        else:
            kind = next((kind for ending, kind in KINDS.items() if entry.name.endswith(ending)), None)
            if kind is not None:
                found.append((path, (entry.read_bytes(), kind)))
    return found


async def send_page_file(request: web.Request) -> web.Response:
    path = "/index.html" if request.path == "/" else request.path
    found = page_files().get(path)
    if found is None:
        raise web.HTTPNotFound(text="there is no such page")
    body, kind = found
    return web.Response(body=body, content_type=kind, charset="utf-8")
