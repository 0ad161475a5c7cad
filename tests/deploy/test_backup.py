"""What docs/operating.md says of back-ups: the catalog first, then the store, while all runs."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from pathlib import Path

from tidelog import Event
from tidelog.home import create_home, open_home
from tidelog.settings import load_settings


def test_a_copy_made_while_events_come_in_is_whole(tmp_path: Path) -> None:
    place, copy = tmp_path / "home", tmp_path / "copy"
    with create_home(load_settings(str(place), {}, tmp_path))[0] as home:
        home.create_topic("orders", 2)
        home.append("orders", [Event(b"before %d" % n, b"%d" % n) for n in range(200)])
        stop = threading.Event()

        def produce() -> None:
            number = 0
            while not stop.is_set():
                home.append("orders", [Event(b"meanwhile %d" % number, b"%d" % number)])
                number += 1

        producing = threading.Thread(target=produce)
        producing.start()
        copy.mkdir()
        with (
            sqlite3.connect(place / "catalog.sqlite") as live,
            sqlite3.connect(copy / "catalog.sqlite") as saved,
        ):
            live.backup(saved)
        live.close()
        saved.close()
        shutil.copytree(place / "objects", copy / "objects")
        stop.set()
        producing.join()
    with open_home(copy) as home:
        report = home.verify("orders")
        assert report.errors == 0, report.findings
        held = [event.value for partition in range(2) for event in home.read("orders", partition)]
        assert {b"before %d" % n for n in range(200)} <= set(held)
        home.append("orders", [Event(b"after")])
