"""The loop that changes rows: what it reads, when it decides again, and how it ends."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from tidelog.catalog.base import ABSENT, Catalog, Change, Delete, Put, Row
from tidelog.catalog.memory import MemoryCatalog
from tidelog.catalog.update import (
    RACE,
    REREAD,
    Decision,
    Rows,
    attempts,
    pause,
    read_if_stable,
    read_stable,
    rounds,
    update,
)
from tidelog.clock import Clock, Ids, RandomIds
from tidelog.errors import (
    ConflictError,
    InvalidError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.model import limits
from tidelog.model.times import Backoff
from tidelog.testing.scheduler import FakeClock

Step = Callable[[], None]


class Meddler(Catalog):
    """A catalog in memory that notes calls, and does something before or instead of a write."""

    def __init__(self) -> None:
        self.inner = MemoryCatalog()
        self.reads: list[str] = []
        self.writes: list[str] = []
        self.before: list[Step] = []  # of each write, in order
        self.replies: list[str] = []  # of each write: "", "lost", "lost before", "unavailable"
        self.is_down = False
        self.before_read: Callable[[str], None] = lambda row: None

    @property
    def url(self) -> str:
        return self.inner.url

    def get(self, partition: str, row: str) -> Row | None:
        if self.is_down:
            raise UnavailableError("catalog: is down: try again")
        self.before_read(row)
        self.reads.append(row)
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
        self.writes.append(write_id)
        if self.before:
            self.before.pop(0)()
        reply = self.replies.pop(0) if self.replies else ""
        if reply == "unavailable":
            raise UnavailableError("catalog: is down: try again")
        try:
            if reply != "lost before":
                self.inner.write(partition, *changes, write_id=write_id)
        finally:
            if reply:
                raise UnknownOutcomeError("no reply")

    def close(self) -> None:
        self.inner.close()

    def set(self, row: str, value: int | None, write_id: str = "") -> None:
        """Change a row as another process does."""
        change: Change = Delete(row) if value is None else Put(row, b"%d" % value)
        self.inner.write("p", change, write_id=write_id or f"other-{random.random()}")

    def value(self, row: str, absent: bytes = b"absent") -> bytes:
        found = self.inner.get("p", row)
        return found.value if found else absent


@dataclass
class Tools:
    catalog: Catalog
    clock: Clock = field(default_factory=FakeClock)
    ids: Ids = field(default_factory=lambda: RandomIds(random.Random(1)))
    random: random.Random = field(default_factory=lambda: random.Random(2))


def number(row: Row | None) -> int:
    return 0 if row is None else int(row.value)


def count(rows: Rows) -> Decision[int]:
    """Add one to ``n``, with a mark that only this write puts beside it."""
    wanted, mark = number(rows["n"]) + 1, f"mark/{rows.write_id}"
    return Decision(wanted, [rows.put("n", b"%d" % wanted), Put(mark, b"", ABSENT)])


def to_seven(rows: Rows) -> Decision[str]:
    """Raise ``n`` to 7: deciding again after a lost reply does no harm."""
    if number(rows["n"]) >= 7:
        return Decision("was there")
    return Decision("raised", [rows.put("n", b"7")])


def run(catalog: Meddler, decide: Callable[[Rows], Decision[int]] = count, *rows: str) -> int:
    return update(Tools(catalog), "p", rows or ("n",), decide, "counter `n`")


def test_rows_are_read_in_order_and_the_result_is_returned() -> None:
    catalog = Meddler()
    catalog.set("b", 5)
    seen: list[tuple[Row | None, Row | None]] = []

    def decide(rows: Rows) -> Decision[int]:
        seen.append((rows["c"], rows["b"]))
        return Decision(3, [rows.put("c", b"1"), rows.check("b")])

    assert run(catalog, decide, "c", "b") == 3
    assert catalog.reads == ["c", "b"]
    assert seen == [(None, catalog.inner.get("p", "b"))]
    found = catalog.inner.get("p", "c")
    assert found is not None
    assert found.version == catalog.writes[0]


def test_decision_without_changes_writes_nothing() -> None:
    catalog = Meddler()
    catalog.set("n", 9)
    assert update(Tools(catalog), "p", ["n"], to_seven, "n") == "was there"
    assert catalog.writes == []


def test_conflict_returns_the_rows_so_that_no_read_follows() -> None:
    catalog = Meddler()
    catalog.before = [lambda: catalog.set("n", 4), lambda: catalog.set("n", 6)]
    assert run(catalog) == 7
    assert catalog.value("n") == b"7"
    assert catalog.reads == ["n"]
    assert len(set(catalog.writes)) == len(catalog.writes) == 3


def test_rows_of_which_the_write_expected_nothing_are_read_again_after_a_conflict() -> None:
    catalog = Meddler()

    def overtake() -> None:
        catalog.set("n", 4)
        catalog.set("limit", 5)

    catalog.before = [overtake]

    def decide(rows: Rows) -> Decision[int]:
        if number(rows["n"]) + 1 >= number(rows["limit"]) > 0:
            return Decision(-1)
        return count(rows)

    assert run(catalog, decide, "n", "limit", "kept") == -1
    assert catalog.reads == ["n", "limit", "kept", "limit", "kept"]


def test_row_that_is_as_expected_is_kept_after_a_conflict() -> None:
    catalog = Meddler()
    catalog.set("gate", 1)
    catalog.before = [lambda: catalog.set("n", 4)]

    def decide(rows: Rows) -> Decision[int]:
        counted = count(rows)
        return Decision(counted.result, [*counted.changes, rows.check("gate")])

    assert run(catalog, decide, "n", "gate") == 5
    assert catalog.reads == ["n", "gate"]


def test_conflict_without_rows_leads_to_a_read() -> None:
    catalog = Meddler()

    def refuse() -> None:
        raise ConflictError("not said which row")

    catalog.before = [refuse]
    assert run(catalog) == 1
    assert catalog.reads == ["n", "n"]


def test_after_a_long_wait_rows_are_read_again() -> None:
    catalog = Meddler()
    catalog.before = [lambda: catalog.set("n", 4)] * 12
    assert run(catalog) == 5
    assert 2 <= len(catalog.reads) < 12, "at first the rows of the conflict, later new ones"


def test_known_rows_are_not_read() -> None:
    catalog = Meddler()
    tools = Tools(catalog)
    assert update(tools, "p", ["n"], count, "n", {"n": None}) == 1
    assert update(tools, "p", ["n"], count, "n", {"n": None}) == 2
    assert catalog.reads == []


def test_lost_reply_that_landed_is_not_repeated() -> None:
    catalog = Meddler()
    catalog.replies = ["lost"]
    assert run(catalog) == 1
    assert catalog.value("n") == b"1"
    assert len(catalog.writes) == 1


def test_lost_reply_that_did_not_land_is_decided_again() -> None:
    catalog = Meddler()
    catalog.replies = ["lost before"]
    assert run(catalog) == 1
    assert catalog.value("n") == b"1"
    assert len(set(catalog.writes)) == 2


def test_earlier_write_that_lands_late_is_found_by_the_conflict() -> None:
    catalog = Meddler()
    catalog.replies = ["lost before", ""]
    late: list[str] = []
    catalog.before = [
        lambda: late.append(catalog.writes[0]),
        lambda: catalog.set("n", 1, write_id=late[0]),
    ]
    assert run(catalog) == 1
    assert catalog.value("n") == b"1"
    assert len(catalog.writes) == 2


@pytest.mark.parametrize("has_mark", [True, False])
def test_mark_settles_what_others_have_changed_since(has_mark: bool) -> None:
    catalog = Meddler()
    catalog.replies = ["lost"]

    def decide(rows: Rows) -> Decision[bytes]:
        mine, before = rows.write_id.encode(), names_in(rows)
        change = rows.put("n", b" ".join([*before, mine]))
        return Decision(mine, [change], (lambda now: mine in names_in(now)) if has_mark else None)

    def overtake(row: str) -> None:
        if catalog.writes and not catalog.value("n", b"").endswith(b"other"):
            catalog.inner.write("p", Put("n", catalog.value("n", b"") + b" other"), write_id="o")

    catalog.before_read = overtake
    mine = update(Tools(catalog), "p", ["n"], decide, "list `n`")
    expected = [catalog.writes[0].encode(), b"other"]
    assert catalog.value("n", b"").split() == (expected if has_mark else [*expected, mine])


def names_in(rows: Rows) -> list[bytes]:
    row = rows["n"]
    return row.value.split() if row else []


def test_idempotent_change_is_decided_again_after_a_lost_reply() -> None:
    catalog = Meddler()
    catalog.replies = ["lost"]
    assert update(Tools(catalog), "p", ["n"], to_seven, "n") == "raised"
    catalog.set("n", 1)
    catalog.replies = ["lost before", "lost before"]
    assert update(Tools(catalog), "p", ["n"], to_seven, "n") == "raised"


def test_deleted_row_is_seen_as_none() -> None:
    catalog = Meddler()
    catalog.set("n", 3)
    catalog.before = [lambda: catalog.set("n", None)]

    def decide(rows: Rows) -> Decision[int]:
        if rows["n"] is None:
            raise NotFoundError("counter `n`: was deleted")
        return count(rows)

    with pytest.raises(NotFoundError):
        run(catalog, decide)
    assert catalog.reads == ["n"]
    assert catalog.value("n") == b"absent"


def test_delete_whose_reply_is_lost_ends_when_the_row_is_gone() -> None:
    catalog = Meddler()
    catalog.set("n", 3)
    catalog.replies = ["lost"]

    def decide(rows: Rows) -> Decision[int]:
        return Decision(0, [] if rows["n"] is None else [rows.delete("n")])

    assert run(catalog, decide) == 0
    assert catalog.value("n") == b"absent"


def test_bound_ends_in_one_error_that_names_the_thing() -> None:
    catalog = Meddler()
    catalog.before = [lambda: catalog.set("n", 4)] * 1_000
    tools = Tools(catalog)
    began_s = tools.clock.monotonic_s()
    with pytest.raises(UnavailableError, match="counter `n`"):
        update(tools, "p", ["n"], count, "counter `n`")
    assert len(catalog.writes) == limits.COMMIT_ATTEMPTS == RACE.attempts
    assert 0 < tools.clock.monotonic_s() - began_s < limits.COMMIT_ATTEMPTS * RACE.max_ms / 1000


def test_attempts_wait_between_each_other_and_end_in_the_error() -> None:
    tools = Tools(Meddler())
    began_s, waited = tools.clock.monotonic_s(), []

    def never_done() -> None:
        for number in attempts(tools, UnavailableError("busy"), Backoff(3, base_ms=40, max_ms=50)):
            now_ms = round((tools.clock.monotonic_s() - began_s) * 1000)
            waited.append((number, now_ms))

    with pytest.raises(UnavailableError, match="busy"):
        never_done()
    assert [number for number, _ in waited] == [0, 1, 2]
    assert waited[0][1] == 0
    assert 20 <= waited[1][1] <= 40
    assert 25 <= waited[2][1] - waited[1][1] <= 50


def test_rounds_wait_only_where_their_caller_pauses() -> None:
    tools, seen = Tools(Meddler()), []
    began_s = tools.clock.monotonic_s()

    def never_done() -> None:
        for number in rounds(3, UnavailableError("busy")):
            seen.append((number, round((tools.clock.monotonic_s() - began_s) * 1000)))
            if number == 1:
                pause(tools, number, Backoff(3, base_ms=40, max_ms=100))

    with pytest.raises(UnavailableError, match="busy"):
        never_done()
    assert seen[:2] == [(0, 0), (1, 0)]
    assert 40 <= seen[2][1] <= 80


def test_error_after_a_lost_reply_does_not_say_that_nothing_was_written() -> None:
    catalog = Meddler()
    catalog.replies = ["lost before"] * 1_000
    with pytest.raises(UnknownOutcomeError, match="counter `n`"):
        run(catalog)
    catalog.replies = ["lost"]
    catalog.before = [lambda: setattr(catalog, "is_down", True)]
    with pytest.raises(UnknownOutcomeError, match="counter `n`"):
        run(catalog)


def test_refusal_after_a_lost_reply_does_not_say_that_nothing_was_written() -> None:
    catalog = Meddler()
    catalog.replies = ["lost before"]

    def refuse(row: str) -> None:
        if catalog.writes:
            raise InvalidError("catalog: the credentials have expired: renew them")

    catalog.before_read = refuse
    with pytest.raises(UnknownOutcomeError, match=r"counter `n`.*expired"):
        run(catalog)


def test_error_of_a_decision_after_a_lost_reply_is_raised_as_it_is() -> None:
    catalog = Meddler()
    catalog.replies = ["lost before"]

    def once(rows: Rows) -> Decision[int]:
        if catalog.writes:
            raise InvalidError("decided otherwise")
        return count(rows)

    with pytest.raises(InvalidError, match="decided otherwise"):
        run(catalog, once)


def test_unavailable_catalog_is_reported_as_it_is() -> None:
    catalog = Meddler()
    catalog.replies = ["unavailable"]
    with pytest.raises(UnavailableError, match="is down"):
        run(catalog)


def test_read_is_repeated_until_nothing_changes_meanwhile() -> None:
    tools, found = Tools(Meddler()), [None, None, "rows"]
    began_s = tools.clock.monotonic_s()
    assert read_stable(tools, lambda: found.pop(0), NotFoundError("never")) == "rows"
    assert 0 < tools.clock.monotonic_s() - began_s < 0.01


def test_read_that_is_always_disturbed_ends_in_the_error_of_its_caller() -> None:
    tools, calls = Tools(Meddler()), []
    failed = UnavailableError("partition `t/0`: is compiled again and again")
    began_s = tools.clock.monotonic_s()
    with pytest.raises(UnavailableError) as raised:
        read_stable(tools, lambda: calls.append(1), failed)
    assert raised.value is failed
    assert len(calls) == REREAD.attempts
    assert read_if_stable(tools, lambda: None) is None
    assert 0 < tools.clock.monotonic_s() - began_s < 2


def test_two_updaters_count_to_n() -> None:
    catalog, each = MemoryCatalog(), 300

    def work(seed: int) -> None:
        tools = Tools(catalog, ids=RandomIds(random.Random(seed)), random=random.Random(seed))
        for _ in range(each):
            update(tools, "p", ["n"], count, "counter `n`")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert number(catalog.get("p", "n")) == 2 * each
