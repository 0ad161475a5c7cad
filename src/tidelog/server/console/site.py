"""Handles a request to the console: finds its page, checks who asks, and renders it.

1. find the place; none is 404, another method 405
2. let the request in, as the gate does; without a token the answer is the form that asks for one
3. for a form: its origin, its mark, and the right to change something
4. make the page in a thread, and send it with headers that allow nothing but our own files

This module lists every address of the console, with who may ask for it. Templates and the files
beside them are read once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import jinja2
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from tidelog.coordination.audit import record_action
from tidelog.errors import InternalError, NotFoundError, TidelogError, contained
from tidelog.home import Home
from tidelog.model.token import Scope as Right
from tidelog.server.api.openapi import description
from tidelog.server.api.openapi_parts import COMMON_ERRORS, limits_text
from tidelog.server.api.sql import SqlRunner, end_with_client
from tidelog.server.api.tail import Tails
from tidelog.server.console import format as showing
from tidelog.server.console.actions import ActionPages
from tidelog.server.console.archives import ArchivePages, Pipelines
from tidelog.server.console.events import EventPages, SqlPages
from tidelog.server.console.forms import Fields, FormPages
from tidelog.server.console.jobs import JobPages, JobRunner
from tidelog.server.console.journals import JournalPages
from tidelog.server.console.sampler import Sampler
from tidelog.server.console.session import (
    Answer,
    Data,
    Handler,
    Redirect,
    Session,
    Sessions,
    ShownPage,
    TokenPages,
    Visit,
    cookie_of,
)
from tidelog.server.console.topics import ConsumerPages, TopicPages
from tidelog.server.http.auth import ADMISSION, Admission, Gate
from tidelog.server.http.connection import REQUEST_ID
from tidelog.server.http.errors import (
    DisconnectedError,
    ForbiddenError,
    MethodError,
    UnauthorizedError,
    answer_error,
    shape,
    status_of,
)
from tidelog.server.http.limits import ServerThreads
from tidelog.server.http.logs import ErrorLog
from tidelog.server.http.metrics import Metrics
from tidelog.server.http.request import WholeRoute
from tidelog.server.http.usage import ClientUsage
from tidelog.server.options import ServeOptions

__all__ = ["PAGE_HEADERS", "PLACES", "Console", "Route"]

_HERE = Path(__file__).parent
_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class StaticFile:
    """A file that pages refer to, and the digest by which a browser knows it."""

    def __init__(self, path: Path) -> None:
        self.body = path.read_bytes()
        self.media_type = _TYPES[path.suffix]
        self.digest = hashlib.sha256(self.body).hexdigest()[:12]


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
        for name in (
            "duration",
            "limit",
            "number",
            "one_line",
            "rate",
            "short",
            "size",
            "visible",
            "when",
        ):
            self._templates.filters[name] = getattr(showing, name)
        for name in ("counted", "json_markup", "message", "process"):
            self._templates.filters[name] = getattr(showing, name)
        self._templates.filters["ago"] = showing.ago
        self._templates.globals["url"] = showing.url
        self._templates.globals["static"] = self._static

    def render(self, template: str, values: Mapping[str, Any]) -> bytes:
        """Renders a page."""
        return self._templates.get_template(template).render(values).encode("utf-8", "replace")

    def file(self, name: str) -> StaticFile:
        """Returns a file of ours. Raises ``NotFoundError``."""
        found = self._files.get(name)
        if found is None:
            raise NotFoundError(f"file `{name[:80]}`: not found: the console has none of that name")
        return found

    def _static(self, name: str) -> str:
        """Returns the address of a file, which changes with its contents."""
        return f"/console/static/{name}?v={self.file(name).digest}"


def _example(value: object) -> str:
    """Returns an example of the API as a person would type it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Route:
    """One address. All need to read the home; ``right`` is what is needed beside that."""

    name: str
    method: Literal["GET", "POST"]
    path: str
    right: Right | None  # None: no token is needed
    kind: Literal["page", "data"] = "page"  # how an error is shown


_TOPIC = "/console/topics/{topic}"
_EVENT = f"{_TOPIC}/events/{{partition}}/{{offset}}"
_ARCHIVE = "/console/archives/{name}"

