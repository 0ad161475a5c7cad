"""The consumer function: how it is notified, how far it reads, when it wants another call."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.lambda_endpoint import FUNCTION, LambdaEndpoint, lambda_endpoint
from tests.support.waiting import until
from tidelog import Event, Home, aws
from tidelog.aws import consumer_handler
from tidelog.errors import InvalidError, NotFoundError, UnavailableError
from tidelog.home import World, create_home
from tidelog.settings import load_settings

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "word"}
NOTICE = {"topic": "orders", "partition": 0, "offset": 3}


@pytest.fixture
def endpoint() -> Iterator[LambdaEndpoint]:
    with lambda_endpoint() as found:
        yield found


@pytest.fixture
def world() -> World:
    return World({**KEYS, "TIDELOG_LEASE_TTL_MS": "2000"})


@pytest.fixture
def home(tmp_path: Path, endpoint: LambdaEndpoint, world: World) -> Iterator[Home]:
    settings = load_settings(str(tmp_path / "home"), world.environ, tmp_path)
    with create_home(settings, world=world)[0] as found:
        found.create_topic("orders", 2)
        found.create_topic("calls", notify=[endpoint.target], max_latency_ms=600_000)
        yield found


def append(home: Home, topic: str, count: int) -> None:
    home.append(topic, [Event(b"%d" % n) for n in range(count)], partition=0)


def sns(message: dict[str, Any]) -> dict[str, Any]:
    """As AWS documents what SNS gives to a function."""
    record = {
        "EventVersion": "1.0",
        "EventSubscriptionArn": "arn:aws:sns:us-east-1:123456789012:told:21be56ed",
        "EventSource": "aws:sns",
        "Sns": {
            "SignatureVersion": "1",
            "Timestamp": "2019-01-02T12:45:07.000Z",
            "MessageId": "95df01b4-ee98-5cb9-9903-4c221d41eb5e",
            "Message": json.dumps(message),
            "Type": "Notification",
            "TopicArn": "arn:aws:sns:us-east-1:123456789012:told",
            "Subject": None,
        },
    }
    return {"Records": [record]}


def sqs(*bodies: str) -> dict[str, Any]:
    return {
        "Records": [{"messageId": "1", "eventSource": "aws:sqs", "body": body} for body in bodies]
    }


@pytest.mark.parametrize(
    "event",
    [
        NOTICE,
        sns(NOTICE),
        sqs(json.dumps(NOTICE), json.dumps({**NOTICE, "offset": 4})),
        sqs(json.dumps({"Type": "Notification", "Message": json.dumps(NOTICE)})),
    ],
    ids=["lambda", "sns", "sqs", "sns through sqs"],
)
def test_notification_is_found_in_what_each_service_sends(
    home: Home, world: World, event: dict[str, Any]
) -> None:
    append(home, "orders", 4)
    handled: list[Event] = []
    handle = consumer_handler(handled.append, "billing", home=home.config, world=world)
    assert handle(event, None) == {
        "consumer": "billing",
        "partitions": [
            {
                "topic": "orders",
                "partition": 0,
                "events_read": 4,
                "done": True,
                "busy": False,
                "notified_again": False,
            }
        ],
    }
    assert [event.value for event in handled] == [b"0", b"1", b"2", b"3"]
    assert handle(event, None)["partitions"][0]["events_read"] == 0  # the cursor has moved


@pytest.mark.parametrize(
    "event",
    [{}, {"Records": [{"kinesis": {}}]}, {"Records": ["x"]}, sns({"topic": "orders"}), sqs("x")],
)
def test_call_for_another_reason_is_refused(
    home: Home, world: World, event: dict[str, Any]
) -> None:
    handle = consumer_handler(print, "billing", home=home.config, world=world)
    with pytest.raises(InvalidError, match="consumer function"):
        handle(event, None)
    with pytest.raises(NotFoundError):
        handle({**NOTICE, "topic": "gone"}, None)


def test_call_that_has_not_caught_up_notifies_again(
    home: Home, world: World, endpoint: LambdaEndpoint
) -> None:
    append(home, "calls", 25)
    until(lambda: endpoint.requests)
    told = {"topic": "calls", "partition": 0, "offset": 24}
    assert endpoint.requests[0] == (
        f"/2015-03-31/functions/{FUNCTION}/invocations",
        "Event",
        told,
    )
    handled: list[Event] = []
    handle = consumer_handler(handled.append, "c", max_events=10, home=home.config, world=world)
    seen = []
    for _ in range(3):
        [done] = handle(endpoint.requests[-1][2], None)["partitions"]
        seen.append((done["events_read"], done["done"], done["notified_again"]))
    assert seen == [(10, False, True), (10, False, True), (5, True, False)]
    assert [each[2] for each in endpoint.requests] == [told] * 3
    assert len(handled) == 25


class CallTime:
    """The context of a call, whose time passes as its handler says."""

    def __init__(self, left_ms: int) -> None:
        self.left_ms = left_ms

    def get_remaining_time_in_millis(self) -> int:
        return self.left_ms


@pytest.mark.parametrize(
    ("left_ms", "handled"), [(60_000, 51), (9_000, 5), (900, 1)], ids=["long", "short", "over"]
)
def test_call_with_a_slow_handler_stops_before_its_time_ends(
    home: Home, world: World, endpoint: LambdaEndpoint, left_ms: int, handled: int
) -> None:
    time = CallTime(left_ms)

    def slow(event: Event) -> None:
        time.left_ms -= 1_000

    append(home, "calls", 60)
    handle = consumer_handler(slow, "c", home=home.config, world=world)
    [done] = handle({**NOTICE, "topic": "calls"}, time)["partitions"]
    assert (done["events_read"], done["notified_again"]) == (handled, True)


def test_call_without_time_for_a_second_partition_leaves_it_to_another(
    home: Home, world: World, endpoint: LambdaEndpoint
) -> None:
    home.create_topic("two", 2, notify=[endpoint.target], max_latency_ms=600_000)
    for partition in range(2):
        home.append("two", [Event(b"1")], partition=partition)
    time = CallTime(60_000)

    def slow(event: Event) -> None:
        time.left_ms = 1_000

    notices = [{"topic": "two", "partition": partition, "offset": 0} for partition in range(2)]
    handle = consumer_handler(slow, "c", home=home.config, world=world)
    found = handle(sqs(*map(json.dumps, notices)), time)["partitions"]
    assert [(each["events_read"], each["notified_again"]) for each in found] == [
        (1, False),
        (0, True),
    ]


@pytest.mark.parametrize(
    ("poison", "error"),
    [
        (json.dumps({**NOTICE, "topic": "gone"}), NotFoundError),
        (json.dumps({**NOTICE, "partition": 1}), ZeroDivisionError),
        ("not a notification", InvalidError),
    ],
    ids=["deleted topic", "failing handler", "other message"],
)
def test_message_that_fails_does_not_stop_the_others_of_its_batch(
    home: Home, world: World, poison: str, error: type[Exception]
) -> None:
    append(home, "orders", 4)
    home.append("orders", [Event(b"0")], partition=1)
    handled: list[int | None] = []

    def show(event: Event) -> None:
        if event.partition == 1:
            raise ZeroDivisionError
        handled.append(event.offset)

    handle = consumer_handler(show, "billing", home=home.config, world=world)
    with pytest.raises(error):  # the queue gives the batch again
        handle(sqs(poison, json.dumps(NOTICE)), None)
    assert handled == [0, 1, 2, 3]


def test_failed_event_comes_again_and_those_before_it_do_not(home: Home, world: World) -> None:
    append(home, "orders", 4)
    handled: list[bytes | None] = []
    broken = [True]

    def show(event: Event) -> None:
        if event.value == b"2" and broken:
            raise RuntimeError(broken.pop())
        handled.append(event.value)

    handle = consumer_handler(show, "billing", home=home.config, world=world)
    with pytest.raises(RuntimeError):
        handle(NOTICE, None)
    assert handle(NOTICE, None)["partitions"][0]["done"]
    assert handled == [b"0", b"1", b"2", b"3"]


def test_call_beside_a_living_reader_leaves_the_rest_to_it(
    home: Home, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(home, "orders", 4)
    looked, results, handled = threading.Event(), [], []
    read_lease = aws.read_lease

    def look(*given: Any) -> Any:
        found = read_lease(*given)
        looked.set()
        return found

    monkeypatch.setattr(aws, "read_lease", look)
    other = consumer_handler(handled.append, "billing", home=home.config, world=world)
    second = threading.Thread(target=lambda: results.append(other(NOTICE, None)))

    def show(event: Event) -> None:
        if event.offset == 1:
            second.start()
            assert looked.wait(60)
        if event.offset == 2:  # the cursor has moved since the other one's first look
            second.join(60)
        handled.append(event)

    handle = consumer_handler(show, "billing", home=home.config, world=world)
    assert handle(NOTICE, None)["partitions"][0]["events_read"] == 4
    assert [event.offset for event in handled] == [0, 1, 2, 3]
    [[left]] = [each["partitions"] for each in results]
    assert (left["events_read"], left["busy"], left["notified_again"]) == (0, True, False)


def test_call_takes_over_from_a_reader_that_shows_nothing(home: Home, world: World) -> None:
    """It waits for 1.5 times the time to live; one that lives on with a heartbeat is an error."""
    append(home, "orders", 4)
    dead = home.consumer("orders", "billing")
    dead._leases._context.processes.is_dead = lambda _: False  # type: ignore[method-assign]
    assert dead._leases.acquire_once(0)
    handled: list[Event] = []
    handle = consumer_handler(handled.append, "billing", home=home.config, world=world)
    assert handle(NOTICE, None)["partitions"][0]["done"]
    assert len(handled) == 4
    with home.consumer("orders", "billing") as member:
        until(lambda: 0 in member.partitions() or member.poll(timeout_s=0.1))
        with pytest.raises(UnavailableError, match="another reader"):
            handle(NOTICE, None)


def test_limits_are_checked_at_once() -> None:
    with pytest.raises(InvalidError, match="max_events"):
        consumer_handler(print, "billing", max_events=0)


def test_notify_needs_targets_and_a_partition_that_exists(
    home: Home, endpoint: LambdaEndpoint
) -> None:
    assert home.notify("calls", 0) is None
    append(home, "calls", 3)
    until(lambda: endpoint.requests)
    assert home.notify("calls", 0) == 2
    with pytest.raises(InvalidError, match="no targets"):
        home.notify("orders", 0)
    with pytest.raises(InvalidError, match="no partition 1"):
        home.notify("calls", 1)
    endpoint.statuses = [429]
    with pytest.raises(UnavailableError, match="try again"):
        home.notify("calls", 0)
    endpoint.statuses = [404]
    with pytest.raises(InvalidError, match="fix the topic's target"):
        home.notify("calls", 0)
