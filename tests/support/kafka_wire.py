"""Writes Kafka records that no client library writes: one Produce request, byte by byte.

librdkafka takes header names as C strings, so a name with a NUL or with bytes that are not UTF-8
can be written only like this. Kafka itself stores any bytes.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

import crc32c

_PRODUCE, _VERSION = 0, 7
_UNKNOWN_PARTITION, _NOT_LEADER = 3, 6  # for a moment, after a topic was created


@dataclass(frozen=True)
class WireRecord:
    """A record in bytes; header names too."""

    value: bytes | None
    key: bytes | None = None
    headers: tuple[tuple[bytes, bytes | None], ...] = ()


def produce_bytes(bootstrap: str, topic: str, partition: int, records: Sequence[WireRecord]) -> int:
    """Appends records in one batch; returns the offset of the first."""
    end_s = time.monotonic() + 60
    while True:
        error, offset = _produce_once(bootstrap, topic, partition, records)
        if error not in (_UNKNOWN_PARTITION, _NOT_LEADER) or time.monotonic() > end_s:
            break
        time.sleep(0.1)
    if error:
        raise AssertionError(f"produce to {topic}/{partition}: error code {error}")
    return offset


def _produce_once(
    bootstrap: str, topic: str, partition: int, records: Sequence[WireRecord]
) -> tuple[int, int]:
    batch = _batch(records)
    name = topic.encode()
    body = struct.pack(">hhii", -1, -1, 30_000, 1)  # no transaction, all replicas, one topic
    body += struct.pack(">h", len(name)) + name
    body += struct.pack(">iii", 1, partition, len(batch)) + batch
    request = struct.pack(">hhih", _PRODUCE, _VERSION, 1, -1) + body
    host, _, port = bootstrap.rpartition(":")
    with socket.create_connection((host, int(port)), 60) as server:
        server.sendall(struct.pack(">i", len(request)) + request)
        (size,) = struct.unpack(">i", _exactly(server, 4))
        answer = _exactly(server, size)
    at = 4 + 4 + 2 + len(name) + 4 + 4  # correlation, topics, name, partitions, index
    error, offset = struct.unpack_from(">hq", answer, at)
    return int(error), int(offset)


def _batch(records: Sequence[WireRecord]) -> bytes:
    now_ms = int(time.time() * 1000)
    body = b"".join(_record(number, record) for number, record in enumerate(records))
    last, count = len(records) - 1, len(records)
    checked = struct.pack(">hiqqqhii", 0, last, now_ms, now_ms, -1, -1, -1, count) + body
    crc = crc32c.crc32c(checked)
    after_length = struct.pack(">ibI", 0, 2, crc) + checked
    return struct.pack(">qi", 0, len(after_length)) + after_length


def _record(number: int, record: WireRecord) -> bytes:
    parts = [b"\x00", _varint(0), _varint(number), _bytes(record.key), _bytes(record.value)]
    parts.append(_varint(len(record.headers)))
    for name, value in record.headers:
        parts += [_bytes(name), _bytes(value)]
    body = b"".join(parts)
    return _varint(len(body)) + body


def _bytes(data: bytes | None) -> bytes:
    return _varint(-1) if data is None else _varint(len(data)) + data


def _varint(number: int) -> bytes:
    left = (number << 1) ^ (number >> 63)
    found = bytearray()
    while left > 0x7F:
        found.append(left & 0x7F | 0x80)
        left >>= 7
    found.append(left)
    return bytes(found)


def _exactly(server: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = server.recv(size - len(found))
        if not part:
            raise AssertionError("the broker closed the connection")
        found += part
    return found
