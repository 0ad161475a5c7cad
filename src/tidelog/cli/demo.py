"""``tidelog demo``: the ground that everything stands on, shown to a person.

It makes a real home in a folder of its own, creates objects and rows, lets workers race for them,
and then runs a log on it. It ends by itself.
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
from tidelog.model.event import Event
from tidelog.settings import load_settings

__all__ = ["demo"]

_WORKERS = 8
_INCREMENTS = 25
_EVENTS = 100_000


@click.command()
@click.option("--keep", is_flag=True, help="Keep the demo's folder instead of removing it.")
@json_option
def demo(output: Output, keep: bool) -> None:
    """Show a home at work: objects, rows, races that one worker wins, and a log.

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
        _show_log(home, output)
        _show_members(home, output)
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


def _show_log(home: Home, output: Output) -> None:
    output.title(f"6. A log: {_EVENTS:,} events appended, durable, and read back in order")
    home.create_topic("orders", partitions=4)
    clock = home.log.clock
    events = [Event(b'{"order": %d}' % n, key=b"customer-%d" % (n % 50)) for n in range(_EVENTS)]
    began_s = clock.monotonic_s()
    positions = home.append("orders", events)
    took_s = clock.monotonic_s() - began_s
    counts = [sum(1 for _ in home.read("orders", partition)) for partition in range(4)]
    with home.producer("orders", name="importer") as producer:
        first = producer.send(b"once", key=b"customer-7", sequence=1).result(30)
    with home.producer("orders", name="importer") as producer:
        again = producer.send(b"once", key=b"customer-7", sequence=1).result(30)
    output.record(
        {
            "step": "log",
            "events a second": round(len(positions) / took_s),
            "read back, by partition": counts,
            "sent twice under one name and sequence": f"{first} and {again}: stored once",
        }
    )


def _show_members(home: Home, output: Output) -> None:
    output.title("7. Two members of one consumer share the partitions")
    with home.consumer("orders", "billing") as one, home.consumer("orders", "billing") as two:
        handled = {"one": 0, "two": 0}
        while sum(handled.values()) <= _EVENTS:
            for name, member in (("one", one), ("two", two)):
                handled[name] += len(member.poll(5_000, timeout_s=0.1))
                member.commit()
        output.record(
            {
                "step": "members",
                "handled by each": handled,
                "partitions of each": {"one": one.partitions(), "two": two.partitions()},
                "left to do": sum(lag.events for lag in one.lag()),
            }
        )


def _show_cost(home: Home, output: Output) -> None:
    output.title("8. What the store was asked for")
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
