"""How a write is brought to its true end: what is read, and when nothing is."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from tidelog.catalog.base import ABSENT, Change, Put, Row, conflict
from tidelog.catalog.update import LostReplyError, Repeat, write_settled
from tidelog.errors import ConflictError, InvalidError, UnknownOutcomeError
from tidelog.model.times import Backoff
from tidelog.testing.scheduler import FakeClock

CHANGES: tuple[Change, ...] = (Put("a", b"2", expect="v1"), Put("b", b"2", expect=ABSENT))


class Backend:
    """Answers attempts from a list, and notes which rows are read."""

    def __init__(self, answers: Iterable[Exception | None], versions: dict[str, str | None]):
        self.answers = iter(answers)
        self.versions = versions
        self.reads: list[str] = []

    def attempt(self) -> None:
        answer = next(self.answers)
        if answer is not None:
            raise answer

    def read_version(self, row: str) -> str | None:
        self.reads.append(row)
        return self.versions[row]

    def write(self) -> None:
        repeat = Repeat(FakeClock(), random.Random(1), Backoff(attempts=4))
        write_settled(self.attempt, self.read_version, "p", CHANGES, "mine", repeat)


def refusal(**found: str | None) -> ConflictError:
    rows = {name: Row(name, b"1", version) if version else None for name, version in found.items()}
    return conflict("p", CHANGES, rows)


def test_first_conflict_reads_nothing() -> None:
    backend = Backend([refusal(a="v9")], {"a": "v9", "b": None})
    with pytest.raises(ConflictError) as told:
        backend.write()
    assert backend.reads == []
    assert told.value.rows == {"a": Row("a", b"1", "v9")}


def test_conflict_with_our_own_id_is_success_without_a_read() -> None:
    backend = Backend([refusal(a="mine", b="mine")], {"a": "mine", "b": "mine"})
    backend.write()
    assert backend.reads == []


def test_conflict_after_a_lost_reply_reads_the_rows() -> None:
    overwritten = Backend([LostReplyError(), refusal(a="v9")], {"a": "v1", "b": None})
    with pytest.raises(UnknownOutcomeError):
        overwritten.write()
    assert overwritten.reads == ["a", "b", "a", "b"]
    landed = Backend([LostReplyError(), refusal(a="mine", b="mine")], {"a": "v1", "b": None})
    landed.write()
    assert landed.reads == ["a", "b"]


def expired() -> InvalidError:
    return InvalidError("catalog: the credentials have expired: renew them")


def test_refusal_of_the_first_attempt_is_reported_as_it_is() -> None:
    with pytest.raises(InvalidError, match="expired"):
        Backend([expired()], {"a": "v1", "b": None}).write()


def test_refusal_after_a_lost_reply_does_not_say_that_nothing_was_written() -> None:
    backend = Backend([LostReplyError(), expired()], {"a": "v1", "b": None})
    with pytest.raises(UnknownOutcomeError, match="expired"):
        backend.write()


def test_refused_read_after_a_lost_reply_does_not_say_that_nothing_was_written() -> None:
    class Refusing(Backend):
        def read_version(self, row: str) -> str | None:
            raise expired()

    with pytest.raises(UnknownOutcomeError, match="expired"):
        Refusing([LostReplyError()], {}).write()
