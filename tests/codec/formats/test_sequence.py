"""SequenceFiles byte by byte, and Secor's keys; Hadoop's own reader is in tests/spark."""

from __future__ import annotations

import struct
import zlib

import msgpack
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.codec.formats.files import batch, opened, write
from tidelog.codec.formats import sequence

LONG = b"org.apache.hadoop.io.LongWritable"
BYTES = b"org.apache.hadoop.io.BytesWritable"
EVENTS = batch([{"value": b"one", "key": b"k", "offset": 41}, {"value": None, "offset": 2**40}])


def header(key_class: bytes, rest: bytes) -> bytes:
    return b"SEQ\x06" + bytes([len(key_class)]) + key_class + bytes([len(BYTES)]) + BYTES + rest


def test_plain_records_are_those_of_the_specification() -> None:
    data = write(opened(("sequence", "none", {})), [EVENTS]).data
    start = header(LONG, b"\x00\x00" + bytes(4))
    assert data.startswith(start)
    sync = data[len(start) : len(start) + 16]
    assert data[len(start) + 16 :] == b"".join(
        [
            struct.pack(">i", -1) + sync,
            struct.pack(">iiqi", 15, 8, 41, 3) + b"one",
            struct.pack(">iiqi", 12, 8, 2**40, 0),
        ]
    )


def test_a_block_is_that_of_the_specification() -> None:
    data = write(opened(("sequence", "zlib", {})), [EVENTS]).data
    codec = b"org.apache.hadoop.io.compress.DefaultCodec"
    start = header(LONG, b"\x01\x01" + bytes([len(codec)]) + codec + bytes(4))
    assert data.startswith(start)
    block = data[len(start) + 16 + 20 :]
    assert block[0] == 2  # records
    parts, position = [], 1
    for _ in range(4):
        size = block[position]
        parts.append(zlib.decompress(block[position + 1 : position + 1 + size]))
        position += 1 + size
    assert position == len(block)
    assert parts == [
        b"\x08\x08",
        struct.pack(">qq", 41, 2**40),
        b"\x07\x04",
        b"\x00\x00\x00\x03one\x00\x00\x00\x00",
    ]


def test_message_pack_keys_are_secors() -> None:
    data = write(opened(("sequence", "none", {"key": "msgpack"})), [EVENTS]).data
    reader = sequence.SequenceReader(pa.BufferReader(data))
    assert reader.header.key_class == BYTES.decode()
    ((keys, values),) = reader.records()
    time = 1_700_000_000_000
    found = [
        list(msgpack.unpackb(key[4:], strict_map_key=False).items()) for key in keys.to_pylist()
    ]
    assert found == [[(1, 41), (3, time), (2, b"k")], [(1, 2**40), (3, time)]]
    assert [int.from_bytes(key[:4], "big") for key in keys.to_pylist()] == [
        len(key) - 4 for key in keys.to_pylist()
    ]
    assert values.to_pylist() == [b"\x00\x00\x00\x03one", bytes(4)]


@pytest.mark.parametrize("codec", ["zlib", "none"])
def test_sync_markers_stand_all_along_a_file(codec: str) -> None:
    events = batch([{"value": bytes([n % 251]) * 1_000} for n in range(3_000)])
    data = write(opened(("sequence", codec, {})), [events]).data
    reader = sequence.SequenceReader(pa.BufferReader(data))
    marks = data.count(b"\xff\xff\xff\xff" + reader.header.sync)
    assert marks == {"zlib": 4, "none": 31}[codec]
    assert sum(len(keys) for keys, _ in reader.records()) == 3_000


@given(st.lists(st.integers(0, 2**62), min_size=1))
def test_numbers_of_any_size_come_back(numbers: list[int]) -> None:
    data = b"".join(map(sequence._vint, numbers))
    assert sequence._decode_vints(data).tolist() == numbers


def test_negative_numbers_of_hadoop_are_understood() -> None:
    known = {
        -1: b"\xff",
        -112: b"\x90",
        -113: b"\x87\x70",
        -256: b"\x87\xff",
        -257: b"\x86\x01\x00",
    }
    assert sequence._decode_vints(b"".join(known.values())).tolist() == list(known)