PLACES = (
    Route("overview", "GET", "/", "read"),
    Route("start", "GET", "/console", None),
    Route("topics", "GET", "/console/topics", "read"),
    Route("topic_form", "GET", "/console/create-topic", "read"),
    Route("make_topic", "POST", "/console/create-topic", "admin"),
    Route("topic", "GET", _TOPIC, "read"),
    Route("timeline", "GET", f"{_TOPIC}/timeline", "read", "data"),
    Route("play", "POST", f"{_TOPIC}/playback", "admin"),
    Route("events", "GET", f"{_TOPIC}/events", "read"),
    Route("tail", "GET", f"{_TOPIC}/tail", "read", "data"),
    Route("event", "GET", _EVENT, "read"),
    Route("value", "GET", f"{_EVENT}/value", "read"),
    Route("produce_form", "GET", f"{_TOPIC}/produce", "read"),
    Route("produce", "POST", f"{_TOPIC}/produce", "append"),
    Route("correct_form", "GET", f"{_EVENT}/correct", "read"),
    Route("correct", "POST", f"{_EVENT}/correct", "amend"),
    Route("consumers", "GET", "/console/consumers", "read"),
    Route("consumer", "GET", "/console/consumer", "read"),
    Route("move", "POST", "/console/consumer/move", "admin"),
    Route("archives", "GET", "/console/archives", "read"),
    Route("archive", "GET", _ARCHIVE, "read"),
    Route("files", "GET", f"{_ARCHIVE}/files", "read"),
    Route("dead", "GET", f"{_ARCHIVE}/dead", "read"),
    Route("act", "POST", f"{_ARCHIVE}/act", "admin"),
    Route("pump", "GET", "/console/pumps/{name}", "read"),
    Route("sql", "GET", "/console/sql", "read"),
    Route("query", "POST", "/console/sql", "read"),
    Route("journals", "GET", "/console/journals", "read"),
    Route("journal", "GET", f"{_TOPIC}/journals", "read"),
    Route("erase", "POST", f"{_TOPIC}/erase", "erase"),
    Route("prove", "POST", f"{_TOPIC}/prove", "erase"),
    Route("proof", "GET", "/console/proofs/{job}", "read"),
    Route("jobs", "GET", "/console/jobs", "read"),
    Route("stop", "POST", "/console/jobs/stop", "admin"),
    Route("forget", "POST", "/console/jobs/forget", "admin"),
    Route("tokens", "GET", "/console/tokens", "read"),
    Route("create", "POST", "/console/tokens", "admin"),
    Route("revoke", "POST", "/console/tokens/revoke", "admin"),
    Route("login", "POST", "/console/login", None),
    Route("logout", "POST", "/console/logout", None),
    Route("static", "GET", "/console/static/{file}", None, "data"),
)


_FORM_PAGES = {  # which page has the form that is sent to a place
    "make_topic": "topic_form",
    "produce": "produce_form",
    "correct": "correct_form",
    "play": "topic",
    "move": "consumer",
    "act": "archive",
    "query": "sql",
    "erase": "journal",
    "prove": "proof",
    "create": "tokens",
}
_PAGE_FIELDS = ("topic", "name", "job")  # of a form: what its page is about
_OF_TOPIC = ("append", "amend", "erase")  # rights on one topic; others reach beyond one
_THEMES = ("light", "dark")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # with none at all, browsers would hide a form's origin
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}


