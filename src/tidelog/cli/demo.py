"""``tidelog demo``: the ground that everything stands on, shown to a person.

It makes a real home in a folder of its own, creates objects and rows, and lets workers race for
them. It ends by itself.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
from pathlib import Path

import click

from tidelog.catalog import ABSENT, Put
from tidelog.cli.output import Output, json_option
from tidelog.clock import RandomIds
from tidelog.errors import AlreadyExistsError, ConflictError
from tidelog.home import Home, create_home, open_home
from tidelog.settings import load_settings

__all__ = ["demo"]

_WORKERS = 8
_INCREMENTS = 25


@click.command()
@click.option("--keep", is_flag=True, help="Keep the demo's folder instead of removing it.")
@json_option
def demo(output: Output, keep: bool) -> None:
    """Show a home at work: objects, rows, and races that one worker wins.

    \b
    Examples:
      tidelog demo
      tidelog demo --keep
    """
    with contextlib.ExitStack() as stack:
        if keep:
            folder = Path(tempfile.mkdtemp(prefix="tidelog-demo-"))
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidelog-demo-")))
        settings = load_settings(str(folder / "home"), {}, folder)
        home = stack.enter_context(create_home(settings)[0])
        output.title("1. A home: one object store and one catalog")
        output.record({"step": "home", "config": home.config, "id": home.id})
        _show_objects(home, output)
        _show_rows(home, output)
        _show_race(home, output)
        _show_reopened(home, output)
        _show_cost(home, output)
        if keep:
            output.say(f"\nThe home stays: tidelog --home {folder / 'home'} home")
        output.say("\nYour own home is one command away: tidelog init")


def _show_objects(home: Home, output: Output) -> None:
    output.title("2. Objects are created once, and never overwritten")
    for number in range(3):
        home.store.put(f"demo/object-{number}", f"hello {number}".encode())
    try:
        home.store.put("demo/object-0", b"another")
        refused = "nothing (this is a bug)"
    except AlreadyExistsError as exc:
        refused = str(exc)
    listed = [info.key for info in home.store.list("demo/")]
    output.record({"step": "objects", "listed": ", ".join(listed), "second create": refused})


def _show_rows(home: Home, output: Output) -> None:
    output.title("3. Rows change together, or not at all")
    home.catalog.write(
        "demo", Put("counter", b"0", ABSENT), Put("owner", b"you", ABSENT), write_id="demo-1"
    )
    try:
        home.catalog.write(
            "demo",
            Put("counter", b"99"),
            Put("owner", b"somebody else", expect="a version that never was"),
            write_id="demo-2",
        )
        refused = "nothing (this is a bug)"
    except ConflictError as exc:
        refused = str(exc)
    rows = {row.row: row.value.decode() for row in home.catalog.scan("demo")}
    output.record({"step": "rows", "rows": rows, "refused write": refused})


def _show_race(home: Home, output: Output) -> None:
    output.title(f"4. {_WORKERS} workers race to count to {_WORKERS * _INCREMENTS}")
    conflicts: list[int] = []
    workers = [
        threading.Thread(target=_count, args=(home, conflicts), daemon=True)
        for _ in range(_WORKERS)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    row = home.catalog.get("demo", "counter")
    output.record(
        {
            "step": "race",
            "lost races, tried again": sum(conflicts),
            "the counter says": int(row.value) if row else None,
        }
    )


def _count(home: Home, conflicts: list[int]) -> None:
    ids = RandomIds()
    done = lost = 0
    while done < _INCREMENTS:
        row = home.catalog.get("demo", "counter")
        if row is None:
            return
        change = Put("counter", str(int(row.value) + 1).encode(), expect=row.version)
        try:
            home.catalog.write("demo", change, write_id=ids.new())
            done += 1
        except ConflictError:
            lost += 1
    conflicts.append(lost)


def _show_reopened(home: Home, output: Output) -> None:
    output.title("5. The config string is all that another process needs")
    with open_home(home.config) as again:
        row = again.catalog.get("demo", "counter")
        output.record(
            {
                "step": "reopened",
                "same home": again.id == home.id,
                "counter": int(row.value) if row else None,
                "object": again.store.get("demo/object-1").decode(),
            }
        )


def _show_cost(home: Home, output: Output) -> None:
    output.title("6. What the store was asked for")
    output.records(
        ("verb", "requests", "refused", "bytes", "ms"),
        [
            {
                "verb": verb,
                "requests": usage.requests,
                "refused": usage.errors,
                "bytes": usage.bytes,
                "ms": round(usage.seconds * 1000, 1),
            }
            for verb, usage in sorted(home.meter.verbs.items())
        ],
    )
