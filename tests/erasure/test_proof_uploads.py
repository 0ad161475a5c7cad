"""A proof searches what stores hold beside objects: writes that did not end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.archive_look import FIRST_S, a_home, drive
from tidelog import Event, Home
from tidelog.archive.archive import create_archive
from tidelog.coordination.audit import Why
from tidelog.erasure import object_search
from tidelog.erasure.delete import delete_key
from tidelog.erasure.proof import Trace
from tidelog.errors import InvalidError
from tidelog.maintenance.erase import purge
from tidelog.model import layout
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.store.base import Upload
from tidelog.store.local import LocalStore

KEY = b"customer-7"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        yield made


def an_event() -> Event:
    return Event(b'{"at": %d}' % FIRST_S, key=KEY, id="order-7")


def killed(folder: Path, part: str, home_folder: Path) -> None:
    """Append and archive in a child process, which is killed before it links an object."""
    child = os.fork()
    if child == 0:
        try:
            real = os.link

            def link(source: Path, target: Path) -> None:
                if part in str(target):
                    os.kill(os.getpid(), signal.SIGKILL)
                real(source, target)

            os.link = link  # type: ignore[assignment]
            home = a_home(home_folder)
            if folder == home_folder:
                home.append("t", [an_event()])
            else:
                drive(home, outside(home, folder))
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def outside(home: Home, folder: Path) -> Archive:
    wanted = Archive(
        name="daily",
        incarnation=home.context.ids.new(),
        source="topic:t",
        kind="partition",
        store=folder.as_uri(),
        root="daily",
        created_ms=0,
        formats={1: ArchiveFormat(parser="json:at")},
    )
    return create_archive(home.context, wanted)


def prove(home: Home) -> list[Trace]:
    return home.prove_erased("t", keys=[KEY]).traces


def temporary(folder: Path) -> list[str]:
    return [path.name for path in (folder / ".tidelog" / "tmp").iterdir()]


def test_bytes_of_a_killed_append_are_a_trace_until_a_sweep_removes_them(
    home: Home, tmp_path: Path
) -> None:
    killed(tmp_path, "/segments/", tmp_path)
    home.append("t", [an_event()])
    delete_key(home.context, home.amender("t", Why("me", "x")), KEY)
    purge(home.context, home.topic("t"), grace_ms=3_600_000)
    (name,) = temporary(tmp_path / "o")
    found = {trace.object: trace for trace in prove(home)}
    assert found[f".tidelog/tmp/{name}"].what == "holds 1 of them: its upload has not ended"
    assert "tidelog sweep" in found[f".tidelog/tmp/{name}"].do
    home.sweep("0s")
    assert temporary(tmp_path / "o") == []
    assert prove(home) == []


def test_bytes_of_a_killed_driver_in_a_store_of_an_archive_are_a_trace_until_a_sweep(
    home: Home, tmp_path: Path
) -> None:
    home.append("t", [an_event()])
    (tmp_path / "out").mkdir()
    killed(tmp_path / "out", "/staging/", tmp_path)
    assert len(temporary(tmp_path / "out")) == 1
    drive(home, home.archives.get("daily").info)
    delete_key(home.context, home.amender("t", Why("me", "x")), KEY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "abort_uploads", lambda *_: 0)
        purge(home.context, home.topic("t"), grace_ms=0)
    assert any(trace.object.startswith(".tidelog/tmp/") for trace in prove(home))
    home.sweep("0s")
    assert temporary(tmp_path / "out") == []
    assert prove(home) == []


def erased(home: Home) -> None:
    home.append("t", [an_event()])
    delete_key(home.context, home.amender("t", Why("me", "x")), KEY)
    purge(home.context, home.topic("t"), grace_ms=0)
    assert prove(home) == []


def test_upload_that_cannot_be_read_is_a_trace_unless_it_ends(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    erased(home)
    looks = 0

    def uploads(_: LocalStore) -> Iterator[Upload]:
        nonlocal looks
        looks += 1
        yield Upload("archives/daily/x", 0, 0, may_end=True, read=None)
        if looks == 1:
            yield Upload("archives/daily/ends", 0, 0, may_end=True, read=None)

    monkeypatch.setattr(LocalStore, "uploads", uploads)
    monkeypatch.setattr(object_search, "WAIT_S", 0.5)
    (trace,) = prove(home)
    assert trace.object == "archives/daily/x"
    assert "cannot be searched" in trace.what
    assert looks > 1


def test_store_whose_uploads_cannot_be_listed_is_a_trace(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    erased(home)

    def uploads(_: LocalStore) -> Iterator[Upload]:
        raise InvalidError("store `x`: no permission: change the rights")

    monkeypatch.setattr(LocalStore, "uploads", uploads)
    (trace,) = prove(home)
    assert trace.object == home.store.url
    assert "no permission" in trace.what
    assert "right to list uploads" in trace.do


def test_remedy_for_the_value_of_an_update_that_died_works(home: Home) -> None:
    home.append("t", [an_event()])
    topic = home.topic("t")
    left = layout.amendment(topic.incarnation, topic.generation, 0, 0, home.context.ids.new())
    home.store.put(left, b"a new value")
    proof = home.erase("t", ids=["order-7"])
    assert [trace.object for trace in proof.traces] == [left]
    assert "repeat the update" in proof.traces[0].do
    assert home.recover_topic("t").values == 1
    home.sweep("0s", accept_loss=["t"])
    assert home.erase("t", ids=["order-7"]).is_erased
