"""Flipped bits of a catalog file are noticed or harmless, and no sweep deletes a live object."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest

from tidelog import Event
from tidelog.errors import TidelogError
from tidelog.home import create_home, open_home
from tidelog.settings import load_settings

EVENTS = [Event(b"one", id="1"), Event(b"two", id="2"), Event(b"three", key=b"k")]
VALUES = [event.value for event in EVENTS]


class Damage:
    """A small home whose catalog file is damaged again and again."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "home"
        home, _ = create_home(load_settings(str(self.path), {}, folder))
        home.create_topic("orders")
        for event in EVENTS:
            home.append("orders", [event])
        home.create_topic("gone")
        home.append("gone", [Event(b"deleted")])
        home.delete_topic("gone")
        home.close()
        self.catalog = self.path / "catalog.sqlite"
        self.whole = self.catalog.read_bytes()
        self.objects = self._objects()

    def _objects(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.path.rglob("*.arrow")}

    def restore(self, data: bytes) -> None:
        for path in self.path.glob("catalog.sqlite*"):
            path.unlink()
        self.catalog.write_bytes(data)

    def is_noticed(self) -> bool:
        """Whether ``verify`` says so; else everything is as it was."""
        try:
            with open_home(self.path) as home:
                if home.inspect() or home.verify("orders").errors:
                    return True
                assert [topic.name for topic in home.topics()] == ["orders"]
                assert [event.value for event in home.read("orders")] == VALUES
                return False
        except TidelogError:
            return True

    def sweep(self) -> None:
        """Sweep with no grace: it may refuse, and must delete nothing that is live."""
        try:
            with open_home(self.path) as home:
                home.sweep(0)
        except TidelogError:
            pass
        assert self._objects() == self.objects


def check_flips(damage: Damage, places: list[int]) -> int:
    """Flip each bit alone; how many were noticed."""
    noticed = 0
    for place in places:
        data = bytearray(damage.whole)
        data[place // 8] ^= 1 << (place % 8)
        damage.restore(bytes(data))
        noticed += damage.is_noticed()
        damage.restore(bytes(data))
        damage.sweep()
    return noticed


def test_flipped_bits_are_noticed_or_harmless(tmp_path: Path) -> None:
    damage = Damage(tmp_path)
    used = [at for at, byte in enumerate(damage.whole) if byte]  # most of the file is free space
    rng = random.Random(15)
    places = [rng.choice(used) * 8 + rng.randrange(8) for _ in range(60)]
    assert check_flips(damage, places) > 30


@pytest.mark.long
def test_many_flipped_bits_are_noticed_or_harmless(tmp_path: Path) -> None:
    damage = Damage(tmp_path)
    rng = random.Random(16)
    places = [rng.randrange(len(damage.whole) * 8) for _ in range(6_000)]
    check_flips(damage, places)


def lose_row(damage: Damage, row: str) -> None:
    with sqlite3.connect(damage.catalog) as connection:
        connection.execute("DELETE FROM rows WHERE row = ?", (row,))
    connection.close()


def test_a_sweep_refuses_objects_that_no_registry_row_explains(tmp_path: Path) -> None:
    damage = Damage(tmp_path)
    lose_row(damage, "topic/orders")
    with open_home(damage.path) as home:
        report = home.sweep(0)
        assert report.objects_deleted == 0
        assert [str(each.error) for each in report.refused if "restore" in str(each.error)]
        assert any("no registry row" in problem for problem in home.inspect())
    damage.sweep()


def test_topic_that_a_restored_catalog_does_not_know_can_be_accepted_as_lost(
    tmp_path: Path,
) -> None:
    path = tmp_path / "home"
    home, _ = create_home(load_settings(str(path), {}, tmp_path))
    home.create_topic("orders")
    home.append("orders", [Event(b"x")])
    home.close()
    saved = (path / "catalog.sqlite").read_bytes()
    with open_home(path) as home:
        late = home.create_topic("late")
        home.append("late", [Event(b"y")])
    (path / "catalog.sqlite").write_bytes(saved)
    with open_home(path) as home:
        (refused,) = home.sweep(0).refused
        assert f"tidelog sweep --accept-loss {late.incarnation}" in str(refused.error)
        report = home.sweep(0, accept_loss=[late.incarnation])
        assert (report.objects_deleted, report.refused) == (1, ())
        assert home.sweep(0).refused == ()
        assert [event.value for event in home.read("orders")] == [b"x"]


def test_late_uploads_of_a_deleted_topic_are_garbage(tmp_path: Path) -> None:
    home, _ = create_home(load_settings(str(tmp_path / "home"), {}, tmp_path))
    topic = home.create_topic("brief")
    home.append("brief", [Event(b"x")])
    home.delete_topic("brief")
    home.store.put(f"topics/{topic.incarnation}/segments/0000000000/aa/aa.arrow", b"late")
    report = home.sweep(0)
    assert (report.objects_deleted, report.refused) == (1, ())
    assert home.inspect() == []
    home.close()


def test_an_index_out_of_order_is_noticed(tmp_path: Path) -> None:
    """SQLite's own check finds a row that no search leads to."""
    damage = Damage(tmp_path)
    damage.restore(damage.whole.replace(b"registrytopic/orders", b"registryzopic/orders"))
    assert damage.is_noticed()
    damage.sweep()
