"""Erasure works for every format, codec and setting that an archive can be created with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.support.archive_look import FIRST_S, a_home, an_archive, drive
from tidelog import Event, Home
from tidelog.archive.read import ReadRequest, archived_rows
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions
from tidelog.codec.formats.avro import AvroFormat
from tidelog.codec.formats.orc import OrcFormat
from tidelog.codec.formats.parquet import ParquetFormat
from tidelog.erasure.matcher import own_column
from tidelog.maintenance.erase import purge
from tidelog.model.archive import Archive

EVENTS = 40
SCHEMA = (
    "user string, at bigint, seen timestamp, day date, price decimal(9, 2), late string, "
    "tags map<string, bigint>, sizes array<double>, place struct<city: string, lot: int>"
)


def settings() -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """All codecs and settings of each format."""
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for columnar in (ParquetFormat, OrcFormat, AvroFormat):
        found[columnar.name] = [
            (codec, made)
            for codec in columnar.codecs
            for made in ({}, {"schema": SCHEMA}, {"schema": SCHEMA, "keep_value": False})
        ]
    texts = ("gzip", "zstd", "none")
    found["jsonlines"] = [(each, {"mode": mode}) for each in texts for mode in ("value", "events")]
    found["delimited"] = [(each, {}) for each in texts]
    found["sequence"] = [("none", {"key": key}) for key in ("offset", "msgpack")]
    found["sequence"] += [
        (codec, {"key": key, "compression": compression})
        for codec in ("zlib", "gzip")
        for key in ("offset", "msgpack")
        for compression in ("block", "record")
    ]
    return found


def value(number: int) -> bytes:
    """Most fields are null in some events, and one is null in all of the first ones."""
    found: dict[str, Any] = {"at": FIRST_S, "user": f"u{number}"}
    if number % 2:
        found |= {"seen": "2026-11-16T01:02:03.000004Z", "day": "2026-11-16", "price": "12.30"}
        found |= {"tags": {f"t{number}": number}, "sizes": [1.5, number]}
        found |= {"place": {"city": "Kiel", "lot": number}}
    if number > EVENTS // 2:
        found["late"] = "x"
    return json.dumps(found).encode()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        events = [Event(value(n), key=b"k-%d" % n, id=f"id-{n}") for n in range(EVENTS)]
        made.append("t", events)
        yield made


def rows(home: Home, archive: Archive) -> list[dict[str, Any]]:
    found = []
    for batch in archived_rows(home.context, archive, ReadRequest()):
        ids = own_column(batch, "id")
        assert ids is not None
        for own, row in zip(ids.to_pylist(), batch.to_pylist(), strict=True):
            found.append({"": own, **row})
    return sorted(found, key=lambda row: str(row[""]))


@pytest.mark.parametrize("format", list(settings()))
def test_every_format_codec_and_setting_loses_the_event_and_nothing_else(
    home: Home, format: str
) -> None:
    archives = {}
    for number, (codec, made) in enumerate(settings()[format]):
        written_as = {
            "format": format,
            "codec": codec,
            "format_settings": made,
            "parser": "json:at",
        }
        archives[codec, str(made)] = an_archive(home, f"a{number}", **written_as)
    before = {}
    for name, archive in archives.items():
        assert drive(home, archive) == EVENTS, name
        before[name] = rows(home, archive)
    topic = home.topic("t")
    home.delete("t", ["id-3"])
    purge(home.context, topic, 0)
    assert home.prove_erased(topic.name, ids=["id-3"]).traces == []
    for name, archive in archives.items():
        left = [row for row in before[name] if row[""] != "id-3"]
        assert len(left) == EVENTS - 1
        assert rows(home, archive) == left, name
        assert verify_archive(home.context, archive, ArchiveVerifyOptions()).problems == [], name
    home.delete("t", [f"id-{n}" for n in range(EVENTS) if n != 3])
    purge(home.context, topic, 0)
    assert home.prove_erased(topic.name, ids=[f"id-{n}" for n in range(EVENTS)]).traces == []
    for name, archive in archives.items():
        assert rows(home, archive) == [], name


@pytest.mark.parametrize("codec", AvroFormat.codecs)
def test_avro_file_without_values_keeps_its_types_when_it_is_written_again(
    tmp_path: Path, codec: str
) -> None:
    """Also a field that is null in all of its rows."""
    with a_home(tmp_path) as home:
        home.create_topic("t", 1)
        home.append("t", [Event(value(n), id=f"id-{n}") for n in range(3)])
        written_as = {"schema": SCHEMA, "keep_value": False}
        archive = an_archive(
            home, parser="json:at", format="avro", codec=codec, format_settings=written_as
        )
        drive(home, archive)
        schemas: list[pa.Schema] = []
        for gone in (None, "id-1"):
            if gone:
                home.delete("t", [gone])
                purge(home.context, home.topic("t"), 0)
            (batch,) = archived_rows(home.context, archive, ReadRequest())
            schemas.append(batch.schema)
        assert schemas[0] == schemas[1]
