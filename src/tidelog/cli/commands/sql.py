"""``tidelog sql``: a query of topics and archives, printed as a table, JSON, CSV or Arrow."""

from __future__ import annotations

import csv
import io
import json
import sys
from typing import Any

import click
import pyarrow as pa

from tidelog.api.sql import printable
from tidelog.cli.output import Output, counted, json_option, utf8, write_out
from tidelog.cli.terminal import open_home
from tidelog.codec.event_json import row_lines
from tidelog.errors import InvalidError

__all__ = ["sql"]

_SHOWN = 1_000  # rows of a table for people
_CELL_MAX = 200  # characters of a cell in such a table


@click.command()
@click.argument("query", type=utf8)
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json", "csv", "arrow"]),
    help="What to print: a table, JSON lines, CSV, or an Arrow stream. [default: table]",
)
@json_option
@click.pass_obj
def sql(home_text: str | None, output: Output, /, query: str, form: str | None) -> None:
    """Query topics and archives with SQL.

    DuckDB runs the query. Every topic and archive is a table with the columns topic, partition,
    offset, timestamp, id, key, value, type and headers, and an archive's typed columns. Put a name
    with other characters than letters, digits and _ in double quotes. Where a topic and an archive
    share a name, write topic.NAME or archive.NAME.

    value and key are bytes: as_json(value)->>'amount' is a field of a JSON value, as_text(value)
    the value as text. Updates and deletes are applied. Filters on timestamp, partition and offset
    limit what is read. Times are UTC. With - it reads the query from standard input.

    \b
    Examples:
      tidelog sql "select type, count(*) from orders group by 1"
      tidelog sql "select count(*) from orders where timestamp >= now() - interval 1 hour"
      tidelog sql "select as_json(value)->>'amount' from daily limit 10" --format csv
      tidelog sql - --format arrow < query.sql > rows.arrow
    """
    if output.as_json and form not in (None, "json"):
        raise InvalidError(f"sql: --json and --format {form} contradict each other: give one")
    if query == "-":
        query = utf8(sys.stdin.read())
    with open_home(home_text) as home:
        found = home.sql(query)
        if output.as_json or form == "json":
            for batch in found:
                write_out(row_lines(printable(batch)))
        elif form == "csv":
            _print_csv(found)
        elif form == "arrow":
            _print_arrow(found)
        else:
            _print_table(output, found)


def _rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Returns rows with plain values, as JSON has them."""
    return [json.loads(line) for line in row_lines(printable(batch)).splitlines()]


def _print_csv(found: pa.RecordBatchReader) -> None:
    write_out(_csv([found.schema.names]))
    for batch in found:
        rows = (row.values() for row in _rows(batch))
        write_out(_csv([["" if cell is None else _text(cell) for cell in row] for row in rows]))


def _csv(rows: list[list[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _print_arrow(found: pa.RecordBatchReader) -> None:
    if sys.stdout.isatty():
        raise InvalidError("sql: Arrow is not text: write it to a file with `> rows.arrow`")
    with pa.ipc.new_stream(pa.PythonFile(sys.stdout.buffer, "w"), found.schema) as writer:
        for batch in found:
            writer.write_batch(batch)
    sys.stdout.buffer.flush()


def _print_table(output: Output, found: pa.RecordBatchReader) -> None:
    shown: list[dict[str, str | None]] = []
    is_cut = False
    for row in (row for batch in found for row in _rows(batch)):
        if len(shown) == _SHOWN:
            is_cut = True
            break
        cells = {
            name: None if value is None else _short(_text(value)) for name, value in row.items()
        }
        shown.append(cells)
    output.records(found.schema.names, shown)
    if is_cut:
        output.say(
            f"… and more: these are the first {_SHOWN:,} rows. Add a LIMIT, or print all with "
            "--format csv."
        )
    else:
        output.say(counted(len(shown), "row"))


def _text(value: Any) -> str:
    """Returns a value as text; lists and objects as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _short(text: str) -> str:
    return text if len(text) <= _CELL_MAX else text[: _CELL_MAX - 1] + "…"
