# ruff: noqa: PLC0415 - one lazy import for each format
"""File formats of archives: event batches to files, and files back to the same events.

Every format keeps topic, partition, offset, timestamp, id, key, value, type and headers: in
columns, or, if the data file holds only values, in a sidecar beside it. What was written comes back
exactly, or ``CorruptError`` is raised. This room must not know where files are, how they are named,
nor when one ends: the pipeline decides that.

``base`` has the interface and the settings. The formats are ``parquet`` (to copy from), ``orc`` and
``avro``, which share ``typed``; ``text_lines`` (JSON and others) and ``sequence``. ``schema`` and
``typed`` turn JSON values into typed columns. Other packages can add a format through the entry
point group ``tidelog.formats``.
"""

from __future__ import annotations

from collections.abc import Callable

from tidelog.codec.formats.base import FileWriter, Format, FormatSettings, settings_of
from tidelog.errors import InvalidError
from tidelog.model.address import nearest
from tidelog.plugins import find_plugins

__all__ = ["FORMATS", "FileWriter", "Format", "FormatSettings", "open_format", "settings_of"]

FORMATS = ("parquet", "orc", "avro", "jsonlines", "delimited", "sequence")


def open_format(
    name: str, codec: str | None = None, settings: FormatSettings | None = None
) -> Format:
    """Returns the format of that name, with its default codec unless one is given.

    Raises ``InvalidError`` for an unknown name, a codec that the format does not have, a setting
    that it does not use, or a malformed schema.
    """
    chosen = settings if settings is not None else FormatSettings()
    opens = _opener(name)
    if opens is None:
        raise InvalidError(
            f"format `{name}`: is unknown{nearest(name, FORMATS)}: give one of {', '.join(FORMATS)}"
        )
    return opens(codec, chosen)


def _opener(name: str) -> Callable[[str | None, FormatSettings], Format] | None:
    opens: Callable[[str | None, FormatSettings], Format] | None = None
    if name == "parquet":
        from tidelog.codec.formats.parquet import ParquetFormat

        opens = ParquetFormat.opened
    elif name == "orc":
        from tidelog.codec.formats.orc import OrcFormat

        opens = OrcFormat.opened
    elif name == "avro":
        from tidelog.codec.formats.avro import AvroFormat

        opens = AvroFormat.opened
    elif name == "jsonlines":
        from tidelog.codec.formats.text_lines import open_jsonlines as opens
    elif name == "delimited":
        from tidelog.codec.formats.text_lines import open_delimited as opens
    elif name == "sequence":
        from tidelog.codec.formats.sequence import open_sequence as opens
    else:
        for entry in find_plugins("tidelog.formats", name):
            opens = entry.load()
    return opens
