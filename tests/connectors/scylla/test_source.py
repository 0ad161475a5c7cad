"""Scylla's change log as a source, played on Cassandra."""

from __future__ import annotations

import logging
import pickle
import uuid
from collections import defaultdict
from decimal import Decimal

import cassandra
import pytest
from cassandra.cluster import NoHostAvailable

from tests.servers.base import free_port
from tests.servers.cassandra import Cassandra
from tests.servers.scylla_play import Play, Row, Shape, moment
from tests.support.scylla_reads import (
    HOUR_MS,
    START_MS,
    a_play,
    at,
    identity,
    opened,
    order_ticks,
    read_all,
    value,
)
from tidelog.clock import SystemClock
from tidelog.connectors.by_url import open_source
from tidelog.connectors.scylla import reader as reading
from tidelog.connectors.scylla.session import ScyllaSession, format_scylla, parse_scylla
from tidelog.connectors.scylla.streams import ChangePosition, group_of, is_before
from tidelog.connectors.source import SourcePartition, SourceRange
from tidelog.errors import InvalidError, NotFoundError, TidelogError, UnavailableError
from tidelog.model.address import parse_address

SHAPES: tuple[Shape, ...] = ("one table", "two tables", "tablets")
SECOND = 1_000

pytestmark = pytest.mark.usefixtures("no_session_outlives_its_server")


def fill(play: Play, count: int, start_ms: int = START_MS, step_ms: int = SECOND) -> None:
    for number in range(count):
        row = Row("insert", f"r{number % 7}", number, {"state": "new"})
        play.write(start_ms + number * step_ms, row)


@pytest.mark.server
@pytest.mark.parametrize("shape", SHAPES)
def test_every_change_of_three_generations_comes_once_and_in_order(
    cassandra_server: Cassandra, shape: Shape
) -> None:
    with a_play(cassandra_server, shape) as play:
        play.begin_generation(START_MS + 60_500)
        play.begin_generation(START_MS + 120_000, streams=30)
        play.begin_generation(START_MS + HOUR_MS)  # told before it begins
        fill(play, 200)
        events = read_all(opened(play.url(), at(10)))
        assert {identity(event): event.type for event in events} == play.expected()
        assert len(events) == 200
        by_stream = defaultdict(list)
        for event in events:
            by_stream[identity(event)[0]].append(order_ticks(event))
        assert all(found == sorted(found) for found in by_stream.values())
        assert len(by_stream) > 10


@pytest.mark.server
def test_a_window_ends_before_the_lag_and_a_later_read_goes_on_there(play: Play) -> None:
    fill(play, 60)
    clock = at(1)
    source = opened(play.url(), clock)
    partitions = source.partitions()
    first = source.bounds(partitions)
    events, reached = [], {}
    for partition, bounds in first.items():
        for chunk in source.read(SourceRange(partition, bounds.first, bounds.end)):
            events += chunk.batch.column("id").to_pylist()
            reached[partition.name] = chunk.position
    assert len(events) == 30  # of a minute, all but the last 30 s
    clock.advance(120)
    later = read_all(source, reached)
    assert len(later) == 30
    assert not {event.id for event in later} & set(events)


