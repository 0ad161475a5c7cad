"""Queries of people who are not trusted with the machine: each in a process of its own.

The server runs the queries of its clients here. A query sees only the topics and archives that its
caller may read; others do not exist. DuckDB can reach no file, no network, no extension and no
setting. The query is one SELECT, and of DuckDB's table functions only harmless ones are allowed.
Time, memory, rows and bytes of the result are limited. The kernel enforces time and memory, so a
query that hangs or crashes takes only its own process with it.

The parent writes a request as JSON to the child's standard input. The child answers with lines: the
columns, the rows, and how it ended.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tidelog.errors import InternalError, InvalidError, TidelogError, UnavailableError
from tidelog.model.decoding import check_json_depth
from tidelog.model.token import Grant, Token

if TYPE_CHECKING:
    import pyarrow as pa

    from tidelog.context import Context

__all__ = [
    "EVERYTHING",
    "SqlAccess",
    "SqlLimits",
    "SqlResult",
    "check_query",
    "locked_query",
    "run_apart",
]

QUERY_CHARACTERS_MAX = 20_000
_BATCH_ROWS = 256  # that DuckDB collects before rows are counted
_START_S = 30.0  # that a machine under load may need to start a process and to open a home
_OTHER_BYTES = 1 << 30  # of the process, beside what DuckDB may use
_THREADS = 2
_SHORTER = "select fewer events, for example by timestamp >= now() - interval 1 hour"
_FUNCTIONS = frozenset(  # table functions that read nothing but their arguments
    ("generate_series", "json_each", "json_tree", "range", "repeat", "repeat_row", "unnest")
)
_SETTINGS = (
    "SET temp_directory = ''",
    "SET home_directory = ''",
    "SET secret_directory = ''",
    "SET extension_directory = ''",
    "SET allow_community_extensions = false",
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)


@dataclass(frozen=True, slots=True)
class SqlAccess:
    """Which topics and archives a query may see."""

    topics: tuple[str, ...]  # patterns, as in grants of tokens
    archives: bool  # all of them, or none

    def allows(self, kind: str, name: str) -> bool:
        """Returns whether a ``topic`` or an ``archive`` of this name is there."""
        if kind != "topic":
            return self.archives
        return any(Grant("read", pattern).allows("read", name) for pattern in self.topics)

    @classmethod
    def of_token(cls, token: Token) -> SqlAccess:
        """Returns what a token may read. Archives are the home's, so they need all of it."""
        allowed = [
            grant for grant in token.grants if Token("", "", (grant,), 0).allows_some("read")
        ]
        return cls(tuple(grant.topics for grant in allowed), token.allows("read"))


EVERYTHING = SqlAccess(("*",), archives=True)


@dataclass(frozen=True, slots=True)
class SqlLimits:
    """What one query may use."""

    seconds: float = 30.0  # by the clock, from when the home is open
    cpu_seconds: float = 20.0  # of all its threads: waiting for a busy machine does not count
    rows: int = 1_000
    result_bytes: int = 4 << 20
    memory_bytes: int = 512 << 20  # of DuckDB


@dataclass(frozen=True, slots=True)
class SqlResult:
    """The rows of a query, each as a JSON object."""

    columns: list[dict[str, str]]  # name and type
    lines: list[bytes]
    is_whole: bool  # False: a limit was reached, and there are more rows


def run_apart(
    config: str,
    query: str,
    values: list[Any] | dict[str, Any] | None,
    access: SqlAccess,
    limits: SqlLimits,
    note: Callable[[subprocess.Popen[bytes]], None] = lambda child: None,
) -> SqlResult:
    """Runs a query in a process of its own and returns its rows. Blocks.

    ``config`` is the home's config string. ``note`` gets the process, which the caller may kill.
    Raises ``InvalidError`` for a query that is refused or that reaches a limit of time or memory.
    """
    if len(query) > QUERY_CHARACTERS_MAX:
        raise InvalidError(f"sql: has more than {QUERY_CHARACTERS_MAX} characters: give fewer")
    if "store=memory:" in config:
        raise InvalidError("sql: this home is in the server's memory: use a home in a folder")
    request = {
        "config": config,
        "query": query,
        "values": values,
        "access": asdict(access),
        "limits": asdict(limits),
    }
    command = [sys.executable, "-P", "-m", __name__]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as child:  # noqa: S603
        note(child)
        try:
            sent = json.dumps(request).encode()
            out, _ = child.communicate(sent, limits.seconds + _START_S)
        except subprocess.TimeoutExpired as exc:
            child.kill()
            raise _too_long(limits) from exc
    if child.returncode == -signal.SIGALRM:
        raise _too_long(limits)
    if child.returncode == -signal.SIGPROF:
        raise InvalidError(
            f"sql: used {limits.cpu_seconds:g} s of processor time, which is the limit: {_SHORTER}"
        )
    if child.returncode == -signal.SIGKILL:
        raise UnavailableError("sql: the query was ended, as the server stops: run it again")
    return _answered(child.returncode, out, limits)


