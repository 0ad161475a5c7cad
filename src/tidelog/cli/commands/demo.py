"""``tidelog demo``: the main job from end to end, shown to a person.

On a real home in a folder of its own: events are produced, shared out to consumers, archived by
Spark into date and hour folders, and counted again by another engine. It ends by itself.

``tidelog sample-traffic``: what ``tidelog up --demo`` shows: orders, clicks, and their readers.

Beside the orders of the demo there are clicks, of which a few are no JSON, so that an archive has
dead letters; a pump that gives clicks the key of their user; and two consumers, one that keeps up
and one that falls behind at times.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import threading
from pathlib import Path

import click
import duckdb
import msgspec

from tidelog.cli.output import Output, json_option
from tidelog.cli.pipeline_options import DriverWatch
from tidelog.cli.terminal import Interruption
from tidelog.errors import AlreadyExistsError, InternalError, InvalidError
from tidelog.home import Home, create_home, open_home
from tidelog.log.consumer.consumer import Consumer
from tidelog.model.archive import Archive
from tidelog.model.event import Event, to_iso
from tidelog.settings import load_settings

__all__ = ["DEMO_TOPICS", "demo", "prepare"]

_EVENTS = 100_000
_FIRST_MS = 1_794_528_000_000  # 2026-11-13
_HOURS = 72
_MAX_AGE_MS = 10_000  # so that who goes on with `tidelog up` sees files come


@click.command()
@click.option("--clean", is_flag=True, help="Delete the demo's folder at the end.")
@click.option("--no-spark", is_flag=True, help="Archive in this process instead of on Spark.")
@click.option(
    "--folder",
    "given",
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder of its home. [default: a new folder]",
)
@json_option
def demo(output: Output, clean: bool, no_spark: bool, given: Path | None) -> None:
    """Show Tidelog at work: produce, consume, archive, query.

    \b
    Examples:
      tidelog demo
      tidelog demo --clean
    """
    if clean and given is not None:
        raise InvalidError("demo: --clean and --folder: give one of them")
    with contextlib.ExitStack() as stack:
        if clean:
            made = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidelog-demo-")))
        else:
            made = given or Path(tempfile.mkdtemp(prefix="tidelog-demo-"))
        folder = given or made / "home"
        settings = load_settings(str(folder), {}, made)
        home = stack.enter_context(create_home(settings)[0])
        output.title("1. A home: a folder for objects and a SQLite file for the catalog")
        output.record({"step": "home", "config": home.config})
        _show_log(home, output)
        _show_members(home, output)
        archive = _show_archive(home, output, no_spark)
        _show_query(home, output, archive)
        if not clean:
            _show_next(output, folder, home, archive)


def _show_log(home: Home, output: Output) -> None:
    output.title(f"2. {_EVENTS:,} orders of three days, appended to a topic of 4 partitions")
    home.create_topic("orders", partitions=4)
    clock = home.context.clock
    events = [
        Event(
            msgspec.json.encode({"order": n, "at": to_iso(_time_ms(n)), "cents": n % 10_000}),
            key=b"customer-%d" % (n % 500),
        )
        for n in range(_EVENTS)
    ]
    began_s = clock.monotonic_s()
    positions = home.append("orders", events)
    took_s = clock.monotonic_s() - began_s
    with home.producer("orders", name="importer") as producer:
        first = producer.send(events[0].value, key=b"customer-7", sequence=1).result(30)
    with home.producer("orders", name="importer") as producer:
        again = producer.send(events[0].value, key=b"customer-7", sequence=1).result(30)
    output.record(
        {
            "step": "log",
            "durable events a second": round(len(positions) / took_s),
            "one more, sent twice under one sequence": f"{first} and {again}: stored once",
        }
    )


def _time_ms(number: int) -> int:
    return _FIRST_MS + number * _HOURS * 3_600_000 // _EVENTS


def _show_members(home: Home, output: Output) -> None:
    output.title("3. Two members of one consumer share the partitions")
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


def _show_archive(home: Home, output: Output, no_spark: bool) -> Archive:
    engine = "this process" if no_spark else "Spark"
    output.title(
        f"4. An archive: {engine} lays the events down by date and hour, each of them once"
    )
    archive = home.archives.create(
        "hourly",
        source="topic:orders",
        parser="iso8601:at",
        granularity="hour",
        max_age=f"{_MAX_AGE_MS // 1000}s",
    )
    clock = home.context.clock
    began_s = clock.monotonic_s()
    with DriverWatch(output, "hourly") as watch:
        done = archive.run(
            spark=None if no_spark else "local[2]",
            stop=watch.stop,
            on_look=watch.look,
            on_cycle=watch.cycle,
        )
    output.record(
        {
            "step": "archive",
            "events": done.events,
            "files": sum(1 for _ in archive.files()),
            "seconds, with the start of the engine": round(clock.monotonic_s() - began_s, 1),
        }
    )
    return archive.info


def _show_query(home: Home, output: Output, archive: Archive) -> None:
    output.title("5. Any engine reads the files: DuckDB over a plain listing of the folder")
    found = duckdb.execute(
        "SELECT dt, count(DISTINCT hr) AS hours, count(*) AS events "
        "FROM read_parquet(?, hive_partitioning = true) GROUP BY dt ORDER BY dt",
        [_files(home, archive)],
    ).fetchall()
    rows = [{"step": "query", "dt": str(dt), "hours": h, "events": n} for dt, h, n in found]
    output.records(("dt", "hours", "events"), rows)
    count = sum(n for _, _, n in found)
    if count != _EVENTS + 1:
        raise InternalError(f"demo: the archive holds {count} events, {_EVENTS + 1} were produced")
    output.say(f"{count:,} events produced, {count:,} archived: the counts match.")


def _show_next(output: Output, folder: Path, home: Home, archive: Archive) -> None:
    output.title("All of it is still there. Look around:")
    output.say(f"  export TIDELOG_HOME={folder}")
    output.say("  tidelog topic show orders")
    output.say("  tidelog consume orders --name me --max 3")
    output.say("  tidelog archive status hourly")
    output.say("  tidelog up")
    output.say(f"  ls {_files(home, archive).partition('/**')[0]}")
    output.say("Then make one of your own: tidelog init, and README.md")


def _files(home: Home, archive: Archive) -> str:
    return f"{home.store.url.removeprefix('file://')}/{archive.folder()}/**/*.parquet"


DEMO_TOPICS = ("clicks", "clicks-by-user", "orders")
_TICK_S = 0.5
_ORDERS, _CLICKS = 8, 12  # in each tick
_BROKEN = 0.02  # of the clicks
_LAG_MAX = 600  # of the slow consumer, before it hurries
_PAGES = ("/", "/tea", "/coffee", "/basket", "/pay")


def prepare(home: Home) -> None:
    """Topics, an archive and a pump, where they are missing."""
    for name, partitions in zip(DEMO_TOPICS, (2, 2, 4), strict=True):
        with contextlib.suppress(AlreadyExistsError):
            home.create_topic(name, partitions)
    with contextlib.suppress(AlreadyExistsError):
        home.archives.create(
            "clicks-daily", source="topic:clicks", parser="iso8601:at", max_age="5s"
        )
    home.pumps.create("by-user", source="topic:clicks", topic="clicks-by-user", key_field="user")


@click.command("sample-traffic", hidden=True)
@json_option
@click.pass_obj
def sample_traffic(home_text: str | None, output: Output, /) -> None:
    """Send sample traffic into the demo's home, until Ctrl-C or SIGTERM.

    \b
    Examples:
      tidelog sample-traffic
      tidelog --home ./demo sample-traffic
    """
    stop = threading.Event()
    with open_home(home_text) as home, Interruption(stop, follows=True):
        prepare(home)
        with (
            home.consumer("orders", "billing", "latest") as billing,
            home.consumer("clicks", "reporting") as reporting,
        ):
            sent = 0
            while not stop.wait(_TICK_S):
                sent += _send(home, home.context.random, sent)
                _read(billing, reporting)
        output.record({"events": sent})


def _send(home: Home, source: random.Random, sent: int) -> int:
    now_ms = home.context.clock.now_ms()
    orders = []
    for number in range(sent, sent + _ORDERS):
        customer = source.randrange(500)
        value = {"order": number, "at": to_iso(now_ms), "cents": source.randrange(10_000)}
        orders.append(
            Event(
                msgspec.json.encode(value),
                key=b"customer-%d" % customer,
                id=f"order-{now_ms}-{number}",
                type="order",
            )
        )
    home.append("orders", orders)
    home.append("clicks", [_click(source, now_ms) for _ in range(_CLICKS)])
    return _ORDERS + _CLICKS


def _click(source: random.Random, now_ms: int) -> Event:
    if source.random() < _BROKEN:
        return Event(b"GET /basket HTTP/1.1", type="click")
    user, page = source.randrange(200), source.choice(_PAGES)
    value = {"user": f"user-{user}", "page": page, "at": to_iso(now_ms)}
    return Event(msgspec.json.encode(value), type="click")


def _read(billing: Consumer, reporting: Consumer) -> None:
    billing.poll(1_000, timeout_s=0)
    billing.commit()
    behind = sum(lag.events for lag in reporting.lag())
    reporting.poll(_LAG_MAX if behind > _LAG_MAX else _CLICKS // 2, timeout_s=0)
    reporting.commit()
