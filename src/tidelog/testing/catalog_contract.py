"""What every catalog must do, as tests: subclass :class:`CatalogContract` and add a fixture.

::

    class TestMyCatalog(CatalogContract):
        @pytest.fixture
        def catalog(self):
            yield MyCatalog(...)

        def opener(self, catalog):       # opens the same rows again, in another process
            return functools.partial(open_catalog, catalog.url)

Backends over a network also override :meth:`losing_replies`, so that real replies get lost.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from tidelog.catalog.base import ABSENT, Catalog, Change, Check, Delete, Put, Row
from tidelog.catalog.update import Decision, Rows, update
from tidelog.clock import Clock, Ids, RandomIds, SystemClock, system_random
from tidelog.errors import ConflictError, InternalError, InvalidError, UnknownOutcomeError
from tidelog.model import limits
from tidelog.testing.faults import Fault, Faults, FaultyCatalog

__all__ = ["CatalogContract"]

ids = RandomIds()
_Work = Callable[[Callable[[], Catalog], str, int, str], None]

STRANGE_KEYS = [
    " leading and trailing ",
    "a/b/c",
    "a\tb\nc",
    "quote'\"`;--",
    "100%_done",
    "ümlaut-é",
    "漢字",
    "\uffff",
    "\U0001f30a wave",
    "\U0010ffff",
    "~",
    "x" * limits.ROW_BYTES_MAX,
]


class CatalogContract:
    """The contract. Every test uses its own partitions, so one server is enough for all."""

    workers = 8
    increments_each = 200
    updates_each = 50
    deleted_rows = 200_000

    @pytest.fixture
    def catalog(self) -> Iterator[Catalog]:
        """Yields a catalog to test; override."""
        raise InternalError("the contract needs the fixture `catalog`: override it")

    @pytest.fixture
    def partition(self) -> str:
        return f"contract/{ids.new()}"

    def opener(self, catalog: Catalog) -> Callable[[], Catalog] | None:
        """Returns a picklable way to open the same rows in another process; None to use threads."""
        return None

    @contextlib.contextmanager
    def losing_replies(self, catalog: Catalog) -> Iterator[tuple[Catalog, Callable[[int], None]]]:
        """Yields a catalog, and a function that makes it lose the replies to its next n writes."""
        faults = Faults()
        yield (
            FaultyCatalog(catalog, faults),
            lambda n: faults.on_next("write", *[Fault.LOSE_REPLY] * n),
        )

    def leave_deleted_rows(self, catalog: Catalog, partition: str, count: int) -> None:
        """Creates and deletes rows ``d/00000000`` and on; override if there is a bulk way."""
        for change in (lambda row: Put(row, b"x"), Delete):
            for first in range(0, count, limits.CHANGES_MAX):
                rows = range(first, min(first + limits.CHANGES_MAX, count))
                changes = [change(f"d/{number:08}") for number in rows]
                catalog.write(partition, *changes, write_id=ids.new())

    # Reading what was written.

    def test_get_returns_what_was_put_and_the_write_id_as_version(
        self, catalog: Catalog, partition: str
    ) -> None:
        assert catalog.get(partition, "a") is None
        catalog.write(partition, Put("a", b"one"), write_id="w1")
        assert catalog.get(partition, "a") == Row("a", b"one", "w1")
        catalog.write(partition, Put("a", b""), write_id="w2")
        assert catalog.get(partition, "a") == Row("a", b"", "w2")
        assert catalog.get(partition + "x", "a") is None

    def test_delete_removes_and_is_quiet_about_what_is_not_there(
        self, catalog: Catalog, partition: str
    ) -> None:
        catalog.write(partition, Put("a", b"one"), write_id=ids.new())
        catalog.write(partition, Delete("a"), Delete("never"), write_id=ids.new())
        assert catalog.get(partition, "a") is None
        assert list(catalog.scan(partition)) == []

    def test_keys_with_any_unicode_and_in_code_point_order(
        self, catalog: Catalog, partition: str
    ) -> None:
        for key in STRANGE_KEYS:
            catalog.write(partition, Put(key, key.encode()), write_id=ids.new())
        assert [row.row for row in catalog.scan(partition)] == sorted(STRANGE_KEYS)
        for key in STRANGE_KEYS:
            found = catalog.get(partition, key)
            assert found is not None and found.value == key.encode()
        catalog.write("漢/" + partition, Put("a", b"1"), write_id=ids.new())
        assert [row.value for row in catalog.scan("漢/" + partition)] == [b"1"]

    def test_values_and_writes_of_the_largest_size(self, catalog: Catalog, partition: str) -> None:
        value = bytes(range(256)) * (limits.VALUE_BYTES_MAX // 256)
        value += b"z" * (limits.VALUE_BYTES_MAX - len(value))
        catalog.write(partition, Put("big", value), write_id=ids.new())
        found = catalog.get(partition, "big")
        assert found is not None and found.value == value
        each = limits.WRITE_BYTES_MAX // limits.CHANGES_MAX
        changes = [Put(f"r{n:02}", value[:each]) for n in range(limits.CHANGES_MAX)]
        catalog.write(partition, *changes, write_id=ids.new())
        assert all(row.value == value[:each] for row in catalog.scan(partition, "r"))

    # Scans.

    def test_scans_are_ordered_bounded_and_paged(self, catalog: Catalog, partition: str) -> None:
        keys = [f"k{n:05}" for n in range(2_600)]
        for first in range(0, len(keys), limits.CHANGES_MAX):
            changes = [Put(key, b"v" * 1_000) for key in keys[first : first + limits.CHANGES_MAX]]
            catalog.write(partition, *changes, write_id=ids.new())

        def scan(*args: object, **options: object) -> list[str]:
            return [row.row for row in catalog.scan(partition, *args, **options)]  # type: ignore[arg-type]

        assert scan() == keys
        assert scan(reverse=True) == keys[::-1]
        assert scan("k00100", "k00200") == keys[100:200]
        assert scan("k00100", "k00200", reverse=True) == keys[100:200][::-1]
        assert scan("k00100", limit=1_500) == keys[100:1_600]
        assert scan("k00100", "k02000", limit=1_500, reverse=True) == keys[500:2_000][::-1]
        assert scan("k00099x", "k00100x") == ["k00100"]
        assert scan("k00005", "k00005") == []
        assert scan("k9", "k0") == []
        assert scan(limit=0) == []
        assert scan("l") == []
        assert sum(len(row.value) for row in catalog.scan(partition)) == 2_600_000

    def test_a_scan_beyond_or_across_deleted_rows_neither_slows_nor_fails(
        self, catalog: Catalog, partition: str
    ) -> None:
        fresh = f"{partition}/fresh"
        for name in (partition, fresh):
            catalog.write(name, Put("e", b"last"), Put("a", b"first"), write_id=ids.new())
        self.leave_deleted_rows(catalog, partition, self.deleted_rows)

        def once_s(name: str) -> float:
            began = time.perf_counter()
            assert [row.row for row in catalog.scan(name, "e")] == ["e"]
            return time.perf_counter() - began

        # Alternate, and use the fastest of each, so that a stall of the machine affects neither.
        pairs = [(once_s(partition), once_s(fresh)) for _ in range(15)]
        beyond_s, fresh_s = (min(times) for times in zip(*pairs, strict=True))
        assert beyond_s < 5 * fresh_s + 0.02
        assert [row.row for row in catalog.scan(partition)] == ["a", "e"]
        assert [row.row for row in catalog.scan(partition, reverse=True)] == ["e", "a"]

    # Expectations.

    def test_expectations_hold_or_nothing_is_written(
        self, catalog: Catalog, partition: str
    ) -> None:
        catalog.write(partition, Put("a", b"1", expect=ABSENT), write_id="w1")
        with pytest.raises(ConflictError):
            catalog.write(partition, Put("a", b"2", expect=ABSENT), write_id="w2")
        with pytest.raises(ConflictError):
            catalog.write(partition, Put("a", b"2", expect="other"), write_id="w3")
        with pytest.raises(ConflictError):
            catalog.write(partition, Put("gone", b"2", expect="w1"), write_id="w4")
        with pytest.raises(ConflictError):
            catalog.write(partition, Delete("a", expect="other"), write_id="w5")
        with pytest.raises(ConflictError):
            catalog.write(partition, Delete("a", expect=ABSENT), write_id="w5a")
        with pytest.raises(ConflictError):
            catalog.write(partition, Check("a", ABSENT), Put("b", b"2"), write_id="w6")
        assert list(catalog.scan(partition)) == [Row("a", b"1", "w1")]
        catalog.write(
            partition,
            Check("a", "w1"),
            Check("b", ABSENT),
            Put("c", b"3", expect=ABSENT),
            Delete("d", expect=ABSENT),
            write_id="w7",
        )
        catalog.write(partition, Check("c", "w7"), write_id="w8")
        with pytest.raises(ConflictError):
            catalog.write(partition, Check("b", "w7"), write_id="w9")
        catalog.write(partition, Delete("a", expect="w1"), write_id="w10")
        assert list(catalog.scan(partition)) == [Row("c", b"3", "w7")]

    def test_a_conflict_returns_the_rows_that_were_not_as_expected(
        self, catalog: Catalog, partition: str
    ) -> None:
        catalog.write(partition, Put("a", b"1"), Put("b", b""), Put("c", b"3"), write_id="w1")
        a, b = Row("a", b"1", "w1"), Row("b", b"", "w1")
        refused: list[tuple[list[Put | Delete | Check], dict[str, Row | None]]] = [
            ([Put("a", b"2", expect=ABSENT)], {"a": a}),
            ([Put("a", b"2", expect="stale")], {"a": a}),
            ([Delete("b", expect="stale")], {"b": b}),
            ([Delete("b", expect=ABSENT)], {"b": b}),
            ([Put("gone", b"2", expect="w1")], {"gone": None}),
            ([Delete("gone", expect="w1")], {"gone": None}),
            ([Check("a", ABSENT)], {"a": a}),
            ([Check("gone", "w1")], {"gone": None}),
            (
                [Put("a", b"2", expect="stale"), Check("b", ABSENT), Put("c", b"4", expect="w1")],
                {"a": a, "b": b},
            ),
            ([Check("c", "w1"), Put("new", b""), Delete("gone", expect="x")], {"gone": None}),
        ]
        everything = {row.row: row for row in catalog.scan(partition)}
        for number, (changes, failed) in enumerate(refused):
            with pytest.raises(ConflictError) as told:
                catalog.write(partition, *changes, write_id=f"refused-{number}")
            rows = told.value.rows
            assert {name: rows[name] for name in failed} == failed
            # Any other row it returns is a current row of the write.
            assert set(rows) <= {change.row for change in changes}
            assert all(row == everything.get(name) for name, row in rows.items())
        assert {row.row: row for row in catalog.scan(partition)} == everything

    def test_many_changes_with_one_failed_expectation_change_nothing(
        self, catalog: Catalog, partition: str
    ) -> None:
        rows = [f"r{n:02}" for n in range(limits.CHANGES_MAX)]
        catalog.write(partition, *[Put(row, b"old") for row in rows], write_id="w1")
        before = list(catalog.scan(partition))
        changes = [Put(row, b"new", expect="w1") for row in rows[:-2]]
        with pytest.raises(ConflictError):
            catalog.write(
                partition,
                *changes,
                Delete(rows[-2]),
                Put(rows[-1], b"new", expect="stale"),
                write_id="w2",
            )
        assert list(catalog.scan(partition)) == before
        catalog.write(partition, *changes, Delete(rows[-2]), write_id="w3")
        assert [row.value for row in catalog.scan(partition)] == [b"new"] * 23 + [b"old"]

    def test_a_version_never_recurs_and_an_old_expectation_never_succeeds(
        self, catalog: Catalog, partition: str
    ) -> None:
        seen: set[str] = set()
        for round_number in range(5):
            made = f"made-{round_number}"
            catalog.write(partition, Put("a", b"same", expect=ABSENT), write_id=made)
            found = catalog.get(partition, "a")
            assert found is not None and found.version not in seen
            for old in sorted(seen):
                with pytest.raises(ConflictError):
                    catalog.write(partition, Put("a", b"late", expect=old), write_id=ids.new())
                with pytest.raises(ConflictError):
                    catalog.write(partition, Delete("a", expect=old), write_id=ids.new())
                with pytest.raises(ConflictError):
                    catalog.write(partition, Check("a", old), Put("b", b"late"), write_id=ids.new())
            seen.add(found.version)
            catalog.write(partition, Delete("a", expect=made), write_id=ids.new())
        assert list(catalog.scan(partition)) == []

    # Limits.

    def test_a_row_named_twice_is_refused(self, catalog: Catalog, partition: str) -> None:
        for pair in (
            (Put("a", b"1"), Put("a", b"2")),
            (Put("a", b"1"), Delete("a")),
            (Check("a", ABSENT), Put("a", b"1")),
        ):
            with pytest.raises(InvalidError, match="twice"):
                catalog.write(partition, *pair, write_id=ids.new())
        assert catalog.get(partition, "a") is None

    def test_what_is_beyond_the_limits_is_refused(self, catalog: Catalog, partition: str) -> None:
        many = [Put(f"r{n}", b"") for n in range(limits.CHANGES_MAX + 1)]
        large = b"x" * limits.VALUE_BYTES_MAX
        bad: list[tuple[str, Sequence[Put | Check], str]] = [
            (partition, many, "w"),
            (partition, [], "w"),
            (partition, [Put("a", large + b"x")], "w"),
            (partition, [Put(f"r{n}", large) for n in range(11)], "w"),
            (partition, [Put("x" * (limits.ROW_BYTES_MAX + 1), b"")], "w"),
            (partition, [Put("", b"")], "w"),
            (partition, [Put("nul\0", b"")], "w"),
            (partition, [Put("\ud800", b"")], "w"),
            (partition, [Put("a", b"")], ""),
            (partition, [Put("a", b"")], "w" * (limits.WRITE_ID_BYTES_MAX + 1)),
            (partition, [Put("a", b"", expect="")], "w"),
            (partition, [Check("a", None)], "w"),  # type: ignore[arg-type]
            ("", [Put("a", b"")], "w"),
            ("p" * (limits.PARTITION_BYTES_MAX + 1), [Put("a", b"")], "w"),
        ]
        for where, changes, write_id in bad:
            with pytest.raises(InvalidError):
                catalog.write(where, *changes, write_id=write_id)
        with pytest.raises(InvalidError):
            list(catalog.scan(partition, limit=-1))
        with pytest.raises(InvalidError):
            catalog.get("", "a")
        assert list(catalog.scan(partition)) == []

    # Repeats and lost replies.

    def test_a_repeat_with_the_same_write_id_returns_as_the_first_did(
        self, catalog: Catalog, partition: str
    ) -> None:
        changes = (Put("a", b"1", expect=ABSENT), Put("b", b"1"))
        catalog.write(partition, *changes, write_id="w1")
        catalog.write(partition, *changes, write_id="w1")
        catalog.write(partition, Put("a", b"2", expect="w1"), write_id="w2")
        catalog.write(partition, *changes, write_id="w1")
        assert catalog.get(partition, "a") == Row("a", b"2", "w2")

    def test_a_lost_reply_is_settled_to_the_truth(self, catalog: Catalog, partition: str) -> None:
        catalog.write(partition, Put("n", b"0"), write_id="w0")
        with self.losing_replies(catalog) as (lossy, lose):
            lose(1)
            lossy.write(partition, Put("a", b"1", expect=ABSENT), write_id="w1")
            lose(2)
            lossy.write(
                partition, Put("n", b"1", expect="w0"), Put("m", b"1", ABSENT), write_id="w2"
            )
            lose(1)
            lossy.write(partition, Put("plain", b"1"), write_id="w3")
        assert list(catalog.scan(partition)) == [
            Row("a", b"1", "w1"),
            Row("m", b"1", "w2"),
            Row("n", b"1", "w2"),
            Row("plain", b"1", "w3"),
        ]

    def test_a_lost_reply_to_a_refused_write_is_never_a_conflict(
        self, catalog: Catalog, partition: str
    ) -> None:
        catalog.write(partition, Put("a", b"1"), write_id="w1")
        with self.losing_replies(catalog) as (lossy, lose):
            lose(1)
            with pytest.raises((UnknownOutcomeError, ConflictError)) as told:
                lossy.write(partition, Put("a", b"2", expect="stale"), write_id="w2")
        # Only a reply that was read may say "conflict"; the first one here was lost.
        assert told.type is UnknownOutcomeError
        assert catalog.get(partition, "a") == Row("a", b"1", "w1")

    def test_a_delete_whose_reply_is_lost_is_not_guessed(
        self, catalog: Catalog, partition: str
    ) -> None:
        catalog.write(partition, Put("a", b"1"), write_id="w1")
        with self.losing_replies(catalog) as (lossy, lose):
            lose(1)
            with pytest.raises(UnknownOutcomeError):
                lossy.write(partition, Delete("a", expect="w1"), write_id="w2")
            lose(1)
            lossy.write(partition, Delete("a"), write_id="w3")
        assert catalog.get(partition, "a") is None

    # Updates: the loop over reads and writes that everything above uses.

    def test_an_update_decides_again_with_the_rows_of_a_conflict(
        self, catalog: Catalog, partition: str
    ) -> None:
        catalog.write(partition, Put("n", b"1"), Put("kept", b""), write_id="w1")
        seen: list[tuple[Row | None, ...]] = []

        def decide(rows: Rows) -> Decision[str]:
            seen.append((rows["n"], rows["kept"], rows["new"]))
            if len(seen) == 1:  # another process comes before the write
                catalog.write(partition, Put("n", b"2"), Put("new", b"x"), write_id="w2")
            changes = rows.put("n", b"3"), rows.check("kept"), rows.put("new", b"y")
            return Decision(rows.write_id, changes)

        counting = _CountingReads(catalog)
        version = update(_Tools(counting), partition, ["n", "kept", "new"], decide, "rows")
        kept = Row("kept", b"", "w1")
        assert seen == [
            (Row("n", b"1", "w1"), kept, None),
            (Row("n", b"2", "w2"), kept, Row("new", b"x", "w2")),
        ]
        assert counting.reads == 3
        assert catalog.get(partition, "n") == Row("n", b"3", version)
        assert catalog.get(partition, "new") == Row("new", b"y", version)

    def test_an_update_sees_that_a_row_was_deleted(self, catalog: Catalog, partition: str) -> None:
        catalog.write(partition, Put("n", b"1"), write_id="w1")
        seen: list[bool] = []

        def decide(rows: Rows) -> Decision[bool]:
            seen.append(rows["n"] is not None)
            if len(seen) == 1:
                catalog.write(partition, Delete("n"), write_id="w2")
            return Decision(True, [rows.put("n", b"2")] if rows["n"] else [])

        assert update(_Tools(catalog), partition, ["n"], decide, "row `n`")
        assert seen == [True, False]
        assert catalog.get(partition, "n") is None

    def test_an_update_whose_replies_get_lost_is_made_once(
        self, catalog: Catalog, partition: str
    ) -> None:
        with self.losing_replies(catalog) as (lossy, lose):
            for done, losses in enumerate((1, 2, 0, 1)):
                lose(losses)
                assert _count(lossy, partition, "w") == done + 1
            lose(1)
            gone = update(_Tools(lossy), partition, ["n"], _without_n, "row `n`")
        assert gone
        assert catalog.get(partition, "n") is None

    def test_updates_by_many_workers_add_up(self, catalog: Catalog, partition: str) -> None:
        names = [f"w{number}" for number in range(self.workers)]
        self._work(catalog, partition, names, _count_up, self.updates_each)
        found = catalog.get(partition, "n")
        assert found is not None
        assert json.loads(found.value) == dict.fromkeys(names, self.updates_each)

    # Concurrency.

    def test_increments_by_many_workers_add_up(self, catalog: Catalog, partition: str) -> None:
        names = [f"w{number}" for number in range(self.workers)]
        catalog.write(partition, Put("n", _spell(dict.fromkeys(names, 0))), write_id=ids.new())
        self._work(catalog, partition, names, _increment, self.increments_each)
        found = catalog.get(partition, "n")
        assert found is not None
        assert json.loads(found.value) == dict.fromkeys(names, self.increments_each)

    def _work(
        self, catalog: Catalog, partition: str, names: Sequence[str], work: _Work, times: int
    ) -> None:
        """Runs a worker for each name, in processes of their own where the rows can be opened."""
        open_again = self.opener(catalog)
        processes = multiprocessing.get_context("forkserver")  # imports what they need once
        processes.set_forkserver_preload([__name__])
        spawn = processes.Process if open_again else threading.Thread
        each = (open_again or (lambda: catalog), partition, times)
        workers = [spawn(target=work, args=(*each, name)) for name in names]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()


def _increment(open_again: Callable[[], Catalog], partition: str, times: int, name: str) -> None:
    """Increments our own number in a shared row, and checks that none is lost or doubled.

    A busy server may leave the outcome of a write unknown. Then the row shows it, once it has
    another version than the write expected.
    """
    catalog = open_again()
    done, unsure_of = 0, ""
    while True:
        row = catalog.get(partition, "n")
        if row is None:
            raise AssertionError("the counter's row is gone")
        counts = json.loads(row.value)
        if not done <= counts[name] <= done + bool(unsure_of):
            raise AssertionError(f"{name} counted to {done}, the row says {counts[name]}")
        done = counts[name]
        unsure_of = unsure_of if unsure_of == row.version else ""
        if done == times:
            return
        counts[name] += 1
        try:
            catalog.write(partition, Put("n", _spell(counts), row.version), write_id=ids.new())
            done += 1
        except ConflictError:
            pass
        except UnknownOutcomeError:
            unsure_of = row.version


def _spell(counts: dict[str, int]) -> bytes:
    return json.dumps(counts).encode()


@dataclass
class _Tools:
    """What an update works with."""

    catalog: Catalog
    clock: Clock = field(default_factory=SystemClock)
    ids: Ids = ids
    random: random.Random = field(default_factory=system_random)


class _CountingReads(Catalog):
    """Counts the rows that are read."""

    def __init__(self, inner: Catalog) -> None:
        self.inner = inner
        self.reads = 0

    @property
    def url(self) -> str:
        return self.inner.url

    def get(self, partition: str, row: str) -> Row | None:
        self.reads += 1
        return self.inner.get(partition, row)

    def scan(
        self,
        partition: str,
        start: str = "",
        end: str | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> Iterator[Row]:
        return self.inner.scan(partition, start, end, limit, reverse)

    def write(self, partition: str, *changes: Change, write_id: str) -> None:
        self.inner.write(partition, *changes, write_id=write_id)

    def close(self) -> None:
        self.inner.close()


def _count_up(open_again: Callable[[], Catalog], partition: str, times: int, name: str) -> None:
    """Counts up our own number in a row that all share, each time by an update."""
    catalog = open_again()
    for done in range(times):
        counted = _count(catalog, partition, name)
        if counted != done + 1:
            raise AssertionError(f"{name} counted to {done + 1}, the row says {counted}")


def _count(catalog: Catalog, partition: str, name: str) -> int:
    """Adds one to our own number; what it is then. Only we change it, so it is the mark."""

    def decide(rows: Rows) -> Decision[int]:
        counts = _counts(rows)
        wanted = counts.get(name, 0) + 1
        change = rows.put("n", _spell(counts | {name: wanted}))
        return Decision(wanted, [change], lambda now: _counts(now).get(name) == wanted)

    return update(_Tools(catalog), partition, ["n"], decide, f"counter of {name}")


def _counts(rows: Rows) -> dict[str, int]:
    row = rows["n"]
    return json.loads(row.value) if row else {}


def _without_n(rows: Rows) -> Decision[bool]:
    return Decision(True, [rows.delete("n")] if rows["n"] else [])
