"""A copied home: what it may do, how it is adopted, and that its original stays whole."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pytest

from tidelog import Event, Home, InvalidError, adopt_home
from tidelog.archive.archive import create_archive, open_pipeline
from tidelog.archive.dead_letters import ReplayOptions, replay
from tidelog.archive.finalize import finalize
from tidelog.archive.generations import begin_backfill, promote
from tidelog.archive.tables import register_table
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions
from tidelog.catalog.base import Put
from tidelog.catalog.memory import MemoryCatalog
from tidelog.coordination.pipeline_rows import read_archive
from tidelog.erasure.rewrite import erase_from_archives
from tidelog.home import World, create_home, open_home
from tidelog.identity import Identity, Location, adopt_identity, create_identity, locate, read_pair
from tidelog.maintenance.erase import purge
from tidelog.maintenance.pipeline_sweep import sweep_archives
from tidelog.maintenance.turn import ArchiveEraser
from tidelog.model import layout
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.model.pipeline import NamedPipeline
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.registry import check_reach
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.playback.request import PlaybackRequest, pinned_playback
from tidelog.settings import load_settings
from tidelog.store.memory import MemoryStore
from tidelog.testing.faults import Faults, FaultyCatalog, FaultyStore
from tidelog.testing.scheduler import Crash, FakeClock, seeded_ids

ADOPT = "run `tidelog home adopt`"


def make(place: Path, machine: str = "one") -> Home:
    world = World(environ={}, machine=machine)
    return create_home(load_settings(str(place), {}, place), world=world)[0]


def opened(place: Path, machine: str = "one") -> Home:
    return open_home(place, world=World(environ={}, machine=machine))


def fill(home: Home, numbers: range) -> None:
    home.append("t", [Event(b"%d" % number, id=f"id-{number}") for number in numbers])


def an_archive(home: Home, name: str, to: Path | None = None) -> Archive:
    store, root = (home.store.url, f"archives/{name}") if to is None else (to.as_uri(), name)
    return create_archive(
        home.context,
        Archive(
            name=name,
            incarnation=home.context.ids.new(),
            source="topic:t",
            kind="backup",
            store=store,
            root=root,
            created_ms=0,
            formats={1: ArchiveFormat()},
        ),
    )


def drive(home: Home, name: str) -> int:
    pipeline = open_pipeline(home.context, home.archives.get(name).info, LocalWorkers(1))
    return Driver(home.context, pipeline, DriverOptions()).run()


def listed(folder: Path) -> Counter[int]:
    """The events that a plain listing of an archive's folder finds."""
    rows = duckdb.sql(f"SELECT value FROM read_parquet('{folder}/**/*.parquet')").fetchall()
    return Counter(int(value) for (value,) in rows)


