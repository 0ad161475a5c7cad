"""Bytes that are not what was written: told, and never taken for events."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pyarrow as pa
import pytest

from tests.codec.formats.files import VARIANTS, File, batch, label, opened, read, table, write
from tidelog import CorruptError, UnavailableError

every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=label)

# What has no checksum of its own: a bit that flips there may go unnoticed here. The archive's
# manifest has one over the whole file.
UNCHECKED = {
    ("avro", "none"),
    ("avro", "zstd"),
    ("avro", "deflate"),
    ("jsonlines", "none"),
    ("jsonlines", "zstd"),
}


def some_events(count: int = 300, seed: int = 1) -> pa.RecordBatch:
    chance = random.Random(seed)
    return batch(
        [
            {
                "value": chance.randbytes(chance.randrange(60)) if n % 3 else b'{"n": %d}' % n,
                "key": b"key-%d" % n,
                "offset": seed * 1_000 + n,
                "headers": [{"name": "h", "value": chance.randbytes(4)}] if n % 5 else None,
            }
            for n in range(count)
        ]
    )


def outcome(variant: Any, file: File) -> pa.Table | None:
    """The events, or None for ``CorruptError``; anything else fails the test."""
    try:
        return read(opened(variant), file)
    except CorruptError:
        return None


@every_variant
def test_a_file_that_is_cut_off_is_corrupt(variant: Any) -> None:
    events = some_events()
    file = write(opened(variant), [events])
    lines = variant == ("jsonlines", "none", {"mode": "events"})
    for cut in {0, 1, 3, 4, 5, 20, len(file.data) // 3, len(file.data) // 2, len(file.data) - 1}:
        found = outcome(variant, dataclasses.replace(file, data=file.data[:cut]))
        if found is not None:
            assert lines, f"cut at {cut} of {len(file.data)}"
            assert file.data[:cut].endswith(b"\n") or cut == 0  # lines cannot tell that more came
    if file.sidecar is not None:
        for cut in (0, 4, len(file.sidecar) // 2, len(file.sidecar) - 1):
            assert outcome(variant, dataclasses.replace(file, sidecar=file.sidecar[:cut])) is None


@every_variant
def test_a_bit_that_flips_is_noticed_where_there_is_a_checksum(variant: Any) -> None:
    events = some_events()
    file = write(opened(variant), [events])
    chance = random.Random(7)
    for _ in range(60):
        position = chance.randrange(len(file.data))
        flipped = bytearray(file.data)
        flipped[position] ^= 1 << chance.randrange(8)
        found = outcome(variant, dataclasses.replace(file, data=bytes(flipped)))
        if found is not None and variant[:2] not in UNCHECKED:
            assert found.equals(table([events])), f"at {position} of {len(file.data)}"


@every_variant
def test_bytes_of_something_else_are_corrupt(variant: Any) -> None:
    own = write(opened(variant), [some_events()])
    chance = random.Random(3)
    for other in VARIANTS[:: len(VARIANTS) // 8]:
        if other[0] != variant[0]:
            data = write(opened(other), [some_events(seed=2)]).data
            assert outcome(variant, dataclasses.replace(own, data=data)) is None
    for size in (1, 10, 1_000):
        noise = chance.randbytes(size)
        assert outcome(variant, dataclasses.replace(own, data=noise)) is None


@pytest.mark.parametrize(
    "variant",
    [
        each
        for each in VARIANTS
        if each[0] in ("delimited", "sequence", "jsonlines") and "mode" not in each[2]
    ],
    ids=label,
)
def test_a_sidecar_belongs_to_its_data_file(variant: Any) -> None:
    form = opened(variant)
    one, other = write(form, [some_events(seed=1)]), write(form, [some_events(seed=2)])
    fewer = write(form, [some_events(count=299, seed=1)])
    swapped = write(form, [batch([{"value": b"ab"}, {"value": b"cd"}])])
    exchanged = write(form, [batch([{"value": b"cd"}, {"value": b"ab"}])])
    for data, sidecar in [
        (one, other),
        (one, fewer),
        (fewer, one),
        (swapped, exchanged),
        (File(one.data + b"\n", None), one),
    ]:
        assert outcome(variant, File(data.data, sidecar.sidecar)) is None
    with pytest.raises(CorruptError, match="sidecar"):
        read(form, File(one.data, write(opened(VARIANTS[0]), [some_events()]).data))


def test_files_of_other_settings_are_told_from_ours() -> None:
    offsets, packed = (
        opened(("sequence", "none", {})),
        opened(("sequence", "none", {"key": "msgpack"})),
    )
    with pytest.raises(CorruptError, match=r"has keys of org.apache.hadoop.io.LongWritable"):
        read(packed, write(offsets, [some_events()]))
    plain = opened(("parquet", "zstd", {}))
    typed = opened(("parquet", "zstd", {"schema": "n int", "keep_value": False}))
    values = batch([{"value": b'{"n": 1}'}])
    with pytest.raises(CorruptError, match=r"has no column `value`.*settings that wrote it"):
        read(plain, write(typed, [values]))
    for name in ("orc", "avro"):
        typed = opened((name, "none", {"schema": "n int", "keep_value": False}))
        with pytest.raises(CorruptError, match=r"`value`.*settings that wrote it"):
            read(opened((name, "none", {})), write(typed, [values]))


class Failing:
    """A file on a disk that fails."""

    closed = False

    def __init__(self, size: int) -> None:
        self._size = size

    def read(self, size: int = -1) -> bytes:
        raise OSError(5, "Input/output error")

    def seek(self, position: int, whence: int = 0) -> int:
        return self._size if whence == 2 else position

    def tell(self) -> int:
        return self._size

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False


@every_variant
def test_a_disk_that_fails_is_not_a_corrupt_file(variant: Any) -> None:
    file = write(opened(variant), [some_events()])
    failing: Any = Failing(len(file.data))
    with pytest.raises(UnavailableError, match="Input/output error"):
        list(opened(variant).read(failing, file.sidecar))
