"""A person's browser for tests of the console: pages, forms with their marks, and no script."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

import httpx

from tests.support.serving import Served

__all__ = ["Browser", "Form", "forms_of", "tags_of", "text_of"]


@dataclass
class Form:
    """A form of a page, as it would be sent."""

    method: str
    action: str
    fields: dict[str, str] = field(default_factory=dict)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.forms: list[Form] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._select = ""
        self._area = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append((tag, given))
        if tag == "form":
            self.forms.append(Form(given.get("method") or "get", given.get("action") or ""))
        elif tag == "input" and self.forms and given.get("name"):
            if given.get("type") in ("radio", "checkbox") and "checked" not in given:
                return
            self.forms[-1].fields[given["name"] or ""] = given.get("value") or ""
        elif tag == "select" and self.forms:
            self._select = given.get("name") or ""
        elif tag == "option" and self._select and self.forms:
            fields = self.forms[-1].fields
            chosen = "selected" in given or self._select not in fields
            fields[self._select] = (given.get("value") or "") if chosen else fields[self._select]

        elif tag == "textarea" and self.forms:
            self._area = given.get("name") or ""
            self.forms[-1].fields[self._area] = ""

    def handle_data(self, data: str) -> None:
        if self._area and self.forms:
            self.forms[-1].fields[self._area] += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "select":
            self._select = ""
        elif tag == "textarea":
            if self._area and self.forms:  # browsers drop the first line end
                fields = self.forms[-1].fields
                fields[self._area] = fields[self._area].removeprefix("\n")
            self._area = ""


def tags_of(page: str) -> list[tuple[str, dict[str, str | None]]]:
    """Every element of a page, and its attributes."""
    reader = _Reader()
    reader.feed(page)
    return reader.tags


def forms_of(page: str) -> list[Form]:
    """The forms of a page."""
    reader = _Reader()
    reader.feed(page)
    return reader.forms


def text_of(page: str) -> str:
    """What a page says, without its elements."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


class Browser:
    """Looks at pages of a server, and sends their forms as a browser would."""

    def __init__(self, served: Served, token: str = "") -> None:
        self.client = httpx.Client(base_url=served.url, timeout=60)
        self.origin = served.url
        if token:
            assert self.login(token).status_code == 303

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *given: object) -> None:
        self.client.close()

    def get(self, path: str, status: int = 200) -> str:
        """A page; checks that it is one."""
        answer = self.client.get(path)
        assert answer.status_code == status, (path, answer.status_code, text_of(answer.text))
        assert answer.headers["content-type"].startswith("text/html")
        return answer.text

    def post(self, path: str, fields: dict[str, str], **headers: str) -> httpx.Response:
        """Send fields, as our own page would unless ``headers`` say otherwise."""
        sent = {"origin": self.origin, "sec-fetch-site": "same-origin"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.post(path, data=fields, headers=sent)

    def send(self, page: str, action: str, **fields: str) -> httpx.Response:
        """Fill in the form of a page that goes to an address, and send it."""
        (form,) = [each for each in forms_of(page) if each.action == action][:1]
        return self.post(form.action, {**form.fields, **fields})

    def login(self, token: str) -> httpx.Response:
        return self.post("/console/login", {"token": token, "next": "/"})
