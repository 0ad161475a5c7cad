"""A stream service that keeps to what AWS documents of Kinesis, where moto does not.

It speaks the real protocol to the real SDK. Beyond moto: records stay in the shards that they were
put into, closed shards take none and end with a null iterator, sequence numbers are unique and
long, iterators expire, what is older than the retention is trimmed in silence, shards whose last
record is gone are gone too, times to come and strange sequence numbers are refused, and access keys
are looked at. Its clock can be set on, and any call can be made to fail.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HASHES = 1 << 128
SEQUENCE = 49_600_000_000_000_000_000_000_000_000_000_000_000_000_000_000_000_000_000


class RefusedError(Exception):
    def __init__(self, code: str, message: str = "") -> None:
        super().__init__(message)
        self.code = code


@dataclass
class Record:
    sequence: int
    key: str
    data: str
    arrived_ms: int


@dataclass
class Shard:
    number: int
    first_hash: int
    last_hash: int
    first_sequence: int
    parents: tuple[int, ...] = ()
    last_sequence: int | None = None
    closed_ms: int | None = None
    records: list[Record] = field(default_factory=list)

    @property
    def id(self) -> str:
        return f"shardId-{self.number:012}"

    def listed(self) -> dict[str, Any]:
        names = ("ParentShardId", "AdjacentParentShardId")
        sequences = {"StartingSequenceNumber": str(self.first_sequence)}
        if self.last_sequence is not None:
            sequences["EndingSequenceNumber"] = str(self.last_sequence)
        return {
            "ShardId": self.id,
            "HashKeyRange": {
                "StartingHashKey": str(self.first_hash),
                "EndingHashKey": str(self.last_hash),
            },
            "SequenceNumberRange": sequences,
            **{name: f"shardId-{n:012}" for name, n in zip(names, self.parents, strict=False)},
        }


class FakeKinesis:
    """All streams of all regions."""

    def __init__(self) -> None:
        self.ahead_ms = 0  # how far its clock is ahead of ours
        self.iterator_ms = 300_000
        self.page = 10_000  # records of one answer
        self.retention_ms = 24 * 3_600_000
        self.late_ends = 0  # empty answers of a closed shard before the null iterator
        self.keys: set[str] | None = None  # access keys that are allowed; None: all
        self.calls: Counter[str] = Counter()
        self.asked: list[dict[str, Any]] = []  # of get_records
        self.refusals: dict[str, list[str]] = defaultdict(list)  # codes, by operation
        self.pages: dict[str, list[bytes]] = defaultdict(list)  # instead of answers, by operation
        self.put_fault: Callable[[dict[str, Any]], bool] = lambda _: False
        self.streams: dict[tuple[str, str], dict[str, Any]] = {}
        self.endpoint = ""
        self._lock = threading.RLock()
        self._sequence = SEQUENCE

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000 + self.ahead_ms

    def handle(self, operation: str, region: str, asked: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self.calls[operation] += 1
            if self.refusals[operation]:
                raise RefusedError(self.refusals[operation].pop(0), "as told")
            name = re.sub(r"(?<!^)(?=[A-Z])", "_", operation).lower()
            answer: dict[str, Any] = getattr(self, f"_{name}")(region, asked) or {}
            return answer

    # What a test looks at, or sets.

    def shards(self, stream: str, region: str = "us-east-1") -> dict[int, Shard]:
        shards: dict[int, Shard] = self.streams[region, stream]["shards"]
        return shards

    def values(self, stream: str) -> list[bytes]:
        """All data in the stream, shard by shard."""
        shards = self.shards(stream).values()
        return [base64.b64decode(each.data) for shard in shards for each in shard.records]

    # The operations.

    def _create_stream(self, region: str, asked: dict[str, Any]) -> None:
        name, count = asked["StreamName"], asked.get("ShardCount", 1)
        if (region, name) in self.streams:
            raise RefusedError("ResourceInUseException", f"{name} exists")
        step = HASHES // count
        lasts = [(n + 1) * step - 1 for n in range(count - 1)] + [HASHES - 1]
        shards = {n: Shard(n, n * step, lasts[n], self._next()) for n in range(count)}
        self.streams[region, name] = {"shards": shards, "created_ms": self.now_ms()}

    def _delete_stream(self, region: str, asked: dict[str, Any]) -> None:
        self._stream(region, asked)
        del self.streams[region, asked["StreamName"]]

    def _describe_stream_summary(self, region: str, asked: dict[str, Any]) -> dict[str, Any]:
        stream, name = self._stream(region, asked), asked["StreamName"]
        return {
            "StreamDescriptionSummary": {
                "StreamName": name,
                "StreamARN": f"arn:aws:kinesis:{region}:123456789012:stream/{name}",
                "StreamStatus": "ACTIVE",
                "RetentionPeriodHours": self.retention_ms // 3_600_000,
                "StreamCreationTimestamp": stream["created_ms"] / 1000,
                "EnhancedMonitoring": [],
                "OpenShardCount": len(stream["shards"]),
            }
        }

    def _list_shards(self, region: str, asked: dict[str, Any]) -> dict[str, Any]:
        if "NextToken" in asked:
            name, first = json.loads(asked["NextToken"])
            asked = {"StreamName": name}
        else:
            first = 0
        shards = list(self._stream(region, asked)["shards"].values())
        page = [shard.listed() for shard in shards[first : first + 3]]
        more = json.dumps([asked["StreamName"], first + 3]) if first + 3 < len(shards) else None
        return {"Shards": page, "NextToken": more}

    def _get_shard_iterator(self, region: str, asked: dict[str, Any]) -> dict[str, Any]:
        shard = self._shard(region, asked)
        kind, number = asked["ShardIteratorType"], asked.get("StartingSequenceNumber")
        if number is not None and not shard.first_sequence <= int(number) <= (
            shard.last_sequence or self._sequence
        ):
            raise RefusedError("InvalidArgumentException", f"{number} is not of {shard.id}")
        if kind == "AT_TIMESTAMP":
            wanted_ms = round(asked["Timestamp"] * 1000)
            if wanted_ms > self.now_ms():
                raise RefusedError("InvalidArgumentException", "timestamp is in the future")
            later = (r.sequence - 1 for r in shard.records if r.arrived_ms >= wanted_ms)
            after = next(later, self._sequence)
        elif kind == "LATEST":
            after = self._sequence
        else:
            wanted = int(number or 0)
            after = wanted - 1 if kind == "AT_SEQUENCE_NUMBER" else wanted
        return {"ShardIterator": self._iterator(region, asked["StreamName"], shard, after)}

    def _get_records(self, region: str, asked: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(asked)
        name, number, after, made_ms = json.loads(base64.b64decode(asked["ShardIterator"]))
        if self.now_ms() - made_ms > self.iterator_ms:
            raise RefusedError("ExpiredIteratorException", "too old")
        shard = self._stream(region, {"StreamName": name})["shards"].get(number)
        if shard is None:
            raise RefusedError("ResourceNotFoundException", f"shard {number} is gone")
        waiting = [record for record in shard.records if record.sequence > after]
        page = waiting[: min(self.page, asked.get("Limit", 10_000))]
        left = len(waiting) - len(page)
        last = page[-1].sequence if page else after
        over = shard.last_sequence is not None and not left
        if over and self.late_ends:
            over, self.late_ends = False, self.late_ends - 1
        return {
            "Records": [
                {
                    "SequenceNumber": str(record.sequence),
                    "ApproximateArrivalTimestamp": record.arrived_ms / 1000,
                    "Data": record.data,
                    "PartitionKey": record.key,
                }
                for record in page
            ],
            "NextShardIterator": None if over else self._iterator(region, name, shard, last),
            "MillisBehindLatest": max(1, self.now_ms() - page[-1].arrived_ms) if left else 0,
        }

    def _put_record(self, region: str, asked: dict[str, Any]) -> dict[str, Any]:
        return self._put(region, asked["StreamName"], asked)

    def _put_records(self, region: str, asked: dict[str, Any]) -> dict[str, Any]:
        sizes = [
            len(base64.b64decode(r["Data"])) + len(r["PartitionKey"]) for r in asked["Records"]
        ]
        if len(sizes) > 500 or sum(sizes) > 5 << 20 or max(sizes) > 1 << 20:
            raise RefusedError("InvalidArgumentException", f"{len(sizes)}, {sum(sizes)} bytes")
        done = [self._put(region, asked["StreamName"], each) for each in asked["Records"]]
        return {"FailedRecordCount": sum("ErrorCode" in each for each in done), "Records": done}

    def _put(self, region: str, name: str, record: dict[str, Any]) -> dict[str, Any]:
        if self.put_fault(record):
            code = "ProvisionedThroughputExceededException"
            return {"ErrorCode": code, "ErrorMessage": "as told"}
        digest = hashlib.md5(record["PartitionKey"].encode()).digest()
        place = int(record.get("ExplicitHashKey") or int.from_bytes(digest))
        for shard in self._found(region, {"StreamName": name})["shards"].values():
            if shard.closed_ms is None and shard.first_hash <= place <= shard.last_hash:
                sequence = self._next()
                shard.records.append(
                    Record(sequence, record["PartitionKey"], record["Data"], self.now_ms())
                )
                return {"SequenceNumber": str(sequence), "ShardId": shard.id}
        raise RefusedError("InternalFailure", "no shard")

    def _split_shard(self, region: str, asked: dict[str, Any]) -> None:
        shards = self._stream(region, asked)["shards"]
        old = shards[int(asked["ShardToSplit"][-12:])]
        border, number = int(asked["NewStartingHashKey"]), max(shards) + 1
        self._close(old)
        for first, last in ((old.first_hash, border - 1), (border, old.last_hash)):
            shards[number] = Shard(number, first, last, self._next(), (old.number,))
            number += 1

    def _merge_shards(self, region: str, asked: dict[str, Any]) -> None:
        shards = self._stream(region, asked)["shards"]
        names = (asked["ShardToMerge"], asked["AdjacentShardToMerge"])
        one, other = (shards[int(name[-12:])] for name in names)
        low, high = sorted((one, other), key=lambda shard: shard.first_hash)
        if low.last_hash + 1 != high.first_hash:
            raise RefusedError("InvalidArgumentException", "not adjacent")
        self._close(one)
        self._close(other)
        number = max(shards) + 1
        parents = (one.number, other.number)
        shards[number] = Shard(number, low.first_hash, high.last_hash, self._next(), parents)

    # Inside.

    def _close(self, shard: Shard) -> None:
        if shard.closed_ms is not None:
            raise RefusedError("ResourceInUseException", f"{shard.id} is closed")
        shard.last_sequence, shard.closed_ms = self._next(), self.now_ms()

    def _next(self) -> int:
        self._sequence += 1_000
        return self._sequence

    def _stream(self, region: str, asked: dict[str, Any]) -> dict[str, Any]:
        """The stream, without all that is older than the retention."""
        found = self._found(region, asked)
        held_ms = self.now_ms() - self.retention_ms
        for shard in list(found["shards"].values()):
            shard.records = [each for each in shard.records if each.arrived_ms >= held_ms]
            if shard.closed_ms is not None and shard.closed_ms < held_ms:
                del found["shards"][shard.number]
        return found

    def _found(self, region: str, asked: dict[str, Any]) -> dict[str, Any]:
        found = self.streams.get((region, asked["StreamName"]))
        if found is None:
            raise RefusedError("ResourceNotFoundException", f"no stream {asked['StreamName']}")
        return found

    def _shard(self, region: str, asked: dict[str, Any]) -> Shard:
        shards: dict[int, Shard] = self._stream(region, asked)["shards"]
        number = int(asked["ShardId"][-12:])
        if number not in shards:
            raise RefusedError("ResourceNotFoundException", f"no shard {number}")
        return shards[number]

    def _iterator(self, region: str, stream: str, shard: Shard, after: int) -> str:
        parts = json.dumps([stream, shard.number, after, self.now_ms()])
        return base64.b64encode(parts.encode()).decode()


@contextmanager
def running_kinesis() -> Iterator[FakeKinesis]:
    """A service of one's own, on the loopback interface."""
    fake = FakeKinesis()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
            scope = re.search(r"Credential=([^/]+)/\d+/([^/]+)/", self.headers["Authorization"])
            assert scope is not None
            operation = self.headers["X-Amz-Target"].rpartition(".")[2]
            try:
                if fake.keys is not None and scope[1] not in fake.keys:
                    raise RefusedError("UnrecognizedClientException", "token is invalid")
                status, answer = 200, fake.handle(operation, scope[2], asked)
            except RefusedError as exc:
                status = 500 if exc.code == "InternalFailure" else 400
                answer = {"__type": exc.code, "message": str(exc)}
            body = json.dumps(answer).encode()
            if fake.pages[operation]:
                status, body = 200, fake.pages[operation].pop(0)
            self.send_response(status)
            self.send_header("Content-Type", "application/x-amz-json-1.1")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def date_time_string(self, timestamp: float | None = None) -> str:
            return super().date_time_string(timestamp or fake.now_ms() / 1000)

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *args: object) -> None:
            """Say nothing of clients that were killed."""
            if not isinstance(sys.exception(), ConnectionError):
                super().handle_error(*args)  # type: ignore[arg-type]

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    fake.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
