"""Tidelog in asyncio: awaited sends, consumers that are iterated, polls that are cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.support.waiting import until
from tidelog import Event, Home, aio, create_home
from tidelog.errors import InvalidError
from tidelog.settings import Settings


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"))
    with create_home(settings)[0] as home:
        home.create_topic("orders", partitions=2)
        yield home


def test_send_future_is_awaited(home: Home) -> None:
    async def send() -> list[int]:
        with home.producer("orders") as producer:
            futures = [producer.send(b"%d" % number, key=b"k") for number in range(3)]
            positions = [await future for future in futures]
            assert (await futures[0]) == positions[0], "it may be awaited again"
            return [position.offset for position in positions]

    assert asyncio.run(send()) == [0, 1, 2]


def test_asyncio_wraps_the_future_of_a_send(home: Home) -> None:
    async def send() -> list[int]:
        with home.producer("orders") as producer:
            sent = [producer.send(b"%d" % number, key=b"k") for number in range(3)]
            wrapped = [asyncio.wrap_future(sent[0]), asyncio.wrap_future(sent[1].as_future())]
            return [(await each).offset for each in [*wrapped, sent[2]]]

    assert asyncio.run(send()) == [0, 1, 2]


def test_future_of_a_send_has_the_methods_of_a_standard_future(
    home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[object] = []
    with home.producer("orders") as producer:
        future = producer.send(b"1")
        future.add_done_callback(lambda _: 1 / 0)
        future.add_done_callback(done.append)
        assert not future.cancel()
        assert future.exception(10) is None
        assert future.done()
        assert not future.running()
        assert not future.cancelled()
    assert done == [future]
    assert "a callback of a future failed" in caplog.text


def test_future_shows_the_position_of_its_event(home: Home) -> None:
    with home.producer("orders") as producer:
        future = producer.send(b"1", key=b"k")
        position = future.result()
        assert repr(future) == f"<SendFuture {position}>"


def test_tail_yields_json_that_is_sent_later(home: Home) -> None:
    async def work() -> list[object]:
        home.append("orders", [Event(b'{"n": 0}')])
        events = aio.tail(home, "orders", wait_s=0.01)
        waiting = asyncio.create_task(anext(events))
        async with aio.producer(home, "orders") as producer:
            while not waiting.done():  # the tail may begin after the first ones
                await producer.send_json({"n": 1}, key=b"k")
        await events.aclose()
        return [waiting.result().json()]

    assert asyncio.run(work()) == [{"n": 1}]


def test_awaited_send_that_fails_raises(home: Home) -> None:
    async def send() -> None:
        async with aio.producer(home, "orders") as producer:
            with pytest.raises(InvalidError):
                await producer.send("text")  # type: ignore[arg-type]

    asyncio.run(send())


def test_events_go_through_a_producer_and_a_consumer(home: Home) -> None:
    async def work() -> list[bytes | None]:
        async with aio.producer(home, "orders") as producer:
            sends = (producer.send(b"%d" % n, id=f"o-{n}", timestamp=n) for n in range(20))
            await asyncio.gather(*sends)
            await producer.flush()
        found: list[bytes | None] = []
        async with aio.consumer(home, "orders", name="billing") as consumer:
            async for event in consumer:
                assert event.timestamp == int(event.value or b"")
                found.append(event.value)
                if len(found) == 20:
                    break
        return found

    assert sorted(asyncio.run(work())) == sorted(b"%d" % n for n in range(20))  # type: ignore[type-var]


def test_events_of_a_cancelled_poll_come_with_the_next_one(home: Home) -> None:
    async def work() -> list[Event]:
        async with aio.consumer(home, "orders", name="billing") as consumer:
            polling = asyncio.ensure_future(consumer.poll(timeout_s=60))
            await asyncio.sleep(0.05)
            polling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await polling
            with pytest.raises(InvalidError, match="poll again"):
                await consumer.commit()
            await asyncio.to_thread(home.append, "orders", [Event(b"late")])
            events = await consumer.poll()
            await consumer.commit()
            return events

    assert [event.value for event in asyncio.run(work())] == [b"late"]
    assert sum(lag.events for lag in home.lag("orders")) == 0


def test_close_does_not_wait_for_a_cancelled_poll(home: Home) -> None:
    async def work() -> None:
        async with aio.consumer(home, "orders", name="billing") as consumer:
            await consumer.poll(timeout_s=0.01)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(consumer.poll(timeout_s=3_600), 0.05)

    asyncio.run(asyncio.wait_for(work(), 60))


def test_close_ends_the_poll_of_another_task(home: Home) -> None:
    async def work() -> None:
        consumer = aio.consumer(home, "orders", name="billing")
        polling = asyncio.ensure_future(consumer.poll(timeout_s=3_600))
        await asyncio.sleep(0.05)
        await consumer.close()
        assert await polling == []
        with pytest.raises(InvalidError, match="is closed: open another"):
            await consumer.poll()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_closed_ones_are_closed_again_and_refuse_calls(home: Home) -> None:
    async def work() -> None:
        async with (
            aio.producer(home, "orders") as producer,
            aio.consumer(home, "orders", name="billing") as consumer,
        ):
            await producer.close()
            await consumer.close()
            for call in (producer.send(b"late"), consumer.poll(), consumer.commit()):
                with pytest.raises(InvalidError, match="is closed: open another"):
                    await call

    asyncio.run(work())


def test_commit_beside_the_poll_of_another_task_says_so(home: Home) -> None:
    async def work() -> None:
        async with aio.consumer(home, "orders", name="billing") as consumer:
            polling = asyncio.ensure_future(consumer.poll(timeout_s=0.5))
            await asyncio.sleep(0.05)
            with pytest.raises(InvalidError, match="another task polls"):
                await consumer.commit()
            await polling
            await consumer.commit()

    asyncio.run(work())


def test_two_tasks_that_poll_get_different_events(home: Home) -> None:
    home.append("orders", [Event(b"%d" % n) for n in range(40)], partition=0)

    async def work() -> list[Event]:
        async with aio.consumer(home, "orders", name="billing") as consumer:
            one, other = await asyncio.gather(consumer.poll(10), consumer.poll(10))
            return [*one, *other]

    assert [event.offset for event in asyncio.run(work())] == list(range(20))


def test_rest_of_a_batch_comes_again_after_a_break(home: Home) -> None:
    home.append("orders", [Event(b"%d" % n) for n in range(40)], partition=0)

    async def work() -> list[int | None]:
        found: list[int | None] = []
        async with aio.consumer(home, "orders", name="billing") as consumer:
            for stop in (3, 40):
                async for event in consumer:
                    found.append(event.offset)
                    if len(found) == stop:
                        break
                await consumer.commit()
                assert home.lag("orders")[0].cursor == stop
        return found

    assert asyncio.run(work()) == list(range(40))


def test_playback_is_iterated(home: Home) -> None:
    home.append("orders", [Event(b"%d" % n, timestamp=1_700_000_000_000 + n) for n in range(1_200)])

    async def play() -> list[bytes | None]:
        found = aio.playback(home, "orders", "2023-11-01", "2023-12-01")
        return [event.value async for event in found]

    assert asyncio.run(play()) == [b"%d" % n for n in range(1_200)]


def test_loop_runs_on_while_a_consumer_waits(home: Home) -> None:
    async def work() -> int:
        ticks = 0
        async with aio.consumer(home, "orders", name="billing") as consumer:
            polling = asyncio.ensure_future(consumer.poll(timeout_s=0.3))
            while not polling.done():
                ticks += 1
                await asyncio.sleep(0.01)
        return ticks

    assert asyncio.run(work()) >= 3


def test_json_goes_in_and_comes_out(home: Home) -> None:
    moment = datetime(2026, 11, 17, 12, tzinfo=UTC)
    with home.producer("orders") as producer:
        producer.send_json({"amount": 12}, key=b"k", id="o-1", timestamp=moment, type="paid")
        producer.send(b"plain", id="o-2", timestamp=moment)
        with pytest.raises(InvalidError, match="cannot be encoded as JSON"):
            producer.send_json(object())
        producer.flush()
    until(lambda: home.get("orders", "o-1") is not None)
    sent = home.get("orders", "o-1")
    assert (sent.json(), sent.time, sent.type) == ({"amount": 12}, moment, "paid")
    plain = home.get("orders", "o-2")
    assert plain.time == moment
    with pytest.raises(InvalidError, match=f"event `{plain.position}`: its value is not"):
        plain.json()