@pytest.mark.server
def test_windows_that_are_too_full_are_read_in_narrower_ones(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_WINDOW_ROWS", 10)
    monkeypatch.setattr(reading, "_CHUNK_EVENTS", 16)
    fill(play, 60, step_ms=250)
    for number in range(30):  # more in one millisecond than fit, which cannot be narrowed
        play.write(START_MS + 30_000, Row("insert", "one", number, {"state": "x"}))
    source = opened(play.url(groups=1), at(5))
    (partition,) = source.partitions()
    bounds = source.bounds([partition])[partition]
    chunks = list(source.read(SourceRange(partition, bounds.first, bounds.end, ordinal=100)))
    assert len(chunks) > 3
    offsets = [n for chunk in chunks for n in chunk.batch.column("offset").to_pylist()]
    assert offsets == list(range(100, 190))
    for done, chunk in enumerate(chunks[:-1], 1):  # reading goes on behind each of them
        rest = source.read(SourceRange(partition, chunk.position, bounds.end))
        left = sum(each.batch.num_rows for each in rest)
        assert left == 90 - sum(each.batch.num_rows for each in chunks[:done])


@pytest.mark.server
def test_a_range_ends_after_as_many_events_as_were_asked_for(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_WINDOW_ROWS", 40)
    fill(play, 200, step_ms=100)
    source = opened(play.url(groups=1), at(5))
    (partition,) = source.partitions()
    bounds = source.bounds([partition])[partition]
    start, counts = bounds.first, []
    while source.before(start, bounds.end):
        limit = source.cut(start, bounds.end, 50)
        *_, last = chunks = list(source.read(SourceRange(partition, start, limit)))
        counts.append(sum(chunk.batch.num_rows for chunk in chunks))
        start = last.position
    assert sum(counts) == 200
    assert len(counts) > 2
    assert max(counts) < 100


@pytest.mark.server
def test_silence_is_one_window_and_moves_no_position_for_a_while(play: Play) -> None:
    source = opened(play.url(), at(5))
    (partition, *_) = source.partitions()
    bounds = source.bounds([partition])[partition]
    quiet = SourceRange(partition, bounds.first, bounds.end)
    (chunk,) = source.read(quiet)
    assert (chunk.batch.num_rows, chunk.position) == (0, bounds.first)
    assert not source.waits(quiet)
    clock = at(60)
    later = opened(play.url(), clock)
    end = later.bounds([partition])[partition].end
    assert later.waits(SourceRange(partition, bounds.first, end))
    (chunk,) = later.read(SourceRange(partition, bounds.first, end))
    assert not later.before(chunk.position, end)
    fill(play, 20)
    assert any(source.waits(SourceRange(p, bounds.first, bounds.end)) for p in source.partitions())


@pytest.mark.server
def test_a_group_that_stays_quiet_has_an_end_that_asks_for_nothing(play: Play) -> None:
    clock = at(2)
    source = opened(play.url(groups=1), clock)
    (partition,) = source.partitions()
    bounds = source.bounds([partition])[partition]
    for _ in range(2):  # whoever reads it twice from one place has found nothing there
        list(source.read(SourceRange(partition, bounds.first, bounds.end)))
    clock.advance(60)
    quiet = source.bounds([partition])[partition].end
    assert not source.before(bounds.first, quiet)
    play.write(START_MS + 100_000, Row("insert", "r", 1, {"state": "x"}))
    end = source.bounds([partition])[partition].end
    assert source.before(bounds.first, end)
    (chunk,) = source.read(SourceRange(partition, bounds.first, end))
    assert chunk.batch.num_rows == 1


@pytest.mark.server
def test_a_generation_that_is_told_too_late_loses_nothing(play: Play) -> None:
    fill(play, 60)
    clock = at(2)
    source = opened(play.url(), clock)
    reached = {}
    for partition, bounds in source.bounds(source.partitions()).items():
        *_, last = source.read(SourceRange(partition, bounds.first, bounds.end))
        reached[partition.name] = ChangePosition(START_MS, START_MS + 90_000).text
        assert not source.before(last.position, bounds.first)
    play.begin_generation(START_MS + 61_000)
    fill(play, 20, START_MS + 62_000)
    clock.advance(60)
    assert len(read_all(source, reached)) == 20


KINDS = [
    Row("insert", "r", 1, {"state": "new", "total": Decimal("1.50"), "seen": moment(5)}, ttl=60),
    Row("update", "r", 1, {"tags": {"a", "b"}}, removed={"tags": {"c"}}),
    Row("update", "r", 1, {"tags": {"z"}}, deleted=["tags"]),
    Row("update", "r", 1, deleted=["tags", "state", "marks"]),
    Row("update", "r", 1, {"words": {uuid.UUID(int=5, version=1): "w"}}),
    Row("update", "r", 1, {"words": {uuid.UUID(int=5, version=1): "w"}}, deleted=["words"]),
    Row("update", "r", 1, {"marks": {"m": 1}}, removed={"marks": {"n"}}),
    Row("update", "r", 1, {"home": ("street", None)}, removed={"home": {1}}),
    Row("update", "r", 1, {"kept": ("street", None)}),
    Row("update", "r", None, {"note": "static"}),
    Row("row_delete", "r", 1),
    Row("partition_delete", "r"),
    Row("range_delete_start_inclusive", "r", 1),
    Row("range_delete_end_exclusive", "r", 9),
    Row("range_delete_start_exclusive", "r", 1),
    Row("range_delete_end_inclusive", "r", 9),
]
TOLD = [
    {
        "columns": {
            "seen": {"type": "timestamp", "value": "1970-01-01T00:00:00.005Z"},
            "state": {"type": "text", "value": "new"},
            "total": {"type": "decimal", "value": "1.50"},
        },
        "ttl": 60,
    },
    {"columns": {"tags": {"type": "set<text>", "added": ["a", "b"], "removed": ["c"]}}},
    {"columns": {"tags": {"type": "set<text>", "value": ["z"]}}},
    {
        "columns": {
            "marks": {"type": "map<text, int>", "deleted": True},
            "state": {"type": "text", "deleted": True},
            "tags": {"type": "set<text>", "deleted": True},
        }
    },
    {
        "columns": {
            "words": {
                "type": "list<text>",
                "added": {"00000000-0000-1000-8000-000000000005": "w"},
            }
        }
    },
    {"columns": {"words": {"type": "list<text>", "value": ["w"]}}},
    {"columns": {"marks": {"type": "map<text, int>", "added": {"m": 1}, "removed": ["n"]}}},
    {"columns": {"home": {"type": "address", "added": {"street": "street"}, "removed": ["no"]}}},
    {
        "columns": {
            "kept": {"type": "frozen<address>", "value": {"street": "street", "no": None}},
        }
    },
    {"columns": {"note": {"type": "text", "value": "static"}}},
    *[{"columns": {}}] * 6,
]


@pytest.mark.server
def test_changes_of_every_kind_are_told_apart(play: Play) -> None:
    for number, row in enumerate(KINDS):
        play.write(START_MS + number * SECOND, row)
    events = sorted(read_all(opened(play.url(groups=1), at(5))), key=order_ticks)
    assert [value(event) for event in events] == TOLD
    assert [event.type for event in events] == [row.operation for row in KINDS]
    assert events[0].key == b'{"region":"r","id":1}'
    assert events[9].key == events[11].key == b'{"region":"r"}'
    assert events[13].key == b'{"region":"r","id":9}'
    first = play.written[0]
    assert events[0].timestamp == START_MS
    assert events[0].id == (
        '{"cursor_gen":"2026-11-13T20:00:00Z","cursor_time":"2026-11-13T20:00:00Z",'
        f'"stream_id":"{first.stream.hex()}","stream_time":"{first.time}","stream_seq":0}}'
    )


@pytest.mark.server
def test_images_are_joined_to_their_change_and_a_batch_is_one_unit(play: Play) -> None:
    play.write(
        START_MS,
        Row("pre_image", "r", 1, {"state": "old"}),
        Row("pre_image", "r", 2, {"state": "gone"}),
        Row("update", "r", 1, {"state": "mid"}),
        Row("update", "r", 1, {"total": Decimal(1)}, ttl=9),
        Row("insert", "r", 3, {"state": "three"}),
        Row("post_image", "r", 1, {"state": "mid", "total": Decimal(1)}),
    )
    events = read_all(opened(play.url(), at(5)))
    assert [(event.type, identity(event)[2]) for event in events] == [
        ("pre_image", 1),  # of a row that no change names
        ("update", 2),
        ("update", 3),
        ("insert", 4),
    ]
    orphan, first, second, third = map(value, events)
    assert orphan["columns"] == {"state": {"type": "text", "value": "gone"}}
    assert first["before"] == {"state": {"type": "text", "value": "old"}}
    assert "after" not in first
    assert second["after"]["total"] == {"type": "decimal", "value": "1"}
    assert (second["ttl"], third["batch"]) == (9, {"number": 3, "of": 4, "whole": True})


@pytest.mark.server
def test_a_batch_whose_end_has_not_landed_is_not_torn_by_the_fast_reader(play: Play) -> None:
    rows = [Row("insert", "r", number, {"state": "x"}) for number in range(3)]
    torn = play.write(START_MS, *rows, torn=2)
    clock = at(5)
    assert read_all(opened(play.url(mode="fast"), clock)) == []
    found = read_all(opened(play.url(), clock))
    assert [value(event)["batch"]["whole"] for event in found] == [False, False]
    play.land(torn, 2, 3)
    assert len(read_all(opened(play.url(mode="fast"), clock))) == 3


@pytest.mark.server
def test_a_changed_schema_is_noticed_and_read_again(play: Play) -> None:
    fill(play, 5)
    source = opened(play.url(), at(5))
    assert len(read_all(source)) == 5
    for statement in (
        "ALTER TABLE orders ADD extra int",
        "ALTER TABLE orders_scylla_cdc_log ADD extra int",
        'ALTER TABLE orders_scylla_cdc_log ADD "cdc$deleted_extra" boolean',
        "ALTER TYPE address ADD town text",
    ):
        play.session.execute(statement)
    play.write(START_MS + 90_000, Row("insert", "r", 1, {"extra": 5, "kept": ("s", 1, "t")}))
    columns = [value(event)["columns"] for event in read_all(source) if event.timestamp]
    assert {"type": "int", "value": 5} in [each.get("extra") for each in columns]
    kept = next(each["kept"]["value"] for each in columns if "kept" in each)
    assert kept == {"street": "s", "no": 1, "town": "t"}
    for statement in (
        "ALTER TABLE orders DROP extra",
        "ALTER TABLE orders_scylla_cdc_log DROP extra",
        'ALTER TABLE orders_scylla_cdc_log DROP "cdc$deleted_extra"',
    ):
        play.session.execute(statement)
    assert len(read_all(source)) == 6


@pytest.mark.server
def test_types_and_keys_by_columns_and_by_lookup(play: Play) -> None:
    play.write(START_MS, Row("insert", "r", 1, {"state": "shipped", "note": "n-1"}))
    play.write(START_MS + 1, Row("update", "r", 1, {"total": Decimal(2)}))
    play.write(
        START_MS + 2,
        Row("pre_image", "r", 1, {"state": "packed"}),
        Row("update", "r", 1, {"total": Decimal(3)}),
    )
    play.write(START_MS + 3, Row("row_delete", "r", 2))
    play.session.execute("INSERT INTO orders (region, id, note) VALUES ('r', 1, 'looked up')")
    named = opened(play.url(groups=1, type_column="state", key_column="id"), at(5))
    found = sorted(read_all(named), key=order_ticks)
    assert [event.type for event in found] == ["shipped", "update", "packed", "row_delete"]
    assert [event.key for event in found] == [b"1", b"1", b"1", b"2"]
    looked = opened(play.url(groups=1, key_lookup="note"), at(5))
    keys = [event.key for event in sorted(read_all(looked), key=order_ticks)]
    assert keys == [b"n-1", b"looked up", b"looked up", b'{"region":"r","id":2}']


@pytest.mark.server
def test_reading_begins_at_a_time_or_at_the_first_change(play: Play) -> None:
    fill(play, 30, START_MS + 20 * 60_000)
    clock = at(60)
    begins = {
        option: ChangePosition.parse(
            next(iter(source.bounds(source.partitions()).values())).first
        ).time_ms
        for option in ("oldest", "first", "-10m", "2026-11-13T20:20:10Z")
        for source in [opened(play.url(start=option), clock)]
    }
    assert begins == {
        "oldest": START_MS,
        "first": START_MS + 20 * 60_000,
        "-10m": START_MS + 50 * 60_000,
        "2026-11-13T20:20:10Z": START_MS + 20 * 60_000 + 10_000,
    }
    later = opened(play.url(start="2026-11-13T20:20:10Z"), clock)
    assert len(read_all(later)) == 20


@pytest.mark.server
def test_what_is_older_than_the_time_to_live_is_lost_and_not_empty(
    cassandra_server: Cassandra,
) -> None:
    with a_play(cassandra_server, ttl_s=3_600) as play:
        source = opened(play.url(), at(120))
        (partition, *_) = source.partitions()
        bounds = source.bounds([partition])[partition]
        old = ChangePosition(START_MS, START_MS + 30 * 60_000).text
        assert source.before(old, bounds.first)
        assert not source.before(
            ChangePosition(START_MS, START_MS + 65 * 60_000).text, bounds.first
        )
        with pytest.raises(NotFoundError, match="time to live of 3600 s"):
            list(source.read(SourceRange(partition, old, bounds.end)))


@pytest.mark.server
def test_a_source_pickles_with_its_plan_and_without_its_password(play: Play) -> None:
    fill(play, 10)
    environ = {"TIDELOG_SCYLLA_USERNAME": "u", "TIDELOG_SCYLLA_PASSWORD": "hidden-word"}
    source = opened(play.url(groups=1), at(5), environ)
    assert "hidden-word" not in repr(source)
    assert b"hidden-word" not in pickle.dumps(source)
    (partition,) = source.partitions()
    bounds = source.bounds([partition])[partition]
    reader = pickle.loads(
        pickle.dumps(source.reader(SourceRange(partition, bounds.first, bounds.end)))
    )
    with pytest.raises(NotFoundError, match="time to live"):  # by a clock of the present
        list(reader.read())


@pytest.mark.server
def test_a_table_without_a_log_and_one_that_was_dropped(play: Play) -> None:
    fill(play, 20)
    source = opened(play.url(), at(5))
    (partition, *_) = source.partitions()
    bounds = source.bounds([partition])[partition]
    play.session.execute("CREATE TABLE plain (k int PRIMARY KEY)")
    bare = play.url().replace(".orders", ".plain")
    with pytest.raises(NotFoundError, match="has no change log: run ALTER TABLE"):
        opened(bare, SystemClock()).partitions()
    play.session.execute("DROP TABLE orders_scylla_cdc_log")
    with pytest.raises(NotFoundError):
        list(source.read(SourceRange(partition, bounds.first, bounds.end)))
    play.session.execute("DROP TABLE orders")
    with pytest.raises(NotFoundError, match="is not there"):
        source.partitions()


@pytest.mark.server
def test_positions_of_another_cluster_and_of_no_log_are_refused(play: Play) -> None:
    source = opened(play.url(), at(5))
    (partition, *_) = source.partitions()
    end = source.bounds([partition])[partition].end
    foreign = ChangePosition(START_MS - 77, START_MS + 1_000).text
    with pytest.raises(NotFoundError, match="another cluster"):
        source.reader(SourceRange(partition, foreign, end))
    with pytest.raises(InvalidError, match="none of a change log"):
        source.reader(SourceRange(partition, "17", end))
    with pytest.raises(InvalidError, match="runs backwards"):
        source.reader(
            SourceRange(partition, ChangePosition(START_MS, START_MS + HOUR_MS).text, end)
        )
    with pytest.raises(NotFoundError, match="in 4 groups"):
        source.bounds([SourcePartition(partition.topic, "4")])


@pytest.mark.server
def test_a_cluster_that_tells_no_generations_is_refused(cassandra_server: Cassandra) -> None:
    play = Play(cassandra_server)
    with pytest.raises(NotFoundError, match="lists no generations"):
        opened(play.url(), at(5)).partitions()
    own = play.url().replace(f"generations={play.keyspace}&", "")
    with pytest.raises(NotFoundError, match="is it Scylla"):
        opened(own, at(5)).partitions()
    play.close()


@pytest.mark.server
def test_unknown_columns_and_datacenters_are_refused(play: Play) -> None:
    fill(play, 1)
    with pytest.raises(InvalidError, match="no such column"):
        read_all(opened(play.url(key_column="nope"), at(5)))
    with pytest.raises(InvalidError, match="no datacenter `mars`: give one of datacenter1"):
        opened(play.url(datacenter="mars"), at(5)).partitions()


BAD = {
    "a lag of zero": ("ks.t?lag=0s", "lag is 0"),
    "a lag that is none": ("ks.t?lag=soon", "give a number and a unit"),
    "a last lag without a sweep": ("ks.t?lag=last", "is for a sweep"),
    "a sweep of nothing": ("ks.t?mode=sweep", "belong together"),
    "a sweep that is none": ("ks.t?of=fast", "belong together"),
    "an unknown mode": ("ks.t?mode=faster", "give safe, fast or sweep"),
    "an unknown option": ("ks.t?lagg=1s", "did you mean `lag`"),
    "no groups": ("ks.t?groups=0", "from 1 to 4096"),
    "too many groups": ("ks.t?groups=5000", "from 1 to 4096"),
    "a level that is none": ("ks.t?consistency=most", "quorum"),
    "no table": ("ks", "is not a valid table name"),
    "no keyspace": (".t", "is not a valid keyspace name"),
    "a hostile table": ('ks.t"; DROP TABLE x', "is not a valid table name"),
    "a hostile column": ('ks.t?key_column=a"b', "letters, digits and underscores"),
    "two keys": ("ks.t?key_column=a&key_lookup=b", "contradict"),
    "the log itself": ("ks.t_scylla_cdc_log", "the table that it belongs to"),
    "a password": ("ks.t?password=x", "looks like a secret"),
    "no window": ("ks.t?window=0s", "window is 0"),
    "half an id": ('ks.t?start={"cursor_gen":"2026-11-13T20:00:00Z"}', "give the whole id"),
    "a time that is none": ("ks.t?start=yesterday", "yesterday"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_addresses_are_refused_before_anything_is_sent(case: str) -> None:
    path, message = BAD[case]
    with pytest.raises(TidelogError, match=message):
        open_source(f"scylla://127.0.0.1:9/{path}", environ={})


def test_half_a_login_and_a_sweep_without_a_home_are_refused() -> None:
    with pytest.raises(InvalidError, match="set both or none"):
        open_source("scylla://h/ks.t", environ={"TIDELOG_SCYLLA_USERNAME": "u"})
    with pytest.raises(InvalidError, match="name the home"):
        open_source("scylla://h/ks.t?mode=sweep&of=fast", environ={})


def test_a_server_that_is_not_there_is_unavailable() -> None:
    source = open_source(f"scylla://127.0.0.1:{free_port()}/ks.t", environ={})
    with pytest.raises(UnavailableError, match="cannot be reached"):
        source.partitions()


class RightlessSession(ScyllaSession):
    """One that never connected."""

    def __init__(self) -> None:
        self.place = parse_scylla(parse_address("scylla://h/ks.t"), {}, 0)[0]
        self._what = "change log of `ks.t`"


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (cassandra.Unauthorized("no SELECT"), InvalidError, "grant it SELECT on ks.t_scylla_cdc"),
        (
            NoHostAvailable("no", {"h": cassandra.AuthenticationFailed("bad")}),
            InvalidError,
            "TIDELOG_SCYLLA_USERNAME",
        ),
        (cassandra.OperationTimedOut(), UnavailableError, "see that the servers are up"),
        (cassandra.InvalidRequest("unconfigured table"), NotFoundError, "was the table dropped"),
        (cassandra.InvalidRequest("nonsense"), InvalidError, "refuses the request"),
    ],
)
def test_errors_of_the_driver_say_what_to_do(
    error: Exception, kind: type[TidelogError], message: str
) -> None:
    found = RightlessSession().error(error)
    assert type(found) is kind
    assert message in str(found)


def test_a_short_lag_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        open_source("scylla://h/ks.t?lag=5s", environ={})
        assert "changes that land later are missed" in caplog.text
        caplog.clear()
        open_source("scylla://h/ks.t", environ={})
        assert caplog.text == ""


def test_an_address_comes_back_as_it_is() -> None:
    for options in (
        "",
        "?window=1s",
        "?groups=3&mode=fast&lag=2000ms",
        "?mode=sweep&lag=last&of=a,b",
    ):
        place, way = parse_scylla(parse_address(f"scylla://a,[::1]:9042/ks.t{options}"), {}, 0)
        url = format_scylla(place, way)
        assert parse_scylla(parse_address(url), {}, 5) == (place, way)
    assert "start=2026-11-13" in opened("scylla://a/ks.t?start=-15m", at(0)).url


def test_positions_are_in_order_and_an_end_is_before_nothing() -> None:
    one, two = ChangePosition(5, 10), ChangePosition(5, 11)
    next_generation = ChangePosition(11, 11)
    assert is_before(one.text, two.text)
    assert is_before(two.text, next_generation.text)
    assert not is_before(two.text, one.text)
    assert not is_before(one.limit().text, two.text)
    assert is_before(one.text, two.limit(7).text)
    assert is_before(one.limit().text, two.limit().text)
    assert is_before(one.text, ChangePosition(5, 10).held(11).text)
    assert not is_before(one.text, ChangePosition(5, 12).held(10).text)
    assert ChangePosition.parse(two.limit(7).text) == two.limit(7)
    for hostile in ("", "5", "5:6", "until:", one.text + "x", "²" * 15 + ":" + "1" * 15):
        with pytest.raises(InvalidError):
            is_before(hostile, one.text)


def test_streams_of_a_vnode_are_in_one_group() -> None:
    def stream(vnode: int, noise: int) -> bytes:
        return noise.to_bytes(8, "big") + (noise << 26 | vnode << 4 | 1).to_bytes(8, "big")

    assert {group_of(stream(21, noise), 16) for noise in range(50)} == {5}
    assert len({group_of(stream(0, noise), 16, by_vnode=False) for noise in range(200)}) == 16
    assert 0 <= group_of(b"short", 16) < 16
