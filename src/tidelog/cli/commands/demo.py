"""``tidelog demo`` and ``tidelog sample-traffic``: what Tidelog does, shown to a person.

**The demo** works on a real home in a folder of its own. It produces events, shares them among
consumers, archives them by date and hour on Spark, counts them with another engine, and draws the
result.

**Sample traffic** is what ``tidelog up --demo`` shows: orders, clicks, and their readers. Besides
the orders of the demo there are clicks, a few of which are not JSON, so that an archive has dead
letters; a pump that gives clicks the key of their user; and two consumers, one that keeps up and
one that falls behind at times.
"""

from __future__ import annotations

import contextlib
import math
import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import duckdb
import msgspec

from tidelog.cli.output import Output, json_option
from tidelog.cli.pipeline_options import DriverWatch, spark_conf, spark_of, spark_options
from tidelog.cli.terminal import Interruption, open_home
from tidelog.errors import AlreadyExistsError, InternalError, InvalidError
from tidelog.home import Home, create_home
from tidelog.log.consumer.consumer import Consumer
from tidelog.model.archive import Archive
from tidelog.model.event import Event, to_iso
from tidelog.settings import load_settings

__all__ = ["DEMO_TOPICS", "demo", "prepare", "program"]

_EVENTS = 100_000
_FIRST_MS = 1_794_528_000_000  # 2026-11-13
_HOURS = 72
_TIDE = 0.6  # how much busier noon is than the mean
_BARS = " ▁▂▃▄▅▆▇█"
_MAX_AGE_MS = 10_000  # so that files appear soon after `tidelog up`


@click.command()
@click.option("--clean", is_flag=True, help="Delete the demo's folder at the end.")
@spark_options
@click.option(
    "--folder",
    "given",
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder of its home. [default: a new folder]",
)
@json_option
def demo(output: Output, /, clean: bool, given: Path | None, **options: Any) -> None:
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
        output.title("1. Create a home: a folder for objects, and a SQLite file for the catalog")
        _show(output, {"step": "home", "config": home.config}, f"{folder}")
        _show_log(home, output)
        _show_members(home, output)
        archive = _show_archive(home, output, spark_of(options), spark_conf(options["confs"]))
        hours = _show_query(home, output, archive)
        _show_picture(output, hours)
        if not clean:
            _show_next(output, folder, home, archive)


def _show(output: Output, values: dict[str, Any], *lines: str) -> None:
    """Print a step: its values for a program, or lines for a person."""
    if output.as_json:
        output.record(values)
    for line in lines:
        output.say(f"   {line}")


def _show_log(home: Home, output: Output) -> None:
    output.title(f"2. Append {_EVENTS:,} orders of three days to a topic with 4 partitions")
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
    if first != again:
        raise InternalError(f"demo: one event was stored twice: {first} and {again}")
    per_s = round(len(positions) / took_s)
    _show(
        output,
        {"step": "log", "events_per_s": per_s, "sent_twice": str(first)},
        f"{per_s:,} events/s, each on disk before it is acknowledged",
        f"One more order, sent twice by a retry, is stored once: {first}",
    )


def _time_ms(number: int) -> int:
    """Three days with a tide in each: many orders at noon, few at midnight."""
    days, share = _HOURS / 24, number / _EVENTS
    tide = _TIDE * math.sin(2 * math.pi * days * share) / (2 * math.pi * days)
    return _FIRST_MS + round((share + tide) * _HOURS * 3_600_000)


def _show_members(home: Home, output: Output) -> None:
    output.title("3. Read them as the consumer `billing`: its two members share the partitions")
    with home.consumer("orders", "billing") as one, home.consumer("orders", "billing") as two:
        handled = {"one": 0, "two": 0}
        while sum(handled.values()) <= _EVENTS:
            for name, member in (("one", one), ("two", two)):
                handled[name] += len(member.poll(5_000, timeout_s=0.1))
                member.commit()
        partitions = {"one": one.partitions(), "two": two.partitions()}
        left = sum(lag.events for lag in one.lag())
    lines = [
        f"member {name}  partitions {', '.join(map(str, partitions[name]))}  "
        f"{count:>7,} events  {'█' * round(count / _EVENTS * 30)}"
        for name, count in handled.items()
    ]
    values = {"step": "members", "events": handled, "partitions": partitions, "left": left}
    _show(output, values, *lines, f"{left} events left to read")


