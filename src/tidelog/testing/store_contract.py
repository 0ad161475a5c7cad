"""What every store must do, as tests: subclass :class:`StoreContract` and add a fixture.

::

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self):
            yield MyStore(...)
"""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from tidelog.backends import probe_store
from tidelog.clock import RandomIds
from tidelog.errors import (
    AlreadyExistsError,
    ConflictError,
    InternalError,
    InvalidError,
    NotFoundError,
)
from tidelog.model import limits
from tidelog.store.base import Store

__all__ = ["StoreContract"]

ids = RandomIds()

STRANGE_NAMES = [
    "plain.txt",
    "with space",
    "dt=2026-11-15",
    "100%",
    "a+b&c=d",
    "ümlaut-é",
    "漢字",
    "\U0001f30a",
    "quote'\"`",
    "~tilde!(x)",
    "x" * limits.KEY_SEGMENT_BYTES_MAX,
    ".hidden",
    "_marked",
]


class StoreContract:
    """The contract. Every test uses its own folder."""

    racers = 16
    races = 100

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        """Yields a store to test; override."""
        raise InternalError("the contract needs the fixture `store`: override it")

    @pytest.fixture
    def base(self) -> str:
        return f"contract/{ids.new()}"

    # Objects.

    def test_an_object_is_read_as_it_was_put(self, store: Store, base: str) -> None:
        for name, data in (("one", b"hello"), ("empty", b""), ("large", b"0123456789" * 1_000_000)):
            etag = store.put(f"{base}/{name}", data)
            info = store.head(f"{base}/{name}")
            assert store.get(f"{base}/{name}") == data
            assert (info.key, info.size) == (f"{base}/{name}", len(data))
            assert etag
            assert info.etag == etag
            assert info.modified_ms > 1_000_000_000_000

    def test_ranges_are_half_open_and_end_with_the_object(self, store: Store, base: str) -> None:
        key = f"{base}/digits"
        store.put(key, b"0123456789")
        assert store.get(key, 2, 5) == b"234"
        assert store.get(key, 7) == b"789"
        assert store.get(key, 0, 10) == b"0123456789"
        assert store.get(key, 8, 100) == b"89"
        assert store.get(key, 3, 3) == b""
        assert store.get(key, 10) == b""
        assert store.get(key, 50, 60) == b""
        for start, end in ((-1, 2), (5, 2)):
            with pytest.raises(InvalidError):
                store.get(key, start, end)

    def test_what_is_not_there_is_not_found(self, store: Store, base: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: store.get(f"{base}/gone"),
            lambda: store.get(f"{base}/gone", 3, 3),
            lambda: store.head(f"{base}/gone"),
            lambda: store.copy(f"{base}/gone", f"{base}/target"),
            lambda: store.replace(f"{base}/gone", b"x", "etag"),
        ]
        for call in calls:
            with pytest.raises(NotFoundError):
                call()
        assert list(store.list(base)) == []

    def test_a_put_never_overwrites(self, store: Store, base: str) -> None:
        store.put(f"{base}/a", b"first")
        for data in (b"second", b"first", b""):
            with pytest.raises(AlreadyExistsError):
                store.put(f"{base}/a", data)
        assert store.get(f"{base}/a") == b"first"

    def test_keys_with_strange_names(self, store: Store, base: str) -> None:
        for name in STRANGE_NAMES:
            store.put(f"{base}/{name}/{name}", name.encode())
        keys = [f"{base}/{name}/{name}" for name in STRANGE_NAMES]
        assert [info.key for info in store.list(f"{base}/")] == sorted(keys)
        for name, key in zip(STRANGE_NAMES, keys, strict=True):
            assert store.get(key) == name.encode()
        store.delete(keys)
        assert list(store.list(f"{base}/")) == []

    def test_bad_keys_are_refused(self, store: Store, base: str) -> None:
        bad = ["", "/a", "a/", "a//b", "a/../b", "..", "a/./b", "a\0b", "a\nb", "\ud800"]
        bad += ["x" * 300, "y/" * 500 + "z"]
        for key in bad:
            with pytest.raises(InvalidError):
                store.put(key, b"x")
            with pytest.raises(InvalidError):
                store.get(key)
            with pytest.raises(InvalidError):
                store.delete([key])

    # Listing.

    def test_listing_is_ordered_and_bounded(self, store: Store, base: str) -> None:
        names = ["a", "a-b/1", "a/1", "a/2", "a0", "b/c/1", "b/c/2", "b/d", "ba"]
        names = [name for name in names if name != "a"]  # a key is not a folder of another
        for name in names:
            store.put(f"{base}/{name}", b"x")

        def listed(prefix: str, start_after: str = "") -> list[str]:
            after = f"{base}/{start_after}" if start_after else ""
            found = store.list(f"{base}/{prefix}", after)
            return [info.key.removeprefix(f"{base}/") for info in found]

        assert listed("") == sorted(names)
        assert listed("a/") == ["a/1", "a/2"]
        assert listed("a") == ["a-b/1", "a/1", "a/2", "a0"]
        assert listed("b/c/") == ["b/c/1", "b/c/2"]
        assert listed("b/c/1") == ["b/c/1"]
        assert listed("b") == ["b/c/1", "b/c/2", "b/d", "ba"]
        assert listed("nothing") == []
        assert listed("", "a/1") == ["a/2", "a0", "b/c/1", "b/c/2", "b/d", "ba"]
        assert listed("b", "b/c/1x") == ["b/c/2", "b/d", "ba"]
        assert listed("b/c/", "b/c/2") == []
        assert [info.size for info in store.list(f"{base}/a/")] == [1, 1]

    def test_listings_longer_than_a_page(self, store: Store, base: str) -> None:
        keys = [f"{base}/{number:05}" for number in range(1_050)]
        for key in keys:
            store.put(key, b"")
        assert [info.key for info in store.list(f"{base}/")] == keys
        assert [info.key for info in store.list(f"{base}/", keys[1_020])] == keys[1_021:]
        store.delete(keys)
        assert list(store.list(f"{base}/")) == []

    # Deleting, copying, replacing.

    def test_delete_takes_many_and_is_idempotent(self, store: Store, base: str) -> None:
        keys = [f"{base}/{number}" for number in range(5)]
        for key in keys:
            store.put(key, b"x")
        store.delete([*keys[:3], f"{base}/never"])
        store.delete(keys[:3])
        store.delete([])
        assert [info.key for info in store.list(f"{base}/")] == keys[3:]
        store.put(keys[0], b"again")
        assert store.get(keys[0]) == b"again"

    def test_a_copy_never_overwrites(self, store: Store, base: str) -> None:
        store.put(f"{base}/a", b"a" * 100_000)
        store.put(f"{base}/b", b"b")
        store.copy(f"{base}/a", f"{base}/sub/c")
        with pytest.raises(AlreadyExistsError):
            store.copy(f"{base}/a", f"{base}/b")
        store.delete([f"{base}/a"])
        assert store.get(f"{base}/sub/c") == b"a" * 100_000
        assert store.get(f"{base}/b") == b"b"

    def test_replace_needs_the_etag_that_is_there(self, store: Store, base: str) -> None:
        key = f"{base}/a"
        first = store.put(key, b"one")
        second = store.replace(key, b"two", first)
        assert store.get(key) == b"two"
        assert store.head(key).etag == second != first
        with pytest.raises(ConflictError):
            store.replace(key, b"three", first)
        assert store.get(key) == b"two"
        third = store.replace(key, b"one", second)
        assert store.get(key) == b"one"
        assert third != second

    def test_presigned_urls_give_the_bytes_to_anyone(self, store: Store, base: str) -> None:
        store.put(f"{base}/a b", b"for anyone")
        url = store.presign(f"{base}/a b", 60)
        with urllib.request.urlopen(url) as reply:  # noqa: S310 - the store's own URL
            assert reply.read() == b"for anyone"

    # Races.

    def test_of_racing_creates_exactly_one_wins(self, store: Store, base: str) -> None:
        for number in range(self.races):
            won = self._race(
                lambda racer, key=f"{base}/{number}": store.put(key, racer),  # type: ignore[misc]
                AlreadyExistsError,
            )
            assert len(won) == 1
            assert store.get(f"{base}/{number}") == won[0]

    def test_of_racing_replaces_exactly_one_wins(self, store: Store, base: str) -> None:
        etag = store.put(f"{base}/a", b"start")
        won = self._race(lambda racer: store.replace(f"{base}/a", racer, etag), ConflictError)
        assert len(won) == 1
        assert store.get(f"{base}/a") == won[0]

    def test_of_racing_copies_exactly_one_wins(self, store: Store, base: str) -> None:
        for number in range(self.racers):
            store.put(f"{base}/from/racer-{number:02}", f"racer-{number:02}".encode())
        won = self._race(
            lambda racer: store.copy(f"{base}/from/{racer.decode()}", f"{base}/to"),
            AlreadyExistsError,
        )
        assert len(won) == 1
        assert store.get(f"{base}/to") == won[0]

    def test_writes_that_ended_leave_no_upload(self, store: Store, base: str) -> None:
        etag = store.put(f"{base}/a", b"1")
        store.copy(f"{base}/a", f"{base}/b")
        store.replace(f"{base}/a", b"2", etag)
        assert [each.name for each in store.uploads()] == []
        assert store.abort_uploads(0) == 0

    def test_it_passes_its_own_probe(self, store: Store) -> None:
        probe_store(store, ids)
        assert list(store.list("probe/")) == []

    def _race(
        self, call: Callable[[bytes], object], refusal: type[AlreadyExistsError | ConflictError]
    ) -> list[bytes]:
        """Lets all racers call at once. Returns those that were not refused."""
        start = threading.Barrier(self.racers)
        won: list[bytes] = []
        wrong: list[BaseException] = []

        def run(racer: bytes) -> None:
            start.wait()
            try:
                call(racer)
                won.append(racer)
            except refusal:
                pass
            except BaseException as exc:  # noqa: BLE001 - shown below
                wrong.append(exc)

        names = [f"racer-{number:02}".encode() for number in range(self.racers)]
        threads = [threading.Thread(target=run, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        return won
