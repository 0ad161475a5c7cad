"""Templates and the files beside them: read once, and the same for everybody."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from tidelog.errors import NotFoundError
from tidelog.server.console import format as showing

__all__ = ["StaticFile", "Templates"]

_HERE = Path(__file__).parent
_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class StaticFile:
    """A file that pages refer to, and the mark by which a browser knows it."""

    def __init__(self, path: Path) -> None:
        self.body = path.read_bytes()
        self.media_type = _TYPES[path.suffix]
        self.mark = hashlib.sha256(self.body).hexdigest()[:12]


class Templates:
    """Renders templates. All that they show is escaped."""

    def __init__(self) -> None:
        self._files = {path.name: StaticFile(path) for path in (_HERE / "static").iterdir()}
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(_HERE / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        for name in ("duration", "number", "one_line", "rate", "short", "size", "visible", "when"):
            self._templates.filters[name] = getattr(showing, name)
        self._templates.filters["ago"] = showing.ago
        self._templates.globals["url"] = showing.url
        self._templates.globals["static"] = self._static

    def render(self, template: str, values: Mapping[str, Any]) -> bytes:
        """A page."""
        return self._templates.get_template(template).render(values).encode("utf-8", "replace")

    def file(self, name: str) -> StaticFile:
        """A file of ours. ``NotFoundError``."""
        found = self._files.get(name)
        if found is None:
            raise NotFoundError(f"file `{name[:80]}`: not found: the console has none of that name")
        return found

    def _static(self, name: str) -> str:
        """Its address, another one when its contents change."""
        return f"/console/static/{name}?v={self.file(name).mark}"
