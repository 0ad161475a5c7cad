"""The local store: durable in the right order, whole or not there, whatever kills it."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.support.homes import a_store
from tidelog.clock import RandomIds, SystemClock, system_random
from tidelog.errors import InvalidError, NotFoundError, UnavailableError
from tidelog.home import World, create_home
from tidelog.model.times import Backoff
from tidelog.settings import Settings
from tidelog.store.base import NoRoomError
from tidelog.store.local import LocalStore
from tidelog.store.wrappers import RetryingStore
from tidelog.testing.scheduler import FakeClock

KILLS = 200


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(
        tmp_path / "objects", clock=SystemClock(), ids=RandomIds(), random=system_random()
    )


def test_a_put_is_durable_before_it_is_visible_and_before_it_returns(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("warm/up", b"")
    done: list[str] = []
    real_fsync, real_link = os.fsync, os.link

    def fsync(descriptor: int) -> None:
        done.append("fsync " + os.readlink(f"/proc/self/fd/{descriptor}"))
        real_fsync(descriptor)

    def link(source: Path, target: Path) -> None:
        done.append(f"link {target}")
        real_link(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    store.put("new/folder/key", b"bytes")
    root = tmp_path / "objects"
    assert done[0].startswith(f"fsync {root}/.tidelog/tmp/")
    assert done[1:] == [
        f"fsync {root}",  # holds `new`
        f"fsync {root}/new",  # holds `folder`
        f"link {root}/new/folder/key",
        f"fsync {root}/new/folder",  # holds `key`
    ]
    done.clear()
    store.put("new/folder/other", b"bytes")
    assert [step.split()[0] for step in done] == ["fsync", "link", "fsync"]


def test_a_folder_that_another_process_made_is_made_durable_too(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("warm/up", b"")
    (tmp_path / "objects" / "theirs").mkdir()  # by a process that has not come to its fsync
    synced: list[str] = []
    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    store.put("theirs/key", b"bytes")
    assert str(tmp_path / "objects") in synced


def test_a_full_disk_is_told_and_leaves_nothing(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a", b"x")

    def full(_descriptor: int, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(UnavailableError, match="No space left"):
        store.put("b", b"x")
    assert list((tmp_path / "objects" / ".tidelog" / "tmp").iterdir()) == []
    assert [info.key for info in store.list()] == ["a"]


def test_its_own_folder_is_out_of_reach(store: LocalStore) -> None:
    for key in (".tidelog/tmp/x", ".tidelog/lock", ".tidelog"):
        with pytest.raises(InvalidError, match="reserved"):
            store.put(key, b"x")
    store.put("a/.tidelog/fine", b"x")
    assert [info.key for info in store.list()] == ["a/.tidelog/fine"]


def test_a_key_below_an_object_is_refused(store: LocalStore) -> None:
    store.put("a", b"x")
    with pytest.raises(InvalidError, match="itself an object"):
        store.put("a/b", b"x")


def test_a_folder_is_no_object(store: LocalStore) -> None:
    store.put("a/b", b"")
    for call in (store.get, store.head, lambda key: store.presign(key, 1)):
        with pytest.raises(NotFoundError):
            call("a")


def _dies(folder: Path, step: str) -> None:
    """Put and replace in a child process, which is killed at one step."""
    child = os.fork()
    if child == 0:
        try:
            store = a_store(str(folder))

            def die(*_: object, **__: object) -> None:
                os.kill(os.getpid(), signal.SIGKILL)

            def link_and_die(source: Path, target: Path) -> None:
                real_link(source, target)
                die()

            real_link = os.link
            if step == "replace":
                etag = store.put("a", b"old")
                os.rename = die
                store.replace("a", b"customer-7", etag)
            name = {"write": "utime", "fsync": "link", "link": "link"}[step]
            setattr(os, name, link_and_die if step == "link" else die)
            store.put("a", b"customer-7")
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("step", ["write", "fsync", "link", "replace"])
def test_bytes_of_a_killed_put_are_listed_and_removed_by_a_sweep(tmp_path: Path, step: str) -> None:
    settings = Settings(str(tmp_path / "objects"), str(tmp_path / "c.sqlite"))
    with create_home(settings, world=World(environ={}))[0] as home:
        _dies(tmp_path / "objects", step)
        (upload,) = home.store.uploads()
        assert not upload.may_end
        assert upload.read is not None
        assert upload.read() == b"customer-7"
        assert home.sweep("1h").uploads_aborted == 0
        assert len(list(home.store.uploads())) == 1
        assert home.sweep("0s").uploads_aborted == 1
        assert list(home.store.uploads()) == []
    assert list((tmp_path / "objects" / ".tidelog" / "tmp").iterdir()) == []
    left = {path.name: path.read_bytes() for path in (tmp_path / "objects").glob("a")}
    assert left == {"link": {"a": b"customer-7"}, "replace": {"a": b"old"}}.get(step, {})


def test_sweep_spares_a_put_that_is_under_way_in_another_process(
    store: LocalStore, tmp_path: Path
) -> None:
    go_read, go_write = os.pipe()
    at_read, at_write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            real = os.link

            def link(source: Path, target: Path) -> None:
                os.write(at_write, b"x")
                os.read(go_read, 1)
                real(source, target)

            os.link = link  # type: ignore[assignment]
            a_store(str(tmp_path / "objects")).put("a", b"bytes")
            os._exit(0)
        finally:
            os._exit(1)
    os.read(at_read, 1)
    (upload,) = store.uploads()
    assert upload.may_end
    assert store.abort_uploads(SystemClock().now_ms() + 86_400_000) == 0
    os.write(go_write, b"x")
    assert os.waitpid(child, 0)[1] == 0
    assert store.get("a") == b"bytes"
    assert list(store.uploads()) == []
    for descriptor in (go_read, go_write, at_read, at_write):
        os.close(descriptor)


def test_put_whose_file_a_sweep_removed_before_it_was_locked_begins_again(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("warm", b"")
    sweeps = [lambda: store.abort_uploads(SystemClock().now_ms() + 86_400_000)]
    removed: list[int] = []
    real = fcntl.flock

    def flock(descriptor: int, how: int) -> None:
        if how == fcntl.LOCK_EX and sweeps:
            removed.append(sweeps.pop()())
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    store.put("a", b"bytes")
    assert removed == [1]
    assert store.get("a") == b"bytes"


def test_etags_differ_also_within_a_clock_tick(store: LocalStore) -> None:
    seen = set()
    for _ in range(300):
        seen.add(store.put("a", b"same"))
        store.delete(["a"])
    assert len(seen) == 300


def put_until_killed(folder: Path, name: str, told: int) -> None:
    """In a child process: put objects whose names hold their digests, and tell of each."""
    store = a_store(str(folder))
    number = 0
    while True:
        data = bytes([number % 251]) * (1 << 18) + name.encode()
        key = f"spread/{name}-{number}-{hashlib.sha256(data).hexdigest()}"
        store.put(key, data)
        os.write(told, f"{key}\n".encode())
        number += 1


@pytest.mark.long
def test_sigkill_in_the_middle_of_puts_leaves_no_torn_object(tmp_path: Path) -> None:
    """Kill putters 200 times; every object that can be seen is whole, every told one is there."""
    folder = tmp_path / "objects"
    chance = random.Random(20261115)
    told: set[str] = set()
    for attempt in range(KILLS):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                put_until_killed(folder, str(attempt), write)
            finally:
                os._exit(1)
        os.close(write)
        with os.fdopen(read) as lines:
            told.add(lines.readline().strip())
            time.sleep(chance.random() * 0.01)
            os.kill(child, signal.SIGKILL)
            told.update(line.strip() for line in lines if line.endswith("\n"))
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
    store = a_store(str(folder))
    seen = {info.key for info in store.list()}
    for key in seen:
        digest = key.rsplit("-", 1)[1]
        assert hashlib.sha256(store.get(key)).hexdigest() == digest
    assert told <= seen
    assert len(told) >= KILLS


@pytest.mark.parametrize(
    ("number", "waits"), [(errno.ENOSPC, 0), (errno.EDQUOT, 0), (errno.EFBIG, 0), (errno.EIO, 3)]
)
def test_a_full_disk_is_told_at_once_and_other_trouble_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, waits: int
) -> None:
    clock, tries = FakeClock(), 0
    inner = LocalStore(tmp_path, clock=clock, ids=RandomIds(), random=random.Random(1))
    store = RetryingStore(inner, clock=clock, random=random.Random(1), backoff=Backoff(attempts=4))

    def fail(_: int) -> None:
        nonlocal tries
        tries += 1
        raise OSError(number, os.strerror(number))

    began_s = clock.monotonic_s()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(UnavailableError, match=os.strerror(number)) as told:
            store.put("a", b"x")
    assert isinstance(told.value, NoRoomError) == (waits == 0)
    assert tries == waits + 1
    assert (clock.monotonic_s() > began_s) == (waits > 0)
    store.put("a", b"x")
    assert store.get("a") == b"x"


@pytest.mark.parametrize("verb", ["put", "replace", "copy", "delete"])
def test_write_that_failed_after_it_took_effect_is_settled_and_durable(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    etag = store.put("in/source", b"x")
    clock, folder_syncs, real = FakeClock(), list[str](), os.fsync

    def fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.endswith("/in"):
            folder_syncs.append("failed" if not folder_syncs else "done")
            if len(folder_syncs) == 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    again = RetryingStore(store, clock=clock, random=random.Random(1), backoff=Backoff(attempts=4))
    calls = {
        "put": lambda: again.put("in/key", b"y"),
        "replace": lambda: again.replace("in/source", b"y", etag),
        "copy": lambda: again.copy("in/source", "in/key"),
        "delete": lambda: again.delete(["in/source"]),
    }
    calls[verb]()
    assert folder_syncs == ["failed", "done"]
    found = {info.key: store.get(info.key) for info in store.list()}
    wanted = {
        "put": {"in/key": b"y", "in/source": b"x"},
        "replace": {"in/source": b"y"},
        "copy": {"in/key": b"x", "in/source": b"x"},
        "delete": {},
    }
    assert found == wanted[verb]


def test_put_that_cannot_remove_its_temporary_file_has_succeeded(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "EIO")))
        store.put("a", b"x")
    assert store.get("a") == b"x"
    assert [upload.read() for upload in store.uploads() if upload.read] == [b"x"]
    assert store.abort_uploads(SystemClock().now_ms() + 1) == 1


def _folders(root: Path) -> set[str]:
    below = (path for path in root.rglob("*") if path.is_dir())
    return {str(path.relative_to(root)) for path in below if ".tidelog" not in path.parts}


def test_delete_removes_the_folders_that_it_emptied(store: LocalStore, tmp_path: Path) -> None:
    for key in ("a/b/c/1", "a/b/c/2", "a/b/d/1", "e/f/1"):
        store.put(key, b"x")
    root = tmp_path / "objects"
    store.delete(["a/b/c/1", "e/f/1"])
    assert _folders(root) == {"a", "a/b", "a/b/c", "a/b/d"}
    store.delete(["a/b/c/2", "a/b/d/1", "a/b/nothing"])
    assert _folders(root) == set()
    assert root.is_dir()
    store.put("a/b/c/1", b"again")
    assert store.get("a/b/c/1") == b"again"


def test_folder_that_another_process_removed_and_made_again_is_made_durable_again(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "objects"
    store.put("a/b/1", b"x")  # from here on we know that both folders are durable
    other = a_store(str(root))
    other.delete(["a/b/1"])
    (root / "a" / "b").mkdir(parents=True)  # by a process that did not reach its fsync
    synced: list[str] = []
    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    store.put("a/b/2", b"x")
    assert {str(root), f"{root}/a", f"{root}/a/b"} <= set(synced)


def _put_and_delete(folder: Path, name: int, rounds: int) -> None:
    store = a_store(str(folder))
    for number in range(rounds):
        key = f"staging/shared/{number % 3}/{name}-{number}"
        store.put(key, b"x")
        store.copy(key, f"final/{number % 2}/{name}-{number}")
        assert store.get(key) == b"x"
        store.delete([key, f"final/{number % 2}/{name}-{number}"])


def test_writers_beside_deletes_lose_neither_folders_nor_objects(tmp_path: Path) -> None:
    children = []
    for name in range(4):
        child = os.fork()
        if child == 0:
            try:
                _put_and_delete(tmp_path, name, 150)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert _folders(tmp_path) == set()
