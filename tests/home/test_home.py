"""Homes: created once, whatever crashes or races; two halves that belong together."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

import tidelog
from tidelog import Event, backends, identity
from tidelog import home as home_module
from tidelog.catalog.base import Catalog, Put
from tidelog.catalog.memory import MemoryCatalog
from tidelog.errors import CorruptError, InvalidError, NotFoundError
from tidelog.home import Home, World, create_home, open_home
from tidelog.model import layout
from tidelog.model.topic import Topic
from tidelog.settings import Settings
from tidelog.store.base import Store
from tidelog.store.memory import MemoryStore
from tidelog.testing.faults import Faults, FaultyCatalog, FaultyStore
from tidelog.testing.scheduler import Crash, FakeClock, seeded_ids


def world(folder: Path, **environ: str) -> World:
    return World(environ=environ, folder=folder)


def settings(folder: Path, name: str = "home") -> Settings:
    return Settings(str(folder / name / "objects"), str(folder / name / "catalog.sqlite"))


def test_the_default_home_is_made_on_first_use_and_found_again(tmp_path: Path) -> None:
    with open_home(world=world(tmp_path)) as first:
        first.catalog.write("p", Put("a", b"1"), write_id="w1")
        first.store.put("a", b"x")
    with open_home(world=world(tmp_path)) as second:
        assert second.id == first.id
        assert second.store.get("a") == b"x"
        assert second.catalog.get("p", "a") is not None


def test_any_other_home_needs_init(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="run `tidelog --home elsewhere init`"):
        open_home("elsewhere", world=world(tmp_path))
    assert list(tmp_path.iterdir()) == []
    made, is_new = create_home(settings(tmp_path, "elsewhere"), world=world(tmp_path))
    made.close()
    again, is_new_again = create_home(settings(tmp_path, "elsewhere"), world=world(tmp_path))
    again.close()
    assert (is_new, is_new_again) == (True, False)
    with open_home("elsewhere", world=world(tmp_path)) as opened:
        assert opened.id == made.id == again.id


def test_the_config_string_opens_the_home_anywhere(tmp_path: Path) -> None:
    with create_home(settings(tmp_path), world=world(tmp_path))[0] as made:
        config = made.config
    with open_home(config, world=world(Path("/"))) as opened:
        assert opened.id == made.id
        assert opened.config == config
    with tidelog.open(config) as opened:
        assert repr(opened) == f"Home({config!r})"


def test_a_path_object_will_do_and_memory_too(tmp_path: Path) -> None:
    create_home(settings(tmp_path), world=world(tmp_path))[0].close()
    with tidelog.open(tmp_path / "home") as opened:
        assert opened.store.url == (tmp_path / "home" / "objects").as_uri()
    with tidelog.open("memory:") as first, tidelog.open("memory:") as second:
        assert first.id != second.id


def test_lag_without_a_topic_is_that_of_all_topics() -> None:
    with tidelog.open("memory:") as home:
        for topic, consumer in (("a", "one"), ("b", "two")):
            home.create_topic(topic)
            home.append(topic, [Event(b"x")] * 3)
            with home.consumer(topic, consumer) as reader:
                reader.poll()
        found = [(each.topic, each.consumer, each.events) for each in home.lag()]
        assert found == [("a", "one", 3), ("b", "two", 3)]
        assert home.lag("b") == home.lag()[1:]


def test_halves_of_two_homes_are_refused(tmp_path: Path) -> None:
    one, two = settings(tmp_path, "one"), settings(tmp_path, "two")
    for each in (one, two):
        create_home(each, world=world(tmp_path))[0].close()
    mixed = Settings(one.store, two.catalog)
    config = f"tidelog:?store=file://{mixed.store}&catalog=sqlite://{mixed.catalog}"
    with pytest.raises(InvalidError, match="belong together"):
        open_home(config, world=world(tmp_path))
    with pytest.raises(InvalidError, match="belong together"):
        create_home(mixed, world=world(tmp_path))


def test_a_store_of_another_home_is_not_given_a_new_catalog(tmp_path: Path) -> None:
    one = settings(tmp_path, "one")
    create_home(one, world=world(tmp_path))[0].close()
    fresh = tmp_path / "fresh.sqlite"
    with pytest.raises(InvalidError, match="fix the address"):
        create_home(Settings(one.store, str(fresh)), world=world(tmp_path))
    assert not fresh.exists()


@pytest.mark.parametrize("is_removed", [True, False])
def test_lost_catalog_of_a_home_with_objects_is_to_be_restored(
    tmp_path: Path, is_removed: bool
) -> None:
    """Neither opening it nor init advises what the other refuses."""
    create_home(settings(tmp_path), world=world(tmp_path))[0].close()
    catalog = tmp_path / "home" / "catalog.sqlite"
    saved = catalog.read_bytes()
    if is_removed:
        catalog.unlink()
    else:
        catalog.write_bytes(b"")
    for attempt in (
        lambda: open_home(tmp_path / "home", world=world(tmp_path)),
        lambda: create_home(settings(tmp_path), world=world(tmp_path)),
    ):
        with pytest.raises(InvalidError, match="restore the catalog from a copy") as caught:
            attempt()
        assert " init`" not in str(caught.value)
    for ending in ("", "-wal", "-shm"):
        catalog.with_name(f"catalog.sqlite{ending}").unlink(missing_ok=True)
    catalog.write_bytes(saved)
    open_home(tmp_path / "home", world=world(tmp_path)).close()


def test_a_catalog_whose_store_is_gone_is_refused(tmp_path: Path) -> None:
    one = settings(tmp_path, "one")
    create_home(one, world=world(tmp_path))[0].close()
    emptied = Settings(str(tmp_path / "empty"), one.catalog)
    for attempt in (
        lambda: create_home(emptied, world=world(tmp_path)),
        lambda: open_home(
            f"tidelog:?store={emptied.store}&catalog=sqlite://{one.catalog}", world=world(tmp_path)
        ),
    ):
        with pytest.raises(InvalidError, match="holds no home"):
            attempt()
    assert not (tmp_path / "empty").exists()


@pytest.mark.parametrize("field", ["reader", "writer"])
def test_a_home_of_a_newer_format_is_refused(tmp_path: Path, field: str) -> None:
    one = settings(tmp_path)
    create_home(one, world=world(tmp_path))[0].close()
    path = Path(one.store) / layout.HOME_OBJECT
    identity = msgspec.json.decode(path.read_bytes().splitlines()[0])
    path.write_bytes(msgspec.json.encode({**identity, field: layout.FORMAT + 1, "more": "fields"}))
    with pytest.raises(InvalidError, match="update tidelog"):
        open_home("home", world=world(tmp_path))
    with pytest.raises(InvalidError, match="update tidelog"):
        create_home(one, world=world(tmp_path))


def test_a_damaged_identity_is_corrupt(tmp_path: Path) -> None:
    one = settings(tmp_path)
    create_home(one, world=world(tmp_path))[0].close()
    (Path(one.store) / layout.HOME_OBJECT).write_bytes(b"{")
    with pytest.raises(CorruptError, match=r"home.json"):
        open_home("home", world=world(tmp_path))


def test_files_that_are_no_catalog_of_ours_are_refused(tmp_path: Path) -> None:
    one = settings(tmp_path)
    file = Path(one.catalog)
    file.parent.mkdir()
    file.write_bytes(b"not a database, but long enough to look at" * 100)
    with pytest.raises(CorruptError, match="not a database"):
        create_home(one, world=world(tmp_path))
    file.unlink()
    with sqlite3.connect(file) as other:
        other.execute("CREATE TABLE rows (something TEXT)")
    other.close()
    with pytest.raises(InvalidError, match="another program or shape"):
        create_home(one, world=world(tmp_path))
    assert not Path(one.store).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_what_root_creates_belongs_to_the_owner_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    settings = Settings(str(folder / "objects"), str(folder / "new" / "catalog.sqlite"))
    with create_home(settings, world=world(tmp_path))[0] as home:
        home.create_topic("t", 1)
        home.append("t", [tidelog.Event(b"x")])
        home.compile("t")
        home.sweep(grace="0s")
        found = {each: each.stat() for each in folder.rglob("*")}
    assert {each.suffix for each in found} >= {".parquet", ".sqlite", ".sqlite-reserve"}
    others = [each for each, stat in found.items() if (stat.st_uid, stat.st_gid) != (65534, 65534)]
    assert others == []


def as_nobody(folder: Path) -> None:
    """Drop root's right to write everywhere, as a test under root would otherwise have."""
    os.chmod(folder, 0o555)
    if os.geteuid() == 0:
        os.seteuid(65534)