class Console:
    """The pages of one home. Start it, and stop it at the end."""

    def __init__(
        self,
        home: Home,
        options: ServeOptions,
        gate: Gate,
        threads: ServerThreads,
        shared: tuple[Metrics, ClientUsage, SqlRunner, ErrorLog],
    ) -> None:
        metrics, self._usage, runner, self._error_log = shared
        self._context = home.context
        self._clock = home.context.clock
        self._gate = gate
        self._options = options
        self._threads = threads
        secret = home.context.random.getrandbits
        self._sessions = Sessions(
            gate, options, threads, lambda: f"{secret(256):064x}", self._clock
        )
        self._pages = Templates()
        self._sampler = Sampler(home)
        self._pipelines = Pipelines(home, lambda: self._sampler.is_busy)
        self._jobs = JobRunner(home.context, self._error_log.add)
        self._tails: Tails | None = None
        topics = TopicPages(home, self._sampler, self._pipelines, self._jobs, metrics)
        events = EventPages(home, metrics)
        consumers = ConsumerPages(home, self._sampler)
        archives = ArchivePages(home, self._pipelines)
        journals = JournalPages(home, self._sampler, self._jobs)
        tokens = TokenPages(home)
        jobs = JobPages(home, self._jobs)
        actions = ActionPages(home, self._pipelines, self._jobs)
        sql = SqlPages(home, runner)
        forms = FormPages(home, self._sampler, events)
        self._handlers: dict[str, Handler] = {}
        shown = (topics, events, consumers, archives, actions, journals, tokens, sql, forms, jobs)
        for pages in shown:
            for place in PLACES:
                if hasattr(pages, place.name):
                    self._handlers[place.name] = getattr(pages, place.name)

    def start(self, tails: Tails) -> None:
        """Starts taking samples."""
        self._tails = tails
        self._sampler.start()
        self._pipelines.start()
        self._jobs.open()

    def stop(self) -> None:
        """Stops taking samples, and stops jobs. Blocks."""
        self._jobs.close()
        self._pipelines.stop()
        self._sampler.stop()

    def docs(self) -> bytes:
        """Renders the reference of the API, which needs no token."""
        values = {
            "session": None,
            "theme": "",
            "now_ms": 0,
            "here": "/docs",
            "form_trouble": "",
            "api": description(self._options),
            "common": COMMON_ERRORS,
            "example": _example,
            "limits_text": limits_text,
        }
        return self._pages.render("docs.html", values)

    @staticmethod
    def has(path: str) -> bool:
        """Returns whether a path is the console's."""
        return path == "/" or path.startswith("/console/") or path == "/console"

    async def run(
        self, scope: Scope, receive: Receive, send: Send, headers: dict[bytes, bytes]
    ) -> int:
        """Answers a request. Returns the status."""
        place: Route | None = None
        session: Session | None = None
        try:
            place, path = self._find_counted(scope, headers)
            if place.name == "tail":
                _, scope[ADMISSION] = self._sessions.enter(scope, headers)
                return await self._tail(scope, receive, send, path)
            if place.name == "static":
                return await self._send(scope, receive, send, self._static(path["file"]))
            is_form = place.method == "POST"
            if is_form:
                self._sessions.check_form(headers)
            if place.right is not None:  # before the form: a stranger's is not read
                session, scope[ADMISSION] = self._sessions.enter(scope, headers)
            form = await self._sessions.form(scope, receive, headers) if is_form else {}
            if session is None:
                answer = await self._come_or_go(place, scope, headers, form)
            else:
                answer = await self._answer(place, path, scope, receive, (session, form))
                if place.right == "read":
                    who, name = scope[ADMISSION].who, f"console {place.name}"
                    self._usage.read(who, name, _read_by(place, path))
        except DisconnectedError:
            raise
        except TidelogError as exc:
            if place is not None and place.kind == "data":
                self._note(exc, scope)
                return await answer_error(send, exc)
            answer = self._failed(exc, scope)
        except Exception as exc:  # noqa: BLE001 - a bug of ours must not close the door
            answer = self._failed(InternalError(f"{type(exc).__name__}: {exc}"), scope)
        # A template takes milliseconds, and many of them when it is first used.
        response = await self._threads.run(self._response, answer, session, headers, scope)
        return await self._send(scope, receive, send, response)

    def _find_counted(
        self, scope: Scope, headers: dict[bytes, bytes]
    ) -> tuple[Route, dict[str, str]]:
        """Finds a place; counts a request for a public or unknown path by the client's address.

        Raises ``NotFoundError``, ``MethodError`` or ``TooManyError``.
        """
        found: tuple[Route, dict[str, str]] | None = None
        try:
            found = _find(scope)
        finally:
            if found is None or found[0].right is None:
                self._gate.count_visit(scope, headers)
        return found

    async def _answer(
        self,
        place: Route,
        path: Mapping[str, str],
        scope: Scope,
        receive: Receive,
        shown: tuple[Session, dict[str, str]],
    ) -> Answer:
        """Returns what a page or form shows to a logged-in user. Raises ``ForbiddenError``."""
        session, form = shown
        if place.method == "POST":
            self._sessions.check_mark(session, form)
        topic = path.get("topic") if place.right in _OF_TOPIC else None
        if place.right is not None and not session.may(place.right, topic):
            raise ForbiddenError(
                f"console: this token may not change this: log in with one created with --read and "
                f"--{place.right}"
            )
        query = dict(Request(scope).query_params)
        visit = Visit(path, query, form, session, self._clock.now_ms(), _address(scope))
        admission: Admission = scope[ADMISSION]

        def act() -> Answer:
            self._gate.check(admission)  # the form, or the turn at a thread, may have taken long
            try:
                return self._handlers[place.name](visit)
            except TidelogError as exc:
                return self._form_again(place, visit, exc, scope)

        work: Awaitable[Answer] = self._threads.run(act)
        if place.name == "query":
            work = end_with_client(receive, visit.query_end, work)
        answer = await work
        if place.right == "read":
            self._gate.check(admission)  # it may have taken long, as a query does
        if place.name in ("create", "revoke"):
            # What was created works at once, what was revoked does not. The page is shown in any
            # case: it has the only copy of a new token.
            with contained("tokens", lambda error: self._note(error, scope)):
                await self._gate.refresh()
        return answer

    def _form_again(
        self, place: Route, visit: Visit, error: TidelogError, scope: Scope
    ) -> ShownPage:
        """Returns the page of a form that failed, with the error and with what was typed in it.

        Raises the error if the form has no page, or that cannot be shown.
        """
        name = _FORM_PAGES.get(place.name, "")
        if place.name == "act" and visit.form.get("do") == "replay":
            name = "dead"
        if not name or isinstance(error, ForbiddenError | UnauthorizedError):
            raise error
        named = {each: visit.form[each] for each in _PAGE_FIELDS if each in visit.form}
        empty = replace(visit, path={**named, **visit.path}, query=named, form={})
        try:
            page = self._handlers[name](empty)
        except (TidelogError, KeyError):  # the form does not say what its page is about
            page = None
        if not isinstance(page, ShownPage):
            raise error
        failed = self._failed(error, scope)
        values = {**page.values, "given": visit.form, "form_trouble": failed.values["message"]}
        if isinstance(form := values.get("form"), Fields):
            values["form"] = Fields({k: visit.form.get(k, v) for k, v in form.given.items()})
        return ShownPage(page.template, values, failed.status, failed.headers)

    async def _come_or_go(
        self, place: Route, scope: Scope, headers: dict[bytes, bytes], form: dict[str, str]
    ) -> Answer:
        """Logs in with a token, or out; or goes to the first page."""
        if place.name == "start":
            return Redirect("/")
        if place.name == "logout":
            self._sessions.logout(headers)
            return Redirect("/", self._sessions.cookie(scope, headers, ""))
        text = form.get("token", "").strip()
        to = form.get("next", "/")
        is_plain = to.isascii() and to.isprintable() and not to.startswith(("//", "/\\"))
        if not is_plain or not Console.has(to.partition("?")[0]):
            to = "/"
        begun, admission = await self._sessions.login(scope, headers, text)
        what = f"console from {self._gate.address(scope, headers)}"
        who = admission.who
        await self._threads.run(record_action, self._context, "login", what, who=who)
        cookie = self._sessions.cookie(scope, headers, begun) if begun else ""
        return Redirect(to, cookie)

    async def _tail(
        self, scope: Scope, receive: Receive, send: Send, path: Mapping[str, str]
    ) -> int:
        if self._tails is None:
            raise InternalError("console: was not started")
        response = await self._tails.tail(Request({**scope, "path_params": dict(path)}, receive))
        response.headers.update(PAGE_HEADERS)
        self._usage.read(scope[ADMISSION].who, "console tail", f"topic {path['topic']}")
        return await self._send(scope, receive, send, response)

    def _static(self, name: str) -> Response:
        found = self._pages.file(name)
        headers = {
            **PAGE_HEADERS,
            "cache-control": "public, max-age=86400",
            "etag": f'"{found.digest}"',
        }
        return Response(found.body, headers=headers, media_type=found.media_type)

    def _response(
        self, answer: Answer, session: Session | None, headers: dict[bytes, bytes], scope: Scope
    ) -> Response:
        if isinstance(answer, Redirect):
            response = Response(status_code=303, headers={**PAGE_HEADERS, "location": answer.to})
            if answer.cookie:
                response.headers["set-cookie"] = answer.cookie
            return response
        if isinstance(answer, Data):
            allowed = {**PAGE_HEADERS, **answer.headers}
            return Response(answer.body, headers=allowed, media_type=answer.media_type)
        theme = cookie_of(headers, "tidelog_theme")
        values: dict[str, Any] = {
            "session": session,
            "theme": theme if theme in _THEMES else "",
            "now_ms": self._clock.now_ms(),
            "here": scope["path"],
            "next": _address(scope),
            "given": {},  # what was typed in a form that failed
            "form_trouble": "",
            **answer.values,
        }
        body = self._pages.render(answer.template, values)
        return Response(body, answer.status, {**PAGE_HEADERS, **answer.headers}, "text/html")

    def _note(self, error: TidelogError, scope: Scope) -> None:
        """Prints an error whose details the page does not show."""
        if status_of(error) >= 500:
            self._error_log.add(error, scope[REQUEST_ID].decode())

    def _failed(self, error: TidelogError, scope: Scope) -> ShownPage:
        """Returns an error as a page, or the form that asks for a token."""
        self._note(error, scope)
        status = status_of(error)
        if isinstance(error, UnauthorizedError):
            tried = scope["method"] == "POST" and scope["path"] == "/console/login"
            return ShownPage("login.html", {"tried": tried}, status, {"www-authenticate": "Bearer"})
        headers = {}
        if "allow" in error.context:
            headers["allow"] = str(error.context["allow"])
        if status in (429, 503):
            headers["retry-after"] = str(error.context.get("retry_after_s", 1))
        values = {"message": shape(error)["error"]["message"], "status": status}
        return ShownPage("error.html", values, status, headers)

    async def _send(self, scope: Scope, receive: Receive, send: Send, response: Response) -> int:
        with contextlib.suppress(OSError):
            await response(scope, receive, send)
        return response.status_code


