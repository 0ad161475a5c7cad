"""The page on which people query topics and archives with SQL."""

from __future__ import annotations

import json
from typing import Any

from tidelog.api.sql_process import SqlLimits
from tidelog.errors import InvalidError, NotFoundError
from tidelog.home import Home
from tidelog.server.api.sql import SqlRunner
from tidelog.server.console.session import Answer, Shown, Visit
from tidelog.server.http import limits
from tidelog.server.http.errors import BusyError, status_of

__all__ = ["SqlPages"]

ROWS_MAX = 500
_LIMITS = SqlLimits(seconds=limits.SQL_S, rows=ROWS_MAX, result_bytes=2 << 20)
_EXAMPLES = (
    "select type, count(*) as events from {name} group by 1 order by 2 desc",
    "select * from {name} where timestamp >= now() - interval 1 hour order by timestamp desc",
    "select date_trunc('hour', timestamp) as hour, count(*) as events from {name} group by all",
    "select as_json(value)->>'field' as field, count(*) as events from {name} group by 1",
)


class SqlPages:
    """The form, and the rows of a query."""

    def __init__(self, home: Home, runner: SqlRunner) -> None:
        self._home = home
        self._runner = runner

    def sql(self, visit: Visit) -> Answer:
        """``GET /console/sql``"""
        return self._show(visit, visit.text("q"))

    def query(self, visit: Visit) -> Answer:
        """``POST /console/sql``: it changes nothing, but costs a processor for seconds"""
        query = visit.text("q")
        if not query:
            raise InvalidError("sql: there is no query: write one")
        token = visit.session.token
        client = "console" if token is None else token.id
        try:
            found = self._runner.run(query, token, client, bounds=_LIMITS)
        except (BusyError, InvalidError, NotFoundError) as exc:
            return self._show(visit, query, status_of(exc), trouble=exc.message)
        names = [column["name"] for column in found.columns]
        rows = [[_cell(row.get(name)) for name in names] for row in map(json.loads, found.lines)]
        return self._show(visit, query, columns=names, rows=rows, is_whole=found.is_whole)

    def _show(self, visit: Visit, query: str, status: int = 200, **more: Any) -> Answer:
        session = visit.session
        topics = [
            each.name
            for each in self._home.topics()
            if each.state == "ready" and session.may("read", each.name)
        ]
        archives = [each.name for each in self._home.archives.list()] if session.may("read") else []
        name = _quoted((topics or archives or ["orders"])[0])
        values = {
            "query": query,
            "topics": topics,
            "archives": archives,
            "examples": [each.format(name=name) for each in _EXAMPLES],
            "rows_max": ROWS_MAX,
            "seconds": limits.SQL_S,
            "columns": None,
            "rows": [],
            "is_whole": True,
            "trouble": "",
        }
        return Shown("sql.html", {**values, **more}, status)


def _quoted(name: str) -> str:
    is_plain = name.replace("_", "a").isalnum() and not name[:1].isdigit()
    return name if is_plain else f'"{name}"'


def _cell(value: Any) -> str | None:
    """Returns a value as text; lists and objects as JSON."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)