@pytest.mark.parametrize("half", ["store", "catalog"])
def test_a_read_only_folder_is_told_and_nothing_is_half_created(tmp_path: Path, half: str) -> None:
    locked, free = tmp_path / "locked", tmp_path / "free"
    for folder in (locked, free):
        folder.mkdir()
        folder.chmod(0o777)
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    places = {"store": str(free / "objects"), "catalog": str(free / "catalog.sqlite")}
    places[half] = str(locked / Path(places[half]).name)
    before = os.geteuid()
    as_nobody(locked)
    try:
        with pytest.raises(InvalidError, match=r"rights|permission"):
            create_home(Settings(**places), world=world(tmp_path))
    finally:
        os.seteuid(before)
    assert list(free.iterdir()) == []
    assert list(locked.iterdir()) == []


def test_many_who_create_one_home_at_once_get_the_same(tmp_path: Path) -> None:
    ids: list[str] = []
    errors: list[Exception] = []

    def create() -> None:
        try:
            with create_home(settings(tmp_path), world=world(tmp_path))[0] as made:
                ids.append(made.id)
        except Exception as exc:  # noqa: BLE001 - shown below
            errors.append(exc)

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(ids) == 8
    assert len(set(ids)) == 1


def create_meanwhile(
    monkeypatch: pytest.MonkeyPatch, folder: Path, place: ModuleType, name: str
) -> None:
    """Lets another process create the home right after this one's first look."""
    look, looks = getattr(place, name), []

    def first_look(*args: Any, **kwargs: Any) -> Any:
        looks.append(name)
        is_first = len(looks) == 1
        try:
            return look(*args, **kwargs)
        finally:
            if is_first:
                create_home(settings(folder), world=world(folder))[0].close()

    monkeypatch.setattr(place, name, first_look)


