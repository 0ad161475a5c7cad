"""One running ``tidelog up``: its programs, what they report, and the row that says so to all.

Programs are kept by a ``Supervisor``. The one that follows archives and pumps reports each of them
as a part of its own, by JSON lines; the server says where it listens. A thread writes the keeper's
row, so that a catalog that is out of reach holds nothing up.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tidelog.cli.exit_codes import FailedError
from tidelog.cli.up_view import View
from tidelog.errors import TidelogError
from tidelog.home import Home
from tidelog.log.keepers import BEAT_MS, Keeper, Part, put_keeper, remove_keeper
from tidelog.model.decoding import decode_json
from tidelog.pipeline.supervisor import Program, Running, Supervisor

__all__ = ["Keeping"]

_SERVE = "serve"
_ANNOUNCE_S = 2.0  # at most so often
_PARTS_MAX = 500  # in the row, which has a limit; those in trouble go first


@dataclass(frozen=True)
class _Said:
    """A line of a program that was JSON."""

    fields: dict[str, object]

    def text(self, name: str) -> str:
        found = self.fields.get(name)
        return found if isinstance(found, str) else ""


class Keeping:
    """Keeps programs running, shows them, and tells the home about them."""

    def __init__(self, home: Home, view: View, grace_s: float) -> None:
        self._home = home
        self._view = view
        self._parts: dict[str, Part] = {}
        self._commands: dict[str, list[str]] = {}
        self.url = ""
        self._first_error = ""
        self._stopping = False
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._ended = threading.Event()
        log = home.log
        self._started_ms = log.clock.now_ms()
        self._id = log.ids.new()
        self._supervisor = Supervisor(
            log.clock, log.random, self._on_running, self._on_line, grace_s
        )

    def add(self, name: str, command: Sequence[str]) -> None:
        """Keep a program."""
        self._commands[name] = list(command)
        self._supervisor.add(Program(name, command))

    def run(self, stop: threading.Event, for_s: float | None = None) -> None:
        """Until told to stop, or for some seconds after the server has begun to listen.

        Call it from the main thread: programs die with the thread that started them.
        ``FailedError`` where the server cannot even start.
        """
        clock = self._home.log.clock
        ends_s: float | None = None
        announcing = threading.Thread(target=self._announce, name="tidelog-keeper", daemon=True)
        announcing.start()
        try:
            while not stop.is_set():
                self._supervisor.tick()
                if self._first_error and not self.url:
                    raise FailedError(self._first_error)
                if self.url and for_s is not None:
                    ends_s = clock.monotonic_s() + for_s if ends_s is None else ends_s
                    if clock.monotonic_s() >= ends_s:
                        break
            self._stopping = True
            self._view.say("Stopping: what is under way is finished.")
            self._supervisor.stop()
        finally:
            self._supervisor.kill()  # nobody is left, whatever has happened
            self._ended.set()
            self._changed.set()
            announcing.join(5.0)

    def parts(self) -> list[Part]:
        """All of them, programs first."""
        with self._lock:
            known = list(self._parts.values())
        return sorted(known, key=lambda part: (part.name not in self._commands, part.name))

    def _on_running(self, running: Running) -> None:
        error = _message(running.error)
        if running.name == _SERVE and running.state == "failed":
            self._first_error = self._first_error or error
        before = self._parts.get(running.name)
        same = before is not None and before.state == running.state
        self._put(
            Part(
                name=running.name,
                state=running.state,
                since_ms=before.since_ms if before and same else self._home.log.clock.now_ms(),
                pid=running.pid,
                restarts=running.restarts,
                error=error,
            )
        )

    def _on_line(self, name: str, text: str, is_complaint: bool) -> None:
        said = _said(text)
        if is_complaint:
            self._view.complain(name, _message(text))
        elif said is None:
            self._view.say(f"{name}: {text}")
        elif said.text("part"):
            own = {key: said.fields[key] for key in Part.__struct_fields__ if key in said.fields}
            with contextlib.suppress(msgspec.ValidationError):
                part = {**own, "name": said.text("part")}
                self._put(decode_json(msgspec.json.encode(part), Part))
        elif name == _SERVE and said.text("url"):
            self._listening(said)
        elif "error" in said.fields:
            self._view.complain(name, _message(text))

    def _listening(self, said: _Said) -> None:
        """The server's address; it keeps the port that it was given first."""
        if self.url:
            return
        self.url = said.text("url")
        command = self._commands[_SERVE]
        command[command.index("--port") + 1] = self.url.rpartition(":")[2]
        self._supervisor.change(Program(_SERVE, command))
        self._view.listening(self.url, bool(said.fields.get("open")))
        self._changed.set()

    def _put(self, part: Part) -> None:
        with self._lock:
            self._parts[part.name] = part
            is_gone = part.name not in self._commands and part.state == "stopped"
            if is_gone and not self._stopping:
                del self._parts[part.name]
        self._view.changed(part, self.parts())
        self._changed.set()

    # In the thread that tells the home.

    def _announce(self) -> None:
        log = self._home.log
        keeper = Keeper(
            id=self._id,
            host=socket.gethostname(),
            pid=os.getpid(),
            mark=log.processes.mark(),
            started_ms=self._started_ms,
            beat_ms=0,
        )
        while not self._ended.is_set():
            self._changed.clear()
            parts = sorted(self.parts(), key=lambda part: not part.error)[:_PARTS_MAX]
            now = msgspec.structs.replace(
                keeper, beat_ms=log.clock.now_ms(), url=self.url, parts=tuple(parts)
            )
            with contextlib.suppress(TidelogError):  # the next beat may come through
                put_keeper(log, now)
            if not self._ended.wait(_ANNOUNCE_S):
                self._changed.wait(BEAT_MS / 1000)
        with contextlib.suppress(TidelogError):
            remove_keeper(log, self._id)


def _said(text: str) -> _Said | None:
    try:
        return _Said(decode_json(text, dict[str, object]))
    except msgspec.MsgspecError:
        return None


def _message(text: str) -> str:
    """What a program complained of: the message of a JSON error, or the line as it is."""
    said = _said(text)
    error = said.fields.get("error") if said is not None else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return str(error["message"])
    return text.removeprefix("error: ")
