"""The probe refuses stores that break their word, and leaves nothing behind."""

from __future__ import annotations

import pytest

from tidelog.backends import probe_store
from tidelog.errors import AlreadyExistsError, ConflictError, InvalidError, UnavailableError
from tidelog.store.memory import MemoryStore
from tidelog.testing.faults import Fault, Faults, FaultyStore
from tidelog.testing.scheduler import FakeClock, seeded_ids


class IgnoresIfNoneMatch(MemoryStore):
    """As some emulators do: a create overwrites without a word."""

    def put(self, key: str, data: bytes) -> str:
        try:
            return super().put(key, data)
        except AlreadyExistsError:
            return super().replace(key, data, self.head(key).etag)


class KeepsFirstButSaysYes(MemoryStore):
    def put(self, key: str, data: bytes) -> str:
        try:
            return super().put(key, data)
        except AlreadyExistsError:
            return "fine"


class IgnoresIfMatch(MemoryStore):
    def replace(self, key: str, data: bytes, etag: str) -> str:
        return super().replace(key, data, self.head(key).etag)


class RefusesEveryReplace(MemoryStore):
    def replace(self, key: str, data: bytes, etag: str) -> str:
        raise ConflictError("no")


class CopiesOver(MemoryStore):
    def copy(self, source: str, target: str) -> None:
        self.delete([target])
        super().copy(source, target)


@pytest.mark.parametrize(
    "broken",
    [IgnoresIfNoneMatch, KeepsFirstButSaysYes, IgnoresIfMatch, CopiesOver],
    ids=lambda kind: kind.__name__,
)
def test_a_store_that_breaks_its_word_is_refused(broken: type[MemoryStore]) -> None:
    store = broken(FakeClock())
    with pytest.raises(InvalidError, match="events could be lost there"):
        probe_store(store, seeded_ids(1))
    assert list(store.list()) == []


def test_errors_of_the_store_come_through() -> None:
    with pytest.raises(ConflictError):
        probe_store(RefusesEveryReplace(FakeClock()), seeded_ids(1))
    faults = Faults()
    faults.on_next("get", Fault.LOSE_REQUEST)
    store = FaultyStore(MemoryStore(FakeClock()), faults)
    with pytest.raises(UnavailableError):
        probe_store(store, seeded_ids(1))
    assert list(store.inner.list()) == []
