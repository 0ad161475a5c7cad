"""Hypothesis machines: a catalog or a store does what a dictionary would do.

Subclass and define ``make``. The machine generates writes, right and wrong expectations, repeats,
scans and deletes, and compares after every step::

    class SqliteMachine(CatalogMachine):
        def make(self) -> Catalog:
            return open_my_catalog()

    TestSqlite = SqliteMachine.TestCase
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tidelog.catalog.base import ABSENT, Catalog, Change, Check, Delete, Put, Row
from tidelog.errors import AlreadyExistsError, ConflictError, InternalError, NotFoundError
from tidelog.store.base import Store

__all__ = ["CatalogMachine", "StoreMachine"]

PARTITIONS = st.sampled_from(["p", "p/1", "é"])
ROWS = st.sampled_from(["a", "a/1", "a/2", "b", "b0", "ü", "\U0001f30a"])
VALUES = st.binary(max_size=20)
BOUNDS = st.one_of(st.just(""), ROWS, st.text("ab/0é", max_size=3))
KEYS = st.sampled_from(["a/1", "a/2", "a-b", "b/c/1", "b/c/2", "b/d", "ü/x"])


class CatalogMachine(RuleBasedStateMachine):
    """Compares a catalog with a dictionary of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[str, dict[str, Row]] = {}
        self.dead_versions: list[str] = ["never"]
        self.writes = 0
        self.last: tuple[str, list[Change], str] | None = None

    def make(self) -> Catalog:
        """Returns a new, empty catalog; override."""
        raise InternalError("the machine needs `make`: override it")

    @initialize()
    def start(self) -> None:
        self.catalog = self.make()

    @rule(partition=PARTITIONS, data=st.data())
    def write(self, partition: str, data: st.DataObject) -> None:
        rows = data.draw(st.lists(ROWS, min_size=1, max_size=4, unique=True))
        changes = [self._draw_change(data, partition, row) for row in rows]
        self.writes += 1
        write_id = f"w{self.writes}"
        held = self.model.setdefault(partition, {})
        if all(self._holds(change, held) for change in changes):
            self.catalog.write(partition, *changes, write_id=write_id)
            self._apply(held, changes, write_id)
            self.last = (partition, changes, write_id)
        else:
            try:
                self.catalog.write(partition, *changes, write_id=write_id)
            except ConflictError:
                return
            raise AssertionError(f"a write with a failed expectation was taken: {changes}")

    @rule()
    def repeat_the_last_write(self) -> None:
        if self.last is not None:
            partition, changes, write_id = self.last
            if any(isinstance(change, Put) for change in changes):
                self.catalog.write(partition, *changes, write_id=write_id)

    @rule(partition=PARTITIONS, row=ROWS)
    def get(self, partition: str, row: str) -> None:
        assert self.catalog.get(partition, row) == self.model.get(partition, {}).get(row)

    @rule(
        partition=PARTITIONS,
        start=BOUNDS,
        end=st.none() | BOUNDS,
        limit=st.none() | st.integers(0, 4),
        reverse=st.booleans(),
    )
    def scan(
        self, partition: str, start: str, end: str | None, limit: int | None, reverse: bool
    ) -> None:
        held = self.model.get(partition, {})
        keys = [key for key in held if key >= start and (end is None or key < end)]
        expected = [held[key] for key in sorted(keys, reverse=reverse)][:limit]
        assert list(self.catalog.scan(partition, start, end, limit, reverse)) == expected

    @invariant()
    def nothing_else_is_there(self) -> None:
        for partition, held in self.model.items():
            found = list(self.catalog.scan(partition))
            assert found == [held[key] for key in sorted(held)]

    def teardown(self) -> None:
        if hasattr(self, "catalog"):
            self.catalog.close()

    def _draw_change(self, data: st.DataObject, partition: str, row: str) -> Change:
        held = self.model.get(partition, {}).get(row)
        right = held.version if held else ABSENT
        stale = st.sampled_from(self.dead_versions[-5:])
        expect: Any = data.draw(st.one_of(st.just(right), st.none(), st.just(ABSENT), stale))
        kind = data.draw(st.sampled_from(["put", "put", "delete", "check"]))
        if kind == "put":
            return Put(row, data.draw(VALUES), expect)
        if kind == "delete":
            return Delete(row, expect)
        return Check(row, right if expect is None else expect)

    def _holds(self, change: Change, held: dict[str, Row]) -> bool:
        if change.expect is None:
            return True
        found = held.get(change.row)
        if change.expect is ABSENT:
            return found is None
        return found is not None and found.version == change.expect

    def _apply(self, held: dict[str, Row], changes: list[Change], write_id: str) -> None:
        for change in changes:
            if not isinstance(change, Check) and change.row in held:
                self.dead_versions.append(held.pop(change.row).version)
            if isinstance(change, Put):
                held[change.row] = Row(change.row, change.value, write_id)


class StoreMachine(RuleBasedStateMachine):
    """Compares a store with a dictionary of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[str, bytes] = {}
        self.etags: dict[str, str] = {}

    def make(self) -> Store:
        """Returns a new, empty store; override."""
        raise InternalError("the machine needs `make`: override it")

    @initialize()
    def start(self) -> None:
        self.store = self.make()

    @rule(key=KEYS, data=VALUES)
    def put(self, key: str, data: bytes) -> None:
        try:
            self.etags[key] = self.store.put(key, data)
        except AlreadyExistsError:
            assert key in self.model
            return
        assert key not in self.model
        self.model[key] = data

    @rule(key=KEYS, data=VALUES, stale=st.booleans())
    def replace(self, key: str, data: bytes, stale: bool) -> None:
        etag = "stale" if stale or key not in self.etags else self.etags[key]
        try:
            self.etags[key] = self.store.replace(key, data, etag)
        except NotFoundError:
            assert key not in self.model
            return
        except ConflictError:
            assert key in self.model
            assert stale
            return
        assert not stale
        assert key in self.model
        self.model[key] = data

    @rule(source=KEYS, copied=KEYS)
    def copy(self, source: str, copied: str) -> None:
        try:
            self.store.copy(source, copied)
        except NotFoundError:
            assert source not in self.model
            return
        except AlreadyExistsError:
            assert copied in self.model
            return
        assert copied not in self.model
        self.model[copied] = self.model[source]
        self.etags[copied] = self.store.head(copied).etag

    @rule(keys=st.lists(KEYS, max_size=3))
    def delete(self, keys: list[str]) -> None:
        self.store.delete(keys)
        for key in keys:
            self.model.pop(key, None)
            self.etags.pop(key, None)

    @rule(key=KEYS, start=st.integers(0, 25), length=st.none() | st.integers(0, 25))
    def get(self, key: str, start: int, length: int | None) -> None:
        end = None if length is None else start + length
        try:
            found = self.store.get(key, start, end)
        except NotFoundError:
            assert key not in self.model
            return
        assert found == self.model[key][start:end]

    @rule(
        prefix=st.sampled_from(["", "a", "a/", "b/c/", "b/", "x"]), start_after=st.just("") | KEYS
    )
    def list(self, prefix: str, start_after: str) -> None:
        expected = sorted(k for k in self.model if k.startswith(prefix) and k > start_after)
        assert [info.key for info in self.store.list(prefix, start_after)] == expected

    @invariant()
    def nothing_else_is_there(self) -> None:
        listed = {info.key: (info.size, info.etag) for info in self.store.list()}
        assert listed == {k: (len(v), self.etags[k]) for k, v in self.model.items()}
