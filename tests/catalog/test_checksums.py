"""Checksums of rows: every flipped bit is noticed."""

from __future__ import annotations

from typing import Any

import pytest

from tidelog.catalog.base import ABSENT, Delete, Put, Row
from tidelog.catalog.checksums import CheckedCatalog, open_row, seal
from tidelog.catalog.memory import MemoryCatalog
from tidelog.coordination.commits import load_manifest
from tidelog.errors import ConflictError, CorruptError, InvalidError
from tidelog.identity import Identity, read_store
from tidelog.model import layout, limits
from tidelog.model.decoding import seal_json
from tidelog.model.pipeline import Manifest, read_manifest
from tidelog.store.memory import MemoryStore
from tidelog.store.wrappers import CachedStore
from tidelog.testing.scheduler import FakeClock


def flips(data: bytes) -> list[bytes]:
    """The data with each of its bits flipped."""
    return [
        data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]
        for at in range(len(data))
        for bit in range(8)
    ]


def test_rows_come_back_as_they_were_written() -> None:
    inner = MemoryCatalog()
    catalog = CheckedCatalog(inner)
    catalog.write("p", Put("a", b"1"), Put("b", b""), write_id="w1")
    assert catalog.get("p", "a") == Row("a", b"1", "w1")
    assert list(catalog.scan("p")) == [Row("a", b"1", "w1"), Row("b", b"", "w1")]
    stored = inner.get("p", "a")
    assert stored is not None
    assert len(stored.value) == 5
    catalog.write("p", Delete("b", "w1"), write_id="w2")
    assert catalog.get("p", "b") is None
    assert catalog.url == "memory:"


def test_the_rows_of_a_conflict_are_checked_too() -> None:
    inner = MemoryCatalog()
    catalog = CheckedCatalog(inner)
    catalog.write("p", Put("a", b"1"), write_id="w1")
    with pytest.raises(ConflictError) as conflict:
        catalog.write("p", Put("a", b"2", ABSENT), write_id="w2")
    assert conflict.value.rows["a"] == Row("a", b"1", "w1")
    inner.write("p", Put("a", b"bad!x"), write_id="w3")
    with pytest.raises(CorruptError, match="row `a` of `p`"):
        catalog.write("p", Put("a", b"2", ABSENT), write_id="w4")


def test_every_flipped_bit_of_a_row_is_noticed() -> None:
    stored = seal("part", "row", "version", b"value")
    assert open_row("part", Row("row", stored, "version")).value == b"value"
    damaged = [("part", Row("row", value, "version")) for value in flips(stored)]
    damaged += [("part", Row(name.decode("latin-1"), stored, "version")) for name in flips(b"row")]
    damaged += [("part", Row("row", stored, name.decode("latin-1"))) for name in flips(b"version")]
    damaged += [(name.decode("latin-1"), Row("row", stored, "version")) for name in flips(b"part")]
    damaged += [("part", Row("row", stored[:size], "version")) for size in range(len(stored))]
    for partition, row in damaged:
        with pytest.raises(CorruptError, match="checksum does not match"):
            open_row(partition, row)


def test_a_value_under_another_name_is_noticed() -> None:
    inner = MemoryCatalog()
    catalog = CheckedCatalog(inner)
    catalog.write("p", Put("a", b"1"), write_id="w1")
    stored = inner.get("p", "a")
    assert stored is not None
    inner.write("p", Put("b", stored.value), write_id="w1")
    with pytest.raises(CorruptError, match="row `b` of `p`"):
        catalog.get("p", "b")


def test_a_value_that_is_too_large_is_refused() -> None:
    catalog = CheckedCatalog(MemoryCatalog())
    with pytest.raises(InvalidError, match="row `a`"):
        catalog.write("p", Put("a", b"x" * limits.VALUE_BYTES_MAX), write_id="w1")
    catalog.write("p", Put("a", b"x" * (limits.VALUE_BYTES_MAX - 4)), write_id="w2")


def test_every_flipped_bit_of_a_manifest_is_noticed() -> None:
    manifest = Manifest("p", "0", "0", "9", 0, 9, 9)
    data = seal_json(manifest)
    assert read_manifest(data, "key") == manifest
    for damaged in [*flips(data), *(data[:size] for size in range(len(data)))]:
        with pytest.raises(CorruptError, match="manifest `key`"):
            read_manifest(damaged, "key")


@pytest.mark.parametrize(
    ("row", "value", "version"),
    [("r", 7, "v"), ("r", "text", "v"), ("r", b"x" * 9, 5), (3, b"", "v")],
)
def test_row_whose_stored_types_are_damaged_is_corrupt(row: Any, value: Any, version: Any) -> None:
    with pytest.raises(CorruptError, match="its checksum does not match"):
        open_row("p", Row(row, value, version))


class _DamagedOnce(MemoryStore):
    """Damages the first reply for each key."""

    def __init__(self) -> None:
        super().__init__(FakeClock())
        self.damaged: set[str] = set()

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        data = super().get(key, start, end)
        if key in self.damaged:
            return data
        self.damaged.add(key)
        return data[: len(data) // 2]


def test_reply_that_is_damaged_on_its_way_is_read_again_and_not_kept() -> None:
    store = _DamagedOnce()
    cached = CachedStore(store, 1 << 20)
    manifest = Manifest("p", "0", "0", "9", 0, 9, 9)
    identity = Identity(id="0" * 32)
    store.put("manifest", seal_json(manifest))
    store.put(layout.HOME_OBJECT, seal_json(identity))
    assert load_manifest(cached, "manifest") == load_manifest(cached, "manifest") == manifest
    assert read_store(cached) == read_store(cached) == identity
