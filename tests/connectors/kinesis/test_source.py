"""Kinesis as a source: on moto, and on a service that is as strict as AWS documents it."""

from __future__ import annotations

import hashlib
import pickle
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import boto3
import pytest

from tests.servers.base import free_port
from tests.servers.moto import KEYS, Moto
from tests.support.kinesis_aggregator import MAGIC, aggregated
from tests.support.kinesis_server import FakeKinesis, running_kinesis
from tidelog.clock import Clock
from tidelog.codec.event_batch import EVENT_SCHEMA
from tidelog.connectors.by_url import open_source
from tidelog.connectors.kinesis.client import Kinesis, parse_kinesis_address
from tidelog.connectors.kinesis.source import KinesisSource, open_kinesis
from tidelog.connectors.source import SourcePartition, SourceRange, waits
from tidelog.errors import InvalidError, NotFoundError, UnavailableError
from tidelog.model.address import parse_address
from tidelog.model.event import to_iso
from tidelog.pipeline.source_partitions import parents_of
from tidelog.testing.scheduler import FakeClock

HOUR_S = 3600


class Stream:
    """A new stream of some service, and what tests do with it."""

    def __init__(self, endpoint: str, shards: int = 1) -> None:
        self.endpoint = endpoint
        self.name = f"s-{uuid.uuid4().hex}"
        self.client: Any = boto3.client(
            "kinesis",
            region_name="us-east-1",
            endpoint_url=endpoint,
            aws_access_key_id="tester",
            aws_secret_access_key="secret",
        )
        self.client.create_stream(StreamName=self.name, ShardCount=shards)

    def put(self, records: Sequence[tuple[str, bytes]]) -> None:
        entries = [{"PartitionKey": key, "Data": data} for key, data in records]
        for first in range(0, len(entries), 500):
            part = entries[first : first + 500]
            answer = self.client.put_records(StreamName=self.name, Records=part)
            assert answer["FailedRecordCount"] == 0

    def url(self, options: str = "") -> str:
        return f"kinesis://{self.name}?region=us-east-1&endpoint_url={self.endpoint}{options}"

    def source(self, options: str = "", clock: Clock | None = None) -> KinesisSource:
        return open_kinesis(parse_address(self.url(options)), environ=KEYS, clock=clock)


@pytest.fixture
def fake() -> Iterator[FakeKinesis]:
    with running_kinesis() as service:
        yield service


@pytest.fixture(params=["moto", "strict"])
def stream(request: pytest.FixtureRequest) -> Iterator[Stream]:
    if request.param == "moto":
        server: Moto = request.getfixturevalue("moto_server")
        yield Stream(server.endpoint)
    else:
        with running_kinesis() as service:
            yield Stream(service.endpoint)


def rows(
    source: KinesisSource, partition: SourcePartition, start: str = "", limit: str = ""
) -> tuple[list[dict[str, Any]], str]:
    """The events of a range, and the end that was reached; of all that is there by default."""
    held = source.bounds([partition])[partition]
    end, found = start or held.first, []
    for chunk in source.read(SourceRange(partition, start or held.first, limit or held.end)):
        assert chunk.batch.schema == EVENT_SCHEMA
        found += chunk.batch.to_pylist()
        end = chunk.position
    return found, end


def values(found: tuple[list[dict[str, Any]], str]) -> list[bytes]:
    return [row["value"] for row in found[0]]


@pytest.mark.server
def test_records_come_in_order_with_all_that_they_have(stream: Stream) -> None:
    stream.put([(f"key-{n % 3}", b"%d" % n) for n in range(700)])
    source = stream.source()
    (shard,) = source.partitions()
    assert shard == SourcePartition(stream.name, "0")
    found, end = rows(source, shard)
    assert [row["value"] for row in found] == [b"%d" % n for n in range(700)]
    assert [row["key"] for row in found] == [b"key-%d" % (n % 3) for n in range(700)]
    assert [row["offset"] for row in found] == list(range(700))
    assert {row["partition"] for row in found} == {0}
    assert all(row["type"] is None for row in found)
    sequences = [int(row["headers"][0]["value"]) for row in found]
    assert sequences == sorted(set(sequences))
    assert end.startswith(f"after:{sequences[-1]}@")
    assert all(abs(row["timestamp"].timestamp() - time.time()) < 60 for row in found)
    summary = stream.client.describe_stream_summary(StreamName=stream.name)
    arn = summary["StreamDescriptionSummary"]["StreamARN"]
    event_id = f"shardId-000000000000:{sequences[5]}"
    assert found[5]["id"] == hashlib.sha256((arn + event_id).encode()).hexdigest()
    assert len({row["id"] for row in found}) == 700


