"""The interface of a file format: a writer for batches of events, and a reader that returns them.

A file comes back as the same events, column by column: null is not empty, headers keep their order
and may repeat a name. If a format's data file has no room for all columns, it writes a *sidecar*
beside it, whose name begins with ``_``, unlike any data.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, BinaryIO, Protocol, runtime_checkable

import pyarrow as pa

from tidelog.codec.event_batch import EVENT_SCHEMA
from tidelog.errors import InvalidError
from tidelog.model.address import nearest

__all__ = [
    "MISFIT_SCHEMA",
    "ByteSink",
    "Data",
    "FileWriter",
    "Format",
    "FormatSettings",
    "OwnColumns",
    "check_batch",
    "check_no_sidecar",
    "check_settings",
    "choose_codec",
    "choose_setting",
    "file_name",
    "settings_of",
]

# Bytes in memory, the path of a file, or an open file that can seek.
Data = bytes | str | os.PathLike[str] | BinaryIO

MISFIT_SCHEMA = EVENT_SCHEMA.append(pa.field("error", pa.string(), nullable=False))


class ByteSink(Protocol):
    """Where a writer puts bytes: an open binary file, or an Arrow output stream."""

    def write(self, data: Any, /) -> Any: ...


class FileWriter(Protocol):
    """Writes one file, and its sidecar if the format has one. Uses limited memory.

    Discard a file whose writer raised. Errors of the sinks pass unchanged.
    """

    @property
    def bytes_written(self) -> int:
        """Returns about how large the data file is, with what is not flushed; exact at the end."""
        ...

    @property
    def bytes_held(self) -> int:
        """Returns about how many bytes of events are in memory and not in the sinks yet."""
        ...

    @property
    def rows(self) -> int:
        """Returns how many events the file has."""
        ...

    def write(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """Adds the events of a batch in event columns. Raises ``InvalidError`` for other columns.

        Returns the rows that the file's schema refuses, in event columns and ``error``, or None if
        it accepted all. They are not in the file.
        """
        ...

    def flush(self) -> None:
        """Gives the sinks what is possible now; it may compress worse than a larger part.

        The events do not change. ``bytes_held`` returns what is left.
        """
        ...

    def close(self) -> None:
        """Finishes the file. The sinks stay open: the caller closes them. Call it once."""
        ...


class Format(Protocol):
    """How events are stored in a file. Plain settings, which pickle."""

    @property
    def name(self) -> str:
        """Returns the name by which it is opened."""
        ...

    @property
    def codec(self) -> str:
        """Returns how it compresses, or ``none``."""
        ...

    @property
    def extension(self) -> str:
        """Returns the suffix of data files, with the dot; may be empty."""
        ...

    def sidecar_name(self, name: str) -> str | None:
        """Returns the name of a data file's sidecar; None if it has none."""
        ...

    def writer(self, sink: ByteSink, sidecar: ByteSink | None = None) -> FileWriter:
        """Starts a file.

        Raises ``InvalidError`` unless the sidecar is given exactly when needed.
        """
        ...

    def read(self, data: Data, sidecar: Data | None = None) -> Iterator[pa.RecordBatch]:
        """Yields the events of a file in order, in event columns, with limited memory.

        Raises ``CorruptError`` if the bytes are not those of one whole file of this format,
        ``InvalidError`` for files without the events' values, ``NotFoundError`` for a path without
        a file, and ``UnavailableError`` if the device fails.
        """
        ...


@runtime_checkable
class OwnColumns(Protocol):
    """A format that reads and writes rows in its own columns, if events cannot be restored."""

    def read_columns(self, data: Data) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a file in its own columns, with the types of its schema."""
        ...

    def write_columns(self, sink: ByteSink, batches: Iterable[pa.RecordBatch]) -> None:
        """Writes a file of rows that :meth:`read_columns` returned."""
        ...


@dataclass(frozen=True, slots=True)
class FormatSettings:
    """The settings of a format; None means the format's default."""

    mode: str | None = None  # of jsonlines: a line is the `value`, or the whole event (`events`)
    delimiter: str | None = None  # of delimited: what follows each value
    key: str | None = None  # of sequence: the record's key is the `offset`, or `msgpack`
    compression: str | None = None  # of sequence: compress by `block`, or each `record` by itself
    schema: str | None = None  # of parquet, orc, avro: typed columns, as DDL or JSON Schema
    keep_value: bool | None = None  # with a schema: False drops the raw value; no restore then
    strict: bool | None = None  # with a schema: a field that it does not name is a misfit


def settings_of(values: Mapping[str, Any]) -> FormatSettings:
    """Returns settings by name. Raises ``InvalidError`` for an unknown name or a wrong type."""
    known = [field.name for field in fields(FormatSettings)]
    for name, value in values.items():
        if name not in known:
            raise InvalidError(
                f"format setting `{name}`: is unknown{nearest(name, known)}: "
                f"give one of {', '.join(known)}"
            )
        kind = bool if name in ("keep_value", "strict") else str
        if value is not None and not isinstance(value, kind):
            raise InvalidError(
                f"format setting `{name}`: is {type(value).__name__}: give {kind.__name__}"
            )
    return FormatSettings(**values)


def check_settings(format: str, settings: FormatSettings, *taken: str) -> None:
    """Raises ``InvalidError`` for settings that a format does not use."""
    for field in fields(settings):
        if field.name not in taken and getattr(settings, field.name) is not None:
            takes = f"it takes {', '.join(taken)}" if taken else "it takes none"
            raise InvalidError(f"format `{format}`: takes no setting `{field.name}`: {takes}")


def choose_setting(format: str, name: str, given: str | None, *known: str) -> str:
    """Returns one of the known words, by default the first."""
    if given is not None and given not in known:
        raise InvalidError(
            f"format `{format}`: {name} `{given}` is unknown{nearest(given, known)}: "
            f"give {' or '.join(known)}"
        )
    return given or known[0]


def choose_codec(format: str, codec: str | None, *known: str) -> str:
    """Returns one of the codecs that a format has, by default the first."""
    if codec and codec not in known:
        raise InvalidError(
            f"format `{format}`: has no codec `{codec}`{nearest(codec, known)}: "
            f"it has {', '.join(known)}"
        )
    return codec or known[0]


def check_batch(batch: pa.RecordBatch) -> None:
    """Raises ``InvalidError`` for a batch that is not in event columns."""
    if not batch.schema.equals(EVENT_SCHEMA):
        raise InvalidError(
            f"batch: has the columns {', '.join(batch.schema.names)}: give the event columns "
            f"{', '.join(EVENT_SCHEMA.names)}"
        )


def check_no_sidecar(format: str, sidecar: ByteSink | Data | None) -> None:
    """Raises ``InvalidError`` for a sidecar if the data file holds everything."""
    if sidecar is not None:
        raise InvalidError(f"format `{format}`: has no sidecar: give the data file alone")


def file_name(format: str, data: Data) -> str:
    """Returns a file's name for messages."""
    if isinstance(data, str | os.PathLike):
        return f"{format} file `{os.fspath(data)}`"
    return f"{format} file"
