"""A home of which one half was restored: from before its adoption or its move, or not at all."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from tests.home.test_adoption import (
    THERE,
    bytes_below,
    drive,
    fill,
    make_halves,
    opened,
    opened_id,
    place,
)
from tidelog import Event, InvalidError, adopt_home
from tidelog.catalog.base import Put
from tidelog.home import World, create_home, open_home
from tidelog.identity import Location, adopt_identity, read_catalog, read_pair
from tidelog.model import layout
from tidelog.settings import load_settings
from tidelog.testing.faults import Faults, FaultyCatalog, FaultyStore
from tidelog.testing.scheduler import Crash, seeded_ids

__all__ = ["place"]  # the fixture


def a_copy(place: Path, name: str = "copy") -> tuple[Path, World]:
    copy = place.parent / name
    shutil.copytree(place, copy)
    return copy, World(environ={}, machine="one")


def halves(store: Path, catalog: Path) -> str:
    """The config of a store and a catalog of any homes."""
    return (
        f"tidelog:?store={(store / 'objects').as_uri()}"
        f"&catalog=sqlite:{(catalog / 'catalog.sqlite').as_uri().removeprefix('file:')}"
    )


OLDER = "is from before the adoption of home `{}`.*run `tidelog home adopt`"


def test_catalog_from_before_an_adoption_is_named_and_gets_its_identity_back(place: Path) -> None:
    copy, world = a_copy(place)
    backup = place.parent / "backup.sqlite"
    shutil.copy(copy / "catalog.sqlite", backup)
    done = adopt_home(copy, world=world)
    with opened(copy) as home:
        fill(home, range(100, 140))
        fill(home, range(140, 150))
        home.create_topic("later")
        home.append("later", [Event(b"x")])
        incarnation = home.topic("later").incarnation
    shutil.copy(backup, copy / "catalog.sqlite")
    settings = load_settings(str(copy), {}, copy)
    for attempt in (lambda: opened(copy), lambda: create_home(settings, world=world)):
        with pytest.raises(InvalidError, match=OLDER.format(done.id)):
            attempt()
    again = adopt_home(copy, world=world)
    assert (again.id, again.was) == (done.id, done.was)
    assert any("archive `outer`: read-only" in line for line in again.detached)
    with opened(copy) as home:
        assert (home.id, home.copy_of) == (done.id, "")
        assert len(list(home.read("t"))) == 100
        assert any("lost commits" in each.what for each in home.verify("t").findings)
        assert any(incarnation in line for line in home.inspect())
        home.recover_topic("t")
        assert Counter(int(e.value or b"") for e in home.read("t")) == Counter(range(150))
        with pytest.raises(InvalidError, match="belongs to home"):
            drive(home, "outer")
    assert adopt_home(copy, world=world).detached == ()
    with opened(place) as home:
        assert drive(home, "outer") == 0


def test_store_from_before_an_adoption_is_named_and_gets_its_identity_back(place: Path) -> None:
    copy, world = a_copy(place)
    before = (copy / "objects" / layout.HOME_OBJECT).read_bytes()
    done = adopt_home(copy, world=world)
    (copy / "objects" / layout.HOME_OBJECT).unlink()
    (copy / "objects" / layout.HOME_OBJECT).write_bytes(before)
    with pytest.raises(InvalidError, match=r"home\.json.*" + OLDER.format(done.id)):
        opened(copy)
    assert adopt_home(copy, world=world).id == done.id
    with opened(copy) as home:
        assert len(list(home.read("t"))) == 100


def test_halves_of_an_original_and_its_adopted_copy_are_never_opened_together(place: Path) -> None:
    """Each knows the other's id, and still the original's half is the original's."""
    copy, world = a_copy(place)
    adopt_home(copy, world=world)
    before = bytes_below(place / "objects"), bytes_below(copy / "objects")
    for config in (halves(copy, place), halves(place, copy)):
        for attempt in (
            lambda config=config: open_home(config, world=world),
            lambda config=config: adopt_home(config, world=world),
            lambda config=config: adopt_home(config, moved=True, world=world),
        ):
            with pytest.raises(InvalidError, match=r"belong together|is still there"):
                attempt()
    third = place.parent / "third"
    third.mkdir()
    shutil.copy(place / "catalog.sqlite", third)
    with pytest.raises(InvalidError, match="copy both halves"):
        adopt_home(halves(copy, third), world=world)
    with pytest.raises(InvalidError, match="is still there"):
        adopt_home(halves(copy, third), moved=True, world=world)
    assert (bytes_below(place / "objects"), bytes_below(copy / "objects")) == before
    assert opened_id(place) != opened_id(copy)


