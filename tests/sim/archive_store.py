"""What lies in the store and the catalog of a world with archives, by code of its own.

Nothing here calls the product's readers. Rows are plain MessagePack, manifests JSON with a line of
checksum below it, files of archives are read by ``json`` and by pyarrow. Only the layout that
docs/reference/layout.md documents is known.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import crc32c
import msgspec

from tests.sim.journal_raw import WatchedCatalog, WatchedStore, parquet_table

__all__ = ["Folders", "Generation", "SourceRows", "Stored", "decoded"]

Row = dict[str, Any]
Place = tuple[str, str, int]  # topic, partition, offset


@dataclass(frozen=True)
class Stored:
    """An event in a file of an archive, or among its dead letters."""

    place: Place
    id: str | None
    value: bytes | None
    key: str  # of the file


@dataclass(frozen=True)
class Generation:
    """One generation of an archive, as its registry row has it."""

    archive: str
    incarnation: str
    number: int

    @property
    def pipeline(self) -> str:
        return f"{self.incarnation}.{self.number}"

    @property
    def folder(self) -> str:
        return f"archives/{self.archive}/g{self.number}/"


@dataclass
class SourceRows:
    """The rows of one source partition of a generation."""

    head: Row
    commits: list[Row]
    manifests: list[Row]  # of ranges, in order
    erased: Row = field(default_factory=dict)


class Folders:
    """Lists folders and rows as they are."""

    def __init__(self, rows: WatchedCatalog, objects: WatchedStore) -> None:
        self._rows = rows
        self._objects = objects
        self._files: dict[tuple[str, str], list[Stored]] = {}  # by name and version
        self._manifests: dict[str, Row] = {}
        self._read: dict[str, tuple[int, SourceRows | None]] = {}  # with the count of changes

    def forget_rows(self) -> None:
        """The rows are others now, without a write."""
        self._read.clear()

    def archives(self) -> dict[str, Row]:
        """The rows of archives that are ready, by name."""
        found = self._rows.values("registry")
        rows = [_fields(value) for name, value in found.items() if name.startswith("archive/")]
        return {row["name"]: row for row in rows if row["state"] == "ready"}

    def live(self) -> list[Generation]:
        """The generation of each archive that readers are promoted to."""
        return [
            Generation(row["name"], row["incarnation"], row["generation"])
            for row in self.archives().values()
        ]

    def changes(self, of: Generation) -> tuple[int, ...]:
        """Counts of changes: while they stay, neither its rows nor any file of an archive changes.

        Deletions count by themselves, since they may be those of manifests.
        """
        rows = self._rows.pipelines[of.pipeline] + self._rows.pipelines[f"{of.pipeline}.dead"]
        return rows, self._objects.changes, self._objects.deletes

    def data_keys(self, of: Generation) -> list[str]:
        """Files that a reader of the folder sees: names that begin with ``_`` are not data."""
        keys = self._objects.keys_below(of.folder)
        return [key for key in keys if not any(part[:1] in "_." for part in key.split("/"))]

    def markers(self, of: Generation) -> list[str]:
        """The ``_SUCCESS`` of its folders."""
        return [key for key in self._objects.keys_below(of.folder) if key.endswith("/_SUCCESS")]

    def events(self, of: Generation) -> Iterator[Stored]:
        """What such a reader finds."""
        for key in self.data_keys(of):
            yield from self.contents(key)

    def dead(self, of: Generation) -> Iterator[Stored]:
        """What lies among the dead letters of a generation."""
        for key in self._objects.keys_below(f"dead/{of.archive}/"):
            if key.rpartition("/")[2].startswith(f"{of.number}_"):
                yield from self.contents(key)

    def contents(self, key: str) -> list[Stored]:
        """The events of a file."""
        version = self.version(key)
        if version not in self._files:
            self._files[version] = list(decoded(key, self._objects.data(key)))
        return self._files[version]

    def version(self, key: str) -> tuple[str, str]:
        """Changes whenever a file does."""
        return key, self._objects.etag(key)

    def partitions(self, of: Generation) -> list[str]:
        """The source partitions that the generation has listed."""
        rows = self._rows.values(f"pipeline/{of.pipeline}")
        names = [name for name in rows if name.startswith("partition/")]
        return sorted(_fields(rows[name])["partition"] for name in names)

    def source_rows(self, of: Generation, partition: str, suffix: str = "") -> SourceRows | None:
        """The rows of a source partition; None before it has a head."""
        where = f"pipeline/{of.pipeline}{suffix}/{partition}"
        changed = self._rows.changed[where]
        if where not in self._read or self._read[where][0] != changed:
            self._read[where] = changed, self._source_rows(where)
        found = self._read[where][1]
        for commit in found.commits if found else ():
            self._check_there(commit["manifest"])
        return found

    def _source_rows(self, where: str) -> SourceRows | None:
        rows = self._rows.values(where)
        if "head" not in rows:
            return None
        names = sorted((name for name in rows if name.startswith("commit/")), key=_in_order)
        commits = [_fields(rows[name]) for name in names]
        manifests = [
            each for commit in commits for each in _ranges(self.manifest(commit["manifest"]))
        ]
        erased = _fields(rows["erased"]) if "erased" in rows else {}
        return SourceRows(_fields(rows["head"]), commits, manifests, erased)

    def manifest(self, key: str) -> Row:
        """A manifest, checked against its checksum."""
        self._check_there(key)
        if key in self._manifests:
            return self._manifests[key]  # no manifest is ever replaced
        text, _, rest = self._objects.data(key).partition(b"\n")
        assert f"{crc32c.crc32c(text):08x}" in rest.decode(), f"manifest `{key}`: {rest!r}"
        found = json.loads(text)
        assert isinstance(found, dict)
        self._manifests[key] = found
        return found

    def _check_there(self, manifest: str) -> None:
        there = self._objects.holds(manifest)
        assert there, f"manifest `{manifest}` is missing, and a commit names it"

    def find(self, key: str) -> bytes | None:
        return self._objects.find(key)

    def value(self, partition: str, row: str) -> Row | None:
        found = self._rows.values(partition).get(row)
        return None if found is None else _fields(found)


def _in_order(name: str) -> tuple[int, list[int]]:
    """Where a commit's row belongs: ranges without events have the ordinal of the next one."""
    _, ordinal, start = name.split("/", 2)
    return int(ordinal), [int(number) for number in start.split(":")]


def _ranges(manifest: Row) -> list[Row]:
    return manifest.get("ranges") or [manifest]


@lru_cache(4096)
def _fields(value: bytes) -> Row:
    found = msgspec.msgpack.decode(value)
    assert isinstance(found, dict)
    return found


def decoded(key: str, data: bytes) -> Iterator[Stored]:
    """The events of a file with these bytes."""
    if key.endswith(".parquet"):
        rows = parquet_table(data).to_pylist()
    else:
        rows = [json.loads(line) for line in data.decode().splitlines()]
    for row in rows:
        place = (row["topic"], str(row["partition"]), row["offset"])
        value = row["value"]
        yield Stored(place, row["id"], value.encode() if isinstance(value, str) else value, key)