def test_key_with_half_a_surrogate_pair_stops_no_other_record(fake: FakeKinesis) -> None:
    stream = Stream(fake.endpoint)
    stream.put([("before", b"1"), ("half", b"2"), ("after", b"3")])
    fake.shards(stream.name)[0].records[1].key = "\ud800"  # JSON of other clients may have it
    source = stream.source()
    found, _ = rows(source, *source.partitions())
    assert [row["value"] for row in found] == [b"1", b"2", b"3"]
    assert found[1]["key"] == b"\xed\xa0\x80"


@pytest.mark.server
def test_reading_goes_on_where_it_ended(stream: Stream) -> None:
    stream.put([("k", b"%d" % n) for n in range(10)])
    source = stream.source()
    (shard,) = source.partitions()
    first, end = rows(source, shard)
    assert not waits(source, SourceRange(shard, end, source.bounds([shard])[shard].end))
    stream.put([("k", b"%d" % n) for n in range(10, 15)])
    assert waits(source, SourceRange(shard, end, source.bounds([shard])[shard].end))
    more, last = rows(source, shard, end)
    assert [row["value"] for row in first + more] == [b"%d" % n for n in range(15)]
    assert rows(source, shard, last) == ([], last)
    chunks = list(source.read(SourceRange(shard, end, "until:99999999999999", 10)))
    assert chunks[0].batch.column("offset").to_pylist() == [10, 11, 12, 13, 14]


@pytest.mark.server
def test_an_empty_stream_has_a_shard_and_nothing_in_it(stream: Stream) -> None:
    source = stream.source()
    (shard,) = source.partitions()
    found, end = rows(source, shard)
    assert found == []
    assert end.startswith("oldest@")
    assert rows(source, shard, end) == ([], end)  # so that nothing has to be committed
    assert source.parents([shard]) == {shard: []}


@pytest.mark.server
def test_it_starts_at_the_oldest_the_newest_or_a_time(stream: Stream) -> None:
    stream.put([("k", b"old")])
    time.sleep(1.2)
    between = int(time.time() * 1000)
    newest = stream.source("&start=newest")
    stream.put([("k", b"new")])
    (shard,) = newest.partitions()
    assert values(rows(newest, shard)) == [b"new"]
    assert values(rows(stream.source(f"&start={to_iso(between)}"), shard)) == [b"new"]
    assert values(rows(stream.source("&start=oldest"), shard)) == [b"old", b"new"]
    assert values(rows(stream.source("&start=-1h"), shard)) == [b"old", b"new"]
    again = open_source(newest.url, environ=KEYS)
    assert again.url == newest.url
    assert values(rows(again, shard)) == [b"new"]  # type: ignore[arg-type]


@pytest.mark.server
def test_aggregated_records_are_taken_apart_and_damaged_ones_kept(stream: Stream) -> None:
    whole = aggregated([("a", b"1"), ("b", b"2", "7"), ("a", b"3")])
    damaged = whole[:-1] + bytes([whole[-1] ^ 1])
    stream.put([("agg", whole), ("plain", b"4"), ("bad", damaged), ("magic", MAGIC)])
    source = stream.source()
    (shard,) = source.partitions()
    found, _ = rows(source, shard)
    assert [row["value"] for row in found] == [b"1", b"2", b"3", b"4", damaged, MAGIC]
    assert [row["key"] for row in found] == [b"a", b"b", b"a", b"plain", b"bad", b"magic"]
    names = [[header["name"] for header in row["headers"]] for row in found]
    assert names[0] == ["kinesis.sequence", "kinesis.sub-sequence"]
    assert names[1] == ["kinesis.sequence", "kinesis.sub-sequence", "kinesis.hash-key"]
    assert names[3] == ["kinesis.sequence"]
    assert [row["headers"][1]["value"] for row in found[:3]] == [b"0", b"1", b"2"]
    assert len({row["id"] for row in found}) == 6
    assert [row["offset"] for row in found] == list(range(6))


