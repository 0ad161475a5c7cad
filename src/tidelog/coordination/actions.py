"""The home's audit: who did what to the home as a whole, such as logins and changes of tokens.

Amendments of events are in the audit of their topic (``journal.audit``). A record is written before
its action, so nothing happens without one; if the action then fails, the record stays. Records are
kept for :data:`ACTIONS_KEPT_MS`; the sweep deletes older ones.
"""

from __future__ import annotations

import os
import pwd
import socket
from collections.abc import Iterator, Mapping
from itertools import islice

from tidelog.catalog.base import ABSENT, Delete, Put
from tidelog.context import Context
from tidelog.coordination.ownership import write_repeatedly
from tidelog.coordination.trusted_time import trusted_now_ms
from tidelog.errors import ConflictError
from tidelog.model import layout
from tidelog.model.decoding import Persisted
from tidelog.model.partition_rows import decode_row, encode_row

__all__ = [
    "ACTIONS_KEPT_MS",
    "WHO_MAX",
    "Action",
    "forget_actions",
    "read_actions",
    "record_action",
    "user_at_host",
]

ACTIONS_KEPT_MS = 400 * 86_400_000  # more than a year
WHO_MAX = 200  # characters
_TEXT_MAX = 500  # characters of each other text
_FORGET_AT_ONCE = 1_000  # records that one sweep deletes at most


class Action(Persisted, frozen=True):
    """One record."""

    id: str
    at_ms: int
    who: str  # user@host, or the token over HTTP
    op: str  # login, token create, cursor move, playback, read, ...
    what: str  # the token, topic, consumer or address
    note: str = ""  # more about it


def record_action(context: Context, op: str, what: str, note: str = "", who: str = "") -> None:
    """Writes a record; call it before the action. By default this process's user did it."""
    by = _stored_text(who or user_at_host(context.environ), WHO_MAX)
    texts = (_stored_text(each, _TEXT_MAX) for each in (what, note))
    action = Action(context.ids.new(), context.clock.now_ms(), by, op, *texts)
    row = layout.audit_row(action.at_ms, action.id)
    try:
        write_repeatedly(context, layout.HOME_AUDIT, Put(row, encode_row(action), ABSENT))
    except ConflictError:
        return  # ids are not reused: an earlier attempt of this very write


def read_actions(context: Context, since_ms: int = 0) -> Iterator[Action]:
    """Yields records from a time on, the oldest first."""
    for row in context.catalog.scan(layout.HOME_AUDIT, layout.audit_row(since_ms, "")):
        yield decode_row(row.value, Action, f"audit row `{row.row}`")


def forget_actions(context: Context) -> int:
    """Deletes some of the records that are too old. Returns how many.

    Their age counts to the newest record, or to the earlier of this machine's time and the store's.
    So no clock that is ahead deletes the audit.
    """
    newest = next(iter(context.catalog.scan(layout.HOME_AUDIT, limit=1, reverse=True)), None)
    if newest is None:
        return 0
    newest_ms = decode_row(newest.value, Action, f"audit row `{newest.row}`").at_ms
    if newest_ms < ACTIONS_KEPT_MS:
        return 0
    before_ms = min(newest_ms, trusted_now_ms(context)) - ACTIONS_KEPT_MS
    end = layout.audit_row(max(0, before_ms), "")
    rows = list(islice(context.catalog.scan(layout.HOME_AUDIT, "", end), _FORGET_AT_ONCE))
    for row in rows:
        change = Delete(row.row, expect=row.version)
        try:
            write_repeatedly(context, layout.HOME_AUDIT, change)
        except ConflictError:
            continue  # another sweep has deleted it
    return len(rows)


def user_at_host(environ: Mapping[str, str]) -> str:
    """Returns the user and host of this process, as far as known."""
    user = environ.get("USER") or environ.get("LOGNAME")
    if not user:
        try:
            user = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            user = str(os.getuid())
    return _stored_text(f"{user}@{socket.gethostname()}", WHO_MAX)


def _stored_text(text: str, most: int) -> str:
    """Returns the text as UTF-8 can hold it. An environment may hold bytes that are not UTF-8."""
    return text.encode(errors="backslashreplace").decode()[:most]