def _show_archive(home: Home, output: Output, spark: str | None, conf: dict[str, str]) -> Archive:
    engine = "this process" if spark is None else "Spark"
    output.title(f"4. Archive them by date and hour: {engine} writes each event once")
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
            spark=spark,
            spark_conf=conf,
            stop=watch.stop,
            on_look=watch.look,
            on_cycle=watch.count,
        )
    files = sum(1 for _ in archive.files())
    took_s = round(clock.monotonic_s() - began_s, 1)
    _show(
        output,
        {"step": "archive", "events": done.events, "files": files, "seconds": took_s},
        f"{done.events:,} events in {files} Parquet files, {took_s} s"
        + ("" if spark is None else " with Spark's start"),
    )
    return archive.info


def _show_query(home: Home, output: Output, archive: Archive) -> list[int]:
    """Count the archived events with another engine; return how many each hour has."""
    output.title("5. Count the files with DuckDB, which only lists the folder")
    found = duckdb.execute(
        "SELECT dt, hr, count(*) AS events "
        "FROM read_parquet(?, hive_partitioning = true) GROUP BY dt, hr ORDER BY dt, hr",
        [_files(home, archive)],
    ).fetchall()
    days: dict[str, list[int]] = {}
    for day, _, events in found:
        days.setdefault(str(day), []).append(events)
    for day, hours in days.items():
        values = {"step": "query", "dt": day, "hours": len(hours), "events": sum(hours)}
        _show(output, values, f"{day}  {len(hours)} hours  {sum(hours):>7,} events")
    count = sum(map(sum, days.values()))
    if count != _EVENTS + 1:
        raise InternalError(f"demo: the archive holds {count} events, {_EVENTS + 1} were produced")
    output.say(f"   {count:,} events produced, {count:,} archived: the counts match.")
    return [events for hours in days.values() for events in hours]


def _show_picture(output: Output, hours: list[int]) -> None:
    """Draw what happened: the way of the events, and how many each hour has."""
    count = f"{sum(hours):,}"
    output.title("What happened")
    way = f"   {count} orders ──▶ topic `orders` ─"
    output.say(f"{way}┬─▶ consumer `billing`, {count} read")
    output.say(f"{'4 partitions  ':>{len(way)}}└─▶ archive `hourly`, {count} in files\n")
    output.say(f"   orders per hour, up to {max(hours):,}")
    for row in chart(hours, rows=5):
        output.say(f"   {row}")
    first = datetime.fromtimestamp(_FIRST_MS / 1_000, UTC).date()
    days = [str(first + timedelta(days=day)) for day in range(len(hours) // 24)]
    output.say("   " + "".join(f"└{day:<23}" for day in days).rstrip())


def chart(values: Sequence[int], rows: int) -> list[str]:
    """Return lines that draw values as bars next to each other, the highest as high as all rows."""
    eighths = [round(value / max(1, *values) * rows * 8) for value in values]
    return [
        "".join(_BARS[min(max(each - 8 * row, 0), 8)] for each in eighths).rstrip()
        for row in reversed(range(rows))
    ]


def _show_next(output: Output, folder: Path, home: Home, archive: Archive) -> None:
    output.title("Everything is still there. Look around:")
    output.say(f"   export TIDELOG_HOME={folder}")
    commands = ("topic show orders", "peek orders", "archive status hourly")
    for words in (*commands, 'sql "select count(*) from hourly"', "up"):
        output.say(f"   {program()} {words}")
    output.say(f"   ls {_files(home, archive).partition('/**')[0]}")
    output.say(f"\nThen create a home of your own: `{program()} init`.")


def program() -> str:
    """Return what starts this program in the user's shell: its name, or where it is installed."""
    own = Path(sys.executable).with_name("tidelog")
    found = shutil.which("tidelog")
    if not own.exists() or (found and Path(found).resolve() == own.resolve()):
        return "tidelog"
    return str(own.relative_to(Path.cwd())) if own.is_relative_to(Path.cwd()) else str(own)


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