def bytes_below(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A home with one archive inside, one outside, 100 events in both."""
    place = tmp_path / "home"
    with make(place) as home:
        home.create_topic("t")
        fill(home, range(100))
        for name, to in (("inner", None), ("outer", tmp_path / "outside")):
            an_archive(home, name, to)
            assert drive(home, name) == 100
    return place


def test_copy_archives_into_its_own_folder_and_leaves_the_original_alone(place: Path) -> None:
    copy = place.parent / "copy"
    shutil.copytree(place, copy)
    before = bytes_below(place / "objects" / "archives")
    with opened(copy) as home:
        assert home.archives.get("inner").info.store == (copy / "objects").as_uri()
        fill(home, range(100, 120))
        assert drive(home, "inner") == 20
    assert bytes_below(place / "objects" / "archives") == before
    assert listed(copy / "objects/archives/inner/g1") == Counter(range(120))
    with opened(place) as home:
        fill(home, range(500, 530))
        assert drive(home, "inner") == drive(home, "outer") == 30
        assert (
            verify_archive(
                home.context, home.archives.get("inner").info, ArchiveVerifyOptions(deep=True)
            ).problem_count
            == 0
        )
    original = Counter([*range(100), *range(500, 530)])
    assert listed(place / "objects/archives/inner/g1") == original
    assert listed(place.parent / "outside/outer/g1") == original


def _erase(home: Home) -> object:
    home.delete("t", ["id-5"])
    return erase_from_archives(home.context, home.topic("t"), {0: [5]})


def _promote(home: Home) -> object:
    return promote(home.context, "outer", force=True)


OUTSIDE: dict[str, Callable[[Home], object]] = {
    "run": lambda home: drive(home, "outer"),
    "erase": _erase,
    "backfill": lambda home: begin_backfill(
        home.context, "outer", ArchiveFormat(format="jsonlines")
    ),
    "promote": _promote,
    "finalize": lambda home: finalize(home.context, home.archives.get("outer").info),
    "replay": lambda home: replay(
        home.context, home.archives.get("outer").info, ReplayOptions(), LocalWorkers(1)
    ),
    "register": lambda home: register_table(home.context, home.archives.get("outer").info, "delta"),
}


@pytest.mark.parametrize("what", OUTSIDE)
@pytest.mark.parametrize("adopted", [False, True])
def test_copy_is_refused_what_writes_outside(place: Path, what: str, adopted: bool) -> None:
    with opened(place) as home:
        if what == "promote":
            begin_backfill(home.context, "outer", ArchiveFormat(format="jsonlines"))
    copy = place.parent / "copy"
    shutil.copytree(place, copy)
    before = bytes_below(place.parent / "outside")
    if adopted:
        done = adopt_home(copy, world=World(environ={}, machine="one"))
        assert done.id != done.was
        assert any("archive `outer`: read-only" in line for line in done.detached)
    is_passed_over = adopted and what == "erase"  # see the test of a delete below
    with opened(copy) as home:
        fill(home, range(100, 120))
        refused = pytest.raises(InvalidError, match="belongs to home" if adopted else ADOPT)
        with contextlib.nullcontext() if is_passed_over else refused:
            OUTSIDE[what](home)
        sweep_archives(home.context, 0)
        assert (
            verify_archive(
                home.context, home.archives.get("outer").info, ArchiveVerifyOptions(deep=True)
            ).files
            == 1
        )
    assert bytes_below(place.parent / "outside") == before
    with opened(place) as home:
        fill(home, range(500, 520))
        assert drive(home, "outer") == 20


def test_delete_is_proved_beside_an_archive_of_the_original_which_is_listed(place: Path) -> None:
    copy = place.parent / "copy"
    shutil.copytree(place, copy)
    before = bytes_below(place.parent / "outside")
    adopt_home(copy, world=World(environ={}, machine="one"))
    with opened(copy) as home:
        topic = home.topic("t")
        home.delete("t", ["id-5"])
        purge(home.context, topic, grace_ms=0)
        proof = home.prove_erased(topic.name, ids=["id-5"])
        assert (proof.is_erased, proof.traces) == (True, [])
        (out_of_reach,) = proof.out_of_reach
        assert "archive `outer`" in out_of_reach
        eraser = ArchiveEraser(home.context)
        eraser.turn()
        assert eraser.troubles == []
        home.delete_topic("t", past_readers=True)
    assert bytes_below(place.parent / "outside") == before
    with opened(place) as home:
        assert home.prove_erased("t", ids=["id-5"]).out_of_reach == []


def test_archive_of_the_original_that_is_made_of_a_copied_topic_is_listed(place: Path) -> None:
    with opened(place) as home:
        home.create_topic("u", 1)
        home.pumps.create(source="topic:t", topic="u").run()
        to = f"{place.parent}/outside/far"
        home.archives.create("far", source="topic:u", to=to).run()
    copy = place.parent / "copy"
    shutil.copytree(place, copy)
    adopt_home(copy, world=World(environ={}, machine="one"))
    with opened(copy) as home:
        for name in ("t", "u"):
            home.erase(name, ids=["id-5"])
        proof = home.prove_erased("t", ids=["id-5"])
        assert proof.verdict == "erased"
        listed = {each.split("`")[1] for each in proof.out_of_reach}
        assert listed == {"outer", "far"}


def test_pipelines_tables_and_playbacks_to_the_outside_are_refused_in_a_copy(place: Path) -> None:
    sink = f"file:{place.parent / 'played.jsonl'}"
    asked = PlaybackRequest("t", sink, None, None, None)
    with opened(place) as home:
        pinned_playback(home.context, "night", asked)
        named = NamedPipeline("out", "i", "topic:t", "kafka://127.0.0.1:1/t", "x", 0, home=home.id)
        check_reach(home.context, named)
    copy = place.parent / "copy"
    shutil.copytree(place, copy)
    for match in (ADOPT, "belongs to home"):
        with opened(copy) as home:
            with pytest.raises(InvalidError, match=match):
                pinned_playback(home.context, "night", asked)
            with pytest.raises(InvalidError, match=match):
                check_reach(home.context, named)
        done = adopt_home(copy, world=World(environ={}, machine="one"))
    assert done.id == done.was, "adopting twice changes nothing"


def test_copy_and_adopted_copy_send_no_notifications_of_the_original(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[object] = []
    target = type("Target", (), {"send": lambda self, notice: sent.append(notice)})
    monkeypatch.setattr("tidelog.home.open_target", lambda *_: target())
    with opened(place) as home:
        home.create_topic("n", notify=["https://example.com/hook/a-secret"])
        home.append("n", [Event(b"1")])
    assert len(sent) == 1
    copy = place.parent / "copy"
    shutil.copytree(place, copy)
    for detached in (["topic `n`: does not notify https://example.com/…"], []):
        with opened(copy) as home:
            home.append("n", [Event(b"2")])
        done = adopt_home(copy, world=World(environ={}, machine="one"))
        assert [each for each in done.detached if each.startswith("topic")] == detached
    assert len(sent) == 1
    with opened(copy) as home:
        home.create_topic("own", notify=["https://example.com/hook"])
        home.append("own", [Event(b"3")])
    assert len(sent) == 2
    assert done.id != opened_id(place)


def opened_id(place: Path) -> str:
    with opened(place) as home:
        return home.id


def test_moved_home_works_inside_and_outside_after_one_command(place: Path) -> None:
    new = place.parent / "elsewhere"
    place.rename(new)
    with opened(new) as home:
        home_id = home.id
        assert home.copy_of
        fill(home, range(100, 110))
        assert drive(home, "inner") == 10
        with pytest.raises(InvalidError, match="--moved"):
            drive(home, "outer")
    done = adopt_home(new, moved=True, world=World(environ={}, machine="one"))
    assert (done.id, done.detached) == (home_id, ())
    with opened(new) as home:
        assert not home.copy_of
        assert drive(home, "outer") == 10


def test_home_did_not_move_while_the_original_is_there(place: Path) -> None:
    copy = place.parent / "copy"
    shutil.copytree(place, copy)
    with pytest.raises(InvalidError, match=r"did not move.*is still there"):
        adopt_home(copy, moved=True, world=World(environ={}, machine="one"))


@pytest.mark.parametrize("other", ["home", "file", "empty"])
def test_another_home_at_the_old_place_is_not_the_original(place: Path, other: str) -> None:
    new = place.parent / "new"
    shutil.move(place, new)
    world = World(environ={}, machine="one")
    if other == "home":
        create_home(load_settings(str(place), {}, place.parent), world=world)[0].close()
    else:
        place.mkdir()
        with closing(sqlite3.connect(place / "catalog.sqlite")) as file:
            if other == "file":
                file.execute("CREATE TABLE songs (title TEXT)")
    assert adopt_home(new, moved=True, world=world).detached == ()
    with opened(new) as home:
        assert not home.copy_of


def test_restore_at_the_same_path_of_another_machine_is_a_copy(place: Path) -> None:
    with opened(place, machine="two") as home, pytest.raises(InvalidError, match=ADOPT):
        drive(home, "outer")
    with opened(place) as home:
        assert drive(home, "outer") == 0


@pytest.mark.parametrize("half", ["catalog.sqlite", "objects"])
def test_two_homes_cannot_share_a_half(place: Path, half: str) -> None:
    other = place.parent / f"other-{half}"
    copy = shutil.copytree if half == "objects" else shutil.copy
    copy(place / half, other)
    halves = {"store": place / "objects", "catalog": place / "catalog.sqlite"}
    halves["store" if half == "objects" else "catalog"] = other
    config = "tidelog:?" + "&".join(f"{name}={path.as_uri()}" for name, path in halves.items())
    config = config.replace("catalog=file:", "catalog=sqlite:")
    world = World(environ={}, machine="one")
    with pytest.raises(InvalidError, match="copy both halves"):
        open_home(config, world=world)
    with pytest.raises(InvalidError, match="copy both halves"):
        adopt_home(config, world=world)
    with pytest.raises(InvalidError, match="is still there"):
        adopt_home(config, moved=True, world=world)
    shutil.move(place / half, place.parent / "away")
    adopt_home(config, moved=True, world=world)
    shutil.move(place.parent / "away", place / half)
    with pytest.raises(InvalidError, match="copy both halves"):
        opened(place)
    with open_home(config, world=world) as home:
        assert drive(home, "outer") == 0


def test_driver_stops_when_the_owner_object_names_another_home(place: Path) -> None:
    owner = place.parent / "outside" / "outer" / "_owner"
    with opened(place) as home:
        archive = home.archives.get("outer").info
        assert json.loads(owner.read_bytes()) == {"home": home.id, "archive": archive.incarnation}
        fill(home, range(100, 110))
        pipeline = open_pipeline(home.context, archive, LocalWorkers(1))
        owner.unlink()
        owner.write_bytes(b'{"home":"another"}')
        with pytest.raises(InvalidError, match="belongs to another home"):
            Driver(home.context, pipeline, DriverOptions()).run()
        with pytest.raises(InvalidError, match="belongs to another home"):
            drive(home, "outer")
        owner.unlink()
        owner.write_bytes(archive.owner_content)
        assert drive(home, "outer") == 10
    assert listed(place.parent / "outside/outer/g1") == Counter(range(110))


def test_folder_below_the_store_of_the_home_is_relative_to_it(place: Path) -> None:
    with opened(place) as home:
        made = an_archive(home, "deep", place / "objects" / "mine")
        assert (made.store, made.root, made.home) == (home.store.url, "mine/deep", "")
        row = home.catalog.get(layout.REGISTRY, layout.archive_row("deep"))
        assert row is not None
        assert b"file:" not in row.value
        assert read_archive(home.context, "deep") == made


HERE, THERE = Location("s3://a/x", "dynamodb://a"), Location("s3://b/x", "dynamodb://b")


def make_halves() -> tuple[MemoryStore, MemoryCatalog]:
    store, catalog = MemoryStore(FakeClock()), MemoryCatalog()
    create_identity(store, catalog, seeded_ids(1), HERE)
    return store, catalog


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("call", range(1, 16))
def test_adoption_that_dies_after_any_call_is_finished_by_the_next(call: int, moved: bool) -> None:
    store, catalog = make_halves()
    first = read_pair(store, catalog, THERE)
    faults = Faults(crash_after_call=call)
    died = False
    try:
        adopt_identity(
            FaultyStore(store, faults),
            FaultyCatalog(catalog, faults),
            seeded_ids(2),
            THERE,
            moved=moved,
        )
    except Crash:
        died = True
    old, new = adopt_identity(store, catalog, seeded_ids(3), THERE, moved=moved)
    found = read_pair(store, catalog, THERE)
    assert found == new
    assert not found.is_copy(THERE)
    assert (found.id == first.id) is moved
    assert old.id == first.id or not died or old == new
    assert found.state == "ready"


def test_home_whose_adoption_did_not_finish_is_refused() -> None:
    store, catalog = make_halves()
    row = catalog.get(layout.HOME_PARTITION, layout.HOME_ROW)
    assert row is not None
    half = msgspec.structs.replace(
        msgspec.json.decode(row.value, type=Identity),
        id="new",
        state="adopting",
        store=THERE.store,
        catalog=THERE.catalog,
        was=read_pair(store, catalog, HERE).id,
    )
    catalog.write(
        layout.HOME_PARTITION,
        Put(layout.HOME_ROW, msgspec.json.encode(half), expect=row.version),
        write_id="w",
    )
    with pytest.raises(InvalidError, match="adoption did not finish: run `tidelog home adopt`"):
        read_pair(store, catalog, THERE)
    assert adopt_identity(store, catalog, seeded_ids(3), THERE, moved=False)[1].id == "new"


def _crash(*_: object) -> str:
    raise Crash


def test_adoption_that_did_not_finish_leaves_the_store_of_another_home_alone() -> None:
    store, catalog = make_halves()
    dead: Any = FaultyStore(store, Faults())
    dead.replace = _crash  # after step 1
    with pytest.raises(Crash):
        adopt_identity(dead, catalog, seeded_ids(2), THERE, moved=False)
    other = MemoryStore(FakeClock())
    elsewhere = Location("s3://c/x", "dynamodb://c")
    create_identity(other, MemoryCatalog(), seeded_ids(5), elsewhere)
    before = other.get(layout.HOME_OBJECT)
    for location in (Location("s3://c/x", THERE.catalog), THERE):
        with pytest.raises(InvalidError, match="do not belong together"):
            adopt_identity(other, catalog, seeded_ids(3), location, moved=False)
    assert other.get(layout.HOME_OBJECT) == before
    assert adopt_identity(store, catalog, seeded_ids(4), THERE, moved=False)[1].state == "ready"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (("s3://b/p?region=x", "dynamodb://t?region=x"), ("s3://b/p", "dynamodb://t"), True),
        (("s3://b/p", "dynamodb://t"), ("s3://c/p", "dynamodb://t"), False),
        (("s3://b/p", "dynamodb://t"), ("s3://b/p", "dynamodb://u"), False),
        (("s3://b", "cql://h1,h2/k"), ("s3://b", "cql://h3:9042/k"), True),
        (("file:///mnt/a", "dynamodb://t"), ("file:///data/a", "dynamodb://t"), True),
        (("memory:", "memory:"), ("memory:", "memory:"), True),
        (("file:///a", "sqlite:///a.sqlite"), ("file:///b", "sqlite:///b.sqlite"), False),
    ],
)
def test_places_are_told_apart_by_what_clients_share(
    one: tuple[str, str], other: tuple[str, str], same: bool
) -> None:
    assert (locate(*one, "m") == locate(*other, "m")) is same


def test_machines_tell_local_homes_apart_and_links_do_not(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    urls: Any = [
        (f"file://{tmp_path}/{each}", f"sqlite://{tmp_path}/{each}/c") for each in ("real", "link")
    ]
    assert locate(*urls[0], "m") == locate(*urls[1], "m") != locate(*urls[1], "n")
    assert dataclasses.astuple(locate(*urls[0], "")) == (
        f"file:{tmp_path}/real",
        f"sqlite:{tmp_path}/real/c",
    )
