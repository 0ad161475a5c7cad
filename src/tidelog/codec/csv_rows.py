"""CSV as lines of JSON: a header names the fields, and each row becomes an object of texts.

Rows are those of Python's ``csv`` module: commas, and double quotes around fields with commas,
quotes or newlines. A row with newlines covers several lines. So that lines keep their numbers, each
line gives one text: the object for the last line of a row, and an empty one for other lines.
"""

from __future__ import annotations

import codecs
import csv
from collections.abc import Sequence

import msgspec

from tidelog.errors import FailedError

__all__ = ["CsvRows"]

_OPEN = "unexpected end of data"  # as the module says of a quoted field that has not ended


class CsvRows:
    """Makes JSON objects of the rows of one input, as its lines come."""

    def __init__(self) -> None:
        self._header: list[str] | None = None
        self._begun: list[str] = []  # lines of a row that has not ended
        self._next = 1  # number of the next line

    @property
    def is_open(self) -> bool:
        """Returns whether the last row has a quoted field that has not ended."""
        return bool(self._begun)

    def objects(self, lines: Sequence[bytes]) -> tuple[list[bytes], FailedError | None]:
        """Returns a text for each line of the rows that end in the next lines.

        Also returns the error of a line that is not valid; the texts are those before it.
        """
        done: list[bytes] = []
        first = self._next - len(self._begun)
        try:
            texts = self._begun + [f"{self._text(line, n)}\n" for n, line in enumerate(lines)]
            self._next += len(lines)
            rows = csv.reader(texts, strict=True)
            while len(done) < len(texts):
                try:
                    row = next(rows)
                except csv.Error as exc:
                    if str(exc) == _OPEN:
                        break
                    raise _bad_line(first + rows.line_num - 1, f"{exc}: fix it") from exc
                text = self._object(row, first + len(done))
                done += [b""] * (rows.line_num - len(done) - 1) + [text]
        except FailedError as exc:
            return done, exc
        self._begun = texts[len(done) :]
        return done, None

    def _text(self, line: bytes, index: int) -> str:
        number = self._next + index
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)  # as spreadsheets write it
        try:
            return line.decode()
        except UnicodeDecodeError as exc:
            raise _bad_line(number, "is not UTF-8: convert the file first") from exc

    def _object(self, row: list[str], number: int) -> bytes:
        if not row:
            return b""
        if self._header is None:
            if len(set(row)) < len(row) or "" in row:
                raise _bad_line(number, "the header needs a name of its own for each field")
            self._header = row
            return b""
        if len(row) != len(self._header):
            fields = "field" if len(row) == 1 else "fields"
            counts = f"has {len(row)} {fields}, and the header has {len(self._header)}"
            raise _bad_line(number, f"{counts}: fix it, or quote what has a comma")
        return msgspec.json.encode(dict(zip(self._header, row, strict=True)))


def _bad_line(number: int, what: str) -> FailedError:
    return FailedError(f"line {number}: {what}", line=number)