def _find(scope: Scope) -> tuple[Route, dict[str, str]]:
    """Returns a request's place and path values. Raises ``NotFoundError`` or ``MethodError``."""
    allowed: set[str] = set()
    for place in PLACES:
        match, child = _ROUTES[place].matches(scope)
        if match is Match.FULL:
            return place, child["path_params"]
        if match is not Match.NONE:
            allowed |= _ROUTES[place].methods or set()
    path = scope["path"][:80]
    if not allowed:
        raise NotFoundError(f"page `{path}`: not found: begin at the overview")
    allow = ", ".join(sorted(allowed))
    raise MethodError(f"page `{path}`: allows {allow}: use one of them", allow=allow)


def _read_by(place: Route, path: Mapping[str, str]) -> str:
    """Returns what a page reads, for the audit."""
    if "topic" in path:
        return f"topic {path['topic']}"
    if "name" in path:
        return f"{'pump' if place.name == 'pump' else 'archive'} {path['name']}"
    return "home"


def _address(scope: Scope) -> str:
    """Returns path and query, as a browser shows them."""
    query = scope["query_string"].decode("latin-1")
    path = quote(scope["path"])
    return f"{path}?{query}" if query else path


async def _nowhere(request: Request) -> Response:
    """Never runs: routes are only matched."""
    raise InternalError(f"path `{request.url.path}`: was routed")


_ROUTES = {place: WholeRoute(place.path, _nowhere, methods=[place.method]) for place in PLACES}
for _place, _route in _ROUTES.items():
    if _place.name == "tail" and _route.methods:
        _route.methods.discard("HEAD")  # it would never end