@pytest.mark.server
def test_what_is_not_there_is_named_with_its_region(moto_server: Moto) -> None:
    there = Stream(moto_server.endpoint)
    missing = f"kinesis://nope?region=eu-west-1&endpoint_url={moto_server.endpoint}"
    with pytest.raises(NotFoundError, match="`nope`: is not there in region eu-west-1"):
        open_source(missing, environ=KEYS).partitions()
    elsewhere = there.url().replace("us-east-1", "eu-west-1")
    with pytest.raises(NotFoundError, match="not there in region eu-west-1"):
        open_source(elsewhere, environ=KEYS).partitions()
    source = there.source()
    gone = SourcePartition(there.name, "7")
    with pytest.raises(NotFoundError, match="is not there"):
        source.bounds([gone])
    with pytest.raises(NotFoundError, match="is not there"):
        list(source.read(SourceRange(gone, "oldest", "until:1")))
    for strange in (SourcePartition("other", "0"), SourcePartition(there.name, "shardId-0")):
        with pytest.raises(NotFoundError, match="is none of stream"):
            source.bounds([strange])


@pytest.mark.server
def test_a_shard_that_moto_has_split_ends_and_its_children_are_named(moto_server: Moto) -> None:
    stream = Stream(moto_server.endpoint)
    stream.put([("k", b"%d" % n) for n in range(5)])
    stream.client.split_shard(
        StreamName=stream.name,
        ShardToSplit="shardId-000000000000",
        NewStartingHashKey=str(2**127),
    )
    source = stream.source()
    parent, one, other = source.partitions()
    assert source.bounds([parent])[parent].end == "end"
    assert [each.partition for each in source.parents([one, other])[one]] == [parent]
    found, end = rows(source, parent)
    assert len(found) == 5
    assert end == "end"


def test_credentials_that_are_missing_or_wrong_are_told(fake: FakeKinesis) -> None:
    stream = Stream(fake.endpoint)
    with pytest.raises(InvalidError, match="no usable AWS credentials"):
        open_source(stream.url(), environ={}).partitions()
    fake.keys = {"somebody"}
    with pytest.raises(InvalidError, match="UnrecognizedClientException"):
        stream.source().partitions()
    fake.keys = None
    fake.refusals["ListShards"] = ["AccessDeniedException"]
    with pytest.raises(InvalidError, match="check the credentials"):
        stream.source().partitions()


BAD = {
    "kinesis://": "names no stream",
    "kinesis://a/b?region=x": "names no stream",
    "kinesis://a:1?region=x": "names no stream",
    "kinesis://a%20b?region=x": "names no stream",
    "kinesis://a?region=x&start=tomorrow": "ISO 8601",
    "kinesis://a?region=x&outside=burn": "give keep or drop",
    "kinesis://a?region=x&endpoint_url=ftp://h": "is not an http or https address",
    "kinesis://a?regoin=x": "did you mean `region`",
    "kinesis://a?secret_access_key=x": "looks like a secret",
    "kinesis://u:p@a": "names a user or password",
}


@pytest.mark.parametrize("url", BAD)
def test_bad_addresses_are_refused(url: str) -> None:
    with pytest.raises(InvalidError, match=BAD[url]):
        open_source(url, environ=KEYS)


def test_without_a_region_it_says_so() -> None:
    source = open_source("kinesis://a", environ=KEYS)
    with pytest.raises(InvalidError, match="no AWS region"):
        source.partitions()


