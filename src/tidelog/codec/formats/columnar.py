"""What formats have in common that keep everything in columns: settings, columns, no sidecar."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import pyarrow as pa

from tidelog.codec.formats.base import (
    Data,
    FileWriter,
    FormatSettings,
    Sink,
    check_no_sidecar,
    check_settings,
    choose_codec,
)
from tidelog.codec.formats.batches import Columns, ColumnWriter, Encoder, check_restorable
from tidelog.codec.formats.typed import YEARS, open_columns

__all__ = ["ColumnarFormat"]


@dataclass(frozen=True, slots=True)
class ColumnarFormat(ABC):
    """Files with everything in columns; a format says how batches become bytes and come back."""

    codec: str
    columns: Columns
    name: ClassVar[str]
    extension: ClassVar[str]
    codecs: ClassVar[tuple[str, ...]]  # the first is taken where none is named
    times: ClassVar[range] = YEARS  # of typed columns, in microseconds since 1970, as it is read

    @classmethod
    def opened(cls, codec: str | None, settings: FormatSettings) -> Self:
        """The format with its settings checked."""
        check_settings(cls.name, settings, "schema", "keep_value", "strict")
        chosen = choose_codec(cls.name, codec, *cls.codecs)
        return cls(chosen, open_columns(cls.name, settings, cls.times))

    def sidecar_name(self, name: str) -> str | None:
        """None: everything is in the file."""
        return None

    def writer(self, sink: Sink, sidecar: Sink | None = None) -> FileWriter:
        """Begin a file."""
        check_no_sidecar(self.name, sidecar)
        return ColumnWriter(self.columns, self._encoder(sink))

    def read(self, data: Data, sidecar: Data | None = None) -> Iterator[pa.RecordBatch]:
        """The events of a file, one part of it after another."""
        check_no_sidecar(self.name, sidecar)
        check_restorable(self.name, self.columns)
        return self._read(data)

    @abstractmethod
    def _encoder(self, sink: Sink) -> Encoder:
        """What turns batches in the file's columns into bytes."""

    @abstractmethod
    def _read(self, data: Data) -> Iterator[pa.RecordBatch]:
        """The events of a file."""
