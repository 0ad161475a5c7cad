"""Archive files read by readers that are not ours: Spark's, Hadoop's and Avro's own, in one JVM."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from tests.codec.formats.files import TYPED, batch, label, opened, write
from tidelog.codec.formats import sequence

pytestmark = pytest.mark.spark

COUNT = 3_000
CHANCE = random.Random(11)
ROWS: list[dict[str, Any]] = [
    {
        "value": None if n % 100 == 7 else CHANCE.randbytes(CHANCE.randrange(400)),
        "key": None if n % 3 else b"key-%d" % n,
        "id": None if n % 4 else f"id-{n}",
        "type": "ü" if n % 2 else None,
        "timestamp": 253_402_300_799_999 if n == 5 else 1_700_000_000_000 + n,
        "headers": None
        if n % 5
        else [{"name": "h", "value": b"\xff"}, {"name": "h", "value": None}],
        "offset": 1_000 + n,
    }
    for n in range(COUNT)
]
EVENTS = batch(ROWS)
EXPECTED = [
    (
        row["offset"],
        row["timestamp"],
        row["value"],
        row["key"],
        row["id"],
        row["type"],
        row["headers"] and [(header["name"], header["value"]) for header in row["headers"]],
    )
    for row in ROWS
]
COLUMNAR = [
    *(("parquet", codec, {}) for codec in ("zstd", "snappy", "gzip", "lz4", "none")),
    *(("orc", codec, {}) for codec in ("zstd", "zlib", "snappy", "lz4", "none")),
]
SEQUENCES = [
    *(("sequence", codec, {}) for codec in ("zlib", "gzip", "none")),
    *(("sequence", codec, {"key": "msgpack"}) for codec in ("zlib", "none")),
    ("sequence", "zlib", {"compression": "record"}),
    ("sequence", "gzip", {"compression": "record"}),
]


def plain(value: Any) -> Any:
    return bytes(value) if isinstance(value, bytearray) else value


@pytest.mark.parametrize("variant", COLUMNAR, ids=label)
def test_spark_reads_every_column(variant: Any, local_spark: SparkSession, tmp_path: Path) -> None:
    form = opened(variant)
    path = tmp_path / f"data{form.extension}"
    path.write_bytes(write(form, [EVENTS]).data)
    found = local_spark.read.format(form.name).load(str(path))
    assert dict(found.dtypes)["timestamp"] == "timestamp"
    columns = ["offset", "unix_millis(timestamp)", "value", "key", "id", "type", "headers"]
    rows = found.selectExpr(*columns).orderBy("offset").collect()
    assert [
        (
            row[0],
            row[1],
            plain(row[2]),
            plain(row[3]),
            row[4],
            row[5],
            row[6] and [(header["name"], plain(header["value"])) for header in row[6]],
        )
        for row in rows
    ] == EXPECTED
    assert found.where("offset >= 1100 AND offset < 1200").count() == 100
    assert found.select("topic", "partition").distinct().collect() == [("orders", 3)]


@pytest.mark.parametrize("name", ["parquet", "orc"])
def test_spark_reads_typed_columns(name: str, local_spark: SparkSession, tmp_path: Path) -> None:
    schema = f"{TYPED}, at timestamp, price decimal(8, 2), counts map<string, int>, day date"
    form = opened((name, "zstd", {"schema": schema}))
    value = (
        b'{"id": 7, "user": {"name": "a", "tags": ["x", null]}, "at": "2026-11-15T10:00:00Z",'
        b' "price": 12.5, "counts": {"k": 1}, "day": "2026-11-15"}'
    )
    path = tmp_path / f"data{form.extension}"
    path.write_bytes(write(form, [batch([{"value": value, "id": "own"}, {"value": b"{}"}])]).data)
    found = local_spark.read.format(name).load(str(path)).orderBy("offset")
    wanted = ["id", "_tidelog_id", "user.name", "user.tags", "unix_millis(at)", "counts['k']"]
    wanted += ["cast(price as string)", "cast(day as string)"]
    assert [tuple(row) for row in found.selectExpr(*wanted).collect()] == [
        (7, "own", "a", ["x", None], 1_794_736_800_000, 1, "12.50", "2026-11-15"),
        (None,) * 8,
    ]


@pytest.mark.parametrize("variant", SEQUENCES, ids=label)
def test_hadoop_reads_our_sequence_files(
    variant: Any, local_spark: SparkSession, tmp_path: Path
) -> None:
    form: Any = opened(variant)
    path = tmp_path / f"data{form.extension}"
    path.write_bytes(write(form, [EVENTS.slice(0, 1_000), EVENTS.slice(1_000)]).data)
    records = hadoop_records(local_spark, path)
    assert [value for _, value in records] == [row["value"] or b"" for row in ROWS]
    if form.key == "offset":
        assert [key for key, _ in records] == [row["offset"] for row in ROWS]
    else:
        found = [bytes(key[4:]) for key in form.keys_of(EVENTS).to_pylist()]
        assert [key for key, _ in records] == found


def hadoop_records(spark: SparkSession, path: Path) -> list[Any]:
    """All records by Hadoop's SequenceFile.Reader, as Python's numbers and bytes."""
    jvm: Any = spark.sparkContext._jvm
    configuration = jvm.org.apache.hadoop.conf.Configuration()
    option = jvm.org.apache.hadoop.io.SequenceFile.Reader.file(
        jvm.org.apache.hadoop.fs.Path(path.as_uri())
    )
    options = spark.sparkContext._gateway.new_array(
        jvm.org.apache.hadoop.io.SequenceFile.Reader.Option, 1
    )
    options[0] = option
    reader = jvm.org.apache.hadoop.io.SequenceFile.Reader(configuration, options)
    key, value = reader.getKeyClass().newInstance(), reader.getValueClass().newInstance()
    is_long = reader.getKeyClassName().endswith("LongWritable")
    found = []
    while reader.next(key, value):
        found.append((key.get() if is_long else bytes(key.copyBytes()), bytes(value.copyBytes())))
    reader.close()
    return found


def test_hadoop_splits_our_sequence_files(local_spark: SparkSession, tmp_path: Path) -> None:
    rows = batch([{"value": bytes([n % 251]) * 1_000} for n in range(5_000)])
    path = tmp_path / "data.seq"
    path.write_bytes(write(opened(("sequence", "none", {})), [rows]).data)
    found = local_spark.sparkContext.sequenceFile(
        str(path),
        "org.apache.hadoop.io.LongWritable",
        "org.apache.hadoop.io.BytesWritable",
        minSplits=8,
    )
    assert found.getNumPartitions() >= 8
    assert sorted(found.keys().collect()) == list(range(5_000))


@pytest.mark.parametrize("compression", ["NONE", "RECORD", "BLOCK"])
@pytest.mark.parametrize("key_class", ["LongWritable", "BytesWritable"])
def test_we_read_sequence_files_of_hadoop(
    compression: str, key_class: str, local_spark: SparkSession, tmp_path: Path
) -> None:
    path = tmp_path / "data.seq"
    writables: Any = local_spark.sparkContext._jvm.org.apache.hadoop.io
    writer = hadoop_writer(local_spark, path, key_class, compression)
    pairs = [(row["offset"], row["value"] or b"") for row in ROWS[:700]]
    for offset, value in pairs:
        key = writables.LongWritable(offset)
        if key_class == "BytesWritable":
            key = writables.BytesWritable(offset.to_bytes(8, "big"))
        writer.append(key, writables.BytesWritable(value))
    writer.close()

    reader = sequence.SequenceReader(pa.OSFile(str(path)))
    assert reader.header.key_class == f"org.apache.hadoop.io.{key_class}"
    assert reader.header.codec == ("none" if compression == "NONE" else "zlib")
    assert reader.header.by_block == (compression == "BLOCK")
    found = [
        (int.from_bytes(key[-8:], "big"), value[4:])
        for keys, values in reader.records()
        for key, value in zip(keys.to_pylist(), values.to_pylist(), strict=True)
    ]
    assert found == pairs


def hadoop_writer(spark: SparkSession, path: Path, key_class: str, compression: str) -> Any:
    context: Any = spark.sparkContext
    files = context._jvm.org.apache.hadoop.io.SequenceFile
    metadata = files.Metadata()
    text = context._jvm.org.apache.hadoop.io.Text
    metadata.set(text("made by"), text("hadoop"))
    options = context._gateway.new_array(files.Writer.Option, 5)
    options[0] = files.Writer.file(context._jvm.org.apache.hadoop.fs.Path(path.as_uri()))
    for index, name in ((1, key_class), (2, "BytesWritable")):
        found = context._jvm.java.lang.Class.forName(f"org.apache.hadoop.io.{name}")
        options[index] = (
            files.Writer.keyClass(found) if index == 1 else files.Writer.valueClass(found)
        )
    options[3] = files.Writer.compression(files.CompressionType.valueOf(compression))
    options[4] = files.Writer.metadata(metadata)
    return files.createWriter(context._jvm.org.apache.hadoop.conf.Configuration(), options)


@pytest.mark.parametrize(
    "codec",
    [
        "deflate",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("snappy", "zstd", "none")),
    ],
)
def test_avros_own_library_reads_our_files(
    codec: str, local_spark: SparkSession, tmp_path: Path
) -> None:
    path = tmp_path / "data.avro"
    path.write_bytes(write(opened(("avro", codec, {})), [EVENTS.slice(0, 600)]).data)
    jvm: Any = local_spark.sparkContext._jvm
    reader = jvm.org.apache.avro.file.DataFileReader(
        jvm.java.io.File(str(path)), jvm.org.apache.avro.generic.GenericDatumReader()
    )
    schema = reader.getSchema()
    assert schema.getFullName() == "tidelog.Event"
    assert schema.getField("timestamp").schema().getLogicalType().getName() == "timestamp-millis"
    found = []
    for record in reader:
        headers = record.get("headers")
        found.append(
            (
                record.get("offset"),
                record.get("timestamp"),
                from_buffer(record.get("value")),
                from_buffer(record.get("key")),
                record.get("id") and record.get("id").toString(),
                record.get("type") and record.get("type").toString(),
                headers
                and [
                    (header.get("name").toString(), from_buffer(header.get("value")))
                    for header in headers
                ],
            )
        )
    reader.close()
    assert found == EXPECTED[:600]


def from_buffer(buffer: Any) -> bytes | None:
    return None if buffer is None else bytes(buffer.array()[: buffer.limit()])


def test_avros_own_library_reads_typed_files(local_spark: SparkSession, tmp_path: Path) -> None:
    schema = f"{TYPED}, price decimal(8, 2), counts map<string, double>, ok boolean NOT NULL"
    value = (
        b'{"id": 7, "user": {"name": "a", "tags": ["x", null]}, "price": -12.5,'
        b' "counts": {"k": 1.5}, "ok": true}'
    )
    path = tmp_path / "data.avro"
    form = opened(("avro", "deflate", {"schema": schema}))
    path.write_bytes(write(form, [batch([{"value": value}, {"value": b'{"ok": false}'}])]).data)
    jvm: Any = local_spark.sparkContext._jvm
    reader = jvm.org.apache.avro.file.DataFileReader(
        jvm.java.io.File(str(path)), jvm.org.apache.avro.generic.GenericDatumReader()
    )
    texts = [record.toString() for record in reader]
    reader.close()
    assert '"user": {"name": "a", "tags": ["x", null]}' in texts[0]
    assert '"counts": {"k": 1.5}, "ok": true' in texts[0]
    assert '"user": null, "price": null, "counts": null, "ok": false' in texts[1]