@pytest.mark.parametrize(
    ("place", "name"),
    [(identity, "read_store"), (identity, "read_catalog"), (backends, "open_catalog_of")],
)
def test_home_created_between_two_looks_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: ModuleType, name: str
) -> None:
    create_meanwhile(monkeypatch, tmp_path, place, name)
    with create_home(settings(tmp_path), world=world(tmp_path))[0] as made:
        assert made.topics() == []


def test_home_created_while_it_is_opened_is_open_or_not_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_meanwhile(monkeypatch, tmp_path, backends, "open_catalog_of")
    folder = tmp_path / "home"
    with open_home(str(folder), world=world(tmp_path)) as found:
        assert found.topics() == []


class TestDiesAfterEveryStep:
    """``create_home`` on faulty halves: it dies after the n-th call, and the next one finishes."""

    @pytest.fixture
    def halves(self) -> tuple[MemoryStore, MemoryCatalog]:
        return MemoryStore(FakeClock()), MemoryCatalog()

    def create(
        self, monkeypatch: pytest.MonkeyPatch, store: Store, catalog: Catalog, seed: int
    ) -> tuple[home_module.Home, bool]:
        monkeypatch.setattr(backends, "open_store_of", lambda *_: store)
        monkeypatch.setattr(backends, "open_catalog_of", lambda *_, create: catalog)
        outside = World(environ={}, clock=FakeClock(), ids=seeded_ids(seed))
        return create_home(Settings("s3://store", "dynamodb://catalog"), world=outside)

    @pytest.mark.parametrize("call", range(1, 40))
    def test_and_is_finished_by_the_next(
        self,
        monkeypatch: pytest.MonkeyPatch,
        halves: tuple[MemoryStore, MemoryCatalog],
        call: int,
    ) -> None:
        faults = Faults(crash_after_call=call)
        store, catalog = halves
        died = False
        try:
            # A dead process cleans nothing up: the probe's objects stay, and harm nobody.
            self.create(
                monkeypatch, FaultyStore(store, faults), FaultyCatalog(catalog, faults), seed=1
            )
        except Crash:
            died = True
        made, _ = self.create(monkeypatch, store, catalog, seed=2)
        again, is_new = self.create(monkeypatch, store, catalog, seed=3)
        assert again.id == made.id
        assert not is_new
        stored = msgspec.json.decode(store.get(layout.HOME_OBJECT).splitlines()[0])
        assert stored["id"] == made.id
        assert died or faults.calls < call


@pytest.mark.parametrize(
    "use",
    [
        lambda home: home.producer("t"),
        lambda home: home.consumer("t", name="c"),
        lambda home: home.append("t", [tidelog.Event(b"a")]),
    ],
    ids=["producer", "consumer", "append"],
)
def test_nothing_is_opened_beside_a_close_that_would_stay_open(
    use: Callable[[Home], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = open_home("memory:")
    topic = home.create_topic("t")

    def closed_meanwhile(name: str) -> Topic:
        home.close()
        return topic

    monkeypatch.setattr(home, "topic", closed_meanwhile)
    with pytest.raises(InvalidError, match=r"^home `.+`: is closed"):
        use(home)
