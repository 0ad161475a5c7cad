"""Playback: an hour out of many days, and how fast events come out of a warm local home.

10 million events of 150 bytes over 30 days, a run for each ten minutes, and some late ones. The
same hour is played when 1, 10 and 30 days are there: neither its time nor what is read may grow.
``python -m bench.playback --events N`` does it with fewer.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa

from bench.measure import scratch
from bench.rates import Rate, against, show_rates
from tidelog import Home
from tidelog.connectors.sink import NullSink
from tidelog.home import create_home, open_home
from tidelog.model import layout
from tidelog.model.event import to_iso
from tidelog.model.topic import Run, decode_row
from tidelog.playback.merge import READERS
from tidelog.playback.play import Playback, run_playback
from tidelog.playback.request import PlaybackRequest, pin_asked
from tidelog.settings import load_settings

EVENTS = 10_000_000
DAYS = 30
PARTITIONS = 4
RUN_MS = 600_000
T0 = 1_790_812_800_000  # a midnight
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
PLAYED = T0 + 12 * HOUR_MS  # the hour that is played, on the first day
VALUES = pa.array([os.urandom(50).hex().encode() + b"x" * 50 for _ in range(10_000)], pa.binary())
ROUNDS = 15


def run(events: int = EVENTS) -> list[Rate]:
    """All cases."""
    with scratch() as folder:
        where = f"{folder}/home"
        with create_home(load_settings(where, {}, Path.cwd()))[0] as home:
            home.create_topic("t", PARTITIONS)
        homes: dict[int, str] = {}
        for start, days in ((0, 1), (1, 10), (10, DAYS)):
            fill(where, start, days, events // DAYS)
            homes[days] = f"{folder}/{days}"
            shutil.copytree(where, homes[days], copy_function=linked)
        return [*one_hour(homes), throughput(homes[10])]


def linked(source: str, target: str) -> None:
    """Objects never change; the catalog does."""
    if "/objects/" in source:
        os.link(source, target)
    else:
        shutil.copy2(source, target)


def fill(where: str, first_day: int, end_day: int, per_day: int) -> None:
    """Some days of events; every fiftieth run is followed by late ones, from days before."""
    began = time.perf_counter()
    source = np.random.default_rng(first_day)
    count = 0
    with open_home(where) as home:
        for number, (start_ms, events) in enumerate(runs(first_day, end_day, per_day)):
            times = np.sort(source.integers(start_ms, start_ms + RUN_MS, events))
            home.append("t", table(times, source), partition=number % PARTITIONS)
            count += events
            if number % 50 == 49:
                late_ms = int(source.integers(T0, max(T0 + 1, start_ms - HOUR_MS)))
                late = np.sort(source.integers(late_ms, late_ms + RUN_MS, 100))
                home.append("t", table(late, source), partition=number % PARTITIONS)
                count += 100
    seconds = time.perf_counter() - began
    print(f"{count:,} events of days {first_day} to {end_day} appended in {seconds:.0f} s")


def runs(first_day: int, end_day: int, per_day: int) -> Iterator[tuple[int, int]]:
    each = per_day * RUN_MS // DAY_MS
    for start_ms in range(T0 + first_day * DAY_MS, T0 + end_day * DAY_MS, RUN_MS):
        yield start_ms, each


def table(times: np.ndarray, source: np.random.Generator) -> pa.Table:
    values = VALUES.take(pa.array(source.integers(0, len(VALUES), len(times))))
    return pa.table({"timestamp": times, "value": values})


def one_hour(homes: dict[int, str]) -> list[Rate]:
    """How often a second an hour can be played, and how little is read beside its runs."""
    rates = {days: Rate(f"an hour of {days} days", unit="hours/s") for days in homes}
    reads: dict[int, Rate] = {}
    for number in range(ROUNDS + 1):
        for days, where in homes.items():
            with open_home(where) as home:  # with an empty cache
                seconds, events = play(home, PLAYED, PLAYED + HOUR_MS)
                if number:
                    rates[days].rounds.append(1 / seconds)
                    continue
                read, held = home.meter.verbs["get"].bytes, bytes_of_runs(home)
                reads[days] = more = Rate(f"read beside its runs, of {days} days", unit="% more")
                more.rounds = [(read / held - 1) * 100]
                more.ratio, more.goal, more.peer = held / read, 0.99, "their bytes"
                more.note = f"{read:,} of {held:,} bytes, {events:,} events"
    first = rates[min(rates)]
    for rate in rates.values():
        rate.note = f"{1000 / rate.median:.1f} ms"
        if rate is not first:
            against(rate, first, 0.8)
    return [*rates.values(), *reads.values()]


def bytes_of_runs(home: Home) -> int:
    """What the runs hold that overlap the hour, told by reading all run rows."""
    topic = home.topic("t")
    total = 0
    for partition in range(topic.partitions):
        where = layout.topic_partition(topic.incarnation, partition)
        for row in home.catalog.scan(where, "run/", "run0"):
            run = decode_row(row.value, Run, row.row)
            if run.first_ms < PLAYED + HOUR_MS and run.last_ms >= PLAYED:
                total += run.byte_end - run.byte_start
    return total


def throughput(where: str) -> Rate:
    """A warm home, as fast as it can, into nothing."""
    rate = Rate("playback to null:, warm")
    for number in range(4):
        with open_home(where) as home:
            seconds, events = play(home, T0, T0 + 10 * DAY_MS)
        if number:
            rate.rounds.append(events / seconds)
            rate.note = f"{events:,} events"
    rate.ratio, rate.goal, rate.peer = rate.median / 300_000, 1.0, "300,000 events/s"
    return rate


def play(home: Home, start_ms: int, end_ms: int) -> tuple[float, int]:
    began = time.perf_counter()
    with ThreadPoolExecutor(READERS) as pool:
        asked = PlaybackRequest("t", "null:", to_iso(start_ms), to_iso(end_ms))
        topic, pin = pin_asked(home.context, asked, pool)
        played = run_playback(Playback(home.context, topic, pin, pool), NullSink())
    return time.perf_counter() - began, played.events


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=int, default=EVENTS)
    show_rates("playback", run(parser.parse_args().events))
