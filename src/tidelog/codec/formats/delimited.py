"""Delimited text: each value followed by a delimiter, a line break unless another is chosen.

Values stand as they are, so readers of the text alone must know that none holds the delimiter; a
null value is an empty record. Everything else is in the sidecar, by which all comes back exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa

from tidelog.codec.formats.base import (
    Data,
    FileWriter,
    Format,
    FormatSettings,
    Sink,
    check_settings,
    choose_codec,
)
from tidelog.codec.formats.lines import EXTENSIONS, LineWriter, plain, read_lines
from tidelog.codec.formats.sidecar import check_sidecar, sidecar_name
from tidelog.errors import InvalidError

__all__ = ["DelimitedFormat", "open_delimited"]

DELIMITER_BYTES_MAX = 16  # a delimiter is a mark, not a text; empty means none


def open_delimited(codec: str | None, settings: FormatSettings) -> DelimitedFormat:
    """The format with its settings checked."""
    check_settings("delimited", settings, "delimiter")
    codec = choose_codec("delimited", codec, "gzip", "zstd", "none")
    text = "\n" if settings.delimiter is None else settings.delimiter
    try:
        delimiter = text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidError(f"format `delimited`: delimiter {text!r} is not Unicode: {exc}") from exc
    if len(delimiter) > DELIMITER_BYTES_MAX:
        raise InvalidError(
            f"format `delimited`: its delimiter has {len(delimiter)} bytes: give "
            f"{DELIMITER_BYTES_MAX} at most"
        )
    return DelimitedFormat(codec, delimiter)


@dataclass(frozen=True, slots=True)
class DelimitedFormat:
    """Values with a delimiter after each, and a sidecar."""

    codec: str
    delimiter: bytes
    name: ClassVar[str] = "delimited"

    @property
    def extension(self) -> str:
        """The codec's alone, as Secor has it."""
        return EXTENSIONS[self.codec]

    def sidecar_name(self, name: str) -> str | None:
        """Beside the data file."""
        return sidecar_name(name)

    def writer(self, sink: Sink, sidecar: Sink | None = None) -> FileWriter:
        """Begin a file and its sidecar."""
        beside: Sink = check_sidecar(self.name, sidecar)
        return LineWriter(sink, beside, self.codec, self.delimiter, plain)

    def read(self, data: Data, sidecar: Data | None = None) -> Iterator[pa.RecordBatch]:
        """The events of both files."""
        beside: Data = check_sidecar(self.name, sidecar)
        return read_lines(self.name, data, beside, self.codec, self.delimiter)


_: type[Format] = DelimitedFormat
