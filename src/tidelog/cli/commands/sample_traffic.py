"""``tidelog sample-traffic``: what ``tidelog up --demo`` shows: orders, clicks, and their readers.

Beside the orders of the demo there are clicks, of which a few are no JSON, so that an archive has
dead letters; a pump that gives clicks the key of their user; and two consumers, one that keeps up
and one that falls behind at times.
"""

from __future__ import annotations

import contextlib
import random
import threading

import click
import msgspec

from tidelog.cli.interruption import Interruption
from tidelog.cli.output import Output, json_option
from tidelog.errors import AlreadyExistsError
from tidelog.home import Home, open_home
from tidelog.log.consumer.consumer import Consumer
from tidelog.model.event import Event, to_iso

__all__ = ["DEMO_TOPICS", "prepare", "sample_traffic"]

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