def test_without_the_sdk_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if name.startswith(("boto", "tidelog.connectors.kinesis"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "tidelog.aws_session")
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(InvalidError, match=r"pip install 'tidelog\[aws\]'"):
        open_source("kinesis://a?region=x", environ=KEYS)


def test_it_pickles_without_secrets(fake: FakeKinesis, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(fake.endpoint)
    stream.put([("k", b"1")])
    source = stream.source("&start=-2h")
    (shard,) = source.partitions()
    held = source.bounds([shard])[shard]
    wanted = SourceRange(shard, held.first, held.end, 41)
    assert source.reader(wanted) == source.reader(wanted), "nothing has changed since"
    data = pickle.dumps(source.reader(wanted))
    assert b"secret" not in data
    for name, text in KEYS.items():
        monkeypatch.setenv(name, text)
    (chunk,) = pickle.loads(data).read()
    assert chunk.batch.column("offset").to_pylist() == [41]
    assert pickle.loads(pickle.dumps(source)).url == source.url


class Throttled:
    """A client that refuses again and again, and otherwise is the real one."""

    def __init__(self, client: Any, refusals: int) -> None:
        self._client = client
        self.refusals = refusals

    def __getattr__(self, name: str) -> Any:
        if name == "get_records" and self.refusals:
            self.refusals -= 1
            error = self._client.exceptions.ProvisionedThroughputExceededException
            raise error({"Error": {"Code": "ProvisionedThroughputExceededException"}}, name)
        return getattr(self._client, name)


@pytest.mark.parametrize("refusals", [0, 4, 10_000])
def test_throttling_is_waited_out_and_told_when_it_lasts(fake: FakeKinesis, refusals: int) -> None:
    stream, clock = Stream(fake.endpoint), FakeClock(int(time.time() * 1000))
    stream.put([("k", b"1")])
    place = parse_kinesis_address(parse_address(stream.url()), KEYS, "source")
    kinesis = Kinesis(place, clock=clock, connect=lambda _: Throttled(stream.client, refusals))
    source = KinesisSource(place, clock=clock, kinesis=kinesis)
    (shard,) = source.partitions()
    began_s = clock.monotonic_s()
    if refusals < 10_000:
        assert values(rows(source, shard)) == [b"1"]
        assert clock.monotonic_s() - began_s >= (0.1 + 0.2 + 0.4 + 0.8 if refusals else 0)
        return
    with pytest.raises(UnavailableError, match="too busy"):
        rows(source, shard)
    assert 10 < clock.monotonic_s() - began_s < 60


def test_a_server_that_fails_is_asked_again(fake: FakeKinesis) -> None:
    stream, clock = Stream(fake.endpoint), FakeClock(int(time.time() * 1000))
    stream.put([("k", b"1")])
    fake.refusals["ListShards"] = ["InternalFailure", "LimitExceededException"]
    fake.refusals["GetShardIterator"] = ["ProvisionedThroughputExceededException"]
    source = stream.source(clock=clock)
    (shard,) = source.partitions()
    assert values(rows(source, shard)) == [b"1"]
    nobody = f"kinesis://a?region=x&endpoint_url=http://127.0.0.1:{free_port()}"
    gone = open_kinesis(parse_address(nobody), environ=KEYS, clock=clock)
    with pytest.raises(UnavailableError, match="out of reach"):
        gone.partitions()


def test_pages_of_a_proxy_and_damaged_answers_are_no_answers(fake: FakeKinesis) -> None:
    stream, clock = Stream(fake.endpoint), FakeClock(int(time.time() * 1000))
    stream.put([("k", b"1")])
    for operation in ("ListShards", "GetShardIterator", "GetRecords", "DescribeStreamSummary"):
        fake.pages[operation] = [b"<html>Sign in</html>", b"", b"{}", b"[]", b'{"Rec', b"\xff"]
    source = stream.source(clock=clock)
    (shard,) = source.partitions()
    assert values(rows(source, shard)) == [b"1"]
    assert not any(fake.pages.values())


def test_iterators_that_expire_are_renewed_where_reading_stands(fake: FakeKinesis) -> None:
    stream, clock = Stream(fake.endpoint), FakeClock()
    fake.page = 10
    stream.put([("k", b"%d" % n) for n in range(35)])
    source = stream.source(clock=clock)
    (shard,) = source.partitions()
    original = fake._get_records
    answers = 0

    def expiring(region: str, asked: dict[str, Any]) -> dict[str, Any]:
        nonlocal answers
        answers += 1
        if answers in (2, 4):
            fake.ahead_ms += 301_000
        return original(region, asked)

    fake._get_records = expiring  # type: ignore[method-assign]
    held = source.bounds([shard])[shard]
    chunks = list(source.read(SourceRange(shard, held.first, held.end)))
    found = [value for chunk in chunks for value in chunk.batch.column("value").to_pylist()]
    assert found == [b"%d" % n for n in range(35)]
    fake.iterator_ms = -1
    with pytest.raises(UnavailableError, match="iterators expire as soon"):
        rows(source, shard)


def test_reading_keeps_to_the_limits_of_a_shard(fake: FakeKinesis) -> None:
    stream, clock = Stream(fake.endpoint), FakeClock(int(time.time() * 1000))
    fake.page = 10
    stream.put([("k", b"%d" % n) for n in range(100)])
    source = stream.source(clock=clock)
    (shard,) = source.partitions()
    began_s = clock.monotonic_s()
    assert len(rows(source, shard)[0]) == 100
    assert 1.8 <= clock.monotonic_s() - began_s < 3
    assert {asked["Limit"] for asked in fake.asked} == {10_000}
    fake.page = 5
    for _ in range(4):
        stream.put([("k", bytes(900_000))] * 5)
    began_s = clock.monotonic_s()
    rows(source, shard)
    assert 8 <= clock.monotonic_s() - began_s < 20  # 18 MB, at 2 MB/s, but for the last answer


@pytest.mark.parametrize(
    ("most", "expected"),
    [(7, [5, 5, 5, 7, 7, 1]), (3, [5, 5, 5, 5, 3, 3, 3, 1])],
    ids=["several records", "less than an aggregated record"],
)
def test_a_range_ends_after_so_many_events_or_one_aggregated_record(
    fake: FakeKinesis, most: int, expected: list[int]
) -> None:
    stream = Stream(fake.endpoint)
    stream.put([("k", aggregated([("a", b"x")] * 5)) for _ in range(4)])
    stream.put([("k", b"%d" % n) for n in range(10)])
    source = stream.source(clock=FakeClock())
    (shard,) = source.partitions()
    held = source.bounds([shard])[shard]
    at, sizes = held.first, []
    while True:
        found, after = rows(source, shard, at, source.cut(at, held.end, most))
        if after == at:
            break
        at = after
        sizes.append(len(found))
    assert sizes == expected


def test_a_range_ends_where_its_time_does(fake: FakeKinesis) -> None:
    stream = Stream(fake.endpoint)
    source = stream.source()
    (shard,) = source.partitions()
    stream.put([("k", b"1"), ("k", b"2")])
    limit = source.bounds([shard])[shard].end
    fake.ahead_ms += 5_000
    stream.put([("k", b"3")])
    found, end = rows(source, shard, limit=limit)
    assert [row["value"] for row in found] == [b"1", b"2"]
    assert not waits(source, SourceRange(shard, end, limit))
    assert rows(source, shard, end, limit) == ([], end)
    assert values(rows(source, shard, end)) == [b"3"]


def test_a_start_in_the_time_to_come_has_nothing_yet(fake: FakeKinesis) -> None:
    stream = Stream(fake.endpoint)
    stream.put([("k", b"1")])
    later = to_iso(int(time.time() * 1000) + 60_000)
    source = stream.source(f"&start={later}")
    (shard,) = source.partitions()
    found, end = rows(source, shard, limit="until:99999999999999")
    assert found == []
    assert end == source.bounds([shard])[shard].first or end.startswith("at:")
    fake.ahead_ms = 61_000
    stream.put([("k", b"2")])
    assert values(rows(source, shard)) == [b"2"]


def test_what_fell_out_of_retention_is_told_and_what_was_quiet_is_not(fake: FakeKinesis) -> None:
    stream, quiet = Stream(fake.endpoint), Stream(fake.endpoint)
    stream.put([("k", b"1")])
    shards = [SourcePartition(each.name, "0") for each in (stream, quiet)]
    sources = [stream.source(), quiet.source()]
    ends = [rows(source, shard)[1] for source, shard in zip(sources, shards, strict=True)]
    for _ in range(30):
        fake.ahead_ms += HOUR_S * 1000
        ends[1] = rows(sources[1], shards[1], ends[1])[1]
    stream.put([("k", b"2")])
    quiet.put([("k", b"3")])
    first = sources[0].bounds(shards[:1])[shards[0]].first
    assert sources[0].before(ends[0], first)
    with pytest.raises(NotFoundError, match="holds nothing that came in before") as told:
        rows(sources[0], shards[0], ends[0])
    assert told.value.context["lost_from"] == ends[0]
    assert values(rows(sources[0], shards[0], first)) == [b"2"]
    assert not sources[1].before(ends[1], sources[1].bounds(shards[1:])[shards[1]].first)
    assert values(rows(sources[1], shards[1], ends[1])) == [b"3"]


def test_closed_shards_end_and_many_shards_are_all_listed(fake: FakeKinesis) -> None:
    stream = Stream(fake.endpoint, shards=4)
    stream.put([(f"{n}", b"%d" % n) for n in range(50)])
    name = {"StreamName": stream.name}
    stream.client.split_shard(
        **name, ShardToSplit="shardId-000000000001", NewStartingHashKey=str(3 * 2**125)
    )
    stream.client.merge_shards(
        **name, ShardToMerge="shardId-000000000002", AdjacentShardToMerge="shardId-000000000003"
    )
    stream.put([(f"{n}", b"%d" % n) for n in range(50, 100)])
    source = stream.source()
    shards = source.partitions()
    assert [each.name for each in shards] == ["0", "1", "2", "3", "4", "5", "6"]
    lineage = parents_of(source, shards)
    parents = {each.name: [p.partition.name for p in lineage[each]] for each in shards}
    assert parents == {
        "0": [], "1": [], "2": [], "3": [], "4": ["1"], "5": ["1"], "6": ["2", "3"],
    }  # fmt: skip
    found = {each.name: rows(source, each) for each in shards}
    assert sorted(value for each in found.values() for value in values(each)) == sorted(
        b"%d" % n for n in range(100)
    )
    ends = {name: end for name, (_, end) in found.items()}
    assert [name for name, end in ends.items() if end == "end"] == ["1", "2", "3"]
    assert rows(source, shards[1], "end") == ([], "end")
    fake.late_ends = 4
    assert rows(source, shards[1])[1] == "end"
    fake.late_ends = 1_000
    assert rows(source, shards[1])[1].startswith("after:")
    fake.late_ends = 0
    fake.ahead_ms += 25 * HOUR_S * 1000
    assert [each.name for each in source.partitions()] == ["0", "4", "5", "6"]
    (gone,) = source.parents(shards[4:5])[shards[4]]
    assert (gone.partition, gone.held) == (shards[1], False)


def test_records_of_another_shard_are_dropped_on_request(fake: FakeKinesis) -> None:
    stream = Stream(fake.endpoint, shards=2)
    low, high = "5", str(2**127 + 5)
    entry = {"PartitionKey": "x", "Data": aggregated([("a", b"ours", low), ("b", b"not", high)])}
    stream.client.put_record(StreamName=stream.name, ExplicitHashKey=low, **entry)
    kept, dropped = stream.source(), stream.source("&outside=drop")
    shard, _ = kept.partitions()
    assert values(rows(kept, shard)) == [b"ours", b"not"]
    found, end = rows(dropped, shard)
    assert [row["value"] for row in found] == [b"ours"]
    assert rows(dropped, shard, end)[0] == []


def test_a_stream_made_anew_is_another_one(fake: FakeKinesis) -> None:
    stream = Stream(fake.endpoint)
    clock = FakeClock()
    source = stream.source(clock=clock)
    (shard,) = source.partitions()
    before = source.bounds([shard])[shard].incarnation
    stream.client.delete_stream(StreamName=stream.name)
    clock.advance(60)
    with pytest.raises(NotFoundError):
        source.partitions()
    time.sleep(0.01)
    stream.client.create_stream(StreamName=stream.name, ShardCount=1)
    assert source.bounds([shard])[shard].incarnation != before