def _answered(code: int, out: bytes, limits: SqlLimits) -> SqlResult:
    """Returns what a child has written. Raises what it has raised."""
    first, *lines = out.splitlines() or [b""]
    if code or not lines:
        raise InvalidError(
            f"sql: needs more than {limits.memory_bytes >> 20} MiB of memory, or DuckDB failed: "
            "select fewer rows or columns"
        )
    end = json.loads(lines.pop())
    if "error" in end:
        kind, message = end["error"]
        known = {each.kind: each for each in TidelogError.__subclasses__()}
        raise known.get(kind, InternalError)(message)
    return SqlResult(json.loads(first)["columns"], lines, end["is_whole"])


def _too_long(limits: SqlLimits) -> InvalidError:
    return InvalidError(
        f"sql: took {limits.seconds:g} s by the clock, which is the limit: {_SHORTER}, or try "
        "again when the machine is less busy"
    )


# In the child.


def main() -> None:
    """Answers the request on standard input."""
    request = json.loads(sys.stdin.buffer.read())
    limits = SqlLimits(**request["limits"])
    access = SqlAccess(tuple(request["access"]["topics"]), request["access"]["archives"])
    signal.setitimer(signal.ITIMER_REAL, limits.seconds + _START_S)  # also if the parent is killed
    os.nice(5)
    most = limits.memory_bytes + _OTHER_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    out = sys.stdout.buffer
    try:
        asked = request["config"], request["query"], request["values"]
        for line in _answer(*asked, access, limits):
            out.write(line + b"\n")
    except TidelogError as exc:
        end = {"error": [exc.kind, " ".join(exc.message.split())]}
        out.write(b"\n" + json.dumps(end).encode() + b"\n")
    out.flush()
    os._exit(0)  # threads of DuckDB may still end; nothing is left to do


def _answer(
    config: str, query: str, values: Any, access: SqlAccess, limits: SqlLimits
) -> Iterator[bytes]:
    """Yields the lines of an answer."""
    from tidelog.api.sql import printable  # noqa: PLC0415 - slow, and the parent does without it
    from tidelog.backends import open_context  # noqa: PLC0415 - the same
    from tidelog.codec.event_json import row_lines  # noqa: PLC0415 - the same

    with open_context(config) as context:
        signal.setitimer(signal.ITIMER_REAL, limits.seconds)  # whose signal ends the process
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)  # the same
        found = locked_query(context, query, values, access, limits)
        columns = [{"name": each.name, "type": str(each.type)} for each in found.schema]
        head = json.dumps({"columns": columns}).encode()
        size = len(head)
        if size > limits.result_bytes:
            raise InvalidError(
                f"sql: the names and types of its columns have {size} bytes, the limit is "
                f"{limits.result_bytes}: select fewer columns"
            )
        yield head
        lines = (line for batch in found for line in row_lines(printable(batch)).splitlines())
        is_whole = True
        for number, line in enumerate(lines):
            size += len(line)
            if number == limits.rows or size > limits.result_bytes:
                is_whole = False
                break
            yield line
        yield json.dumps({"is_whole": is_whole}).encode()


def locked_query(
    context: Context, query: str, values: Any, access: SqlAccess, limits: SqlLimits
) -> pa.RecordBatchReader:
    """Returns the rows of a query that can reach nothing but the tables that it may see."""
    from tidelog.api.sql import run_query  # noqa: PLC0415 - slow to load

    return run_query(
        context,
        query,
        values,
        allow=access.allows,
        prepare=lambda connection: _lock(connection, query, limits),
        batch_rows=_BATCH_ROWS,
    )


def _lock(connection: Any, query: str, limits: SqlLimits) -> None:
    """Refuses all but one harmless SELECT, and takes everything from DuckDB but the tables."""
    check_query(connection, query)
    connection.execute(f"SET memory_limit = '{limits.memory_bytes >> 20}MiB'")
    connection.execute(f"SET threads = {_THREADS}")
    for setting in _SETTINGS:
        connection.execute(setting)


def check_query(connection: Any, query: str) -> None:
    """Raises ``InvalidError`` unless a query is one SELECT with harmless table functions."""
    text = connection.execute("SELECT json_serialize_sql(?)", [query]).fetchone()[0]
    check_json_depth(text, "sql")
    parsed = json.loads(text)
    if parsed["error"] and parsed.get("error_type") != "parser":
        raise InvalidError("sql: only a SELECT is allowed here: use `tidelog sql` for the rest")
    for name in _functions(parsed):
        if name not in _FUNCTIONS:
            raise InvalidError(
                f"sql: function `{name}` is not allowed here: query topics and archives by name"
            )


def _functions(parsed: Any) -> Sequence[str]:
    """Returns the table functions of a parsed query, by DuckDB's own tree of it."""
    found: list[str] = []
    left = [parsed]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            if each.get("type") == "TABLE_FUNCTION":
                function = each.get("function") or {}
                found.append(str(function.get("function_name", "?")).lower())
            left += each.values()
        elif isinstance(each, list):
            left += each
    return found


if __name__ == "__main__":
    main()