def test_older_catalog_in_a_new_place_is_taken_on_when_the_newer_one_is_gone(place: Path) -> None:
    copy, world = a_copy(place)
    third = place.parent / "third"
    third.mkdir()
    shutil.copy(copy / "catalog.sqlite", third)
    done = adopt_home(copy, world=world)
    (copy / "catalog.sqlite").unlink()
    again = adopt_home(halves(copy, third), moved=True, world=world)
    assert (again.id, again.was) == (done.id, done.id)
    with open_home(halves(copy, third), world=world) as home:
        assert (home.id, home.copy_of) == (done.id, "")
        assert len(list(home.read("t"))) == 100


def test_catalog_from_before_the_move_of_one_half_is_taken_on(place: Path) -> None:
    """It has the same id, and an older place."""
    away, world = place.parent / "away", World(environ={}, machine="one")
    away.mkdir()
    backup = (place / "catalog.sqlite").read_bytes()
    shutil.move(place / "catalog.sqlite", away / "catalog.sqlite")
    adopt_home(halves(place, away), moved=True, world=world)
    (away / "catalog.sqlite").write_bytes(backup)
    with pytest.raises(InvalidError, match="--moved"):
        open_home(halves(place, away), world=world)
    adopt_home(halves(place, away), moved=True, world=world)
    with open_home(halves(place, away), world=world) as home:
        assert not home.copy_of
        assert drive(home, "outer") == 0


def test_moved_home_is_not_held_up_by_an_adopted_copy_at_its_old_place(place: Path) -> None:
    """That copy lists the home's id as a former one of its own."""
    new, world = place.parent / "new", World(environ={}, machine="one")
    shutil.copytree(place, new)
    kept = place.parent / "kept"
    place.rename(kept)
    shutil.copytree(kept, place.parent / "x")
    adopt_home(place.parent / "x", world=world)
    (place.parent / "x").rename(place)
    assert adopt_home(new, moved=True, world=world).id == opened_id(new)


@pytest.mark.parametrize("half", ["catalog", "store"])
@pytest.mark.parametrize("call", range(1, 12))
def test_restore_of_an_identity_that_dies_is_finished_by_the_next(call: int, half: str) -> None:
    store, catalog = make_halves()
    row = catalog.get(layout.HOME_PARTITION, layout.HOME_ROW)
    assert row is not None
    before = store.get(layout.HOME_OBJECT)
    for seed, location in ((2, THERE), (3, Location("s3://c/x", "dynamodb://c"))):
        _, last = adopt_identity(store, catalog, seeded_ids(seed), location, moved=False)
    assert len(last.former) == 2
    if half == "catalog":
        older = Put(layout.HOME_ROW, row.value)
        catalog.write(layout.HOME_PARTITION, older, write_id="w")
    else:
        store.replace(layout.HOME_OBJECT, before, store.head(layout.HOME_OBJECT).etag)
    with pytest.raises(InvalidError, match=OLDER.format(last.id)):
        read_pair(store, catalog, location)
    faults = Faults(crash_after_call=call)
    faulty = FaultyStore(store, faults), FaultyCatalog(catalog, faults)
    with contextlib.suppress(Crash):
        adopt_identity(*faulty, seeded_ids(4), location, moved=False)
    adopt_identity(store, catalog, seeded_ids(5), location, moved=False)
    assert read_pair(store, catalog, location) == last
    claimed = read_catalog(catalog)
    assert claimed is not None
    assert claimed[0] == last


@pytest.mark.parametrize("how", ["missing", "no bytes", "no rows"])
def test_adoption_of_a_home_that_lost_its_catalog_says_so(place: Path, how: str) -> None:
    catalog = place / "catalog.sqlite"
    if how == "no rows":
        with closing(sqlite3.connect(catalog)) as file, file:
            file.execute("DELETE FROM rows")
    else:
        catalog.unlink()
        if how == "no bytes":
            catalog.write_bytes(b"")
    world = World(environ={}, machine="one")
    settings = load_settings(str(place), {}, place)
    for attempt in (
        lambda: adopt_home(place, world=world),
        lambda: adopt_home(place, moved=True, world=world),
        lambda: opened(place),
        lambda: create_home(settings, world=world),
    ):
        with pytest.raises(
            InvalidError, match=r"is missing or empty.*restore the catalog"
        ) as caught:
            attempt()
        assert " init`" not in str(caught.value)


def test_adoption_of_a_home_whose_store_is_empty_says_so(place: Path) -> None:
    (place / "objects" / layout.HOME_OBJECT).unlink()
    with pytest.raises(InvalidError, match="holds no home"):
        adopt_home(place, world=World(environ={}, machine="one"))
