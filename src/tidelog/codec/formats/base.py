"""What a file format is: a writer that takes batches of events, a reader that gives them back.

A file comes back as the same events, column by column: null is not empty, headers keep their order
and may repeat a name. A format whose data file has no room for all columns writes a *sidecar*
beside it, whose name begins with ``_``, as nothing does that is data.
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
    """Writes one file, and its sidecar where the format has one. Holds a bounded amount.

    A file whose writer raised is to be thrown away. Errors of the sinks come through as they are.
    """

    @property
    def bytes_written(self) -> int:
        """About how large the data file is by now, with what is not yet flushed; exact at last."""
        ...

    @property
    def bytes_held(self) -> int:
        """About how many bytes of events are in memory, since the sinks do not have them yet."""
        ...

    @property
    def rows(self) -> int:
        """How many events the file holds."""
        ...

    def write(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """Add the events of a batch in event columns; ``InvalidError`` for other columns.

        Gives back the rows that the file's schema does not take, in event columns and ``error``, or
        None when all were taken. They are not in the file.
        """
        ...

    def flush(self) -> None:
        """Give the sinks what can be given by now; it may be worse compressed than a larger part.

        The events are as they would be without it. ``bytes_held`` tells what is left.
        """
        ...

    def close(self) -> None:
        """Finish the file. The sinks stay open: who opened them closes them. Once is enough."""
        ...


class Format(Protocol):
    """How events stand in a file. Plain settings, which pickle."""

    @property
    def name(self) -> str:
        """The name by which it is opened."""
        ...

    @property
    def codec(self) -> str:
        """How it compresses, or ``none``."""
        ...

    @property
    def extension(self) -> str:
        """How names of data files end, with the dot; may be empty."""
        ...

    def sidecar_name(self, name: str) -> str | None:
        """What the sidecar of a data file is called; None where the data file holds everything."""
        ...

    def writer(self, sink: ByteSink, sidecar: ByteSink | None = None) -> FileWriter:
        """Begin a file. ``InvalidError`` unless the sidecar is given exactly where one is due."""
        ...

    def read(self, data: Data, sidecar: Data | None = None) -> Iterator[pa.RecordBatch]:
        """The events of a file in order, in event columns, a bounded amount at a time.

        ``CorruptError`` when the bytes are not those of one whole file of this format,
        ``InvalidError`` for files that do not hold the events' values, ``NotFoundError`` for a
        path where nothing is, ``UnavailableError`` when the device fails.
        """
        ...


@runtime_checkable
class OwnColumns(Protocol):
    """A format that reads and writes rows in its own columns, where no events can be restored."""

    def read_columns(self, data: Data) -> Iterator[pa.RecordBatch]:
        """Returns the rows of a file in its own columns, with the types of its schema."""
        ...

    def write_columns(self, sink: ByteSink, batches: Iterable[pa.RecordBatch]) -> None:
        """Write a file of rows that :meth:`read_columns` returned."""
        ...


@dataclass(frozen=True, slots=True)
class FormatSettings:
    """What may be chosen about a format; None leaves it as the format has it."""

    mode: str | None = None  # of jsonlines: a line is the `value`, or the whole event (`events`)
    delimiter: str | None = None  # of delimited: what stands after each value
    key: str | None = None  # of sequence: the record's key is the `offset`, or `msgpack`
    compression: str | None = None  # of sequence: compress by `block`, or each `record` by itself
    schema: str | None = None  # of parquet, orc, avro: typed columns, as DDL or JSON Schema
    keep_value: bool | None = None  # with a schema: False drops the raw value; no restore then
    strict: bool | None = None  # with a schema: a field that it does not name is a misfit


def settings_of(values: Mapping[str, Any]) -> FormatSettings:
    """Settings by name. ``InvalidError`` for an unknown name or a value of the wrong type."""
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
    """Refuse settings that a format has no use for."""
    for field in fields(settings):
        if field.name not in taken and getattr(settings, field.name) is not None:
            takes = f"it takes {', '.join(taken)}" if taken else "it takes none"
            raise InvalidError(f"format `{format}`: takes no setting `{field.name}`: {takes}")


def choose_setting(format: str, name: str, given: str | None, *known: str) -> str:
    """One of the known words, the first by default."""
    if given is not None and given not in known:
        raise InvalidError(
            f"format `{format}`: {name} `{given}` is unknown{nearest(given, known)}: "
            f"give {' or '.join(known)}"
        )
    return given or known[0]


def choose_codec(format: str, codec: str | None, *known: str) -> str:
    """One of the codecs that a format has, the first by default, or when none is named."""
    if codec and codec not in known:
        raise InvalidError(
            f"format `{format}`: has no codec `{codec}`{nearest(codec, known)}: "
            f"it has {', '.join(known)}"
        )
    return codec or known[0]


def check_batch(batch: pa.RecordBatch) -> None:
    """Refuse what is not in event columns."""
    if not batch.schema.equals(EVENT_SCHEMA):
        raise InvalidError(
            f"batch: has the columns {', '.join(batch.schema.names)}: give the event columns "
            f"{', '.join(EVENT_SCHEMA.names)}"
        )


def check_no_sidecar(format: str, sidecar: ByteSink | Data | None) -> None:
    """Refuse a sidecar where the data file holds everything."""
    if sidecar is not None:
        raise InvalidError(f"format `{format}`: has no sidecar: give the data file alone")


def file_name(format: str, data: Data) -> str:
    """How messages name a file."""
    if isinstance(data, str | os.PathLike):
        return f"{format} file `{os.fspath(data)}`"
    return f"{format} file"
